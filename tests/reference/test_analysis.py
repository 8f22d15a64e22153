"""Analyses: hand values, the papers' numbers where they are mathematics, invariances, errors."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference
from attnkit_reference import analysis
from attnkit_reference.lowrank.soft import gaussian

GENERATOR = np.random.default_rng(3)
ROW = np.array([2.0, 4.0, 1.0, 3.0])


# ---------------------------------------------------------------------------------------- rows of weights


def test_concentration_by_hand(same: Any) -> None:
    for percent, share in ((0.2, 0.4), (25.0, 0.4), (26.0, 0.7), (50.0, 0.7), (75.0, 0.9), (76.0, 1.0), (100.0, 1.0)):
        same(analysis.concentration(ROW, percent), share)
    for percent, share in ((12.5, 0.2), (25.0, 0.4), (30.0, 0.46), (100.0, 1.0)):
        same(analysis.concentration(ROW, percent, fractional=True), share)
    same(analysis.concentration_curve(ROW, (25.0, 60.0)), [0.4, 0.9])


# n, percent and k = percent·n/100, a whole number that float64 rounds up to a little more
WHOLE = next(
    (n, tenths / 10, tenths * n // 1000)
    for n in range(10, 1000)
    for tenths in range(1, 1000)
    if tenths * n % 1000 == 0 and math.ceil(tenths / 10 * n / 100) != tenths * n // 1000
)


def test_whole_numbers_of_keys_are_not_rounded_up(same: Any) -> None:
    n, percent, k = WHOLE
    assert math.ceil(percent * n / 100) == k + 1
    same(analysis.concentration(np.ones(n), percent), k / n)


def test_uniform_and_one_hot_rows(same: Any) -> None:
    """Uniform weights over n keys: entropy log n and top shares k/n; one weight: entropy 0 and share 1."""
    n = 40
    uniform, one_hot = np.full((3, n), 0.3), np.eye(n)
    for percent in (1.0, 10.0, 55.0):
        same(analysis.concentration(uniform, percent), math.ceil(percent * n / 100) / n)
        same(analysis.concentration(one_hot, percent), 1.0)
    zeros = np.zeros((n, 2))
    same(reference.row_statistics("softmax_attention", zeros, zeros).entropy, np.full(n, math.log(n)))
    hot = reference.row_statistics("pointwise_attention", np.eye(n), np.eye(n), alpha=0.0)
    assert hot.entropy is not None
    assert not hot.entropy.any()


def test_invisible_keys_are_as_if_removed_and_rows_without_weight_do_not_count(same: Any) -> None:
    w = GENERATOR.random((5, 12))
    seen = np.arange(12) % 3 != 0
    w[1] = 0.0
    hidden = np.where(seen, w, np.nan)
    kept = w[[0, 2, 3, 4]][:, seen]
    for fractional in (False, True):
        same(
            analysis.concentration(hidden, 30.0, seen, fractional=fractional),
            analysis.concentration(kept, 30.0, fractional=fractional),
        )
    same(analysis.mass_at_rank(hidden, 2, seen), analysis.mass_at_rank(kept, 2))
    rows = np.array([True, False, True, True, True])[:, None] & seen  # row 1 null instead of dead
    same(analysis.concentration(hidden, 30.0, rows), analysis.concentration(kept, 30.0))
    assert analysis.concentration(np.zeros((2, 3)), 10.0) == 0.0
    assert analysis.concentration(w, 10.0, np.zeros(12, bool)) == 0.0


def test_concentration_knows_neither_scale_nor_order_of_keys(same: Any) -> None:
    w = GENERATOR.random((4, 30))
    curve = analysis.concentration_curve(w, (1.0, 10.0, 40.0))
    same(analysis.concentration_curve(w * 2.0 ** np.arange(4)[:, None], (1.0, 10.0, 40.0)), curve)
    same(analysis.concentration_curve(w[:, GENERATOR.permutation(30)], (1.0, 10.0, 40.0)), curve)
    assert np.all(np.diff(curve) > 0)


def test_mass_at_rank(same: Any) -> None:
    same([analysis.mass_at_rank(ROW, rank) for rank in (1, 2, 3, 4, 5)], [0.4, 0.3, 0.2, 0.1, 0.0])
    w = np.stack([ROW, [0.0, 0.0, 5.0, 0.0], np.zeros(4)])
    same(analysis.mass_at_rank(w, 1), (0.4 + 1.0) / 2)
    same(analysis.mass_at_rank(w, 2), 0.3 / 2)


def test_sparsity_by_hand(same: Any) -> None:
    w = np.array([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 3.0], [9.0, 9.0, 9.0, 9.0]])
    seen = np.ones((4, 4), bool)
    seen[0, 3], seen[3] = False, False
    found = analysis.sparsity(w, seen)
    same(found.zeros, (1 + 4 + 1) / 11)
    same(found.null, 0.25)
    same(found.dead, 0.25)
    same(found.active, 2.5)
    relu = reference.row_statistics("pointwise_attention", np.eye(3) * 2 - 1, np.eye(3), query_mask=np.arange(3) > 0)
    w = reference.pointwise_attention_weights(np.eye(3) * 2 - 1, np.eye(3), query_mask=np.arange(3) > 0)
    assert relu.nonzero is not None
    same(analysis.sparsity(w, np.arange(3)[:, None] > 0).active, relu.nonzero[1:].mean())
    assert tuple(analysis.sparsity(np.zeros((0, 4)))) == (0.0, 0.0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------------- vectors


def test_anisotropy_of_orthogonal_equal_and_opposite_slots(same: Any) -> None:
    """The ends of Shen et al. 2023 eq 4."""
    assert tuple(map(float, analysis.anisotropy(3.0 * np.eye(6)))) == (0.0, 6.0, 0.0)
    equal = np.tile(GENERATOR.standard_normal(5), (7, 1)) * np.arange(1, 8)[:, None]  # lengths do not matter
    same(analysis.anisotropy(equal)[0], 1.0)
    same(analysis.anisotropy(np.array([[1.0, 2.0], [-2.0, -4.0]]))[0], -1.0)


def test_anisotropy_is_the_mean_over_pairs(near: Any) -> None:
    x = GENERATOR.standard_normal((2, 9, 4)) + 1.0
    x[0, 3] = 0.0
    mask = np.ones((2, 9), bool)
    mask[:, 7:] = False
    value, used, excluded = analysis.anisotropy(np.where(mask[..., None], x, np.nan), mask)
    assert used.tolist() == [6, 7]
    assert excluded.tolist() == [1, 0]
    for n in range(2):
        rows = [row / np.linalg.norm(row) for row in x[n, :7] if row.any()]
        cosines = [a @ b for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
        near(value[n], sum(cosines) / len(cosines), magnitude=cosines)
    assert np.isnan(analysis.anisotropy(np.ones((1, 4)))[0])
    assert np.isnan(analysis.anisotropy(np.zeros((5, 4)))[0])


def test_anisotropy_magnitudes_bound_the_sums_of_the_closed_form(same: Any) -> None:
    x = GENERATOR.standard_normal((6, 4))
    unit = np.abs(x / np.linalg.norm(x, axis=1, keepdims=True))
    same(analysis.anisotropy_magnitudes(x)["value"], ((unit.sum(axis=0) ** 2).sum() + 6) / 30)
    assert analysis.anisotropy_magnitudes(x)["value"] > np.abs(analysis.anisotropy(x)[0])


def test_variance_ratio_by_hand(same: Any) -> None:
    branch = np.array([[1.0, 3.0], [2.0, 2.0], [50.0, -50.0]])
    residual = np.array([[0.0, 4.0], [2.0, 2.5], [7.0, 1.0]])
    mask = np.array([True, True, False])
    pooled = 0.5 / (26.25 / 4 - (8.5 / 4) ** 2)
    same(analysis.variance_ratio(branch, residual, mask), pooled)
    same(analysis.variance_ratio(branch, residual, mask, pooled=False), (1.0 / 4.0 + 0.0) / 2)
    same(analysis.variance_ratio(branch + 3.0, residual - 5.0, mask), pooled)
    assert np.isnan(analysis.variance_ratio(branch, np.ones((3, 2))))
    assert np.isnan(analysis.variance_ratio(branch, residual, np.zeros(3, bool)))


# ---------------------------------------------------------------------------------------------- moments


CLOSED = {
    "relu": (1 / math.sqrt(2 * math.pi), 1 / 2, 2 / math.sqrt(2 * math.pi), 3 / 2),
    "relu_squared": (1 / 2, 3 / 2, 15 / 2, 105 / 2),
    "identity": (0.0, 1.0, 0.0, 3.0),
    "gelu": (1 / (2 * math.sqrt(math.pi)), None, None, None),
    "sigmoid": (1 / 2, None, None, None),
}


@pytest.mark.parametrize("activation", CLOSED)
def test_moments_of_activations_in_closed_form(activation: str) -> None:
    found = analysis.activation_moments(activation)
    size = max(found)
    for value, expected in zip(found, CLOSED[activation], strict=True):
        assert expected is None or abs(value - expected) <= 64 * np.finfo(float).eps * size


def test_moments_are_those_of_the_specification() -> None:
    """The two rows of docs/semantics.md B, to the digits printed there."""
    text = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
    rows = [re.search(rf"\| {label} \|(.+)\|", text) for label in ("h", "E h", "E h²")]
    names, first, second = (row.group(1).split("|") for row in rows if row)
    for name, mean, square in zip(names, first, second, strict=True):
        found = analysis.activation_moments(name.strip())
        assert [round(found.first, 5), round(found.second, 5)] == [float(mean), float(square)]


def test_moments_of_a_shifted_gaussian(same: Any) -> None:
    """relu of N(m, s²): mΦ(m/s) + sφ(m/s) and (m² + s²)Φ(m/s) + msφ(m/s)."""
    for m, s in ((0.7, 1.3), (-1.0, 2.0), (3.0, 0.5)):
        cdf, density = 0.5 * math.erfc(-m / s / math.sqrt(2)), math.exp(-0.5 * (m / s) ** 2) / math.sqrt(2 * math.pi)
        found = analysis.activation_moments("relu", mean=m, var=s * s)
        same(found.first, m * cdf + s * density)
        same(found.second, (m * m + s * s) * cdf + m * s * density)
    assert analysis.activation_moments("relu6", mean=7.0, var=0.0) == (6.0, 36.0, 216.0, 1296.0)


@pytest.mark.parametrize("n", [1, 7, 196, 1024])
def test_relu_attention_has_variance_n_over_2(n: int, same: Any) -> None:
    """Shen et al. 2023 Theorem 4.1; their factor 1/(gamma·√(n/2)) makes it 1/gamma², and the kurtosis is 3 + 15/n."""
    found = analysis.output_moments("relu", n, alpha=0.0)
    same(found.variance, n / 2)
    same(found.mean, 0.0)
    same(found.kurtosis, 3 + 15 / n)
    for gamma in (1.0, 0.5):
        same(analysis.output_moments("relu", n, alpha=0.5, gain=math.sqrt(2) / gamma).variance, gamma**-2)


def test_the_mean_weight_is_of_order_one_over_n_iff_alpha_is_1(same: Any) -> None:
    """Wortsman et al. 2023 §3."""
    for alpha in (0.0, 0.5, 1.0, 1.5):
        weights = [n * analysis.output_moments("relu", n, alpha=alpha).weight for n in (16, 256)]
        same(weights[1] / weights[0], 16.0 ** (1.0 - alpha))


def test_a_sum_of_gaussians_is_gaussian(same: Any) -> None:
    """Linear attention of scores around 1 to a constant value: kurtosis 3 for every n."""
    for n in (1, 5):
        same(analysis.output_moments("identity", n, mean=2.0, var=0.0, score_mean=1.0).kurtosis, 3.0)


@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("relu", {"alpha": 0.5, "gain": 1.5}),
        ("gelu", {"alpha": 1.0, "mean": 0.8, "var": 0.5}),
        ("sigmoid", {"alpha": 0.0, "shift": "-log_length", "mean": -1.0, "score_var": 2.0}),
        ("relu_squared", {"alpha": 0.0, "shift": 0.5, "score_mean": 0.3, "mean": 0.4}),
    ],
)
def test_moments_are_those_of_simulated_attention(activation: str, options: dict[str, Any]) -> None:
    """Independent of the formulas: within six standard errors of 100 000 drawn outputs."""
    n, draws = 6, 100_000
    found = analysis.output_moments(activation, n, **options)
    rng = np.random.default_rng(8)
    s = options.get("score_mean", 0.0) + math.sqrt(options.get("score_var", 1.0)) * rng.standard_normal((draws, 1, n))
    v = options.get("mean", 0.0) + math.sqrt(options.get("var", 1.0)) * rng.standard_normal((draws, n, 1))
    own = {name: options[name] for name in ("alpha", "gain", "shift") if name in options}
    w = reference.pointwise_attention_weights(s, np.eye(n), activation=activation, scale=1.0, **own)
    o = (w @ v)[:, 0, 0]
    assert abs(w.mean() - found.weight) < 6 * w.std() / math.sqrt(w.size)
    assert abs(o.mean() - found.mean) < 6 * math.sqrt(found.variance / draws)
    centered = o - found.mean
    fourth = (centered**4).mean()
    assert abs((centered**2).mean() - found.variance) < 6 * math.sqrt(fourth / draws)
    error = centered**4 / found.variance**2
    assert abs(error.mean() - found.kurtosis) < 6 * error.std() / math.sqrt(draws)


# ---------------------------------------------------------------------------------------------- spectra


def landmark_kernel(kind: str, m: int = 49, d: int = 32) -> Any:
    """A of SOFT: landmarks of unit variance, or as a picture gives them: neighbours alike, one direction in common."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((4, m, d))
    if kind == "trained-like":
        x = 1.5 * rng.standard_normal((4, 1, d)) + np.cumsum(x, axis=-2) / math.sqrt(m)
    return gaussian(x, x, d**-0.5)


