"""What a model attends with is said, kept in what is saved, and compared with what loads it."""

import copy
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM

import attnkit
from attnkit.integrations import transformers as integration
from attnkit.integrations.torch import MultiheadAttention, set_sdpa, swap
from attnkit.nn import GatedAttentionUnit, KeyValueMemory, LSHAttention, MultiHeadAttention, SoftAttention2d, describe
from attnkit.nn.record import SEMANTICS
from tests.integrations.test_timm import Gated, Model
from tests.integrations.test_torch_swap import transformer
from tests.integrations.test_transformers import SIZES, llama

HALF = r"saved with pointwise_attention\(activation='relu', alpha=0.5, .*\) but loaded into "
ONE = HALF + r"pointwise_attention\(activation='relu', alpha=1.0, .*\)"

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:swap. left as they were:UserWarning"
)


def swapped(model: nn.Module, op: str, **options) -> nn.Module:
    swap(model, op, **options)
    return model


def through_a_pickle(model: nn.Module, path: Path) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def through_safetensors(model: nn.Module, path: Path) -> dict[str, Tensor]:
    save_file(model.state_dict(), path / "weights.safetensors")
    return load_file(path / "weights.safetensors")


def through_a_distributed_checkpoint(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read into the weights of a model with other options, as it does."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    checkpoint.save(get_model_state_dict(model), checkpoint_id=path)
    other = copy.deepcopy(model)
    swap(other, "relu", alpha=0.25)
    weights = get_model_state_dict(other)
    checkpoint.load(weights, checkpoint_id=path)
    return weights


@pytest.mark.parametrize("through", [through_a_pickle, through_safetensors, through_a_distributed_checkpoint])
@pytest.mark.parametrize("make", [Model, transformer])
def test_weights_of_a_swapped_model(make: Callable[[], nn.Module], through, tmp_path):
    """Taken by one of the same options, refused by another and by one that was not swapped, whatever the file."""
    state = through(swapped(make(), "relu", alpha=0.5), tmp_path)
    assert not swapped(make(), "relu", alpha=0.5).load_state_dict(state).unexpected_keys
    one = swapped(make(), "relu")
    for given in ({}, {"strict": False}):
        with pytest.raises(RuntimeError, match=ONE) as raised:
            copy.deepcopy(one).load_state_dict(state, **given)
        assert str(raised.value).count("saved with") == 1
    with pytest.raises(RuntimeError, match=HALF + r"softmax_attention\(\)"):
        swapped(make(), "softmax").load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\.attnkit_pointwise_attention\._extra_state"):
        make().load_state_dict(state)


@pytest.mark.parametrize("make", [Model, transformer])
def test_weights_of_softmax_are_as_ever(make):
    """Those of a model that was not swapped begin one that is, and a swap to softmax changes nothing."""
    plain = make()
    swapped(make(), "relu").load_state_dict(plain.state_dict())
    softmax = swapped(make(), "softmax")
    assert list(softmax.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(softmax.state_dict())
    with pytest.raises(RuntimeError, match=r"saved with softmax_attention\(\) but loaded into pointwise"):
        swapped(make(), "relu").load_state_dict(softmax.state_dict())


def test_a_whole_model_that_is_pickled_or_swapped_again_keeps_one_record(tmp_path):
    model = swapped(swapped(Model(), "relu"), "relu", alpha=0.5)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert len([name for name in loaded.state_dict() if "attnkit" in name]) == 2
    loaded.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=ONE):
        swapped(loaded, "relu").load_state_dict(model.state_dict())
    save_model(model, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="attnkit_pointwise_attention"):
        load_model(Model(), tmp_path / "model.safetensors")


def test_records_are_read_from_weights_that_were_cast_or_averaged():
    state = swapped(Model(), "relu", alpha=0.5).state_dict()
    for given in ({n: x.bfloat16() for n, x in state.items()}, {n: 0.1 * x + 0.9 * x for n, x in state.items()}):
        with pytest.raises(RuntimeError, match=ONE):
            swapped(Model(), "relu").load_state_dict(given)


def test_arrays_among_the_options_are_compared():
    def performer(seed: int) -> nn.Module:
        projection = torch.from_numpy(attnkit.orthogonal_features(16, 8, seed))
        return swapped(Model(), "performer", projection=projection)

    performer(0).load_state_dict(performer(0).state_dict())
    with pytest.raises(RuntimeError, match=r"projection='torch.float64 \(16, 8\) .*loaded into performer_attention"):
        performer(1).load_state_dict(performer(0).state_dict())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: MultiHeadAttention(8, 2), lambda: MultiHeadAttention(8, 2, op="relu")),
        (lambda: GatedAttentionUnit(8), lambda: GatedAttentionUnit(8, alpha=1.0)),
        (lambda: LSHAttention(8, 2, num_buckets=2), lambda: LSHAttention(8, 2, num_buckets=2, chunk_size=8)),
        (lambda: SoftAttention2d(8, 2), lambda: SoftAttention2d(8, 2, ridge=0.01)),
        (lambda: KeyValueMemory(8, 4), lambda: KeyValueMemory(8, 4, activation="softmax")),
    ],
    ids=["heads", "gated", "lsh", "soft", "memory"],
)
def test_our_modules(one, other, tmp_path):
    """Their weights have no entry more; the record is in the metadata of the state dict, or that of a file."""
    state = through_a_pickle(one(), tmp_path)
    assert not [name for name in state if "attnkit" in name]
    one().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"attention saved with \w+\(.*\) but loaded into \w+\(.*\): the model"):
        other().load_state_dict(state)
    other().load_state_dict(dict(state))
    metadata = describe(other()).metadata()
    describe(other()).check(metadata)
    describe(other()).check({"format": "pt"})
    with pytest.raises(ValueError, match=r"describe: attention saved with \w+\(.*\) but loaded into \w+\(.*\): the m"):
        describe(one()).check(metadata)


