"""Values that can be computed by hand, and exact rules: kinks, null and dead rows, tails, constants of the papers."""

import math
from decimal import Decimal, getcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference.pointwise import SCORE_FUNCTIONS

OPS = ("softmax_attention", "pointwise_attention", "reluformer_attention", "sigmoid_attention")
# scale 1 and k = identity: the scores are the entries of q
SCORES = np.array([[1.0, -2.0, 3.0], [0.0, -1.0, -4.0]])
IDENTITY = np.eye(3)
VALUES = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])


def test_softmax_by_hand(same: Any) -> None:
    q = np.log(np.array([[1.0, 2.0, 5.0], [4.0, 4.0, 4.0]]))
    o, lse = reference.softmax_attention(q, IDENTITY, VALUES, scale=1.0, return_lse=True)
    same(lse, np.log([8.0, 12.0]))
    same(reference.softmax_attention_weights(q, IDENTITY, scale=1.0), [[0.125, 0.25, 0.625], [1 / 3] * 3])
    same(o, [[(1 + 4 + 20) / 8, (10 + 40 + 200) / 8], [7 / 3, 70 / 3]])


def test_default_scale_is_one_over_root_d(same: Any) -> None:
    q = np.full((1, 9), 2.0)
    same(reference.pointwise_attention_weights(q, q, activation="identity"), [[36.0 / 3.0]])


def test_softmax_of_large_scores(same: Any) -> None:
    o, lse = reference.softmax_attention(SCORES * 1e4, IDENTITY, VALUES, scale=1.0, return_lse=True)
    same(o, VALUES[[2, 0]])
    same(lse, [3e4, 0.0])


def test_a_sink_is_a_key_without_a_value(near: Any) -> None:
    """A number, and one for each head: softmax with one more key of that score, whose weight and value are left out."""
    rng = np.random.default_rng(5)
    q, k, v, bias = (rng.normal(size=shape) for shape in ((2, 3, 4), (2, 5, 4), (2, 5, 3), (2, 3, 5)))
    mask = rng.random((2, 3, 5)) < 0.7
    mask[:, 1] = False
    for sink in (0.0, 2.5, np.array(-1.0, np.float32), np.array([0.5, 30.0])):
        c = np.broadcast_to(np.reshape(sink, (-1, 1, 1)), (2, 3, 1))
        more = [np.concatenate([x, np.zeros((2, 1, x.shape[-1]))], axis=1) for x in (k, v)]
        seen = np.concatenate([mask, mask.any(-1, keepdims=True)], axis=-1)
        options = {"mask": seen, "bias": np.concatenate([bias, c], axis=-1), "return_lse": True}
        expected = reference.softmax_attention(q, *more, **options)
        found = reference.softmax_attention(q, k, v, sink=sink, mask=mask, bias=bias, return_lse=True)
        for one, other in zip(found, expected, strict=True):
            null = np.isneginf(other)
            assert np.array_equal(np.isneginf(one), null)
            near(np.where(null, 0, one), np.where(null, 0, other))


def test_a_sink_of_minus_infinity_is_none(same: Any) -> None:
    q, k, v = np.arange(6.0).reshape(3, 2), np.ones((4, 2)), np.arange(8.0).reshape(4, 2)
    for sink in (-math.inf, np.array(-np.inf)):
        same(reference.softmax_attention(q, k, v, sink=sink), reference.softmax_attention(q, k, v))


def test_null_rows_have_no_sink() -> None:
    q, k, v = np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 1))
    bias, sink = np.array([[0.0, 0.0], [-np.inf, -np.inf], [-np.inf, 0.0]]), np.array(3.0)
    seen = {"bias": bias, "query_mask": np.array([False, True, True])}
    o, lse = reference.softmax_attention(q, k, v, sink=sink, return_lse=True, **seen)
    assert np.isneginf(lse).tolist() == [True, True, False]
    assert np.all(o[:2] == 0)
    do, dlse = np.array([[np.nan], [np.nan], [1.0]]), np.array([np.nan, np.nan, 1.0])
    whole = reference.softmax_attention_vjp(q, k, v, do, dlse, sink=sink, **seen)
    last = reference.softmax_attention_vjp(q[2:], k, v, do[2:], dlse[2:], sink=sink, bias=bias[2:])
    assert whole["sink"] == last["sink"] != 0


