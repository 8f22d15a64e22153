"""Row statistics and the regulariser: hand values, dead and null rows, gradients off the support, signed weights."""

import math
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

IDENTITY = np.eye(4)
# rows: spread, one-hot, dead (no positive score), tie
SCORES = np.array([[1.0, 2.0, 0.0, 1.0], [0.0, -1.0, 3.0, 0.0], [0.0, -1.0, -2.0, 0.0], [2.0, 2.0, -1.0, 2.0]])
FIELDS = reference.RowStatistics._fields


def relu_statistics(**params: Any) -> Any:
    return reference.row_statistics("pointwise_attention", SCORES, IDENTITY, scale=1.0, alpha=0.0, **params)


def test_statistics_by_hand(same: Any) -> None:
    stats = relu_statistics()
    assert stats._fields == FIELDS
    same(stats.total, [4.0, 3.0, 0.0, 6.0])
    same(stats.entropy, [1.5 * math.log(2), 0.0, 0.0, math.log(3)])
    same(stats.sum_squares, [6.0, 9.0, 0.0, 12.0])
    same(stats.maximum, [2.0, 3.0, 0.0, 2.0])
    same(stats.nonzero, [3.0, 1.0, 0.0, 3.0])
    same(stats.visible, [4.0, 4.0, 4.0, 4.0])
    assert all(field.dtype == np.float64 for field in stats)


def test_null_rows_keep_no_statistics(same: Any) -> None:
    stats = relu_statistics(query_mask=np.array([False, True, True, True]))
    assert [float(field[0]) for field in stats] == [0.0] * 6
    same(stats.visible, [0.0, 4.0, 4.0, 4.0])


def test_entropy_of_uniform_and_of_one_hot_weights(same: Any) -> None:
    for op in ("softmax_attention", "sigmoid_attention"):
        stats = reference.row_statistics(op, np.zeros((5, 2)), np.ones((5, 2)), causal=True)
        same(stats.entropy, np.log(np.arange(1, 6)))
    stats = reference.row_statistics("softmax_attention", np.array([[1e4, 0.0]]), np.eye(2))
    assert stats.entropy.tolist() == [0.0]
    stats = reference.row_statistics("softmax_attention", np.zeros((1, 2)), np.eye(2))
    same(stats.total, [1.0])
    same(stats.sum_squares, [0.5])
    # 0.1 is not representable: the entropy of a single weight is still exactly 0
    one = np.full((1, 1), 0.1)
    assert reference.row_statistics("reluformer_attention", one, one).entropy.tolist() == [0.0]


def test_only_the_fields_asked_for_are_there() -> None:
    stats = relu_statistics(fields=("maximum", "total"))
    assert [name for name in FIELDS if getattr(stats, name) is not None] == ["total", "maximum"]


def test_op_is_a_function_or_its_name() -> None:
    q = np.random.default_rng(0).normal(size=(3, 4))
    for op in (reference.softmax_attention, reference.sigmoid_attention, reference.reluformer_attention):
        for field, expected in zip(
            reference.row_statistics(op, q, q), reference.row_statistics(op.__name__, q, q), strict=True
        ):
            np.testing.assert_array_equal(field, expected)


@pytest.mark.parametrize("activation", ["softplus", "sigmoid"])
def test_nonzero_is_visible_where_zeros_are_not_meant(activation: str) -> None:
    scores = np.array([[-1e4, 1.0], [-1e4, -1e4]])
    stats = reference.row_statistics("pointwise_attention", scores, np.eye(2), scale=1.0, activation=activation)
    # the second row underflows as a whole: it is dead
    assert stats.nonzero.tolist() == [2.0, 0.0]
    assert stats.visible.tolist() == [2.0, 2.0]


def test_softmax_rows_without_a_finite_score_are_null() -> None:
    bias = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    stats = reference.row_statistics("softmax_attention", np.zeros((2, 2)), np.eye(2), bias=bias)
    assert stats.total.tolist() == [0.0, 1.0]
    assert stats.nonzero.tolist() == [0.0, 2.0]
    assert stats.visible.tolist() == [2.0, 2.0]


def test_a_sum_that_cancels_is_not_dead(same: Any) -> None:
    own = {"activation": "identity", "scale": 1.0, "alpha": 0.0}
    fields = ("total", "maximum", "nonzero")
    scores = np.array([[1.0, -1.0], [-2.0, -3.0], [0.0, 0.0]])
    stats = reference.row_statistics("pointwise_attention", scores, np.eye(2), fields=fields, **own)
    assert stats.total.tolist() == [0.0, -5.0, 0.0]
    assert stats.maximum.tolist() == [1.0, -2.0, 0.0]
    assert stats.nonzero.tolist() == [2.0, 2.0, 0.0]
    dstats = reference.RowStatistics(total=np.ones(3))
    gradient = reference.row_statistics_vjp("pointwise_attention", scores, np.eye(2), dstats, fields=fields, **own)
    same(gradient["q"], [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])


@pytest.mark.parametrize("own", [{"activation": "identity"}, {"activation": "gelu"}, {"activation": "gelu_tanh"},
                                 {"activation": "silu"}, {"gain": -1.0}])  # fmt: skip
