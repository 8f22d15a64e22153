"""The non-linearities h of point-wise attention and their derivatives: one table, by name."""

import math
from collections.abc import Callable
from typing import NamedTuple

from attnkit._special import erf
from attnkit._typing import Array, Namespace

_TANH_SCALE, _TANH_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _relu(xp: Namespace, s: Array) -> Array:
    return xp.where(s <= 0, 0.0, s)


def _sigmoid(xp: Namespace, s: Array) -> Array:
    """1/(1 + exp(-s)), or exp(s)/(1 + exp(s)) below 0: no rounding of the tail, no overflow."""
    negative = s < 0
    z = xp.exp(xp.where(negative, s, -s))
    return xp.where(negative, z, 1.0) / (1.0 + z)


def _normal_cdf(xp: Namespace, s: Array) -> Array:
    return 0.5 * (1.0 + erf(xp, s * math.sqrt(0.5)))


def _doubled(s: Array) -> Array:
    """2y with y = √(2/π)(s + 0.044715 s³): (1 + tanh y)/2 = σ(2y) has a tail that 1 + tanh y has rounded away."""
    return 2.0 * _TANH_SCALE * (s + _TANH_CUBIC * s * s * s)


def _gelu_tanh(xp: Namespace, s: Array) -> Array:
    return s * _sigmoid(xp, _doubled(s))


def _relu6(xp: Namespace, s: Array) -> Array:
    return xp.where(s <= 0, 0.0, xp.where(s >= 6, 6.0, s))


def _d_relu(xp: Namespace, s: Array) -> Array:
    return xp.where(s <= 0, 0.0, xp.ones_like(s))


def _d_gelu(xp: Namespace, s: Array) -> Array:
    return _normal_cdf(xp, s) + s * xp.exp(-0.5 * s * s) / math.sqrt(2.0 * math.pi)


def _d_gelu_tanh(xp: Namespace, s: Array) -> Array:
    y = _doubled(s)
    p = _sigmoid(xp, y)
    return p + s * p * _sigmoid(xp, -y) * (2.0 * _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * s * s))


def _d_relu6(xp: Namespace, s: Array) -> Array:
    return xp.where((s <= 0) | (s >= 6), 0.0, xp.ones_like(s))


def _d_sigmoid(xp: Namespace, s: Array) -> Array:
    return _sigmoid(xp, s) * _sigmoid(xp, -s)


def _d_silu(xp: Namespace, s: Array) -> Array:
    p = _sigmoid(xp, s)
    return p + s * p * _sigmoid(xp, -s)


class Activation(NamedTuple):
    """h and its derivative; the derivative at a kink is 0 (semantics A8)."""

    h: Callable[[Namespace, Array], Array]
    derivative: Callable[[Namespace, Array], Array]
    signed: bool = False  # whether h takes negative values
    exact_zeros: bool = False  # whether h is 0 on an interval


ACTIVATIONS = {
    "relu": Activation(_relu, _d_relu, exact_zeros=True),
    "relu_squared": Activation(lambda xp, s: _relu(xp, s) ** 2, lambda xp, s: 2.0 * _relu(xp, s), exact_zeros=True),
    "gelu": Activation(lambda xp, s: s * _normal_cdf(xp, s), _d_gelu, signed=True),
    "gelu_tanh": Activation(_gelu_tanh, _d_gelu_tanh, signed=True),
    "softplus": Activation(lambda xp, s: xp.logaddexp(s, xp.zeros_like(s)), _sigmoid),
    "identity": Activation(lambda xp, s: s, lambda xp, s: xp.ones_like(s), signed=True),
    "relu6": Activation(_relu6, _d_relu6, exact_zeros=True),
    "sigmoid": Activation(_sigmoid, _d_sigmoid),
    "silu": Activation(lambda xp, s: s * _sigmoid(xp, s), _d_silu, signed=True),
}

NAMES = tuple(ACTIVATIONS)
