"""Argument checks: every error names the op, the argument, the value expected and the value received."""

import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # of any dtype: arguments have four of floats, masks and lengths others

FLOATS = ("float16", "bfloat16", "float32", "float64")
MOST_TOKENS = 2**62


def refuse_unexpected(op: str, arguments: Iterable[str], legal: Iterable[str]) -> None:
    """ValueError for the first unknown argument, suggesting the closest known one."""
    legal = list(legal)
    for name in arguments:
        if name not in legal:
            nearest = difflib.get_close_matches(name, legal, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{op}: unexpected argument {name!r}; did you mean {nearest!r}? It takes {', '.join(legal)}"
            )


def refuse_none(op: str, arguments: Mapping[str, object], names: Iterable[str]) -> None:
    """TypeError for the first of `names` that is None."""
    for name in names:
        if name in arguments and arguments[name] is None:
            raise TypeError(f"{op}: {name}; expected a NumPy array, got None")


def as_float(op: str, name: str, x: object) -> Array:
    """x in float64; TypeError unless it is a NumPy array of real floats in the byte order of this machine."""
    if not _is_plain(x) or x.dtype.name not in FLOATS or not x.dtype.isnative:
        raise TypeError(f"{op}: {name}; expected a NumPy array of {', '.join(FLOATS)}, got {_kind(x)}")
    return np.asarray(x).astype(np.float64)


def tokens(op: str, name: str, x: object) -> Array:
    """`as_float` of x (..., tokens, features)."""
    wide = as_float(op, name, x)
    if wide.ndim < 2:
        raise ValueError(f"{op}: {name} needs two axes, tokens and features; expected (..., n, d), got {wide.shape}")
    return wide


def number(op: str, name: str, x: object, positive: bool = False) -> float:
    """A finite real number (> 0 if `positive`)."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{op}: {name}; expected a number, got {_kind(x)}")
    try:
        value = float(x)
    except OverflowError:  # an integer or a fraction that float64 does not hold
        value = np.inf
    if not np.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{op}: {name}; expected a finite number{' > 0' if positive else ''}, got {short(x)}")
    return value


def short(x: object) -> str:
    """What a message shows of x; Python prints no integer of thousands of digits."""
    try:
        text = repr(x)
    except ValueError:
        return f"{type(x).__name__} with thousands of digits"
    return f"{text[:30]}..." if isinstance(x, numbers.Number) and len(text) > 40 else text


def broadcast(op: str, name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """x broadcast to `shape`, which it must not enlarge."""
    try:
        return np.broadcast_to(x, shape)
    except ValueError:
        text = f"{op}: {name} does not fit; expected a shape that broadcasts to {shape}, got {x.shape}"
        raise ValueError(text) from None


def cotangent(op: str, name: str, x: object, shape: tuple[int, ...]) -> Array:
    """x in float64; its shape must be that of the output. None is 0."""
    if x is None:
        return np.zeros(shape)
    wide = as_float(op, name, x)
    if wide.shape != shape:
        raise ValueError(f"{op}: {name} has another shape than the output; expected {shape}, got {wide.shape}")
    return wide


def leading_axes(op: str, names: str, shapes: Iterable[tuple[int, ...]], hint: str = "") -> tuple[int, ...]:
    """The leading axes of a call, to which those of its arrays broadcast."""
    shapes = list(shapes)
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        got = " and ".join(map(str, shapes))
        text = f"{op}: leading axes of {names} do not broadcast; expected equal sizes or 1, got {got}{hint}"
        raise ValueError(text) from None


def _kind(x: object) -> str:
    return f"{type(x).__name__} of dtype {x.dtype}" if hasattr(x, "dtype") else f"{type(x).__name__} {short(x)}"


def _is_plain(x: object) -> TypeGuard[np.generic | Array]:
    """Whether x is an array or number of NumPy, with nothing that would be dropped: no mask, unit or other product."""
    return isinstance(x, np.generic) or type(x) in (np.ndarray, np.memmap)


def boolean(op: str, name: str, x: object) -> Array:
    if not _is_plain(x) or x.dtype != np.bool_:
        hint = " (numbers to be added to the scores are `bias`)" if name == "mask" else ""
        raise TypeError(f"{op}: {name}; expected a boolean array, True = takes part{hint}, got {_kind(x)}")
    return np.asarray(x)


def integers(op: str, name: str, x: object) -> Array:
    array = np.asarray(max(-1, min(x, MOST_TOKENS)) if type(x) is int else x)  # no array holds every integer of Python
    if isinstance(x, bool | np.ma.MaskedArray) or array.dtype.kind not in "iu" or not array.dtype.isnative:
        raise TypeError(f"{op}: {name}; expected integers, got {_kind(x)}")
    return array


def window_bounds(op: str, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    legal = isinstance(window, tuple | list) and len(window) == 2
    for bound in window if legal else ():
        whole = isinstance(bound, numbers.Integral) and not isinstance(bound, bool)
        legal = legal and (bound is None or (whole and bound >= 0))
    if not legal:
        raise ValueError(f"{op}: window; expected (left, right), integers >= 0 or None, got {short(window)}")
    left, right = (None if bound is None else int(bound) for bound in window)  # NumPy has none below 0 for some
    return left, right
