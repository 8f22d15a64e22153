"""Linear attention by the Triton kernels called from JAX: states, segments, transformations. Run like
in_interpreter.py."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import attnkit
from attnkit.backends.jax.triton import launch, linear
from attnkit.kernels import linear_calls
from attnkit_conformance.adapters import triton_bfloat16
from attnkit_conformance.adapters.jax_triton_interpreted import interpret

from .in_interpreter_linear import CASES, D, E

triton_bfloat16.install()

EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "call", interpret)
    monkeypatch.setattr(linear_calls, "FEWEST", 1)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def state(*leading: int) -> tuple[jax.Array, jax.Array]:
    return draw(7, *leading, D, E), jnp.abs(draw(8, *leading, D)) + 1.0


def inputs(of_q: tuple[int, ...], of_k: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    return draw(1, *of_q, D), draw(2, *of_k, D), draw(3, *of_k, E)


def agree(got: Any, expected: Any) -> None:
    """Within a few roundings of the largest element of sums of tens of terms."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        size = jnp.max(jnp.abs(other), initial=0.0)
        assert jnp.all(jnp.abs(one - other) <= 64 * EPS * size), jnp.max(jnp.abs(one - other))


def of_jax(x: Any) -> Any:
    return jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", CASES)
def test_states_in_and_out(name: str) -> None:
    of_q, of_k, of_state, options = CASES[name]
    q, k, v = inputs(of_q, of_k)
    options = {key: of_jax(x) for key, x in options.items()}
    options["initial_state"] = None if of_state is None else state(*of_state)
    o, kept = attnkit.linear_attention(q, k, v, **options, return_state=True, impl="generic")
    agree(linear.attend(q, k, v, **options, return_state=True), (o, kept))
    agree(linear.attend(q, k, v, **options), o)
    do = draw(6, *o.shape)
    for dstate in (None, (draw(9, *kept[0].shape), draw(10, *kept[1].shape))):
        expected = attnkit.linear_attention_vjp(q, k, v, do, dstate=dstate, **options, impl="generic")
        agree(linear.pull(q, k, v, do, dstate=dstate, **options), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_features_in_several_blocks(causal: bool) -> None:
    """Every program has a part of do·num, of the columns of a state, and of a gradient."""
    q, k, v, do = draw(1, 2, 20, 40), draw(2, 2, 20, 40), draw(3, 2, 20, 70), draw(4, 2, 20, 70)
    agree(linear.attend(q, k, v, causal=causal), attnkit.linear_attention(q, k, v, causal=causal, impl="generic"))
    expected = attnkit.linear_attention_vjp(q, k, v, do, causal=causal, impl="generic")
    agree(linear.pull(q, k, v, do, causal=causal), expected)


def test_a_part_of_dstate_may_be_missing() -> None:
    q, k, v = inputs((9,), (9,))
    for dstate in ((None, draw(10, D)), (draw(9, D, E), None)):
        expected = attnkit.linear_attention_vjp(q, k, v, v, dstate=dstate, impl="generic")
        agree(linear.pull(q, k, v, v, dstate=dstate), expected)


def test_gradients_of_a_state_under_jit() -> None:
    """By jax.vjp, in bfloat16, of an initial state in half precision that heads share."""
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs((2, 4, 9), (2, 2, 9)))
    S, z = (x.astype(jnp.float16) for x in state(1, 2))
    options = {"enable_gqa": True, "causal": True, "return_state": True}

    def pulled(function: Any) -> Any:
        results, pull = jax.vjp(lambda S, z: function(q, k, v, initial_state=(S, z), **options), S, z)
        return pull(jax.tree.map(jnp.ones_like, results))

    found = jax.jit(pulled, static_argnums=0)(linear.attend)
    expected = pulled(partial(attnkit.linear_attention, impl="generic"))
    for got, truth in zip(found, expected, strict=True):
        assert got.dtype == jnp.float16
        assert jnp.all(jnp.abs(got - truth) <= 2.0**-10 * jnp.abs(truth))


MAPPED = ("q", "k", "mask", "lengths", "S")


@pytest.mark.parametrize("mapped", [MAPPED, ("q",), ("k", "S"), ("mask",), ("lengths",)])
def test_vmap_adds_an_axis(mapped: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch per kernel, whichever arrays have the axis; the state of keys that have none is the same for all."""
    q, k, v = draw(0, 2, 2, 4, 9, D), draw(1, 2, 2, 9, D), draw(2, 2, 9, E)
    arrays = {"q": q, "k": k, "mask": draw(3, 2, 9) > -1.0, "lengths": jnp.asarray([[9], [4]])}
    arrays |= {"S": draw(4, 2, 2, D, E), "z": jnp.ones((2, D))}
    arrays = {name: x if name in mapped or name == "z" else x[0] for name, x in arrays.items()}

    def call(function: Any, arrays: dict[str, Any]) -> Any:
        options = {"mask": arrays["mask"], "key_lengths": arrays["lengths"], "return_state": True, "enable_gqa": True}
        return function(arrays["q"], arrays["k"], v, initial_state=(arrays["S"], arrays["z"]), causal=True, **options)

    def loss(function: Any, own: dict[str, Any], rest: dict[str, Any]) -> Any:
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(call(function, own | rest)))

    def both(function: Any, arrays: dict[str, Any]) -> Any:
        rest = {name: arrays[name] for name in ("mask", "lengths")}
        own = {name: x for name, x in arrays.items() if name not in rest}
        return call(function, arrays), jax.grad(partial(loss, function))(own, rest)

    axes = {name: 0 if name in mapped else None for name in arrays}
    programs = []
    monkeypatch.setattr(launch, "call", lambda given: programs.append(given.outputs[0].shape) or interpret(given))
    found = jax.vmap(partial(both, linear.attend), (axes,))(arrays)
    assert programs[-1][:2] == (2, 2)
    generic = partial(attnkit.linear_attention, impl="generic")
    for n in range(2):
        one = {name: x[n] if name in mapped else x for name, x in arrays.items()}
        agree(jax.tree.map(lambda x, n=n: x[n], found), both(generic, one))


def test_second_derivatives_are_refused_by_name() -> None:
    q, k, v = inputs((2, 9), (2, 9))
    first = jax.grad(lambda q: jnp.sum(linear.attend(q, k, v) ** 2))
    with pytest.raises(NotImplementedError, match="linear_attention: impl='triton' has no second derivatives"):
        jax.grad(lambda q: jnp.sum(first(q) ** 2))(q)


def test_states_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs((2, 9), (2, 9))
    with pytest.raises(ValueError, match="linear_attention: initial_state's S has shape"):
        linear.attend(q, k, v, initial_state=state(3))
    with pytest.raises(ValueError, match="linear_attention_vjp: dstate's S has shape"):
        linear.pull(q, k, v, v, dstate=state(1))