@pytest.mark.parametrize("kind", ["random", "trained-like"])
def test_newton_converges_within_20_steps(kind: str) -> None:
    """Lu et al. 2021 Figure 4 and Proposition 1: residuals fall, and after 20 steps are below what mathematics allows.

    After k steps an eigenvalue λ of A is missed by λ(1 - 2βλ²/‖A‖₁²)^(2^k), β the initial scale, which is at most
    ‖A‖₁ e^-½/(2√(β 2^k)) whatever λ is.
    """
    a = landmark_kernel(kind)
    found = analysis.newton_residuals(a)
    assert found.shape == (4, 21)
    sums, norm = np.abs(a).sum(axis=-2).max(axis=-1), np.linalg.norm(a, 2, axis=(-2, -1))
    rounding = 64 * np.finfo(float).eps * np.linalg.cond(a)[:, None]
    assert np.all(np.diff(found) <= rounding)
    limits = (sums / norm)[:, None] * math.exp(-0.5) / (2 * np.sqrt(0.9 * 2.0 ** np.arange(21)))
    assert np.all(found[:, 1:] <= limits[:, 1:])
    assert np.all(found[:, -1] < 1e-3)
    assert np.all(found[:, 0] > 1e-3), "nothing to converge from"


def test_the_printed_initial_value_does_not_converge(same: Any) -> None:
    same(analysis.newton_residuals(np.eye(5), init_scale=1.0)[1:], np.ones(20))
    assert analysis.newton_residuals(np.eye(5))[-1] == 0.0
    assert not analysis.newton_residuals(np.zeros((3, 3))).any()


