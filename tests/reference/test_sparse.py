"""Sparsemax and α-entmax: gradients by central differences, values by hand, ends, ties, kinks, tails, errors."""

import math
from typing import Any

import numpy as np
import pytest

from attnkit_reference import entmax
from attnkit_reference.softmax import softmax_attention, softmax_attention_vjp, softmax_attention_weights

from .cases import CASES as COMMON
from .cases import OF_ROWS, draw

Arrays = dict[str, Any]

MARGIN = 0.02  # of (α-1)s from the threshold, where the support changes
ALPHAS = (1.0, 1.1, 1.3, 1.5, 1.8, 2.0)
IDENTITY = np.eye(4)


CASES = {**OF_ROWS, "causal": COMMON["causal"], "minus_infinity": OF_ROWS["masked"]}


def distances(alpha: Any, arrays: Arrays, params: Arrays) -> Any:
    """How far (α-1)s is from the threshold of its row, at visible pairs with a finite score."""
    common = {name: x for name, x in params.items() if not name.startswith("dropout")}
    rows = entmax.entmax_rows(
        "sample", arrays["q"], arrays["k"], arrays["v"], alpha=alpha, bias=arrays.get("bias"), **common
    )
    sc, above = rows.scores, np.broadcast_to(alpha, (*rows.scores.n.shape, 1)) - 1.0
    top = np.max(sc.s, axis=-1, keepdims=True, initial=-np.inf, where=sc.visible)
    there = sc.visible & np.isfinite(sc.s) & (above > 0)
    largest = rows.w.max(axis=-1, keepdims=True, initial=0.0) ** np.where(above > 0, above, 1.0)
    return np.abs(above * np.where(there, sc.s - np.where(there, top, 0.0), 0.0) + largest)[there]


def sample(case: str, alpha: Any) -> tuple[Arrays, Arrays]:
    """The first draw of a case whose scores keep MARGIN from the thresholds."""
    for seed in range(2000):
        arrays, params = draw(np.random.default_rng(seed), CASES[case])
        if case == "minus_infinity":
            arrays["bias"][0, 2], arrays["bias"][2] = -np.inf, -np.inf
        if np.all(distances(alpha, arrays, params) > MARGIN):
            return arrays, params
    raise AssertionError("no draw keeps the margin")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients(check_vjp: Any, alpha: float, case: str) -> None:
    arrays, params = sample(case, alpha)
    check_vjp("entmax_attention", arrays, {**params, "alpha": alpha})


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_sparsemax(check_vjp: Any, case: str) -> None:
    check_vjp("sparsemax_attention", *sample(case, 2.0), beyond=1.5 if case == "groups" else 0.0)


@pytest.mark.parametrize(
    ("case", "alpha"),
    [
        ("masked", np.array([[1.2], [1.5], [1.7]])),
        ("causal", np.array(1.35)),
        ("windows", np.array([[[1.2]], [[1.6]], [[1.9]]])),
        ("groups", np.array([[[1.3]], [[1.05]], [[1.95]], [[1.6]]])),
        ("minus_infinity", np.array([[1.6]])),
    ],
)
def test_gradient_in_alpha(check_vjp: Any, case: str, alpha: Any) -> None:
    arrays, params = sample(case, alpha)
    check_vjp("entmax_attention", {**arrays, "alpha": alpha}, params, beyond=1.5 if case == "groups" else 0.0)


