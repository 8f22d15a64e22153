"""How far the non-linearities h of point-wise attention and their derivatives may be off (semantics E5).

An error is at most 8·eps·(1 + |exponent|)·magnitude plus the smallest normal number. The exponent is that of the
exponential which a value is made of: below 0, and for σ' on both sides; above 0 values are near 1 or s. The magnitude
is that of the value, and where two summands cancel, in h' of gelu, gelu_tanh and silu, that of both.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mpmath
import numpy as np
from mpmath import mpf

from .arrays import assert_agrees

SPACED = [np.linspace(-100.1, 99.9, 301), np.linspace(-16.03, 16.01, 201), np.linspace(-2.003, 2.01, 101)]
SPECIAL = [0.0, -0.0, 6.0, 1e-20, -1e-20, 1e-6, -1e-6, -13.02, -13.22, -37.6, -87.4, -88.73, -92.0, 88.73]
GRID = np.concatenate([*SPACED, SPECIAL]).astype(np.float32)  # the same numbers in float32 and float64
NEAR = np.flatnonzero((abs(GRID) < 5.9) & (abs(GRID) > 1e-3))[::4]  # without kinks
DIGITS = 60

Summands = Callable[[mpf], tuple[mpf, ...]]


class Truth(NamedTuple):
    """On the grid, as sums of two float64 numbers: a value; its magnitude; the exponent."""

    value: np.ndarray
    rest: np.ndarray
    magnitude: np.ndarray
    exponent: np.ndarray


def sigmoid(s: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-s))


def cdf(s: mpf) -> mpf:
    return mpmath.erfc(-s / mpmath.sqrt(2)) / 2


def density(s: mpf) -> mpf:
    return mpmath.exp(-s * s / 2) / mpmath.sqrt(2 * mpmath.pi)


def doubled(s: mpf) -> mpf:
    return 2 * mpmath.sqrt(2 / mpmath.pi) * (s + mpf("0.044715") * s**3)


def d_doubled(s: mpf) -> mpf:
    return 2 * mpmath.sqrt(2 / mpmath.pi) * (1 + 3 * mpf("0.044715") * s * s)


def relu(s: mpf) -> mpf:
    return s if s > 0 else mpf(0)


ONE_SIDED: dict[str, Callable[[mpf], mpf]] = {
    "gelu": lambda s: s * s / 2,
    "gelu_tanh": doubled,
    "softplus": lambda s: s,
    "sigmoid": lambda s: s,
    "silu": lambda s: s,
}
"""The exponent below 0; the others have none."""

H: dict[str, Summands] = {
    "relu": lambda s: (relu(s),),
    "relu_squared": lambda s: (relu(s) ** 2,),
    "relu6": lambda s: (min(relu(s), mpf(6)),),
    "identity": lambda s: (s,),
    "gelu": lambda s: (s * cdf(s),),
    "gelu_tanh": lambda s: (s * sigmoid(doubled(s)),),
    "softplus": lambda s: (mpmath.log1p(mpmath.exp(s)),),
    "sigmoid": lambda s: (sigmoid(s),),
    "silu": lambda s: (s * sigmoid(s),),
}
SLOPE: dict[str, Summands] = {
    "relu": lambda s: (mpf(s > 0),),
    "relu_squared": lambda s: (2 * relu(s),),
    "relu6": lambda s: (mpf(0 < s < 6),),
    "identity": lambda s: (mpf(1),),
    "gelu": lambda s: (cdf(s), s * density(s)),
    "gelu_tanh": lambda s: (
        sigmoid(doubled(s)), s * sigmoid(doubled(s)) * sigmoid(-doubled(s)) * d_doubled(s),
    ),
    "softplus": lambda s: (sigmoid(s),),
    "sigmoid": lambda s: (sigmoid(s) * sigmoid(-s),),
    "silu": lambda s: (sigmoid(s), s * sigmoid(s) * sigmoid(-s)),
}  # fmt: skip


@cache
def truth(name: str, slope: bool) -> Truth:
    """h, or h', on the grid."""
    function, exponent = (SLOPE if slope else H)[name], ONE_SIDED.get(name, lambda s: mpf(0))
    both = slope and name == "sigmoid"
    rows = []
    with mpmath.workdps(DIGITS):
        for number in GRID:
            s = mpf(float(number))
            summands = function(s)
            value = mpmath.fsum(summands)
            size = mpmath.fsum(summands, absolute=True)
            rows.append((value, value - mpf(float(value)), size, abs(exponent(s)) if s < 0 or both else mpf(0)))
    return Truth(*(np.array([float(x) for x in column]) for column in zip(*rows, strict=True)))


@cache
def curvature(name: str) -> np.ndarray:
    """h'' at `NEAR`."""
    with mpmath.workdps(DIGITS):
        return np.array([float(mpmath.diff(lambda s: H[name](s)[0], mpf(float(s)), 2)) for s in GRID[NEAR]])


def assert_curvature(name: str, got: Any) -> None:
    """`got` is h'' on the grid: finite, and near 0 as close to the truth as the kit wants."""
    got = np.asarray(got)
    assert np.isfinite(got).all()
    assert_agrees(got[NEAR], curvature(name))


def worst(name: str, slope: bool, got: Any) -> float:
    """The largest error of h or h' on the grid, as a share of what is allowed for the dtype of `got`."""
    got, t = np.asarray(got), truth(name, slope)
    assert got.shape == GRID.shape
    limits = np.finfo(got.dtype)
    error = np.abs((got.astype(np.float64) - t.value) - t.rest)
    allowed = 8 * float(limits.eps) * (1 + t.exponent) * t.magnitude + float(limits.tiny)
    shares = np.where(np.isfinite(error), error / allowed, np.inf)
    return float(shares.max())


def assert_tails(name: str, slope: bool, got: Any) -> None:
    """`got` is h, or h', on the grid."""
    share = worst(name, slope, got)
    assert share <= 1.0, f"{name}{' slope' if slope else ''}: {share:.3g} of what is allowed"
