"""Short names of ops: which ops they are, in every place that takes an op by its name."""

import inspect
from typing import get_args

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import attnkit
from attnkit._core.typing import FullName, OpName
from attnkit.integrations import _ops, transformers
from attnkit.integrations.flax import attention_fn
from attnkit.integrations.timm import swap_attention
from attnkit.nn import MultiHeadAttention
from attnkit.ops.names import PRESETS, spelled_out
from tests.integrations.test_timm import Attention


def test_every_op_and_every_activation_has_a_short_name():
    whole = {n for n in attnkit.__all__ if n.endswith("_attention")}
    for name in whole:
        assert spelled_out(name) == spelled_out(name.removesuffix("_attention")) == (name, {})
    for activation in {*attnkit.ACTIVATIONS} - {"sigmoid"}:
        assert spelled_out(activation) == ("pointwise_attention", {"activation": activation})
        assert spelled_out(f"{activation}_attention") == spelled_out(activation)
    assert spelled_out("entmax15") == ("entmax_attention", {"alpha": 1.5})
    assert {*get_args(FullName)} == whole
    assert {*get_args(get_args(OpName)[1])} == {name.removesuffix("_attention") for name in whole} | {*PRESETS}
    for op, options in PRESETS.values():
        assert {*options} <= {*inspect.signature(getattr(attnkit, op)).parameters}


def test_what_others_call_an_op_says_what_it_is_here():
    with pytest.raises(
        AttributeError, match=r"relu_attention; .* attnkit\.pointwise_attention\(q, k, v, activation='relu'\)"
    ):
        _ = attnkit.relu_attention
    with pytest.raises(AttributeError, match=r"attnkit\.entmax_attention\(q, k, v, alpha=1\.5\)"):
        _ = attnkit.entmax15_attention
    for name in ("relu", "rely_attention", "softmax"):
        assert not hasattr(attnkit, name)
        with pytest.raises(AttributeError, match=f"module 'attnkit' has no attribute '{name}'"):
            getattr(attnkit, name)


def test_a_name_with_options_of_its_own():
    assert _ops.resolve("f", "relu", {"alpha": 0.5}, frozenset()) == (
        attnkit.pointwise_attention,
        {"activation": "relu", "alpha": 0.5},
    )
    with pytest.raises(ValueError, match=r"f: op='relu' means activation='relu'; got activation='gelu'"):
        _ops.resolve("f", "relu", {"activation": "gelu"}, frozenset())
    for name in ("rely", "rela", "soft", "lsh", ""):
        with pytest.raises(ValueError, match=rf"f: op must be one of .* short such as 'relu'; got '{name}'"):
            _ops.resolve("f", name, {}, frozenset())


def by_nn(op, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(8, 2, op=op, options=options)(torch.ones(1, 3, 8))


def by_timm(op, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(8))
    swap_attention(model, op, **options)
    return model(torch.ones(1, 3, 8))


def by_transformers(op, **options):
    transformers.register_variant("short", op, **options)
    x = torch.arange(24.0).reshape(1, 1, 3, 8) / 10
    return transformers.AttentionInterface()["short"](nn.Identity(), x, x, x, None)[0]


def by_flax(op, **options):
    x = jnp.arange(24.0).reshape(1, 3, 1, 8) / 10
    return torch.tensor(attention_fn(op, **options)(x, x, x).tolist())


@pytest.mark.parametrize("place", [by_nn, by_timm, by_transformers, by_flax])
def test_places_that_take_names(place):
    long = place("pointwise_attention", activation="relu_squared", alpha=0.5)
    assert torch.equal(place("relu_squared", alpha=0.5), long)
    assert torch.equal(place(attnkit.pointwise_attention, activation="relu_squared", alpha=0.5), long)
    assert not torch.equal(place("softmax"), long)