def test_gradient_in_alpha_at_one_is_the_limit(near: Any) -> None:
    """The one-sided difference quotient of step h is off by O(h): Richardson removes that from 1.01 and 1.02."""
    rng = np.random.default_rng(0)
    z, do = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))

    def value(alpha: float) -> Any:
        return np.sum(
            entmax.entmax_attention(z, IDENTITY, IDENTITY, alpha=alpha, scale=1.0) * do, axis=-1, keepdims=True
        )

    gradient = entmax.entmax_attention_vjp(z, IDENTITY, IDENTITY, do, alpha=np.ones((3, 1)), scale=1.0)["alpha"]
    quotients = {h: (value(1 + h) - value(1)) / h for h in (0.01, 0.02, 0.04)}
    first = [2 * quotients[h] - quotients[2 * h] for h in (0.01, 0.02)]
    second = (4 * first[0] - first[1]) / 3
    error = np.abs(first[0] - second)  # what the last extrapolation still changed
    assert np.all(np.abs(second - gradient) <= error)
    assert np.all(np.abs(gradient) > 10 * error)
    # exactly: -½ Σ dp p (log² p - Σ p log² p)
    p = softmax_attention_weights(z, IDENTITY, scale=1.0)
    log2 = np.log(p) ** 2
    expected = -0.5 * np.sum(do * p * (log2 - np.sum(p * log2, axis=-1, keepdims=True)), axis=-1, keepdims=True)
    near(gradient, expected, magnitude=np.sum(np.abs(do) * p * log2, axis=-1))


def weights(z: Any, **params: Any) -> Any:
    z = np.asarray(z, dtype=np.float64)
    return entmax.entmax_attention_weights(z, np.eye(z.shape[-1]), scale=1.0, **params)


def test_sparsemax_by_hand(same: Any) -> None:
    same(weights([[0.1, 0.2, 0.3]], alpha=2.0), [[0.7 / 3, 1 / 3, 1.3 / 3]])
    same(
        weights([[3.0, 2.5, 0.0], [0.0, 0.0, -5.0], [1.0, 5.0, 1.0]], alpha=2),
        [[0.75, 0.25, 0], [0.5, 0.5, 0], [0, 1, 0]],
    )
    same(entmax.sparsemax_attention_weights(np.array([[3.0, 2.5]]), np.eye(2), scale=1.0), [[0.75, 0.25]])


def test_entmax_by_hand(same: Any) -> None:
    # two scores at distance d: √p_1 - √p_2 = d/2 with p_1 + p_2 = 1
    d = 1.0
    t = (-d / 2 + math.sqrt(2 - d * d / 4)) / 2
    same(weights([[d, 0.0]]), [[(t + d / 2) ** 2, t * t]])
    # α = 1.25, two equal scores: their x - τ is 2^-¼ = 0.841, which a score 4·0.841 = 3.364 below does not reach
    same(weights([[0.0, 0.0, -3.37]], alpha=1.25), [[0.5, 0.5, 0.0]])
    assert 0 < weights([[0.0, 0.0, -3.36]], alpha=1.25)[0, 2] < 1e-11
    same(weights([[7.0] * 4], alpha=1.7), [[0.25] * 4])


@pytest.mark.parametrize("alpha", [1.01, 1.1, 1.5, 1.9, 2.0, np.array([[1.3]])])
def test_weights_satisfy_their_equation(same: Any, alpha: Any) -> None:
    """Σp = 1, and p^{α-1} = (α-1)s - τ with one τ on the support, which no score outside exceeds."""
    s = 3 * np.random.default_rng(0).normal(size=(50, 20))
    p, a = weights(s, alpha=alpha), float(np.ravel(alpha)[0])
    same(p.sum(axis=-1), np.ones(50))
    tau = np.where(p > 0, (a - 1) * s - p ** (a - 1), np.nan)
    spread = np.nanmax(tau, axis=-1) - np.nanmin(tau, axis=-1)
    assert np.all(spread <= 64 * np.finfo(np.float64).eps * (a - 1) * np.abs(s).max(axis=-1) / (a - 1))
    outside = np.where(p > 0, -np.inf, (a - 1) * s).max(axis=-1)
    assert np.all(outside <= np.nanmax(tau, axis=-1))
    assert np.any(p == 0) == (a > 1.05)


