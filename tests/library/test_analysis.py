"""Analyses where conformance does not look: what comes in parts, memory, tracing, quadrature, errors."""

import inspect
import math

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference as reference
from attnkit import analysis
from attnkit._core.activations import ACTIVATIONS
from attnkit.analysis import rows
from attnkit_conformance.model import tolerance

from .arrays import assert_agrees, normal, traced_memory

LIBRARIES = {"numpy": np.asarray, "strict": array_api_strict.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}
PERCENTS = (0.2, 5.0, 25.0, 100.0)
ONLY_IN_ATTNKIT = {"Anisotropy", "Concentration", "VarianceRatio", "weight_blocks"}


def relu_weights(*shape: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    return np.maximum(normal(shape, seed=seed)[0], 0).astype(dtype)


def test_names_and_signatures_are_those_of_the_reference():
    theirs = set(reference.analysis.__all__)
    assert set(analysis.__all__) - theirs == ONLY_IN_ATTNKIT
    for name in theirs:
        ours, other = (inspect.signature(getattr(module, name)) for module in (analysis, reference.analysis))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in other.parameters.values()
        ]
        assert getattr(analysis, name).__doc__


# ---------------------------------------------------------------------------------------------- in parts


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("fractional", [False, True])
def test_concentration_in_parts_is_that_of_the_whole(library, fractional):
    w, array = relu_weights(6, 20, 50, dtype="float32"), LIBRARIES[library]
    seen = np.random.default_rng(1).random((6, 20, 50)) < 0.8
    w[1, 4], seen[2, 5] = 0.0, False
    golden = reference.analysis.concentration_curve(w, PERCENTS, seen, fractional=fractional)
    first, second = (analysis.Concentration(PERCENTS, fractional=fractional) for _ in range(2))
    for n, curve in ((0, first), (1, first), (2, second), (3, second), (4, second), (5, first)):
        curve.update(array(w[n]), array(seen[n]))
    assert analysis.Concentration(PERCENTS).value == (0.0,) * 4
    first.merge(second)
    assert first.rows == 118
    assert_agrees(first.value, golden, dtype="float32")
    assert all(isinstance(x, float) for x in first.value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_anisotropy_in_parts_is_that_of_the_whole(library):
    x, array = normal((4, 30, 8), dtype="float32")[0] + np.float32(0.5), LIBRARIES[library]
    mask = np.random.default_rng(1).random((4, 30)) < 0.8
    x[2, 3], mask[2, 3] = 0.0, True
    flat = (x.reshape(120, 8), mask.reshape(120))
    value, used, excluded = reference.analysis.anisotropy(*flat)
    first, second = analysis.Anisotropy(), analysis.Anisotropy()
    assert math.isnan(first.value)
    first.update(array(x[0]), array(mask[0]))
    second.update(array(x[1:]), array(mask[1:]))  # leading axes are rows too
    first.merge(second)
    assert (first.used, first.excluded) == (used, excluded) == (used, 1)
    assert_agrees(
        first.value, value, magnitude=reference.analysis.anisotropy_magnitudes(*flat)["value"], dtype="float32"
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_variance_ratio_in_parts_is_that_of_the_whole(library):
    array = LIBRARIES[library]
    x, r = normal((4, 30, 8), (4, 30, 8), dtype="float32")
    x, r = x * np.float32(0.3) + np.arange(4, dtype="float32")[:, None, None], r - np.float32(2)  # batches differ
    mask = np.random.default_rng(1).random((4, 30)) < 0.7
    mask[3] = False
    first, second = analysis.VarianceRatio(), analysis.VarianceRatio()
    assert math.isnan(first.value)
    assert math.isnan(first.per_token)
    for n, ratio in ((0, first), (1, second), (2, second), (3, first)):
        ratio.update(array(x[n]), array(r[n]), array(mask[n]))
    first.merge(second)
    assert first.tokens == mask.sum()
    assert_agrees(first.value, reference.analysis.variance_ratio(x, r, mask), dtype="float32")
    assert_agrees(first.per_token, reference.analysis.variance_ratio(x, r, mask, pooled=False), dtype="float32")
    assert_agrees(analysis.variance_ratio(array(x), array(r), array(mask)), first.value, dtype="float32")


def test_parts_are_added_in_float64():
    """2 000 batches of float32: added up in float32, they lose the digits that are asked for here."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2000, 100, 4)) * 0.1 + 3.0).astype("float32")
    r = (rng.standard_normal((2000, 100, 4)) + 3.0).astype("float32")
    ratio, directions = analysis.VarianceRatio(), analysis.Anisotropy()
    for a, b in zip(x, r, strict=True):
        ratio.update(a, b)
        directions.update(a)
    assert_agrees(ratio.value, reference.analysis.variance_ratio(x, r), dtype="float32")
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=-1, keepdims=True)
    m = x.shape[0] * x.shape[1]
    golden, lossy = (
        ((total.astype(float) ** 2).sum() - m) / (m * (m - 1))
        for total in (unit.sum(axis=(0, 1)), np.cumsum(unit.reshape(m, 4), axis=0, dtype="float32")[-1])
    )
    assert_agrees(directions.value, golden, dtype="float32")
    assert abs(lossy - golden) > 64 * np.finfo("float32").eps * golden


@pytest.mark.parametrize("library", LIBRARIES)
def test_variances_far_from_zero(library):
    """A mean of 10⁵ deviations is known in float32 to a hundredth of one: what it is off must be taken out again."""
    array = LIBRARIES[library]
    x, r = (y + np.float32(1e5) for y in normal((4, 50, 8), (4, 50, 8), dtype="float32", seed=2))
    golden = reference.analysis.variance_ratio(x, r)
    assert_agrees(analysis.variance_ratio(array(x), array(r)), golden, dtype="float32")
    ratio = analysis.VarianceRatio()
    for n in range(4):
        ratio.update(array(x[n]), array(r[n]))
    assert_agrees(ratio.value, golden, dtype="float32")


def test_merging_what_does_not_fit_is_an_error():
    curve = analysis.Concentration([1, 10])
    with pytest.raises(ValueError, match=r"Concentration: cannot merge percents \(10.0,\)"):
        curve.merge(analysis.Concentration([10]))
    with pytest.raises(ValueError, match="cannot merge"):
        curve.merge(analysis.Concentration([1, 10], fractional=True))
    directions = analysis.Anisotropy()
    directions.update(np.ones((2, 3)))
    with pytest.raises(ValueError, match="Anisotropy: vectors of 4 features; those before have 3"):
        directions.update(np.ones((2, 4)))


# ---------------------------------------------------------------------------------------------- in blocks


@pytest.mark.parametrize("op", ["softmax_attention", "pointwise_attention", "entmax_attention", "gaussian_attention"])
def test_blocks_are_the_weights_of_the_op(op, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK", 3 * 2 * 2 * 7)  # three queries
    q, k = normal((2, 2, 8, 6), (2, 1, 7, 6))
    options = {"causal": True, "query_mask": np.arange(8) != 5, "key_lengths": np.array([[6], [4]]), "enable_gqa": True}
    blocks = list(analysis.weight_blocks(op, q, k, **options))
    assert [w.shape[-2] for w, _ in blocks] == [3, 3, 2]
    expected = getattr(attnkit, f"{op}_weights")(q, k, **options)
    growth = tolerance.growth_of_exponent(-math.log(np.min(expected[expected > 0])))
    assert_agrees(np.concatenate([w for w, _ in blocks], axis=-2), expected, growth=growth)
    curve = analysis.Concentration(PERCENTS)
    for w, visible in blocks:
        curve.update(w, visible)
    seen = reference._core.visibility("test", (2, 2, 8, 7), None, True, None, options["key_lengths"])
    seen &= options["query_mask"][:, None]
    assert_agrees(curve.value, reference.analysis.concentration_curve(expected, PERCENTS, seen))
    with pytest.raises(ValueError, match=r"^weight_blocks\(softmax_attention\): unexpected argument 'alpha'"):
        analysis.weight_blocks("softmax_attention", q, k, alpha=1.0)


@pytest.mark.parametrize("op", ["softmax_attention", "pointwise_attention"])
def test_long_rows_without_a_matrix_of_weights(op):
    """4096 queries and keys: the peak stays far below one (L, S) array, and a block holds what the row asks for."""
    length = 4096
    q, k = normal((length, 8), (length, 8), dtype="float32")
    curve = analysis.Concentration((1.0, 10.0))
    with traced_memory() as memory:
        for w, visible in analysis.weight_blocks(op, q, k, causal=True):
            curve.update(w, visible)
    assert curve.rows > 0.99 * length
    assert memory.peak < 4 * length * length / 2
    assert 0 < curve.value[0] < curve.value[1] < 1


def test_how_many_keys_does_not_depend_on_the_dtype():
    """percent·n/100 of 32.4 % of 250 keys is 81; in float32 it is above, and one key more would be taken."""
    percent, n, k = 32.4, 250, 81
    exact = np.float32(percent) * np.float32(n) / np.float32(100)
    assert math.ceil(exact - np.float32(1e-9 * n)) == k + 1
    w, seen = np.ones((2, 300), "float32"), np.stack([np.arange(300) < n, np.arange(300) < n])
    for array in LIBRARIES.values():
        assert_agrees(analysis.concentration(array(w), percent, array(seen)), k / n, dtype="float32")
        assert_agrees(analysis.concentration(array(w[:, :n]), percent), k / n, dtype="float32")


# ---------------------------------------------------------------------------------------------- tracing


def test_under_jit():
    w, seen = relu_weights(4, 9, dtype="float32"), np.arange(9) < 7
    for function, options in (
        (analysis.concentration, {"percent": 30.0}),
        (analysis.concentration_curve, {"percents": PERCENTS}),
        (analysis.mass_at_rank, {"rank": 2}),
    ):
        traced = jax.jit(lambda w, seen, f=function, o=options: f(w, visible=seen, **o))
        assert_agrees(
            traced(w, seen), getattr(reference.analysis, function.__name__)(w, visible=seen, **options), dtype="float32"
        )
    assert np.isnan(traced(-w, seen)), "negative weights cannot be refused there, and must not pass for weights"
    with pytest.raises(ValueError, match="mass_at_rank: weights must not be negative; got -"):
        analysis.mass_at_rank(jnp.asarray(-w), 2)


def test_spectra_are_computed_in_float64_without_jax_x64():
    """A kernel of condition 10⁸ and more: in float32 its smallest singular value is noise."""
    x = np.linspace(0, 1, 9)[:, None]
    a = np.exp(-((x - x.T) ** 2)).astype("float32") + np.float32(1e-3) * np.eye(9, dtype="float32")
    a = a @ a  # exactly what the library is given
    golden = reference.analysis.condition_number(a)
    assert golden > 1e7
    in_single = torch.linalg.svdvals(torch.from_numpy(a))
    assert abs(float(in_single[0] / in_single[-1]) / golden - 1) > 1e-3
    assert jnp.zeros(1).dtype == np.float32
    for array in (np.asarray, torch.from_numpy, jnp.asarray):
        found = analysis.condition_number(array(a))
        assert str(found.dtype).endswith("float32")
        assert_agrees(
            found, golden, dtype="float32", growth=max(1.0, golden * np.finfo(float).eps / np.finfo("float32").eps)
        )
    assert jnp.zeros(1).dtype == np.float32, "the setting is as it was"


def test_singular_values_need_linear_algebra(monkeypatch):
    class Bare:
        """A library without the extension."""

        __name__ = "bare"

    with pytest.raises(NotImplementedError, match="condition_number: needs singular values, and bare has no extension"):
        attnkit._core.special.singular_values(Bare(), None, "condition_number")


# ---------------------------------------------------------------------------------------------- moments

PARAMETERS = [(0.0, 1.0), (0.3, 4.0), (-4.2, 1.0), (12.0, 9.0), (2.0, 400.0), (-1.0, 0.01), (6.0, 1e-4), (0.5, 0.0)]


SIGNED = tuple(name for name, h in ACTIVATIONS.items() if h.signed)


@pytest.mark.parametrize("activation", attnkit.ACTIVATIONS)
def test_moments_of_activations(activation):
    """Two quadratures. Where h changes sign or is a difference, as in gelu, its rounding is relative to |x|."""
    for mean, var in PARAMETERS:
        golden = reference.analysis.activation_moments(activation, mean=mean, var=var)
        halves = [reference.analysis.activation_moments("relu", mean=m, var=var) for m in (mean, -mean)]
        found = analysis.activation_moments(activation, mean=mean, var=var)
        for value, expected, *size in zip(found, golden, *halves, strict=True):
            assert_agrees(value, expected, magnitude=sum(size) if activation in SIGNED else None)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_moments_far_below_0(activation):
    """There h⁴ falls faster than the density does: the peak is far from the mean."""
    for mean, var in ((-20.0, 1.0), (-30.0, 1.0), (-300.0, 100.0)):
        golden = reference.analysis.activation_moments(activation, mean=mean, var=var)
        for value, expected in zip(analysis.activation_moments(activation, mean=mean, var=var), golden, strict=True):
            assert value == pytest.approx(expected, rel=1e-12, abs=0.0)


def test_moments_of_outputs():
    for activation, options in (
        ("relu", {"alpha": 0.0}),
        ("relu", {"alpha": 0.5, "gain": math.sqrt(2.0)}),
        ("softplus", {"mean": 0.7, "var": 0.3, "score_var": 2.0}),
        ("sigmoid", {"alpha": 0.0, "shift": "-log_length", "mean": -2.0}),
        ("relu_squared", {"shift": 0.5, "score_mean": -1.0, "mean": 0.2}),
    ):
        golden = reference.analysis.output_moments(activation, 196, **options)
        for value, expected in zip(analysis.output_moments(activation, 196, **options), golden, strict=True):
            assert_agrees(value, expected)
    assert_agrees(analysis.output_moments("relu", 64, alpha=0.0).variance, 32.0)
    assert math.isnan(analysis.output_moments("relu", 4, var=0.0).kurtosis)


def test_complexity_of_soft():
    assert analysis.soft_complexity(784, 49, 32) == reference.analysis.soft_complexity(784, 49, 32)
    assert analysis.soft_complexity(7, 3, 5, newton_steps=2) == reference.analysis.soft_complexity(
        7, 3, 5, newton_steps=2
    )


# ---------------------------------------------------------------------------------------------- errors

ONES = np.ones((2, 3))
ERRORS = [
    (analysis.concentration, (-ONES, 10.0), {}, ValueError, r"concentration: weights must not be negative; got -1\.0"),
    (analysis.concentration, (ONES, 0.0), {}, ValueError, r"concentration: percent must lie in \(0, 100\]; got 0\.0"),
    (analysis.concentration, (ONES, "1"), {}, TypeError, "concentration: percent must be a number; got '1'"),
    (analysis.concentration_curve, (ONES, (1, 200)), {}, ValueError, "percent must lie in .* got 200"),
    (analysis.mass_at_rank, (ONES, 0), {}, ValueError, "mass_at_rank: rank must be at least 1; got 0"),
    (analysis.anisotropy, (np.ones(3),), {}, ValueError, r"anisotropy: x has shape \(3,\); expected at least two axes"),
    (
        analysis.variance_ratio,
        (ONES, ONES.astype("float32")),
        {},
        TypeError,
        "branch and residual must share one dtype",
    ),
    (analysis.output_moments, ("relu", 0), {}, ValueError, "output_moments: n must be greater than 0; got 0"),
    (analysis.output_moments, ("relu", 4), {"shift": "log"}, ValueError, "shift must be a number or '-log_length'"),
    (analysis.output_moments, ("relu", 4), {"var": -1.0}, ValueError, "var must not be negative; got -1.0"),
    (analysis.activation_moments, ("rely",), {}, ValueError, "activation must be one of .*did you mean 'relu'"),
    (analysis.effective_rank, (np.ones((2, 0)),), {}, ValueError, "effective_rank: a has shape .* not empty"),
    (analysis.soft_complexity, (8, 2.0, 4), {}, TypeError, "soft_complexity: m must be an integer; got 2.0"),
]


@pytest.mark.parametrize("index", range(len(ERRORS)))
def test_errors(index):
    function, arguments, options, error, text = ERRORS[index]
    with pytest.raises(error, match=text):
        function(*arguments, **options)


def test_strict_promotion_of_jax_changes_nothing():
    """Of ranks and of dtypes; in functions, and in what adds batches up."""
    weights = np.random.default_rng(0).random((2, 3, 5), np.float32)
    square, seen = weights @ weights.mT, np.arange(5) < 4

    def added(accumulator, *batch):
        accumulator.update(*batch)
        return accumulator.value

    calls = {
        "concentration": lambda w, a, mask: analysis.concentration(w, 30.0, fractional=True),
        "visible": lambda w, a, mask: analysis.concentration(w, 30.0, mask),
        "curve": lambda w, a, mask: analysis.concentration_curve(w, (10.0, 50.0)),
        "rank": lambda w, a, mask: analysis.mass_at_rank(w, 2, mask),
        "sparsity": lambda w, a, mask: analysis.sparsity(w, mask)[0],
        "anisotropy": lambda w, a, mask: analysis.anisotropy(w, mask[:3])[0],
        "ratio": lambda w, a, mask: analysis.variance_ratio(w, 2 * w, mask[:3], pooled=False),
        "residuals": lambda w, a, mask: analysis.newton_residuals(a),
        "condition": lambda w, a, mask: analysis.condition_number(a),
        "effective": lambda w, a, mask: analysis.effective_rank(a),
        "Concentration": lambda w, a, mask: added(analysis.Concentration((30.0,)), w, mask),
        "Anisotropy": lambda w, a, mask: added(analysis.Anisotropy(), w, mask[:3]),
        "VarianceRatio": lambda w, a, mask: added(analysis.VarianceRatio(), w, 2 * w, mask[:3]),
    }
    arrays = [jax.numpy.asarray(x) for x in (weights, square, seen)]
    for name, call in calls.items():
        expected = call(*arrays)
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            found = call(*arrays)
        np.testing.assert_array_equal(found, expected, err_msg=name)
