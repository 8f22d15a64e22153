"""MultiheadAttention beside torch's, whose parameters it shares, and in torch's layers, fast path or not."""

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

import attnkit_reference as reference
from attnkit.integrations.torch import MultiheadAttention
from attnkit.nn import capture
from tests.integrations.counting import count
from tests.library.arrays import LAYER, assert_close

B, L, S, E, HEADS = 2, 5, 7, 16, 2
GENERATOR = torch.Generator().manual_seed(0)
PADDING = torch.tensor([[False] * S, [False] * 4 + [True] * 3])
HIDDEN = (torch.rand(L, S, generator=GENERATOR) < 0.4).index_fill_(1, torch.tensor([0]), False)
BY_HEAD = (torch.rand(B * HEADS, L, S, generator=GENERATOR) < 0.4).index_fill_(2, torch.tensor([0]), False)
ADDED = torch.randn(L, S, dtype=torch.float64, generator=GENERATOR)
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)

# torch: nested tensors, which its encoder makes
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def tokens(n: int, features: int = E) -> Tensor:
    return torch.randn(B, n, features, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def both(op: str = "softmax", **given) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's with its state dict, their biases not 0."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, HEADS, dtype=torch.float64, **given)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.4)
    ours = MultiheadAttention(E, HEADS, dtype=torch.float64, op=op, **given)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_arguments_state_dict_and_initial_values_are_torchs():
    ours, theirs = (inspect.signature(kind).parameters for kind in (MultiheadAttention, nn.MultiheadAttention))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == p.default for name, p in theirs.items())
    for given in ({}, {"kdim": 6, "vdim": 3, "add_bias_kv": True, "bias": False}):
        states = []
        for kind in (MultiheadAttention, nn.MultiheadAttention):
            torch.manual_seed(0)
            states.append(kind(E, HEADS, **given).state_dict())
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"key_padding_mask": PADDING},
        {"attn_mask": HIDDEN},
        {"attn_mask": BY_HEAD, "key_padding_mask": PADDING},
        {"attn_mask": ADDED, "key_padding_mask": torch.zeros(B, S).double().masked_fill(PADDING, -torch.inf)},
    ],
    ids=["plain", "padding", "hides", "by head", "adds"],
)
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True, "bias": False}],
    ids=["", "more keys"],
)
def test_softmax_is_torchs(options, given):
    """Outputs, weights of heads or their mean, and gradients."""
    x, y = tokens(L), tokens(S)
    if not options.get("batch_first"):
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    found = []
    for module in both(**options):
        q, k = x.clone().requires_grad_(), y.clone().requires_grad_()
        out, mean = module(q, k, k, **given)
        weights = module(q, k, k, **given, average_attn_weights=False)[1]
        alone = module(q, k, k, **given, need_weights=False)
        assert alone[1] is None
        found.append(
            [out, mean, weights, alone[0], *torch.autograd.grad(out.sin().sum(), (q, k, *module.parameters()))]
        )
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, 2 * LAYER)


def test_without_a_batch_and_with_other_features():
    for ours, theirs, x, y, z in (
        (*both(), tokens(L)[0], tokens(S)[0], tokens(S)[1]),
        (*both(kdim=6, vdim=3, batch_first=True), tokens(L), tokens(S, 6), tokens(S, 3)),
    ):
        given = {"key_padding_mask": PADDING[1] if x.ndim == 2 else PADDING, "attn_mask": HIDDEN}
        for a, b in zip(ours(x, y, z, **given), theirs(x, y, z, **given), strict=True):
            assert_close(a, b, LAYER)


def golden(module: MultiheadAttention, x: Tensor, **options) -> Tensor:
    """The module of x and x, its op by the reference."""
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2).detach().numpy() for y in (q, k, v))
    found = torch.from_numpy(getattr(reference, module.op.__name__)(*heads, **options))
    return module.out_proj(found.transpose(1, 2).flatten(2))


