"""Packed sequences: boundaries as a tuple and as an array mean the same, and nothing leaks between sequences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnkit
from attnkit.ops import packed

from .arrays import assert_close

Q, K = (0, 5, 5, 12), (0, 7, 9, 16)  # the second sequence has keys and no queries


def inputs(heads: tuple[int, int] = (4, 2), dtype: Any = np.float64) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((Q[-1], heads[0], 6), (K[-1], heads[1], 6), (K[-1], heads[1], 3))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("softmax", {"enable_gqa": True}),
    ("softmax", {"enable_gqa": True, "causal": True}),
    ("softmax", {"enable_gqa": True, "causal": "upper_left", "window": (3, None)}),
    ("pointwise", {"enable_gqa": True, "window": (2, 1)}),
    ("linear", {"enable_gqa": True, "causal": True, "chunk_size": 3}),
    ("linear", {"enable_gqa": True, "feature_map": "relu", "scale": 0.5}),
    ("pointwise", {"enable_gqa": True, "length": "all", "alpha": 0.5, "causal": True}),
    ("pointwise", {"enable_gqa": True, "length": np.arange(1.0, 13.0), "activation": "softplus"}),
)


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_tuples_and_arrays_mean_the_same(name: str, options: dict[str, Any]) -> None:
    forward, vjp = (getattr(packed, f"{name}_attention_packed{suffix}") for suffix in ("", "_vjp"))
    q, k, v = inputs()
    whole = np.asarray(Q), np.asarray(K)
    o = forward(q, k, v, Q, K, **options)
    assert_close(forward(q, k, v, *whole, **options), o)
    do = np.random.default_rng(1).standard_normal(o.shape)
    one, two = vjp(q, k, v, Q, K, do, **options), vjp(q, k, v, *whole, do, **options)
    for gradient, x in zip("qkv", (q, k, v), strict=True):
        assert one[gradient].shape == x.shape
        assert_close(two[gradient], one[gradient])


@pytest.mark.parametrize(
    ("edges", "value"), [((Q, K), np.nan), ((np.asarray(Q), np.asarray(K)), 1e30)], ids=["tuple", "array"]
)
def test_nothing_leaks_between_sequences(edges: Any, value: float) -> None:
    q, k, v = inputs((2, 2))
    before = attnkit.pointwise_attention_packed(q, k, v, *edges)
    k[9:], v[9:] = value, value
    with np.errstate(invalid="ignore"):
        after = attnkit.pointwise_attention_packed(q, k, v, *edges)
    np.testing.assert_array_equal(before[:5], after[:5])
    assert not np.any(before[5:] == after[5:])


def test_array_boundaries_can_be_traced() -> None:
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs((2, 2)))
    traced = jax.jit(attnkit.pointwise_attention_packed)(q, k, v, jnp.asarray(Q), jnp.asarray(K))
    assert_close(traced, attnkit.pointwise_attention_packed(q, k, v, Q, K))


@pytest.mark.parametrize(
    ("edges", "error", "pattern"),
    [
        (((0, 5, 11), (0, 9, 16)), ValueError, "cu_seqlens_q must rise from 0 to the 12 tokens"),
        ((Q, (0, 16)), ValueError, "as many sequences"),
        (([0, 12], [0, 16]), TypeError, "cu_seqlens_q must be a tuple of integers or an integer array"),
        ((Q, np.asarray(K)), TypeError, "both be tuples or both be arrays"),
    ],
)
def test_boundaries_are_checked(edges: Any, error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=f"softmax_attention_packed: .*{pattern}"):
        attnkit.softmax_attention_packed(*inputs((2, 2)), *edges)