def test_singular_values_by_hand(same: Any) -> None:
    rotation = np.linalg.qr(GENERATOR.standard_normal((3, 3)))[0]
    a = np.stack([np.diag([4.0, 2.0, 1.0]), 5.0 * np.eye(3)]) @ rotation
    same(analysis.condition_number(a), [4.0, 1.0])
    p = np.array([4, 2, 1]) / 7
    same(analysis.effective_rank(a), [math.exp(-(p * np.log(p)).sum()), 3.0])
    assert analysis.condition_number(np.diag([1.0, 0.0])) == np.inf
    assert analysis.effective_rank(np.diag([1.0, 0.0])) == 1.0
    assert analysis.effective_rank(np.zeros((2, 2))) == 0.0
    same(analysis.condition_number(np.array([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])), 1.5)


def test_complexity_of_soft() -> None:
    """Lu et al. 2021 §3.2: the total they print is the sum of its parts, and linear in n."""
    n, m, d, steps = 784, 49, 32, 20
    found = analysis.soft_complexity(n, m, d, newton_steps=steps)
    assert found.time == (d + 4 * m * d + m**2) * n + steps * m**3 + d * m**2
    assert found.space == (2 * m + d) * n + m**2
    one, two, three = (analysis.soft_complexity(p * n, m, d) for p in (1, 2, 3))
    for name in ("time", "space"):
        assert getattr(three, name) - getattr(two, name) == getattr(two, name) - getattr(one, name)


