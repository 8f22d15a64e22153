"""Adapters of peft and what their model attends with; test_other_folders.py runs this file."""

import copy
import json
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from attnkit.integrations import transformers as integration
from attnkit.integrations.torch import swap
from attnkit.nn import describe
from tests.integrations.test_transformers import llama, padded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
BOTH = r"saved with pointwise_attention\(activation='relu', alpha=1.0.* but loaded into softmax_attention\(\): model.la"


@pytest.fixture(scope="module")
def peft():
    """Imported after attnkit, which waits for it."""
    assert "peft" not in sys.modules
    integration.register()
    import peft

    return peft


def base(attention: str = "sdpa") -> LlamaForCausalLM:
    return llama(attention, torch.float32)


def adapted(peft, model: nn.Module, *targets: str):
    torch.manual_seed(1)
    made = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets)))
    for name, p in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p.data, std=0.3)
    return made.eval()


def test_an_adapter_is_refused_by_a_model_that_attends_otherwise(peft, tmp_path):
    """Trained after the switch, by peft's model and by transformers'; the right one computes the same."""
    model = base()
    model.set_attn_implementation("attnkit_relu")
    trained = adapted(peft, model, "q_proj", "v_proj")
    trained.save_pretrained(tmp_path)
    for load in (
        lambda model: peft.PeftModel.from_pretrained(model, tmp_path),
        lambda model: model.load_adapter(str(tmp_path)),
    ):
        with pytest.raises(ValueError, match=rf"peft adapter 'default': attention {BOTH}"):
            load(base())
    right, batch = peft.PeftModel.from_pretrained(base("attnkit_relu"), tmp_path).eval(), padded(False)
    with torch.no_grad():
        assert torch.equal(right(**batch).logits, trained(**batch).logits)


def test_the_record_is_of_the_time_of_saving(peft, tmp_path):
    model = base()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "softmax")
    model.set_attn_implementation("attnkit_relu")
    model.save_pretrained(tmp_path / "relu")
    found = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("softmax", "relu")]
    assert "attnkit_attention" not in found[0]
    assert json.loads(found[1]["attnkit_attention"])[0]["op"] == "pointwise_attention"


def test_an_adapter_without_a_record_is_loaded(peft, tmp_path):
    adapted(peft, base(), "q_proj").save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(base("attnkit_relu"), tmp_path)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def test_torchs_module_with_an_op_is_adapted(peft, tmp_path):
    """Our module hides from torch's fast path that q, k and v share a weight; peft asks for the same."""
    swapped, x = encoder(), torch.randn(2, 5, 16)
    swap(swapped, "relu")
    model = adapted(peft, copy.deepcopy(swapped), "self_attn")
    with torch.no_grad():
        out = model(x)
        with pytest.raises(AssertionError):  # the adapter does something
            torch.testing.assert_close(out, swapped(x))
        merged = copy.deepcopy(model).merge_and_unload()
        torch.testing.assert_close(merged(x), out)
    assert [row.attention.op for row in describe(merged)] == ["pointwise_attention"]
    model.train()(x).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "lora" in name}
    assert len(grads) == 4
    assert all(grad is not None and grad.any() for grad in grads.values())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"but loaded into softmax_attention\(\): layers.0.self_attn"):
        peft.PeftModel.from_pretrained(encoder(), tmp_path)
    with torch.no_grad():
        assert torch.equal(peft.PeftModel.from_pretrained(swapped, tmp_path).eval()(x), out)


def test_separate_weights_are_what_peft_refuses(peft):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, kdim=8, vdim=8)})
    swap(model, "relu")
    with pytest.raises(ValueError, match="Only same embed"):
        adapted(peft, model, "a")