@pytest.mark.parametrize("sink", [math.nan, math.inf, np.array(np.inf), np.array(np.nan), np.zeros(3), np.zeros(1)])
def test_what_is_no_sink(sink: Any) -> None:
    q = np.ones((2, 3, 2))
    with pytest.raises(ValueError, match="softmax_attention: sink"):
        reference.softmax_attention(q, q, q, sink=sink)


def test_pointwise_by_hand(same: Any) -> None:
    args = (SCORES, IDENTITY, VALUES)
    same(reference.pointwise_attention(*args, scale=1.0), np.array([[13.0, 130.0], [0.0, 0.0]]) / 3)
    own = {"activation": "relu_squared", "alpha": 0.5, "gain": 2.0, "length": 16.0, "shift": 1.0, "scale": 1.0}
    same(reference.pointwise_attention_weights(SCORES, IDENTITY, **own), [[2.0, 0.0, 8.0], [0.5, 0.0, 0.0]])
    bias = np.array([0.0, 2.5, -1.0])
    weights = reference.pointwise_attention_weights(SCORES, IDENTITY, alpha=0.0, bias=bias, scale=1.0)
    same(weights, [[1.0, 0.5, 2.0], [0.0, 1.5, 0.0]])


def test_causal_lengths_by_hand(same: Any) -> None:
    ones = np.ones((3, 1))
    weights = reference.pointwise_attention_weights(ones, ones, causal=True)
    same(weights, [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    weights = reference.pointwise_attention_weights(ones, ones, causal=True, length="all")
    same(weights, np.tril(np.full((3, 3), 1 / 3)))
    weights = reference.pointwise_attention_weights(ones, ones, causal=True, length=np.array([2.0, 4.0, 5.0]))
    same(weights, [[1 / 2, 0, 0], [1 / 4, 1 / 4, 0], [1 / 5, 1 / 5, 1 / 5]])


def test_causal_is_lower_right_and_can_be_upper_left() -> None:
    q, k = np.ones((2, 1)), np.ones((4, 1))
    lower_right = [[True, True, True, False], [True, True, True, True]]
    upper_left = [[True, False, False, False], [True, True, False, False]]
    assert (reference.sigmoid_attention_weights(q, k, causal=True) > 0).tolist() == lower_right
    assert (reference.sigmoid_attention_weights(q, k, causal="upper_left") > 0).tolist() == upper_left


@pytest.mark.parametrize("window", [None, (1, 1), (0, None), (None, 2), (2, 0)])
@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 4), (1, 4)])
def test_visibility_pair_by_pair(sizes: tuple[int, int], causal: Any, window: Any) -> None:
    L, S = sizes
    rng = np.random.default_rng(0)
    mask, queries = rng.random((L, S)) < 0.8, rng.random((2, L)) < 0.8
    lengths = np.array([S - 1, S])
    weights = reference.sigmoid_attention_weights(
        np.ones((2, L, 1)), np.ones((2, S, 1)),
        mask=mask, causal=causal, window=window, key_lengths=lengths, query_mask=queries,
    )  # fmt: skip
    for b in range(2):
        for i in range(L):
            for j in range(S):
                expected = mask[i, j] and queries[b, i] and j < lengths[b]
                if causal:
                    expected = expected and j <= (i if causal == "upper_left" else i + S - L)
                if window is not None:
                    left, right = window
                    offset = j - (i + S - L)
                    expected = expected and (left is None or offset >= -left) and (right is None or offset <= right)
                assert (weights[b, i, j] > 0) == expected, (b, i, j)


