"""The non-linearities h of point-wise attention, their derivatives and what is known of them: one record each, by name.

Values and derivatives are accurate in their tails: the error is a few ulps per unit of the exponent, down to the
smallest normal number. The same holds for automatic derivatives.
"""

import math
from collections.abc import Container
from typing import NamedTuple

from attnkit._core.gelu import d_gelu, gelu
from attnkit._core.special import Function, logistic, relu, relu6, sigmoid, softplus, step, with_derivative
from attnkit._core.typing import ActivationName, Array, Namespace

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
    """A score function: all that the library knows of it. Everything else asks by its name.

    A kernel has a table of its own with the functions that it computes, and refuses what the table lacks (`lacking`).
    """

    name: ActivationName
    h: Function
    slope: Function  # h', which is 0 at kinks (semantics A8)
    signed: bool = False  # whether h takes negative values
    exact_zeros: bool = False  # whether h is 0 on an interval
    through_zero: bool = False  # whether h(0) is 0: then pairs of score 0 need no mask
    kinks: tuple[float, ...] = ()  # where h or h' jumps, in ascending order
    growth: int = 0  # with which power of |s| the exponent of its tail grows; 0: no exponential is taken


_ROWS = (
    Activation("relu", relu, step, exact_zeros=True, through_zero=True, kinks=(0.0,)),
    Activation(
        "relu_squared",
        lambda xp, s: relu(xp, s) ** 2,
        lambda xp, s: 2.0 * relu(xp, s),
        exact_zeros=True,
        through_zero=True,
        kinks=(0.0,),
    ),
    Activation("gelu", gelu, d_gelu, signed=True, through_zero=True, growth=2),
    Activation(
        "gelu_tanh",
        lambda xp, s: _gated(xp, s, _doubled(s)),
        _d_gelu_tanh,
        signed=True,
        through_zero=True,
        growth=3,
    ),
    Activation("softplus", softplus, logistic, growth=1),
    Activation("identity", lambda xp, s: s, lambda xp, s: xp.ones_like(s), signed=True, through_zero=True),
    Activation("relu6", relu6, _d_relu6, exact_zeros=True, through_zero=True, kinks=(0.0, 6.0)),
    Activation("sigmoid", sigmoid, lambda xp, s: logistic(xp, s) * logistic(xp, -s), growth=1),
    Activation(
        "silu",
        lambda xp, s: _gated(xp, s, s),
        lambda xp, s: _gated(xp, 1.0 + s * logistic(xp, -s), s),
        signed=True,
        through_zero=True,
        growth=1,
    ),
)
ACTIVATIONS: dict[str, Activation] = {row.name: row._replace(h=with_derivative(row.h, row.slope)) for row in _ROWS}
NAMES: tuple[ActivationName, ...] = tuple(row.name for row in _ROWS)


def is_in_pieces(activation: str) -> bool:
    """Whether h is a polynomial in pieces; kernels also have functions of distances, which have no record."""
    return activation in ACTIVATIONS and ACTIVATIONS[activation].growth == 0


def lacking(kernels: str, table: Container[str], name: str, kind: str = "activation") -> str | None:
    """Why kernels with this table of functions of a kind do not serve the one of a name, or None."""
    return None if name in table else f"no kernel of {kernels} has the {kind} {name!r}"
