"""Triton kernels called from JAX: transformations and layouts. Run like in_interpreter.py."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
import numpy as np

import attnkit
from attnkit.backends.jax.triton import launch, pointwise, rows
from attnkit_conformance.adapters.jax_triton_interpreted import interpret
from tests.library.arrays import assert_close


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "call", interpret)


OP = "pointwise_attention"
attend = partial(pointwise.attend, OP)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_vmap_is_one_call_with_one_more_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(0, 3, 2, 6, 4), draw(1, 3, 1, 7, 4), draw(2, 2, 7, 5)
    lengths = jnp.asarray([7, 2, 5])
    programs = []

    def counted(given: launch.Launch) -> Any:
        programs.append(given.programs)
        return interpret(given)

    def call(q: jax.Array, k: jax.Array, length: jax.Array) -> jax.Array:
        return attend(q, k, v, causal=True, key_lengths=length[None])

    monkeypatch.setattr(launch, "call", counted)
    found = jax.vmap(call)(q, k, lengths)
    assert programs[-1] == 3 * 2
    for n in range(3):
        expected = attnkit.pointwise_attention(q[n], k[n], v, causal=True, key_lengths=lengths[n][None])
        assert_close(found[n], expected)


@pytest.mark.parametrize("op", ["pointwise_attention", "softmax_attention"])
def test_vmap_over_a_mask_of_keys_alone(op: str) -> None:
    q, k, mask = draw(0, 2, 6, 4), draw(1, 2, 7, 4), draw(2, 3, 7) > 0
    kernels = partial((rows if op == "softmax_attention" else pointwise).attend, op)
    found = jax.vmap(lambda mask: kernels(q, k, k, mask=mask))(mask)
    for n in range(3):
        assert_close(found[n], getattr(attnkit, op)(q, k, k, mask=mask[n], impl="generic"))


def test_vmap_with_dropout_is_a_loop() -> None:
    q, k, v = draw(0, 2, 6, 4), draw(1, 7, 4), draw(2, 7, 5)
    mapped = jax.vmap(lambda q: attend(q, k, v, dropout=(0.5, 3)))(q)
    for n in range(2):
        assert_close(mapped[n], attnkit.pointwise_attention(q[n], k, v, dropout=(0.5, 3), impl="generic"))


def test_leading_axes_that_cannot_be_joined() -> None:
    q, k, v = draw(0, 2, 3, 2, 6, 4), draw(1, 2, 1, 2, 7, 4), draw(2, 3, 1, 7, 5)
    assert_close(attend(q, k, v), attnkit.pointwise_attention(q, k, v))
    do = draw(3, 2, 3, 2, 6, 5)
    expected = attnkit.pointwise_attention_vjp(q, k, v, do, impl="generic")
    for name, grad in pointwise.pull(OP, q, k, v, do).items():
        assert_close(grad, expected[name])


def test_second_derivatives_are_refused_by_name() -> None:
    q = draw(0, 6, 4)
    first = jax.grad(lambda q: jnp.sum(attend(q, q, q) ** 2))
    with pytest.raises(NotImplementedError, match="pointwise_attention: impl='triton' has no second derivatives"):
        jax.grad(lambda q: jnp.sum(first(q) ** 2))(q)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("pointwise_attention", {"activation": "softplus"}),
        ("softmax_attention", {"return_lse": True}),
        ("entmax_attention", {}),
    ],
)
def test_gradients_under_vmap_are_those_of_every_call(op: str, options: dict[str, Any]) -> None:
    """Numbers of rows are saved for them."""
    q, k, v, bias = draw(0, 2, 3, 2, 6, 4), draw(1, 3, 1, 7, 4), draw(2, 7, 5), draw(3, 2, 6, 7)

    def own(function: Any, q: jax.Array, k: jax.Array, bias: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            results = function(*arrays[:2], v, bias=arrays[2], causal=True, **options)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results))

        return jax.grad(loss, (0, 1, 2))(q, k, bias)

    kernels = partial((pointwise if op == OP else rows).attend, op)
    found = jax.jit(jax.vmap(partial(own, kernels), (0, None, 0)))(q, k, bias)
    for n in range(2):
        expected = own(partial(getattr(attnkit, op), impl="generic"), q[n], k, bias[n])
        for got, truth in zip(found, expected, strict=True):
            assert_close(got[n], truth)


@pytest.mark.parametrize("op", ["softmax_attention", "entmax_attention"])
def test_gradients_of_rows_without_saved_numbers(op: str) -> None:
    q, k, v, do = draw(0, 2, 6, 4), draw(1, 2, 300, 4), draw(2, 2, 300, 5), draw(3, 2, 6, 5)
    expected = getattr(attnkit, f"{op}_vjp")(q, k, v, do, impl="generic")
    for name, grad in rows.pull(op, q, k, v, do).items():
        assert_close(grad, expected[name])