def test_heads_of_a_group_share_keys_and_values(near: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 6, 3, 4)), rng.normal(size=(2, 2, 5, 4)), rng.normal(size=(2, 2, 5, 3))
    for name in OPS:
        grouped = getattr(reference, name)(q, k, v, enable_gqa=True)
        for head in range(6):
            near(grouped[:, head], getattr(reference, name)(q[:, head], k[:, head // 3], v[:, head // 3]))


def test_reluformer_is_a_pointwise_attention(near: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(4, 3)), rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    weights = reference.reluformer_attention_weights(q, k, gamma=0.8, causal=True)
    visible = np.tril(np.ones((4, 6), dtype=bool), 2)
    n = visible.sum(axis=1, keepdims=True)
    near(weights, np.where(visible, np.maximum(q @ k.T, 0) / math.sqrt(3) / (0.8 * np.sqrt(n / 2)), 0.0))
    own = {"activation": "relu", "alpha": 0.5, "gain": math.sqrt(2) / 0.8}
    pointwise = reference.pointwise_attention(q, k, v, causal=True, **own)
    near(reference.reluformer_attention(q, k, v, gamma=0.8, causal=True), pointwise)


def test_reluformer_keeps_the_output_variance() -> None:
    # Shen et al. 2023 Thm 4.1: the sum has variance n/2; the sample variance of `count` normal-like values has
    # standard deviation sqrt((kurtosis - 1)/count), kurtosis 3 + 15/n
    n, count = 64, 20000
    rng = np.random.default_rng(0)
    q, v = rng.normal(size=(count, 1, n)), rng.normal(size=(count, n, 1))
    o = reference.reluformer_attention(q, np.eye(n), v, scale=1.0)
    assert abs(np.var(o) - 1.0) < 5 * math.sqrt((2 + 15 / n) / count)


def test_sigmoid_is_exact_in_both_tails(same: Any) -> None:
    getcontext().prec = 50
    x = np.concatenate([np.linspace(-700, 40, 149), [-1e-9, 0.0, 1e-9, 710.0, 1e4]])
    exact = [float(1 / (1 + (-Decimal(value)).exp())) for value in x.tolist()]
    own = {"activation": "sigmoid", "alpha": 0.0, "scale": 1.0}
    same(reference.pointwise_attention_weights(x[:, None], np.ones((1, 1)), **own)[:, 0], exact)
    v, do = np.ones((1, 1)), np.ones((len(x), 1))
    slope = reference.pointwise_attention_vjp(x[:, None], np.ones((1, 1)), v, do, **own)["q"][:, 0]
    exact_slope = [
        float((-abs(Decimal(value))).exp() / (1 + (-abs(Decimal(value))).exp()) ** 2) for value in x[:-2].tolist()
    ]
    same(slope[:-2], exact_slope)


def test_sigmoid_attention_is_shifted_by_log_n(same: Any) -> None:
    weights = reference.sigmoid_attention_weights(SCORES, IDENTITY, scale=1.0, causal=True)
    expected = [1 / (1 + n * math.exp(-s)) for s, n in ((1.0, 2), (-2.0, 2), (0.0, 3), (-1.0, 3), (-4.0, 3))]
    same(weights, [[*expected[:2], 0.0], expected[2:]])
    q = np.zeros((1, 1))
    same(reference.sigmoid_attention_weights(q, np.ones((8, 1))).sum(), 8 / 9)


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def exact_activation(name: str, value: float) -> float:
    """softplus, gelu, gelu_tanh and silu in 80 digits; the normal distribution function by its power series."""
    x = Decimal(value)
    if name == "softplus":
        return float((1 + x.exp()).ln())
    if name == "gelu":
        term, total = x, Decimal(0)
        for n in range(1, 1500):
            total += term
            term = term * x * x / (2 * n + 1)
        return float(x * (Decimal("0.5") + total * (-x * x / 2).exp() / (2 * PI).sqrt()))
    y = x if name == "silu" else 2 * (2 / PI).sqrt() * (x + Decimal("0.044715") * x**3)
    return float(x / (1 + (-y).exp()))


@pytest.mark.parametrize("name", ["softplus", "gelu", "gelu_tanh", "silu"])
def test_activations_keep_relative_accuracy_below_zero(same: Any, name: str) -> None:
    getcontext().prec = 80
    x = np.array([-5.0, -3.0, -1.0, -1e-3, 0.0, 1e-3, 2.0, 30.0])
    same(SCORE_FUNCTIONS[name].h(x), [exact_activation(name, value) for value in x.tolist()])


def weights_and_slope(name: str, x: float) -> tuple[float, float]:
    one = np.ones((1, 1))
    own = {"activation": name, "alpha": 0.0, "scale": 1.0}
    q = np.full((1, 1), x)
    w = reference.pointwise_attention_weights(q, one, **own)
    return float(w[0, 0]), float(reference.pointwise_attention_vjp(q, one, one, one, **own)["q"][0, 0])


def test_kinks_are_exact() -> None:
    assert weights_and_slope("relu", 0.0) == (0.0, 0.0)
    assert weights_and_slope("relu", -0.0) == (0.0, 0.0)
    assert weights_and_slope("relu", 5e-324) == (5e-324, 1.0)
    assert weights_and_slope("relu_squared", 0.0) == (0.0, 0.0)
    assert weights_and_slope("relu6", 0.0) == (0.0, 0.0)
    assert weights_and_slope("relu6", 6.0) == (6.0, 0.0)
    assert weights_and_slope("relu6", 5.5) == (5.5, 1.0)
    assert weights_and_slope("relu6", 6.5) == (6.0, 0.0)
    assert weights_and_slope("softplus", 0.0) == (math.log(2), 0.5)


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_a_visible_nan_stays_nan(name: str) -> None:
    weight, slope = weights_and_slope(name, math.nan)
    assert math.isnan(weight)
    assert math.isnan(slope)


@pytest.mark.parametrize("name", OPS)
def test_null_rows_are_zero_and_take_no_part(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=shape) for shape in ((3, 4), (5, 4), (5, 2), (3, 2)))
    bias, queries = rng.normal(size=(3, 5)), np.array([True, False, True])
    op, vjp = getattr(reference, name), getattr(reference, f"{name}_vjp")
    o, gradients = op(q, k, v, query_mask=queries, bias=bias), vjp(q, k, v, do, query_mask=queries, bias=bias)
    assert np.all(o[1] == 0)
    assert np.all(o[[0, 2]] != 0)
    assert np.all(gradients["q"][1] == 0)
    assert np.all(gradients["bias"][1] == 0)
    rest = vjp(q[[0, 2]], k, v, do[[0, 2]], bias=bias[[0, 2]])
    for x in ("k", "v"):
        np.testing.assert_array_equal(gradients[x], rest[x])


def test_lse_of_null_rows_is_minus_infinity() -> None:
    q, k, v = np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 1))
    bias = np.array([[0.0, 0.0], [-np.inf, -np.inf], [-np.inf, 0.0]])
    _, lse = reference.softmax_attention(q, k, v, bias=bias, query_mask=np.array([False, True, True]), return_lse=True)
    assert np.isneginf(lse).tolist() == [True, True, False]