def test_the_version_is_that_of_the_page_and_is_compared():
    page = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
    assert re.search(r"This is semantics version (\d+)", page)[1] == str(SEMANTICS)
    metadata = {name: text.replace('"semantics": 1', '"semantics": 0') for name, text in saved_by_relu().items()}
    with pytest.raises(ValueError, match=r"of semantics 0, not 1, but loaded into pointwise_attention"):
        describe(swapped(Model(), "relu")).check(metadata)


def saved_by_relu() -> dict[str, str]:
    return describe(swapped(Model(), "relu")).metadata()


# ------------------------------------------------------------------------------------------- transformers


def test_a_name_that_means_something_else_is_refused(tmp_path):
    """By configs and models; a model that is given another implementation is loaded with that."""
    integration.register_variant("half", "relu", alpha=0.5)
    llama("half", torch.float32).save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "half"
    integration.register_variant("half", "relu")
    for load in (LlamaForCausalLM.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=rf"attn_implementation='half' was {ONE}"):
            load(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").config._attn_implementation == "sdpa"


def test_a_config_without_a_record_is_loaded(tmp_path):
    """As those of files that were written before there was one."""
    integration.register()
    llama("attnkit_relu", torch.float32).config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("attnkit_attention")["attnkit_relu"]["semantics"] == SEMANTICS
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation == "attnkit_relu"


# ------------------------------------------------------------------------------------------- describe


def said(model: nn.Module) -> list[tuple]:
    return [(row["name"], row["op"], row["options"].get("alpha"), row["impl"], row["is_ours"]) for row in rows(model)]


def rows(model: nn.Module) -> list[dict]:
    return [row.to_dict() for row in describe(model)]


def test_describe_says_what_attends():
    parts = {"ours": MultiHeadAttention(8, 2, op="relu", impl="generic"), "torch": nn.MultiheadAttention(8, 2)}
    parts |= {"swapped": MultiheadAttention(8, 2, op="relu", alpha=0.5), "timm": Model(), "gated": Gated()}
    model = nn.ModuleDict(parts | {"other": nn.Linear(2, 2)})
    model["timm"].blocks[1]["attn"].fused_attn = True
    relu, softmax = "pointwise_attention", "softmax_attention"
    assert said(model) == [
        ("ours", relu, 1.0, "generic", True),
        ("torch", softmax, None, "torch", False),
        ("swapped", relu, 0.5, "auto", True),
        ("timm.blocks.0.attn", softmax, None, "eager", False),
        ("timm.blocks.1.attn", softmax, None, "sdpa", False),
        ("gated", softmax, None, "eager", False),
    ]
    text = str(describe(model))
    assert "ours: MultiHeadAttention, pointwise_attention(activation='relu', alpha=1.0" in text
    assert "torch: MultiheadAttention, plain softmax by torch, not attnkit's" in text
    set_sdpa("relu", alpha=0.25)
    try:
        assert said(model)[1] == ("torch", relu, 0.25, "auto", True)
        assert said(model)[4] == ("timm.blocks.1.attn", relu, 0.25, "auto", True)
    finally:
        set_sdpa(None)
    assert json.dumps(rows(model))
    assert str(describe(nn.Linear(2, 2))) == "no attention modules"


class OwnAttention(nn.Module):
    pass


def test_describe_says_what_attends_in_transformers():
    """And what it does not know."""
    integration.register_variant("half", "relu", alpha=0.5, impl="generic")
    model = llama("sdpa", torch.float32)
    layers = [f"model.layers.{n}.self_attn" for n in range(SIZES["num_hidden_layers"])]
    assert said(model) == [(name, "softmax_attention", None, "sdpa", False) for name in layers]
    model.set_attn_implementation("half")
    assert said(model) == [(name, "pointwise_attention", 0.5, "generic", True) for name in layers]
    assert said(nn.ModuleDict({"a": OwnAttention()})) == [("a", None, None, None, False)]
    assert "a: OwnAttention, code of its own" in str(describe(nn.ModuleDict({"a": OwnAttention()})))
