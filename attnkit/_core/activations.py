"""The non-linearities h of point-wise attention and their derivatives: one table, by name.

Values and derivatives are accurate in their tails: the error is a few ulps per unit of the exponent, down to the
smallest normal number. The same holds for automatic derivatives.
"""

import math
from typing import NamedTuple

from attnkit._core.gelu import d_gelu, gelu
from attnkit._core.special import Function, logistic, relu, relu6, sigmoid, softplus, step, with_derivative
from attnkit._core.typing import Array, Namespace

_TANH_SCALE, _TANH_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _gated(xp: Namespace, y: Array, x: Array) -> Array:
    """y·σ(x) = y·p²/(p² + (1 - p)²) with p = σ(x/2): the product can be normal where σ(x) underflows."""
    p = logistic(xp, 0.5 * x)
    return (y * p) * p / (1.0 + 2.0 * (p * p - p))


def _doubled(s: Array) -> Array:
    """2y with y = √(2/π)(s + 0.044715 s³): (1 + tanh y)/2 = σ(2y) keeps the tail that 1 + tanh y rounds away."""
    return s * (s * s * (2.0 * _TANH_SCALE * _TANH_CUBIC) + 2.0 * _TANH_SCALE)


def _d_relu6(xp: Namespace, s: Array) -> Array:
    return xp.astype(~((s <= 0) | (s >= 6)), s.dtype)


def _d_gelu_tanh(xp: Namespace, s: Array) -> Array:
    x, slope = _doubled(s), s * s * (6.0 * _TANH_SCALE * _TANH_CUBIC) + 2.0 * _TANH_SCALE
    return _gated(xp, 1.0 + s * logistic(xp, -x) * slope, x)


class Activation(NamedTuple):
    """h and its derivative; the derivative at a kink is 0 (semantics A8)."""

    h: Function
    derivative: Function
    signed: bool = False  # whether h takes negative values
    exact_zeros: bool = False  # whether h is 0 on an interval
    through_zero: bool = True  # whether h(0) is 0


def _activation(h: Function, derivative: Function, **facts: bool) -> Activation:
    return Activation(with_derivative(h, derivative), derivative, **facts)


ACTIVATIONS = {
    "relu": _activation(relu, step, exact_zeros=True),
    "relu_squared": _activation(lambda xp, s: relu(xp, s) ** 2, lambda xp, s: 2.0 * relu(xp, s), exact_zeros=True),
    "gelu": _activation(gelu, d_gelu, signed=True),
    "gelu_tanh": _activation(lambda xp, s: _gated(xp, s, _doubled(s)), _d_gelu_tanh, signed=True),
    "softplus": _activation(softplus, logistic, through_zero=False),
    "identity": _activation(lambda xp, s: s, lambda xp, s: xp.ones_like(s), signed=True),
    "relu6": _activation(relu6, _d_relu6, exact_zeros=True),
    "sigmoid": _activation(sigmoid, lambda xp, s: logistic(xp, s) * logistic(xp, -s), through_zero=False),
    "silu": _activation(
        lambda xp, s: _gated(xp, s, s), lambda xp, s: _gated(xp, 1.0 + s * logistic(xp, -s), s), signed=True
    ),
}

NAMES = tuple(ACTIVATIONS)