def test_an_op_is_the_references(monkeypatch):
    calls = count(monkeypatch, "pointwise_attention")
    module, _ = both("relu", batch_first=True)
    x = tokens(S)
    keys = ~PADDING[:, None, None].numpy()
    assert_close(module(x, x, x, PADDING)[0], golden(module, x, mask=keys), LAYER)
    causal = golden(module, x, mask=keys, causal=True)
    hint = {"attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1)}
    for given in (hint, hint | {"is_causal": True, "need_weights": False}):
        assert_close(module(x, x, x, PADDING, **given)[0], causal, LAYER)
    with torch.no_grad(), capture(module) as record:
        module(x, x, x)
    assert record[""].rows == B * HEADS * S
    assert calls == ["pointwise_attention"] * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_encoder_runs_the_op_in_evaluation(mode, norm_first, monkeypatch):
    """A layer, and an encoder that makes nested tensors of a padded batch; softmax's numbers are others."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval()
    assert model.use_nested_tensor
    softmax = copy.deepcopy(model)
    for part in (*model.layers, *softmax.layers):
        part.norm_first = norm_first
    calls = count(monkeypatch, "pointwise_attention")
    for part in model.layers:
        part.self_attn = MultiheadAttention.replacing(part.self_attn, "relu")
    x, padding = tokens(S), {"src_key_padding_mask": PADDING}
    wanted = [model.layers[0](x), model(x), model(x, **padding)]  # with gradients, which the fast path has not
    with mode():
        found = [model.layers[0](x), model(x), model(x, **padding)]
        others = [softmax.layers[0](x), softmax(x), softmax(x, **padding)]
    assert calls == ["pointwise_attention"] * 2 * 5
    seen = torch.ones(B, S, dtype=torch.bool), torch.ones(B, S, dtype=torch.bool), ~PADDING
    for out, want, other, real in zip(found, wanted, others, seen, strict=True):
        assert_close(out[real], want[real], 2 * (LAYER + 5))
        assert float((out - other)[real].abs().max()) > 1e-3


def test_torchs_transformer_trains_and_decodes_with_an_op():
    """Encoder and decoder with causal hints and padding; softmax in our modules is torch's."""
    torch.manual_seed(0)
    theirs = nn.Transformer(E, HEADS, 1, 1, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    for layer in (*ours.encoder.layers, *ours.decoder.layers):
        for name in ("self_attn", "multihead_attn"):
            if hasattr(layer, name):
                setattr(layer, name, MultiheadAttention.replacing(getattr(layer, name), "softmax"))
    mask = {
        "tgt_mask": CAUSAL,
        "tgt_is_causal": True,
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
    }
    outs = [model(tokens(S), tokens(L), **mask) for model in (ours, theirs)]
    assert_close(outs[0], outs[1], 2 * (2 * LAYER + 5))
    for out in outs:
        out.sin().sum().backward()
    grads = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert_close(p.grad, grads[name].grad, 4 * (2 * LAYER + 5), grads[name].grad.abs().max() + 1.0)


def test_dropout_and_copies():
    module = copy.deepcopy(both("relu", dropout=0.5, batch_first=True)[0])
    x, runs = tokens(S), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(module(x, x, x)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_linear_attention_serves_the_float_masks_that_torchs_layers_make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = MultiheadAttention.replacing(layer.self_attn, "linear")
    x = tokens(S)
    out, alone = layer(x, src_key_padding_mask=PADDING)[1, :4], layer(x[1:, :4])[0]
    assert_close(out, alone, LAYER + 5)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"is_causal": True}, ValueError, "is_causal=True says what attn_mask is; got None"),
        ({"attn_mask": HIDDEN.T}, ValueError, r"attn_mask has shape \(7, 5\); expected \(5, 7\) or \(4, 5, 7\)"),
        ({"key_padding_mask": PADDING[:, 1:]}, ValueError, r"key_padding_mask has shape \(2, 6\); expected \(2, 7\)"),
        ({"attn_mask": HIDDEN.long()}, TypeError, "attn_mask has dtype torch.int64; expected torch.bool or a float"),
        ({"attn_mask": ADDED}, NotImplementedError, "linear_attention takes no bias"),
    ],
)
def test_what_a_call_cannot_ask(given, error, text):
    module, _ = both("linear", batch_first=True)
    with pytest.raises(error, match=f"MultiheadAttention: .*{text}"):
        module(tokens(L), tokens(S), tokens(S), **given)


def test_what_is_refused_when_it_is_made():
    with pytest.raises(NotImplementedError, match=r"MultiheadAttention: linear_attention takes no dropout; got 0.1"):
        MultiheadAttention(E, HEADS, 0.1, op="linear")
    with pytest.raises(ValueError, match=r"MultiheadAttention: op must be one of .*; got 'rela'"):
        MultiheadAttention(E, HEADS, op="rela")
    module, x = both("sima", batch_first=True)[0], tokens(L)
    with pytest.raises(NotImplementedError, match="sima_attention has no option causal"):
        module(x, x, x, attn_mask=CAUSAL, is_causal=True)
    x = torch.nested.nested_tensor([torch.ones(2, E), torch.ones(3, E)], dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="nested tensors of strided layout"):
        module(x, x, x, PADDING)


def test_the_text_of_a_module_has_the_op_and_its_options():
    ours = MultiheadAttention(E, HEADS, op="relu", alpha=0.5, dropout=0.1)
    assert ours.extra_repr() == f"{E}, {HEADS}, op=pointwise_attention, activation='relu', alpha=0.5, dropout=0.1"