def test_entropy_of_signed_weights_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^row_statistics\(pointwise_attention\): entropy; .*pass fields=\('total',"):
        reference.row_statistics("pointwise_attention", SCORES, IDENTITY, **own)
    fields = tuple(name for name in FIELDS if name != "entropy")
    stats = reference.row_statistics("pointwise_attention", SCORES, IDENTITY, fields=fields, **own)
    assert stats.entropy is None


def test_gradients_at_kinks_and_off_the_support(same: Any) -> None:
    # scale 1 and k = identity: dq is ds
    def ds(**cotangents: Any) -> Any:
        dstats = reference.RowStatistics(**{name: np.ones(4) for name in cotangents})
        return reference.row_statistics_vjp(
            "pointwise_attention", SCORES, IDENTITY, dstats, scale=1.0, alpha=0.0, activation="relu"
        )["q"]

    same(ds(total=1), [[1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]])
    same(ds(maximum=1), [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    same(ds(sum_squares=1), 2 * np.where(SCORES > 0, SCORES, 0))
    H = 1.5 * math.log(2)
    first = [-(math.log(0.25) + H) / 4, -(math.log(0.5) + H) / 4]
    np.testing.assert_array_equal(ds(entropy=1)[1:3], np.zeros((2, 4)))
    same(ds(entropy=1)[0], [first[0], first[1], 0.0, first[0]])
    np.testing.assert_array_equal(ds(nonzero=1, visible=1), np.zeros((4, 4)))


def test_the_maximum_is_taken_over_visible_keys() -> None:
    mask = np.array([False, True, True, True])
    scores = np.array([[5.0, 1.0, 2.0, 2.0]])
    own = {"scale": 1.0, "mask": mask, "alpha": 0.0}
    dstats = reference.RowStatistics(maximum=np.ones(1))
    assert reference.row_statistics("pointwise_attention", scores, IDENTITY, **own).maximum.tolist() == [2.0]
    gradient = reference.row_statistics_vjp("pointwise_attention", scores, IDENTITY, dstats, **own)["q"]
    assert gradient.tolist() == [[0.0, 0.0, 1.0, 0.0]]
    negative = {**own, "activation": "identity", "fields": ("maximum",)}
    found = reference.row_statistics("pointwise_attention", -scores, IDENTITY, **negative).maximum
    assert found.tolist() == [-1.0]


def test_what_the_weights_of_an_op_do_not_take_is_named() -> None:
    with pytest.raises(ValueError, match=r"^row_statistics\(linear_attention\): unexpected argument 'bias'"):
        reference.row_statistics("linear_attention", IDENTITY, IDENTITY, bias=np.ones((4, 4)))


def statistics(total: Any, entropy: Any, visible: Any) -> Any:
    arrays = (np.array(x, dtype=np.float64) for x in (total, entropy, visible))
    return reference.RowStatistics(**dict(zip(("total", "entropy", "visible"), arrays, strict=True)))


def test_regulariser_by_hand(same: Any) -> None:
    # rows: sparse and too large; flat and too small; null; dead
    stats = statistics([math.e, 0.5, 0.0, 0.0], [0.1, 2.0, 0.0, 0.0], [8, 8, 0, 5])
    loss, sum_term, entropy_term = reference.attention_regulariser(stats, sum_weight=3.0, entropy_weight=5.0)
    same(sum_term, (1 + math.log(2)) / 2)
    same(entropy_term, (2.0 - 0.7 * math.log(8)) / 2)
    same(loss, 3 * sum_term + 5 * entropy_term)
    mask = np.array([True, False, True, True])
    masked = reference.attention_regulariser(stats, query_mask=mask, entropy_cap=0.0)
    same(masked, [1.1, 1.0, 0.1])


def test_regulariser_without_a_valid_row_is_zero() -> None:
    stats = statistics([0.0, 2.0], [0.0, 0.0], [3, 4])
    mask = np.array([True, False])
    assert reference.attention_regulariser(stats, query_mask=mask) == (0.0, 0.0, 0.0)
    gradients = reference.attention_regulariser_vjp(stats, 1.0, query_mask=mask)
    assert not any(gradient.any() for gradient in gradients.values())


def test_regulariser_kinks_have_no_gradient(same: Any) -> None:
    # Z = 1 is the kink of |log Z|; one visible key has H = cap log 1 = 0
    stats = statistics([1.0, 2.0], [0.0, 0.0], [1, 2])
    gradients = reference.attention_regulariser_vjp(stats, 1.0)
    same(gradients["total"], [0.0, 0.25])
    same(gradients["entropy"], [0.0, 0.0])


def test_regulariser_of_a_dead_row_ignores_what_it_holds() -> None:
    stats = statistics([0.0, 2.0], [np.nan, 0.5], [3, 4])
    assert np.all(np.isfinite(reference.attention_regulariser(stats)))
    assert reference.attention_regulariser_vjp(stats, 1.0)["entropy"][0] == 0


def test_regulariser_of_an_attention_call(near: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 6, 4)), rng.normal(size=(2, 6, 4)), rng.normal(size=(2, 6, 4))
    w = reference.reluformer_attention_weights(q, k, causal=True)
    stats = reference.attention_with_statistics("reluformer_attention", q, k, v, causal=True)[1]
    sums, excess = [], []
    for row, n in zip(w.reshape(-1, 6), list(range(1, 7)) * 2, strict=True):
        if row.sum() > 0:
            p = row[row > 0] / row.sum()
            sums.append(abs(math.log(row.sum())))
            excess.append(max(-float(np.sum(p * np.log(p))) - 0.7 * math.log(n), 0.0))
    _, sum_term, entropy_term = reference.attention_regulariser(stats)
    assert 0 < len(sums) < 12
    assert max(excess) > 0
    near(sum_term, np.mean(sums), magnitude=1.0)  # the logarithm of a sum near 1 has the sum's relative error
    near(entropy_term, np.mean(excess), magnitude=math.log(6))
