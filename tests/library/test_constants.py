"""What is a constant to automatic differentiation is one in every implementation (semantics A10)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit

from .arrays import normal

X, PROJECTION, ROTATIONS, SLOTS = normal((2, 6, 4), (5, 4), (4, 2, 3), (3, 6), dtype="float32")
Op = Callable[..., Any]
CONSTANTS: dict[str, tuple[Op, Callable[..., Any], np.ndarray]] = {
    "projection": (attnkit.performer_attention, lambda op, x, c, **o: op(x, x, x, c, **o), PROJECTION),
    "projection of a step": (
        attnkit.performer_attention_step,
        lambda op, x, c, **o: op(None, x[:, 0, :], x[:, 0, :], x[:, 0, :], c, **o),
        PROJECTION,
    ),
    "projection of statistics": (
        attnkit.row_statistics,
        lambda op, x, c, **o: op("performer_attention", x, x, projection=c, fields=("entropy",), **o),
        PROJECTION,
    ),
    "rotations": (attnkit.lsh_attention, lambda op, x, c, **o: op(x, x, c, chunk_size=3, **o), ROTATIONS),
    "dropout_mask": (
        attnkit.softmax_attention,
        lambda op, x, c, **o: op(x, x, x, dropout_mask=c, **o),
        np.full((6, 6), 2.0, np.float32),
    ),
    "dropout_mask of slots": (
        attnkit.linformer_attention,
        lambda op, x, c, **o: op(x, x, x, slots(x), slots(x), dropout_mask=c, **o),
        np.full((6, 3), 2.0, np.float32),
    ),
    "length": (
        attnkit.pointwise_attention,
        lambda op, x, c, **o: op(x, x, x, length=c, **o),
        np.full((6,), 3.0, np.float32),
    ),
}


def slots(x: Any) -> Any:
    return torch.from_numpy(SLOTS) if isinstance(x, torch.Tensor) else jnp.asarray(SLOTS)


def first(found: Any) -> Any:
    """The first output."""
    return next(part for part in found if part is not None) if isinstance(found, tuple) else found


def implementations(op: Op, call: Callable[..., Any], x: Any, c: Any) -> list[str]:
    """Those that serve the call."""
    told = call(lambda *arrays, **options: attnkit.explain(op, *arrays, **options), x, c)
    return [name for name, reason in told.items() if reason is None]


@pytest.mark.parametrize("name", CONSTANTS)
def test_torch(name: str) -> None:
    op, call, given = CONSTANTS[name]
    x, c = torch.from_numpy(X), torch.from_numpy(given)
    for impl in implementations(op, call, x, c):
        alone = first(call(op, x, c.clone().requires_grad_(), impl=impl))
        assert not alone.requires_grad, impl
        leaves = [x.clone().requires_grad_(), c.clone().requires_grad_()]
        weight = torch.arange(alone.numel()).reshape(alone.shape)  # so that rows that sum to 1 have a gradient
        dx, dc = torch.autograd.grad((first(call(op, *leaves, impl=impl)) * weight).sum(), leaves, allow_unused=True)
        assert dx.any(), impl
        assert dc is None, impl


@pytest.mark.parametrize("name", ["projection", "rotations", "dropout_mask", "length"])
def test_jax(name: str) -> None:
    op, call, given = CONSTANTS[name]
    x, c = jnp.asarray(X), jnp.asarray(given)
    for impl in implementations(op, call, x, c):

        def loss(x: Any, c: Any, impl: str = impl) -> Any:
            out = first(call(op, x, c, impl=impl))
            return (out * jnp.arange(out.size).reshape(out.shape)).sum()

        dx, dc = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, c)
        assert dx.any(), impl
        assert not dc.any(), impl
