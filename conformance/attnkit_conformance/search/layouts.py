"""Where an array lies: the same values in memory that is not dense.

Some layouts say something about the values: entries along an expanded axis are one, and rows that overlap share
entries. `held` gives an array the values that its layout can hold; `placed` puts it there. A layout that does not fit
an array, such as an axis that it does not have, leaves it dense. What lies between the entries is NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

Array = np.ndarray
MOVED = ("turned", "reversed", "stepped", "negative", "unaligned", "readonly")
SHARING = ("expanded 0", "expanded 1", "overlapping")  # entries
OF_SUMS = ("expanded all", "expanded -1")  # cotangents of sums of everything, and of features
MATRIX = 2  # last axes, which inputs do not expand
BYTE = 0xFF  # four of it are NaN


def shared_axes(x: Array, layout: str) -> tuple[int, ...]:
    """The axes along which all entries of an array are one."""
    of = layout.removeprefix("expanded ")
    if x.dtype.kind == "b" or x.dtype.kind in "iu" or of == layout:
        return ()
    if of == "all":
        return tuple(range(x.ndim))
    axis = int(of)
    return (axis,) if -x.ndim <= axis < (x.ndim - MATRIX if axis >= 0 else 0) else ()


def overlaps(x: Array, layout: str) -> bool:
    """Whether each row of an array begins within the one before."""
    return layout == "overlapping" and x.dtype.kind not in "biu" and x.ndim >= MATRIX and x.size > 0


def held(x: Array, layout: str) -> Array:
    """`x` with the values that its layout can hold: the first of those that are one."""
    for axis in shared_axes(x, layout) if x.size else ():
        x = np.broadcast_to(np.take(x, [0], axis), x.shape)
    if overlaps(x, layout):
        x = windows(line(x), x.shape)
    return np.array(x, order="C")


def line(x: Array) -> Array:
    """The first entries of the rows of a matrix, and what the last row has besides."""
    return np.concatenate([x[..., :, 0], x[..., -1, 1:]], axis=-1)


def windows(x: Array, shape: tuple[int, ...]) -> Array:
    """Rows of a matrix, each of which begins one entry after the one before."""
    return as_strided(x, shape, (*x.strides[:-1], x.strides[-1], x.strides[-1]), writeable=False)


def placed(x: Array, layout: str) -> Array:
    """A dense array as a view of memory with a layout. ValueError unless it holds values that this can hold."""
    if x.ndim == 0 and layout not in ("unaligned", "readonly"):
        return x
    if layout.startswith("expanded") or layout == "overlapping":
        return shared(x, layout)
    if layout == "turned" and x.ndim > MATRIX:  # (B, L, H, d) in memory seen as (B, H, L, d)
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -3, -2)), -3, -2)
    if layout == "reversed":  # the last axis is the one with the largest stride
        return np.asfortranarray(x)
    if layout == "stepped":
        room = np.full(x.nbytes * 2**x.ndim, BYTE, np.uint8).view(x.dtype).reshape([2 * n for n in x.shape])
        view = room[tuple(slice(1, None, 2) for _ in x.shape)]
        view[...] = x
        return view
    if layout == "negative":
        backwards = tuple(slice(None, None, -1) for _ in x.shape)
        return np.ascontiguousarray(x[backwards])[backwards]
    if layout == "unaligned":
        view = np.ndarray(x.shape, x.dtype, np.full(x.nbytes + 1, BYTE, np.uint8), 1)
        view[...] = x
        return view
    if layout == "readonly":
        x = x.copy()
        x.flags.writeable = False
    return x


def shared(x: Array, layout: str) -> Array:
    """An array some of whose entries are one in memory."""
    if held(x, layout).tobytes() != x.tobytes():
        raise ValueError(f"layout {layout!r}: entries that are to be one differ")
    if overlaps(x, layout):
        return windows(line(x), x.shape)
    one = x[tuple(slice(0, 1) if axis in axes_from_0(x, layout) else slice(None) for axis in range(x.ndim))]
    return np.broadcast_to(one.copy(), x.shape)


def axes_from_0(x: Array, layout: str) -> set[int]:
    """`shared_axes` as numbers from 0."""
    return {axis % x.ndim for axis in shared_axes(x, layout)} if x.size else set()