def test_ends_are_softmax_and_sparsemax(near: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=shape) for shape in ((5, 3), (6, 3), (6, 2), (5, 2)))
    np.testing.assert_array_equal(
        entmax.entmax_attention(q, k, v, alpha=2, causal=True), entmax.sparsemax_attention(q, k, v, causal=True)
    )
    for alpha in (1.0, np.ones((5, 1))):
        o = entmax.entmax_attention(q, k, v, alpha=alpha, causal=True)
        near(o, softmax_attention(q, k, v, causal=True))
        found = entmax.entmax_attention_vjp(q, k, v, do, alpha=alpha, causal=True)
        for name, expected in softmax_attention_vjp(q, k, v, do, causal=True).items():
            near(found[name], expected)


def test_a_common_shift_changes_nothing() -> None:
    z = np.round(np.random.default_rng(0).normal(size=(20, 9)) * 16) / 16
    for alpha in (1.2, 1.5, 2.0):
        np.testing.assert_array_equal(weights(z, alpha=alpha), weights(z + 1024.0, alpha=alpha))


def test_scores_on_the_threshold_are_outside() -> None:
    """Ties that are exact in binary: the weight is exactly 0, and so is the gradient."""
    for z, alpha, support in (
        ([[0.0, -1.0, -1.0]], 2.0, [1, 0, 0]),
        ([[0.0] * 4 + [-0.25, -0.5]], 2.0, [1] * 4 + [0, 0]),
        ([[0.0] * 4 + [-1.0]], 1.5, [1] * 4 + [0]),
        ([[0.0] * 16 + [-2.0]], 1.25, [1] * 16 + [0]),
    ):
        n = len(z[0])
        p = weights(z, alpha=alpha)
        np.testing.assert_array_equal(p, np.array([support]) / sum(support))
        do = np.random.default_rng(0).normal(size=(1, n))
        params = {"alpha": alpha, "scale": 1.0}
        ds = entmax.entmax_attention_vjp(np.array(z), np.eye(n), np.eye(n), do, **params)["q"]
        assert ((ds != 0) == np.array([support], dtype=bool)).all() or sum(support) == 1


def test_rows_without_a_finite_score_are_null(same: Any) -> None:
    bias = np.array([[0.0, -np.inf, 0.0, 0.0], [-np.inf] * 4, [0.0, 0.0, -np.inf, -np.inf]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 1, 1]], dtype=bool)
    z = np.random.default_rng(0).normal(size=(3, 4))
    for alpha in (1.0, 1.3, 1.5, 2.0, np.array([[1.4], [1.0], [1.7]])):
        p = weights(z, alpha=alpha, bias=bias, mask=mask)
        assert p[0, 1] == 0
        assert not p[1:].any()
        same(p[0].sum(), 1.0)
        rest = {"alpha": alpha, "bias": bias, "mask": mask, "scale": 1.0}
        gradients = entmax.entmax_attention_vjp(z, IDENTITY, IDENTITY, np.ones((3, 4)), **rest)
        assert all(np.isfinite(x).all() for x in gradients.values())
        assert not gradients["q"][1:].any()
        assert "alpha" not in gradients or not gradients["alpha"][1:].any()


def test_the_smallest_alpha_may_be_written_in_any_dtype() -> None:
    for dtype in ("float16", "float32", "float64"):
        assert weights([[1.0, 0.0]], alpha=np.array([1.01]).astype(dtype)).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_magnitudes_of_weights_count_the_summands_of_scores(alpha: float) -> None:
    """A bias that all keys of a query share changes no weight, but costs every score its last digits."""
    rng = np.random.default_rng(0)
    q, k, bias = rng.normal(size=(5, 4)), rng.normal(size=(7, 4)), np.full((5, 1), 1e3)
    weights = entmax.entmax_attention_weights(q, k, alpha=alpha, bias=bias)
    size = entmax.entmax_attention_weights_magnitudes(q, k, alpha=alpha, bias=bias)["w"]
    assert np.all(size[weights > 0] > 1e3 * weights[weights > 0] ** (2 - alpha))
    assert np.all(size[weights == 0] == 0)
