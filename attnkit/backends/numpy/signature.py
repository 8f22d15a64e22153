"""The signature of a call on NumPy arrays: everything that checks and dispatch look at."""

import numpy as np

from attnkit._core.typing import Array, Keywords


def _of(x: np.ndarray) -> tuple[object, ...]:
    return x.shape, x.strides, x.dtype, x.flags.aligned


def signature(arrays: tuple[Array, ...], options: Keywords) -> tuple[object, ...] | None:
    """None if the call must be checked every time."""
    parts: list[object] = []
    for x in arrays:
        if type(x) is not np.ndarray:
            return None
        parts.append(_of(x))
    for name, value in options.items():
        kind = type(value)
        if kind is np.ndarray:
            parts.append((name, _of(value)))
        elif kind in (bool, int, float, str, type(None)):
            parts.append((name, kind, value))
        else:
            return None
    return tuple(parts)
