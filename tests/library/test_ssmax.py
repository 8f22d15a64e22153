"""Scalable softmax: how many keys a query sees, counted without pairs, and what reaches the kernels of softmax."""

import itertools
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit._core.library import namespace
from attnkit._core.mask import Rows, Visibility

from .arrays import traced_memory

QUERIES, KEYS = 7, 9
RNG = np.random.default_rng(0)
MASKS: tuple[Any, ...] = (
    None,
    RNG.random(KEYS) < 0.6,
    RNG.random((2, 1, 1, KEYS)) < 0.6,
    RNG.random((QUERIES, KEYS)) < 0.6,
)
LENGTHS: tuple[Any, ...] = (None, 4, np.array([[0], [2**64 - 1]], np.uint64), np.array([[3], [-2]], np.int8))
QUERY_MASKS: tuple[Any, ...] = (None, RNG.random((2, 1, QUERIES)) < 0.6)
WINDOWS: tuple[Any, ...] = (None, (2, 1), (None, 0), (3, None))


@pytest.mark.parametrize("queries", [QUERIES, 12, 0])
@pytest.mark.parametrize("causal", [False, True, "upper_left"])
def test_keys_are_counted_without_pairs(causal: Any, queries: int) -> None:
    q = np.zeros((2, 3, queries, 4))
    xp = namespace(q)
    for mask, window, lengths, rows in itertools.product(MASKS, WINDOWS, LENGTHS, QUERY_MASKS):
        if queries != QUERIES and (rows is not None or mask is MASKS[-1]):
            continue
        visibility = Visibility(mask, causal, window, lengths, rows)
        pairs = visibility.pairs(xp, q, KEYS, Rows(0, queries, queries))
        expected = KEYS if pairs is None else np.broadcast_to(pairs, (2, 3, queries, KEYS)).sum(-1, keepdims=True)
        counted = visibility.counted(xp, q, KEYS, np.float64)
        assert np.array_equal(
            np.broadcast_to(counted, (2, 3, queries, 1)), np.broadcast_to(expected, (2, 3, queries, 1))
        )


def test_a_padded_causal_call_of_the_kernel_forms_no_pairs() -> None:
    q = np.ones((1, 1, 4096, 8), np.float32)
    options: dict[str, Any] = {"causal": True, "mask": np.arange(4096) > 5, "impl": ("native", "blocked")}
    attnkit.ssmax_attention(q, q, q, **options)
    with traced_memory() as memory:
        attnkit.ssmax_attention(q, q, q, **options)
    assert memory.peak < 4096 * 4096


@pytest.mark.parametrize("impl", ["generic", "blocked", "native"])
def test_infinite_padding_is_multiplied_by_no_zero(impl: str) -> None:
    """The factor is 0 where a row sees no key, or one."""
    q, k = np.ones((6, 4)), np.ones((3, 4))
    q[:3] = np.inf
    if attnkit.explain("ssmax_attention", q, k, k).get(impl, "absent") is not None:
        pytest.skip(f"no {impl} here")
    o = attnkit.ssmax_attention(q, k, k, causal=True, impl=impl)  # NumPy's warnings are errors
    grads = attnkit.ssmax_attention_vjp(q, k, k, o, causal=True, slope=np.array(1.0), impl=impl)
    assert np.all(o[:3] == 0)
    assert np.all(o[3:] == 1)
    assert all(np.all(np.isfinite(x)) for x in grads.values())


def test_a_kernel_does_not_round_the_product_of_a_row() -> None:
    """Scores of several hundreds: rounding q times the factor to float16 would move one by 0.1."""
    q, k, v = (np.random.default_rng(3).standard_normal((16, n, 64)).astype(np.float16) for n in (40, 50, 50))
    if reason := attnkit.explain("ssmax_attention", q, k, v).get("native", "there is no CPU library"):
        pytest.skip(reason)
    one, other = (attnkit.ssmax_attention(q, k, v, slope=11.3, impl=impl) for impl in ("native", "generic"))
    assert np.max(np.abs(one.astype(float) - other)) <= 4 * np.finfo(np.float16).eps