# ---------------------------------------------------------------------------------------------- errors

ONES = np.ones((2, 3))
ERRORS = [
    (analysis.concentration, (-ONES, 10.0), {}, ValueError, "weights.*not negative.*-1.0"),
    (analysis.concentration, (ONES, 0.0), {}, ValueError, r"percent.*\(0, 100\].*0.0"),
    (analysis.concentration, (ONES, True), {}, TypeError, "percent.*number"),
    (analysis.concentration, (ONES, 10.0), {"fraction": True}, ValueError, "'fraction'.*'fractional'"),
    (analysis.concentration_curve, (ONES, (1.0, 200.0)), {}, ValueError, "percent.*200"),
    (analysis.sparsity, (np.float64(1.0),), {}, ValueError, "weights.*one axis"),
    (analysis.anisotropy, (np.ones(3),), {}, ValueError, "x.*two axes"),
    (analysis.variance_ratio, (ONES, np.ones(3)), {}, ValueError, "residual.*shape of branch"),
    (analysis.activation_moments, ("elu",), {}, ValueError, "activation.*relu"),
    (analysis.activation_moments, ("relu",), {"var": -1.0}, ValueError, "var.*>= 0"),
    (analysis.output_moments, ("relu", 0), {}, ValueError, "n.*> 0"),
    (analysis.output_moments, ("relu", 4), {"shift": "log"}, ValueError, "shift.*-log_length"),
    (analysis.condition_number, (np.ones((0, 3)),), {}, ValueError, "not empty"),
    (analysis.soft_complexity, (0, 1, 1), {}, ValueError, "n.*>= 1"),
    (analysis.soft_complexity, (1.5, 1, 1), {}, TypeError, "n.*integer"),
]


@pytest.mark.parametrize("index", range(len(ERRORS)))
def test_errors(index: int) -> None:
    function, arguments, options, error, text = ERRORS[index]
    with pytest.raises(error, match=text):
        function(*arguments, **options)