def test_bias_of_minus_infinity_gives_no_weight(same: Any) -> None:
    bias = np.array([[-np.inf, 0.0, 0.0], [-np.inf, -np.inf, -np.inf]])
    weights = reference.softmax_attention_weights(SCORES, IDENTITY, scale=1.0, bias=bias)
    same(weights, [[0.0, 1 / (1 + math.exp(5)), 1 / (1 + math.exp(-5))], [0.0, 0.0, 0.0]])
    # the length still counts all three keys
    weights = reference.sigmoid_attention_weights(SCORES, IDENTITY, scale=1.0, bias=bias)
    same(weights, [[0.0, 1 / (1 + 3 * math.exp(2)), 1 / (1 + 3 * math.exp(-3))], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", OPS)
def test_every_float_dtype_is_computed_in_float64(name: str, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(kind) for shape in ((3, 4), (5, 4), (5, 2), (3, 2))]
    wide = [x.astype(np.float64) for x in arrays]
    o = getattr(reference, name)(*arrays[:3])
    assert o.dtype == np.float64
    np.testing.assert_array_equal(o, getattr(reference, name)(*wide[:3]))
    gradients = getattr(reference, f"{name}_vjp")(*arrays)
    for x, expected in getattr(reference, f"{name}_vjp")(*wide).items():
        assert gradients[x].dtype == np.float64
        np.testing.assert_array_equal(gradients[x], expected)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_empty_queries_or_keys(name: str, sizes: tuple[int, int]) -> None:
    L, S = sizes
    q, k, v, do = np.ones((2, L, 4)), np.ones((2, S, 4)), np.ones((2, S, 5)), np.ones((2, L, 5))
    o = getattr(reference, name)(q, k, v, causal=True)
    assert o.shape == (2, L, 5)
    assert not o.any()
    gradients = getattr(reference, f"{name}_vjp")(q, k, v, do, causal=True)
    assert {x: gradient.shape for x, gradient in gradients.items()} == {"q": q.shape, "k": k.shape, "v": v.shape}
    assert not any(gradient.any() for gradient in gradients.values())
    stats = reference.row_statistics(name, q, k)
    assert all(field.shape == (2, L) and not field.any() for field in stats)


def test_qk_layernorm_by_hand(same: Any) -> None:
    q, k = np.array([[1.0, 3.0], [5.0, 5.0]]), np.array([[100.0, 104.0]])
    q_normed, k_normed = reference.qk_layernorm(q, k, np.array([1.0, 10.0]), np.array([2.0, 1.0]), eps=0.21)
    same(q_normed, np.array([[-1.0, 10.0], [0.0, 0.0]]) / math.sqrt(1.21))
    same(k_normed, np.array([[-4.0, 2.0]]) / math.sqrt(4.21))
