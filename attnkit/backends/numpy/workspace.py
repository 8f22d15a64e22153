"""What `attnkit.backends.in_place` needs of NumPy.

`where=` and `np.where` take about as long as a product with 64 features where true and false alternate, so zeros are
put by bits, and slopes of 0 and 1 multiply.
"""

import math
from collections.abc import Mapping

import numpy as np

from attnkit.backends import in_place

Array = np.ndarray
TANH_SCALE = math.sqrt(2.0 / math.pi)
BITS: Mapping[int, type[np.signedinteger]] = {4: np.int32, 8: np.int64}  # as wide as a float of that many bytes


def cleared(x: Array, hidden: Array) -> Array:
    """x with 0 where `hidden`, whatever was there: its bits with those of 0 or -1."""
    bits = x.view(BITS[x.itemsize])
    np.bitwise_and(bits, hidden.view(np.int8) - np.int8(1), out=bits)
    return x


def above(x: Array) -> Array:
    """True on and above the diagonal of the last two axes."""
    rows, columns = x.shape[-2:]
    return ~np.tri(rows, columns, -1, dtype=bool)


# ---------------------------------------------------------------------------------------------- h and its derivative


def _relu(s: Array) -> Array:
    return np.maximum(s, 0, out=s)


def _squared(s: Array) -> Array:
    return np.multiply(s, s, out=s)


def _relu6(s: Array) -> Array:
    return np.clip(s, 0, 6, out=s)


def _sigmoid(s: Array) -> Array:
    """1/(1 + exp(-s)). Where exp overflows, σ is below the smallest normal number, and 0."""
    with np.errstate(over="ignore"):
        np.exp(np.negative(s, out=s), out=s)
    s += 1
    return np.divide(1, s, out=s)


def _odds(half: Array) -> Array:
    """2⁻¹⁶·exp(-x) from -x/2, in its place; infinite only where σ(x) is far below the smallest normal number."""
    with np.errstate(over="ignore"):
        np.exp(half, out=half)
        half *= 2.0**-8
        return np.multiply(half, half, out=half)


def _gated(y: Array, half: Array) -> Array:
    """y·σ(x) = y·2⁻¹⁶/(2⁻¹⁶ + 2⁻¹⁶ exp(-x)) from -x/2: it may be a normal number where exp(-x) overflows."""
    odds = _odds(half)
    odds += 2.0**-16
    y *= 2.0**-16
    return np.divide(y, odds, out=y)


def _silu(s: Array) -> Array:
    return _gated(s, s * -0.5)


def _softplus(s: Array) -> Array:
    """max(s, 0) + log(1 + exp(-|s|))."""
    tail = np.abs(s)
    np.log1p(np.exp(np.negative(tail, out=tail), out=tail), out=tail)
    return np.add(_relu(s), tail, out=s)


def _gelu_tanh(s: Array) -> Array:
    """s·σ(2y), y = √(2/π)(s + 0.044715 s³)."""
    y = s * s  # in the end -y
    y *= -0.044715 * TANH_SCALE
    y -= TANH_SCALE
    y *= s
    return _gated(s, y)


def _relu_pull(s: Array, ds: Array) -> tuple[Array, Array]:
    u = _relu(s)
    return u, np.multiply(ds, ~(u <= 0), out=ds)


def _relu_squared_pull(s: Array, ds: Array) -> tuple[Array, Array]:
    u = _relu(s)
    ds *= u
    ds *= 2
    return _squared(u), ds


def _relu6_pull(s: Array, ds: Array) -> tuple[Array, Array]:
    ds *= ~((s <= 0) | (s >= 6))
    return _relu6(s), ds


def _sigmoid_pull(s: Array, ds: Array) -> tuple[Array, Array]:
    """1 - σ(s) is σ(-s), with digits."""
    u = _sigmoid(s.copy())
    ds *= u
    ds *= _sigmoid(np.negative(s, out=s))
    return u, ds


def _silu_pull(s: Array, ds: Array) -> tuple[Array, Array]:
    """h' = σ(s)(1 + s·σ(-s))."""
    odds = _odds(s * -0.5)
    whole = odds + 2.0**-16
    slope = np.minimum(odds, np.finfo(odds.dtype).max, out=odds)  # for inf/inf is nan
    slope /= whole
    slope *= s
    slope += 1
    for factor in (slope, s):
        factor *= 2.0**-16
        factor /= whole
    return s, np.multiply(ds, slope, out=ds)


def _softplus_pull(s: Array, ds: Array) -> tuple[Array, Array]:
    ds *= _sigmoid(s.copy())
    return _softplus(s), ds


OVERWRITE: Mapping[str, in_place.Overwrite] = {
    "relu": _relu,
    "relu_squared": lambda s: _squared(_relu(s)),
    "relu6": _relu6,
    "identity": lambda s: s,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "softplus": _softplus,
    "gelu_tanh": _gelu_tanh,
}
PULL: Mapping[str, in_place.Pull] = {
    "relu": _relu_pull,
    "relu_squared": _relu_squared_pull,
    "relu6": _relu6_pull,
    "identity": lambda s, ds: (s, ds),
    "sigmoid": _sigmoid_pull,
    "silu": _silu_pull,
    "softplus": _softplus_pull,
}


def _multiply(x: Array, y: Array, into: Array) -> Array:
    return np.matmul(x, y, out=into)


LIBRARY = in_place.Library(
    empty=lambda size, like: np.empty(size, like.dtype),
    multiply=_multiply,
    clear=cleared,
    clear_above=lambda x: cleared(x, above(x)),
    overwrite=OVERWRITE,
    pull=PULL,
)
