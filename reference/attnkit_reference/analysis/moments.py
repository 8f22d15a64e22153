"""Moments of the weights and outputs of point-wise attention for independent Gaussian scores and values."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from attnkit_reference._check import Array, number
from attnkit_reference._op import refuse_others
from attnkit_reference.pointwise import ACTIVATIONS, SCORE_FUNCTIONS

REACH = 38.0  # standard deviations beyond which the density is 0 in float64
ORDERS = (1, 2, 3, 4)


class ActivationMoments(NamedTuple):
    """E[h], E[h²], E[h³], E[h⁴] of h(x) for a Gaussian x."""

    first: float
    second: float
    third: float
    fourth: float


class OutputMoments(NamedTuple):
    """E[w] of one weight; mean, variance and kurtosis of an output o = Σ_j w_j v_j over n independent keys."""

    weight: float
    mean: float
    variance: float
    kurtosis: float


@refuse_others
def activation_moments(activation: str, *, mean: float = 0.0, var: float = 1.0) -> ActivationMoments:
    """E[h(x)^p] = ∫ h(x)^p N(x; mean, var) dx for p = 1, 2, 3, 4, by adaptive quadrature between the kinks of h."""
    op = "activation_moments"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation; expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    mean, std = number(op, "mean", mean), np.sqrt(_variance(op, "var", var))
    h, kinks = SCORE_FUNCTIONS[activation].h, SCORE_FUNCTIONS[activation].kinks
    if std == 0:
        value = float(h(np.asarray(mean)))
        return ActivationMoments(*(value**p for p in ORDERS))
    return ActivationMoments(*(_expectation(h, p, kinks, mean, std) for p in ORDERS))


def _expectation(h: Callable[[Array], Array], power: int, kinks: tuple[float, ...], mean: float, std: float) -> float:
    from scipy.integrate import quad  # imported here: it is a third of the import time of the reference

    def integrand(x: float) -> float:
        density: float = (
            float(h(np.asarray(x)) ** power) * np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2.0 * np.pi))
        )
        return density

    lowest, highest = mean - REACH * std, mean + REACH * std
    inner = {*kinks, mean, mean - 8.0 * std, mean + 8.0 * std}
    edges = [lowest, *sorted(x for x in inner if lowest < x < highest), highest]
    pieces = (
        quad(integrand, a, b, epsabs=0.0, epsrel=2e-14, limit=500, full_output=1)[0]
        for a, b in itertools.pairwise(edges)
    )
    return float(sum(pieces))


@refuse_others
def output_moments(
    activation: str,
    n: float,
    *,
    alpha: float = 1.0,
    gain: float = 1.0,
    shift: float | str = 0.0,
    mean: float = 0.0,
    var: float = 1.0,
    score_mean: float = 0.0,
    score_var: float = 1.0,
) -> OutputMoments:
    """Moments of pointwise_attention over n keys with independent scores N(score_mean, score_var) and values (μ, σ²).

    w = gain n^-alpha h(s + shift), o = Σ_j w_j v_j, μ = mean and σ² = var of v:
    E[w] = gain n^-alpha E[h]; E[o] = gain n^(1-alpha) E[h] μ;
    Var[o] = gain² n^(1-2 alpha) (E[h²](σ² + μ²) - E[h]² μ²): both exact for any distribution of v;
    kurtosis 3 + (μ₄/Var² - 3)/n, μ₄ the fourth central moment of one h v with a Gaussian v, for μ = 0
    3 + 3 (E[h⁴]/E[h²]² - 1)/n; nan where the variance is 0.

    shift is a number or "-log_length". Source: Shen et al. 2023 Theorem 4.1 (relu, alpha = 0, n/2), except for its
    claim that o is Gaussian, which holds only in the limit. Wortsman et al. 2023 §3: E[w] is O(1/n) iff alpha = 1.
    """
    op = "output_moments"
    n, alpha, gain = number(op, "n", n, positive=True), number(op, "alpha", alpha), number(op, "gain", gain)
    mu, sigma2 = number(op, "mean", mean), _variance(op, "var", var)
    if isinstance(shift, str) and shift != "-log_length":
        raise ValueError(f"{op}: shift; expected a number or '-log_length', got {shift!r}")
    offset = -np.log(n) if isinstance(shift, str) else number(op, "shift", shift)
    center, spread = number(op, "score_mean", score_mean) + float(offset), _variance(op, "score_var", score_var)
    h = activation_moments(activation, mean=center, var=spread)
    v = (mu, mu**2 + sigma2, mu**3 + 3 * mu * sigma2, mu**4 + 6 * mu**2 * sigma2 + 3 * sigma2**2)
    z = [a * b for a, b in zip(h, v, strict=True)]
    second = h.second * sigma2 + (h.second - h.first**2) * mu**2
    fourth = z[3] - 4 * z[2] * z[0] + 6 * z[1] * z[0] ** 2 - 3 * z[0] ** 4
    factor = gain * n**-alpha
    return OutputMoments(
        factor * h.first,
        factor * n * z[0],
        factor**2 * n * second,
        3.0 + (fourth / second**2 - 3.0) / n if second > 0 else float("nan"),
    )


def _variance(op: str, name: str, x: object) -> float:
    value = number(op, name, x)
    if value < 0:
        raise ValueError(f"{op}: {name}; expected a number >= 0, got {x!r}")
    return value
