"""gelu(s) = s·Φ(s) and its derivative, accurate far below 0, where (1 + erf(s/√2))/2 cancels.

Φ is the distribution function of the normal distribution and φ its density. Torch and CuPy have erfc. Elsewhere Φ(-a) =
m(a)·φ(a) for a ≥ 0 with Mills' ratio m.
"""

import math

from attnkit._core.library import library
from attnkit._core.special import erfc, relu, step, with_derivative
from attnkit._core.typing import Array, Namespace

_SQRT_HALF = math.sqrt(0.5)
_DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)
_BEYOND = 64.0  # φ underflows beyond 14 in float32 and 39 in float64

# (1 + x)·m(x) as a polynomial in (x - 4)/(x + 4): interpolation at Chebyshev nodes, for x from 0 to 14 with a relative
# error of 7e-8 (half a unit of float32), and to 39 with one of 5e-17 (a quarter of a unit of float64)
_FLOAT32 = (
    1.18326199, -0.242399558, 0.0350893252, 0.0716858357, -0.0806730092, 0.045018442, -0.0126840863, -0.00100717472,
    0.00186496507, 0.000247430202,
)  # fmt: skip
_FLOAT64 = (
    1.1832619145678034, -0.24239967052180744, 0.035091880234750863, 0.0716904812013675, -0.08070800967922126,
    0.04495912907918444, -0.01253910361649989, -0.0007159509346364681, 0.0017418487274732644, -0.00023670153402391412,
    -0.00022021525354578076, 5.326592873318071e-05, 3.4157402262815145e-05, -8.603125055401714e-06,
    -6.5493205820384295e-06, 1.0137014901542394e-06, 1.3831853785326601e-06, 3.819879904610877e-09,
    -2.777271352086815e-07, -4.9896305405547557e-08, 4.391889396202827e-08, 1.5564544144164463e-08,
    -3.778653873745926e-09, -1.9379462362944427e-09,
)  # fmt: skip


def _mills_ratio(xp: Namespace, x: Array) -> Array:
    """m(x) = (1 - Φ(x))/φ(x) for x ≥ 0."""
    coefficients = _FLOAT32 if x.dtype == xp.float32 else _FLOAT64
    q = 1.0 - 8.0 / (x + 4.0)
    value = coefficients[-1] * q + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * q + coefficient
    return value / (1.0 + x)


def _size_and_sign(xp: Namespace, s: Array) -> tuple[Array, Array]:
    """|s|, bounded, and 1 above 0 and -1 elsewhere; the derivative of |s| at 0 is -1."""
    sign = 2.0 * step(xp, s) - 1.0
    return xp.minimum(s * sign, _BEYOND), sign


def gelu(xp: Namespace, s: Array) -> Array:
    """s·Φ(s)."""
    if library(s) in ("torch", "cupy"):
        return (0.5 * s) * erfc(s * -_SQRT_HALF)
    a, _ = _size_and_sign(xp, s)
    return relu(xp, s) - a * _mills_ratio(xp, a) * (xp.exp(-0.5 * a * a) * _DENSITY_AT_0)


def _slope(xp: Namespace, s: Array) -> Array:
    if library(s) in ("torch", "cupy"):
        return 0.5 * erfc(s * -_SQRT_HALF) + s * xp.exp(-0.5 * s * s) * _DENSITY_AT_0
    a, sign = _size_and_sign(xp, s)
    root = xp.exp(-0.25 * a * a)  # a·φ(a) can be normal where φ(a) is subnormal, which JAX flushes to 0
    return step(xp, s) + sign * ((a - _mills_ratio(xp, a)) * root * (root * _DENSITY_AT_0))


def _curvature(xp: Namespace, s: Array) -> Array:
    return (2.0 - s * s) * xp.exp(-0.5 * s * s) * _DENSITY_AT_0


d_gelu = with_derivative(_slope, _curvature)
"""Φ(s) + s·φ(s), whose derivative is (2 - s²)·φ(s)."""
