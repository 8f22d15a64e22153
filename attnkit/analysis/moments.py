"""Moments of the weights and outputs of point-wise attention for independent Gaussian scores and values.

These functions take and return Python floats, not arrays.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from attnkit._core import check
from attnkit._core.activations import ACTIVATIONS, Activation
from attnkit._core.special import quadrature
from attnkit._core.typing import ActivationName

_REACH = 13.0  # standard deviations: beyond, the density is below e^-84 of that at the nearest point of a piece
_TILT = 4.0  # variances by which h⁴, where it grows like e^4x, moves the peak of the integrand up
_POINTS = 24
_PANELS = 20_000


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


def _reach(h: Activation, start: float, std: float) -> float:
    """Up to where the integrand of h⁴ matters, from `start`, the mean or a kink.

    Below 0 it may grow like e^4x, and more steeply where the exponent of h grows faster than x; beyond 0 it falls.
    """
    var = std * std
    reach = start + _REACH * std + _TILT * var
    if h.growth <= 1:
        return reach
    steep = math.prod([abs(start)] * (h.growth - 1))  # a power of floats raises where this is infinite
    return max(reach, min(_REACH, start + _REACH * std + _TILT * steep * var))


def _pieces(h: Activation, mean: float, std: float) -> Iterator[tuple[float, float]]:
    """Intervals without interior kinks that contain the whole integral, also between the mean and a kink."""
    edges = (-math.inf, *h.kinks, math.inf)
    for low, high in itertools.pairwise(edges):
        low = max(low, min(mean, high) - _REACH * std)
        high = min(high, _reach(h, max(mean, low), std))
        if low < high:
            yield low, high


def _variance(op: str, name: str, value: float) -> float:
    if check.number(op, name, value) < 0:
        raise ValueError(f"{op}: {name} must not be negative; got {value}")
    return float(value)


def activation_moments(activation: ActivationName, *, mean: float = 0.0, var: float = 1.0) -> ActivationMoments:
    """E[h(x)^p] for x ~ N(mean, var) and p = 1, 2, 3, 4.

    Gauss-Legendre quadrature in float64: 24 points on panels of at most one standard deviation (and at most length 1,
    the scale on which h varies) that end at the kinks of h. relu and identity have closed forms, but these cancel when
    the mean is far below 0, so they are not used. The error is a few units of rounding.

    Raises:
        ValueError: an unknown activation, var < 0. TypeError: not a number.
    """
    op = "activation_moments"
    if activation not in ACTIVATIONS:
        check.refuse_name(op, "activation", activation, ACTIVATIONS)
    mean, std = check.number(op, "mean", mean), math.sqrt(_variance(op, "var", var))
    xp, nodes, weights = quadrature(_POINTS)
    record = ACTIVATIONS[activation]
    h = record.h
    if std == 0:
        value = float(h(xp, xp.asarray([mean]))[0])
        return ActivationMoments(*(value**p for p in (1, 2, 3, 4)))
    sums = [0.0] * 4
    for low, high in _pieces(record, mean, std):
        panels = min(math.ceil((high - low) / min(std, 1.0)), _PANELS)
        half = (high - low) / (2.0 * panels)
        x = low + half * (2.0 * xp.arange(panels)[:, None] + 1.0 + nodes)
        density = half * weights * xp.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2.0 * math.pi))
        values = h(xp, x)
        sums = [total + float(xp.sum(values**p * density)) for p, total in enumerate(sums, 1)]
    return ActivationMoments(*sums)


def output_moments(
    activation: ActivationName,
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
    """Moments of `pointwise_attention` over n keys with independent scores s and values v of mean μ and variance σ².

    With w = gain·n^-alpha·h(s + shift), o = Σ_j w_j v_j and E over s ~ N(score_mean, score_var):

        E[w]   = gain·n^-alpha·E[h]
        E[o]   = gain·n^(1-alpha)·E[h]·μ
        Var[o] = gain²·n^(1-2·alpha)·(E[h²](σ² + μ²) - E[h]²μ²)
        kurtosis = 3 + (μ₄/Var² - 3)/n, μ₄ and Var of one h·v; for μ = 0: 3 + 3(E[h⁴]/E[h²]² - 1)/n

    Mean and variance are exact for any distribution of v, the kurtosis for a Gaussian one. relu, alpha = 0, is Shen et
    al. 2023 Theorem 4.1: Var[o] = n/2; that o is Gaussian, as it says, holds in the limit only. reluformer is relu,
    alpha = ½, gain = √2/gamma: Var[o] = 1/gamma². E[w] is O(1/n) iff alpha = 1 (Wortsman et al. 2023 §3).

    Args:
        activation, alpha, gain, shift: as in `pointwise_attention`; shift = "-log_length" is -log n.
        n: the length, > 0.
        mean, var: μ and σ² of the values.
        score_mean, score_var: of the scores.

    Returns:
        weight = E[w], mean, variance and kurtosis (nan if the variance is 0), floats.

    Raises:
        ValueError: an unknown activation or shift, n <= 0, negative variances. TypeError: not a number.
    """
    op = "output_moments"
    for name, value in (("alpha", alpha), ("gain", gain), ("mean", mean), ("score_mean", score_mean), ("n", n)):
        check.number(op, name, value)
    if n <= 0:
        raise ValueError(f"{op}: n must be greater than 0; got {n}")
    if isinstance(shift, str) and shift != "-log_length":
        raise ValueError(f"{op}: shift must be a number or '-log_length'; got {shift!r}")
    offset = -math.log(n) if isinstance(shift, str) else check.number(op, "shift", shift)
    sigma2, spread = _variance(op, "var", var), _variance(op, "score_var", score_var)
    h = activation_moments(activation, mean=score_mean + offset, var=spread)
    mu2 = mean * mean
    variance = h.second * sigma2 + (h.second - h.first**2) * mu2
    factor = gain * n**-alpha
    return OutputMoments(
        factor * h.first,
        factor * n * h.first * mean,
        factor * factor * n * variance,
        3.0 + (_fourth_moment(h, mean, sigma2) / variance**2 - 3.0) / n if variance > 0 else math.nan,
    )


def _fourth_moment(h: ActivationMoments, mean: float, var: float) -> float:
    """E[(hv - E[hv])⁴] for a Gaussian v that does not depend on h."""
    moments = (
        h.first * mean,
        h.second * (mean**2 + var),
        h.third * (mean**3 + 3.0 * mean * var),
        h.fourth * (mean**4 + 6.0 * mean**2 * var + 3.0 * var**2),
    )
    first, second, third, fourth = moments
    return fourth - 4.0 * third * first + 6.0 * second * first**2 - 3.0 * first**4
