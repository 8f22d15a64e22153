"""A plan says of a call what the generic bodies find in arrays."""

import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit._core.dropout import keep_mask
from attnkit._core.mask import Rows, Visibility, row_length
from attnkit.kernels import plan as plans
from attnkit.kernels.plan import Limits, Plan, cached_plan, layout, plan, signature, summed_axes

LENGTHS = [(4, 6), (6, 4), (5, 5), (1, 7), (3, 0), (0, 3)]
CAUSAL = [False, True, "upper_left"]
WINDOWS = [None, (None, None), (1, None), (None, 0), (2, 1), (0, 9)]


def planned(queries: int = 4, keys: int = 6, **options: Any) -> Plan:
    q, k, v = (np.zeros((2, 3, n, width)) for n, width in ((queries, 8), (keys, 8), (keys, 5)))
    return plan(signature(q, k, v, options))


def seen_within(s: Limits, queries: int, keys: int) -> np.ndarray:
    """visible(i, j) as the docstring of `Limits` says."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    inside = (j < s.keys) & (i >= 0)
    inside &= True if s.left is None else j >= i - s.left
    return inside & (True if s.right is None else j <= i + s.right)


def pairs_of(queries: int, keys: int, **options: Any) -> np.ndarray:
    found = Visibility(**options).pairs(np, np.zeros((queries, 1)), keys, Rows(0, queries, queries))
    return np.broadcast_to(True if found is None else found, (queries, keys))


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_limits_are_the_visible_pairs(queries: int, keys: int) -> None:
    for causal, window, key_lengths in itertools.product(CAUSAL, WINDOWS, (None, 0, 2, 9, np.int64(3))):
        options = {"causal": causal, "window": window, "key_lengths": key_lengths}
        found = seen_within(planned(queries, keys, **options).limits, queries, keys)
        given = options | {"key_lengths": None if key_lengths is None else int(key_lengths)}
        assert np.array_equal(found, pairs_of(queries, keys, **given)), options


def test_limits_that_bind_nothing_are_none() -> None:
    assert planned().limits == Limits(None, None, 6)
    assert planned(window=(None, None), key_lengths=9).limits == Limits(None, None, 6)


def test_sequences_are_bounded_each_from_its_own_end() -> None:
    q = np.zeros((3, 10, 8))

    def bounds(**options: Any) -> Limits:
        return plan(signature(q, q, q, options, sequences=2)).limits

    assert bounds(causal=True, window=(3, None)) == Limits(None, None, 10, 3, 0)
    assert bounds(causal="upper_left", window=(3, 2)) == Limits(None, 0, 10, 3, 2)
    assert bounds() == Limits(None, None, 10)


@pytest.mark.parametrize("own", [{}, {"alpha": 0.5, "gain": 3.0}, {"alpha": 0.0, "shift": "-log_length"}])
@pytest.mark.parametrize("length", ["visible", "all", 3, np.float32(2.5)])
def test_what_is_the_same_for_all_queries_is_in_gain_and_shift(own: dict[str, Any], length: Any) -> None:
    seeing: dict[str, Any]
    for queries, keys in LENGTHS:
        for seeing in ({}, {"key_lengths": 2}, {"causal": True}, {"mask": np.ones((2, 1, 1, keys), bool)}):
            s = planned(queries, keys, **own, length=length, **seeing)
            rows = Rows(0, queries, queries)
            pairs = Visibility(**seeing).pairs(np, np.zeros((queries, 1)), keys, rows)
            count = keys if pairs is None else pairs.sum(-1, keepdims=True)
            number = np.asarray(length) if isinstance(length, np.generic) else length
            n = np.broadcast_to(row_length(np, number, count, keys, rows, float), (*np.shape(count)[:-2], queries, 1))
            alpha, gain, shift = own.get("alpha", 1.0), own.get("gain", 1.0), own.get("shift", 0.0)
            factor = s.numbers.gain * n**-s.numbers.alpha
            moved = s.numbers.shift - (np.log(n) if s.numbers.log_length else 0.0)
            np.testing.assert_allclose(factor, gain * n**-alpha, rtol=1e-15)
            np.testing.assert_allclose(moved, -np.log(n) if isinstance(shift, str) else n * 0, rtol=1e-15)
            folded = length != "visible" or ("mask" not in seeing and "causal" not in seeing)
            assert s.numbers.rows == ((False, False) if folded else (alpha != 0, isinstance(shift, str)))


def test_an_array_of_lengths_is_left_to_the_kernels() -> None:
    s = planned(length=np.full((2, 1, 4), 3.0), shift="-log_length", causal=True)
    assert s.numbers.rows == (True, True)
    assert not s.by_position
    assert planned(causal=True).by_position


def test_dropout_is_a_word_and_part_of_the_gain() -> None:
    s = planned(dropout=(0.25, 7), gain=3.0, alpha=0.0).numbers
    assert s.gain == 4.0
    word = s.last_kept
    assert word / 2**32 < 0.75 <= (word + 1) / 2**32
    kept = keep_mask(np, np.zeros(1), 0.25, 7, (2, 3), 200, Rows(0, 200, 200)).mean()
    assert abs(kept - (word + 1) / 2**32) < 0.01
    assert not planned(dropout=(0.0, 7)).numbers.drops
    assert planned(dropout=(1 - 2**-40, 7)).numbers[-2:] == (True, 0)


def test_scale_is_that_of_the_head_size_unless_named() -> None:
    assert planned().numbers.scale == 1 / math.sqrt(8)
    assert planned(scale=0).numbers.scale == 0.0


@pytest.mark.parametrize(
    ("q", "k", "v", "enable_gqa", "leading", "shared"),
    [
        ((4, 8), (6, 8), (6, 5), False, (), ()),
        ((3, 4, 8), (6, 8), (6, 5), False, (3,), (3,)),
        ((2, 1, 4, 8), (3, 6, 8), (1, 1, 6, 5), False, (2, 3), (2, 3)),
        ((7, 1, 6, 4, 8), (2, 3, 6, 8), (1, 3, 6, 5), True, (7, 2, 6), (7, 2, 3)),
        ((0, 2, 4, 8), (2, 6, 8), (2, 6, 5), False, (0, 2), (0, 2)),
    ],
)
def test_every_array_broadcasts_to_its_shape(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], enable_gqa: bool, leading: Any, shared: Any
) -> None:
    a = layout(q, k, v, enable_gqa)
    assert (a.leading, a.shared) == (leading, shared)
    assert a.items * a.heads == math.prod(leading)
    assert a.items * a.kv_heads == math.prod(shared)
    assert (a.queries, a.keys, a.d, a.e) == (4, 6, 8, 5)
    for name, shape in zip("qkv", (q, k, v), strict=True):
        assert np.broadcast_to(np.zeros(shape), a.shape_of(name)).shape == a.shape_of(name)
    assert a.shape_of("o") == (*leading, 4, 5)
    assert layout(q, k, None, enable_gqa).e == 8


def test_a_gradient_is_summed_along_the_axes_that_were_broadcast() -> None:
    for shape in ((2, 3, 4, 6), (3, 4, 6), (4, 1), (1, 1, 1, 6), (), (2, 1, 4, 6)):
        grad = np.random.default_rng(0).standard_normal((2, 3, 4, 6))
        found = grad.sum(summed_axes(grad.shape, shape), keepdims=True).reshape(shape)
        ones = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), grad.shape)
        expected = [grad[ones == n].sum() for n in range(math.prod(shape))]
        np.testing.assert_allclose(found.ravel(), expected)


@pytest.mark.parametrize(
    ("bias", "expected"),
    [((6,), (1, 1, 4, 6)), ((3, 1, 6), (1, 3, 4, 6)), ((2, 1, 4, 6), (2, 1, 4, 6)), ((1, 1, 4, 1), (1, 1, 4, 6))],
)
def test_the_gradient_of_a_bias_has_the_axes_that_it_differs_in(bias: Any, expected: Any) -> None:
    assert planned(bias=np.zeros(bias)).dbias == expected


def test_plans_are_cached_by_what_they_depend_on() -> None:
    q = np.zeros((2, 3, 4, 8))
    options = {"mask": np.ones((4, 4), bool), "dropout": (0.5, np.uint64(3)), "causal": True}
    one = signature(q, q, q, options)
    other = signature(q + 1, q, q, options | {"mask": np.zeros((4, 4), bool), "dropout": (0.5, 9)})
    assert one == other
    assert cached_plan(one) is cached_plan(other)
    for changed in ({"causal": False}, {"mask": None}, {"dropout": None}, {"gain": 2.0}):
        assert cached_plan(signature(q, q, q, options | changed)) != cached_plan(one), changed


def test_defaults_are_those_of_the_op() -> None:
    known = inspect.signature(attnkit.pointwise_attention).parameters
    defaults = plans.Signature._field_defaults
    for name in plans.PLAIN:
        if name in known:
            assert known[name].default == defaults[name], name
    assert {"alpha", "gain", "length", "shift"} <= {*plans.PLAIN} & {*known}


# ---------------------------------------------------------------------------------------------- linear attention


def linear(queries: int = 4, keys: int = 6, heads: int = 4, shared: int = 2, **options: Any) -> plans.Linear:
    q, k, v = np.zeros((2, heads, queries, 8)), np.zeros((2, shared, keys, 8)), np.zeros((1, shared, keys, 5))
    return plans.linear_plan(q, k, v, {"enable_gqa": True, **options})


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_keys_behind_the_stop_are_seen_by_no_query(queries: int, keys: int) -> None:
    for causal, key_lengths in itertools.product(CAUSAL, (None, 0, 2, 9)):
        s = linear(queries, keys, causal=causal, key_lengths=key_lengths)
        i, j = np.arange(queries)[:, None], np.arange(keys)
        found = (j < s.stop) & ((j <= i + s.shift) if s.causal else (i >= 0))
        assert np.array_equal(found, pairs_of(queries, keys, causal=causal, key_lengths=key_lengths))
        if queries and s.stop > 0:
            assert found[:, s.stop - 1].any()
        assert s.valid == (keys if key_lengths is None else min(keys, key_lengths))
        start, end = s.positions
        assert start <= s.shift
        assert end >= max(keys, queries + s.shift)


@pytest.mark.parametrize(
    ("options", "members"),
    [
        ({}, 2),
        ({"mask": np.ones((2, 1, 1, 6), bool), "key_lengths": np.ones((2, 1), int)}, 2),
        ({"mask": np.ones((4, 1, 6), bool)}, 1),
        ({"mask": np.ones(6, bool), "query_mask": np.ones((4, 4), bool)}, 1),
        ({"key_lengths": np.ones(4, int)}, 1),
        ({"key_lengths": 3, "query_mask": np.ones(4, bool)}, 2),
    ],
)
def test_query_heads_share_a_state_unless_their_masks_differ(options: dict[str, Any], members: int) -> None:
    s = linear(**options)
    assert (s.members, s.num_states, s.state_leading) == (members, 4 // members, (2, 4 // members))


def test_a_returned_state_has_the_axes_of_what_it_is_made_of() -> None:
    k, v = np.zeros((2, 6, 8)), np.zeros((1, 2, 6, 5))
    assert plans.state_axes("linear_attention", k, v, None, {}) == (1, 2)
    assert plans.state_axes(
        "linear_attention", k, v, None, {"mask": np.ones((3, 1, 1, 6), bool), "key_lengths": 4}
    ) == (3, 2)
    initial = np.zeros((5, 1, 8, 5)), np.zeros((1, 2, 8))
    assert plans.state_axes("linear_attention", k, v, initial, {"key_lengths": np.ones((1, 1), int)}) == (5, 2)


def test_defaults_of_linear_attention() -> None:
    assert linear()[-3:] == (True, 1.0, 1e-6)
    assert linear(feature_map="identity", scale=0.5, eps=1e-3)[-3:] == (False, 0.5, 1e-3)
    assert linear(feature_map="identity", normalize=True).normalize
