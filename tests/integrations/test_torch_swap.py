"""swap on models of torch and transformers, and on timm-style modules; what it leaves alone is named."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from attnkit.integrations.torch import MultiheadAttention, replace_sdpa, swap
from tests.integrations.counting import count
from tests.integrations.test_timm import Attention, Gated, Model
from tests.library.arrays import LAYER, assert_close

E, HEADS = 16, 2

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:The PyTorch API of nested tensors:UserWarning"
)


def transformer(**given) -> nn.Transformer:
    torch.manual_seed(0)
    sizes = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | given
    return nn.Transformer(E, HEADS, 1, 1, 32, **sizes)


NAMES = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")


def tokens(n: int = 5) -> Tensor:
    return torch.randn(2, n, E, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def test_a_transformer_computes_the_op_with_the_parameters_that_it_has(monkeypatch):
    """What it computes is what replace_sdpa lets it compute, in evaluation and padded too."""
    model, hidden = transformer().eval(), torch.arange(5).expand(2, -1) >= 3
    padding = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    original, before = copy.deepcopy(model), dict(model.named_parameters())
    calls = count(monkeypatch, "pointwise_attention")
    assert swap(model, "relu", alpha=0.5) == (NAMES, {})
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    model.load_state_dict(original.state_dict())
    with torch.no_grad(), replace_sdpa("relu", alpha=0.5):
        golden = original(tokens(), tokens(3), **padding)
    assert calls == ["pointwise_attention"] * 3
    with torch.no_grad():
        assert_close(model(tokens(), tokens(3), **padding), golden, 2 * (2 * LAYER + 5))
    assert calls == ["pointwise_attention"] * 6


def test_a_swapped_model_gets_another_op():
    model = transformer()
    swap(model, "relu")
    assert swap(model, "softmax") == (NAMES, {})
    assert_close(model(tokens(), tokens(3)), transformer()(tokens(), tokens(3)), 2 * (2 * LAYER + 5))
    timm, x = Model().eval(), tokens()
    timm.blocks[0]["attn"].scale = 0.7
    golden = timm(x)
    swap(timm, "relu")
    assert swap(timm, "softmax").swapped == ("blocks.0.attn", "blocks.1.attn")
    assert_close(timm(x), golden, 2 * LAYER)


def test_a_module_in_two_places_stays_one():
    shared = nn.MultiheadAttention(E, HEADS)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    assert swap(model, "relu").swapped == ("a", "b.0")
    assert model["a"] is model["b"][0]
    assert type(model["a"]) is MultiheadAttention


class Own(nn.MultiheadAttention):
    pass


def mixed() -> nn.ModuleDict:
    hooked, dropped = nn.MultiheadAttention(E, HEADS), nn.MultiheadAttention(E, HEADS, dropout=0.25)
    hooked.register_forward_hook(lambda *_: None)
    bert = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    parts = {"plain": nn.MultiheadAttention(E, HEADS), "own": Own(E, HEADS), "hooked": hooked, "dropped": dropped}
    return nn.ModuleDict(parts | {"timm": Attention(), "gated": Gated(), "bert": bert})


def test_what_is_left_alone_is_named_with_its_reason():
    model = mixed()
    with pytest.warns(UserWarning, match="swap: left as they were: own: Own is a subclass"):
        swapped, unchanged = swap(model, "linear")
    assert swapped == ("plain", "timm")
    assert list(unchanged) == ["own", "hooked", "dropped", "gated", "bert.encoder.layer.0.attention.self"]
    texts = ["with code of its own", "forward hooks", "takes no dropout; got 0.25", "not known: gate"]
    for reason, text in zip(unchanged.values(), [*texts, "BertSelfAttention is"], strict=True):
        assert text in reason
    assert type(model["own"]) is Own


def test_errors_leave_the_model_as_it_was():
    model = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2))
    with pytest.raises(ValueError, match=r"nothing to swap in a ViTModel. .*attention.*: ViT\w+ is neither torch"):
        swap(model, "relu")
    with pytest.raises(ValueError, match=r"nothing to swap in a Linear. It has no attention modules"):
        swap(nn.Linear(2, 2), "relu")
    with pytest.raises(ValueError, match="expected a model that holds attention modules; got one, a Multi"):
        swap(nn.MultiheadAttention(E, HEADS), "relu")
    dropped = transformer(dropout=0.5)
    with pytest.raises(ValueError, match=r"nothing to swap .*: linear_attention takes no dropout; got 0.5"):
        swap(dropped, "linear")
    with pytest.raises(ValueError, match=r"swap: pointwise_attention takes the options .*; got 'scale'"):
        swap(dropped, "relu", scale=1.0)
    assert type(dropped.encoder.layers[0].self_attn) is nn.MultiheadAttention
