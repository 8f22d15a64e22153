"""Softmax with a sink: which implementations know it, and what differs from softmax. Values are judged by the kit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit.backends.torch import KERNELS

from .arrays import assert_close, qkv

Q, K, V = qkv()
HEADS = np.array([0.4, -math.inf, 2.0])


def on(library: Any, *arrays: np.ndarray) -> list[Any]:
    return [library(x) for x in arrays]


@pytest.mark.parametrize("sink", [0.0, -math.inf, HEADS, np.array(-1.5)])
def test_kernels_know_a_sink_or_refuse_it_by_name(sink: Any) -> None:
    for library in (np.asarray, torch.as_tensor, jnp.asarray):
        given = sink if isinstance(sink, float) else library(sink)
        q, k, v = on(library, Q, K, V)
        with attnkit.implementations() as ran:
            attnkit.softmax_attention(q, k, v, sink=given)
        told = attnkit.explain("softmax_attention", q, k, v, sink=given)
        assert {name for name, reason in told.items() if reason is None} >= {"generic", "blocked"}
        assert told["native"] is not None or ran == {"softmax_attention": {"native"}} or library is jnp.asarray
        for name in {"sdpa", "triton"} & {*told}:
            assert told[name] == "sink is served by the generic implementation" or "CUDA" in told[name]
    assert "sdpa" in [kernel.name for kernel in KERNELS["softmax_attention"]]


@pytest.mark.parametrize("impl", ["native", "generic"])
def test_a_sink_that_repeated_calls_change_is_read_again(impl: str) -> None:
    if attnkit.explain("softmax_attention", Q, K, V).get(impl, "absent") is not None:
        pytest.skip(f"no {impl} here")
    for x in (0.2, 3.0):
        sink = np.full((3,), x)
        one, other = (attnkit.softmax_attention(Q, K, V, sink=c, impl=impl) for c in (sink, x))
        assert_close(one, other)
        of_torch = attnkit.softmax_attention(*on(torch.as_tensor, Q, K, V), sink=torch.as_tensor(sink), impl=impl)
        assert_close(of_torch, one)


@pytest.mark.parametrize("impl", ["native", "blocked", "generic"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_far_above_and_below_all_scores(impl: str, dtype: Any) -> None:
    """exp(c - m) is beyond the largest number, or 0."""
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    if attnkit.explain("softmax_attention", q, k, v).get(impl, "absent") is not None:
        pytest.skip(f"no {impl} here")
    lse = {} if impl == "blocked" else {"return_lse": True}
    sink, do = np.array([2000.0, -2000.0, 95.0], dtype), np.ones_like(V).astype(dtype)[..., :5, :]
    found = attnkit.softmax_attention(q, k, v, sink=sink, impl=impl, **lse)
    plain = attnkit.softmax_attention(q, k, v, impl=impl, **lse)
    o, of_plain = (found[0], plain[0]) if lse else (found, plain)
    assert np.all(o[:, 0] == 0)
    assert np.array_equal(o[:, 1], of_plain[:, 1])
    assert np.all(np.abs(o[:, 2]) < 1e-36)
    if lse:
        assert np.all(found[1][:, 0] == 2000)
        assert np.all(found[1][:, 2] == 95)
    grads = attnkit.softmax_attention_vjp(q, k, v, do, None if impl == "blocked" else found[1], sink=sink, impl=impl)
    assert all(np.all(np.isfinite(x)) for x in grads.values())
    assert grads["sink"][1] == 0
    if lse:  # p = 1: the cotangent of lse alone
        assert_close(grads["sink"][0], found[1][:, 0].sum())


def test_an_infinite_number_passes_through_custom_ops() -> None:
    q, k, v = on(torch.as_tensor, Q, K, V)
    mapped = torch.func.vmap(lambda x: attnkit.softmax_attention(x, k, v, sink=-math.inf, impl=("native", "blocked")))
    assert_close(mapped(q[None])[0], attnkit.softmax_attention(q, k, v))


def test_the_gradient_of_a_mapped_sink_is_that_of_each() -> None:
    q, k, v = on(jnp.asarray, Q, K, V)
    sinks = jnp.asarray([[0.5, 1.0, -1.0], [0.0, 2.0, 3.0]])

    def loss(sink: Any) -> Any:
        return (attnkit.softmax_attention(q, k, v, sink=sink) ** 2).sum()

    for one, sink in zip(jax.vmap(jax.grad(loss))(sinks), sinks, strict=True):
        assert np.allclose(one, jax.grad(loss)(sink), rtol=1e-5)


@pytest.mark.parametrize("sink", [math.nan, math.inf, True, "0", np.zeros(2), np.zeros(3, int), [0.0, 0.0, 0.0]])
def test_what_is_no_sink(sink: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="softmax_attention: sink"):
        attnkit.softmax_attention(Q, K, V, sink=sink)


def test_packed_forms_take_no_sink() -> None:
    q = np.ones((4, 2, 3))
    with pytest.raises(ValueError, match="unexpected argument 'sink'"):
        attnkit.softmax_attention_packed(q, q, q, (0, 4), (0, 4), sink=0.0)
