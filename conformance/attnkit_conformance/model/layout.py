"""Memory layouts: the same values at other addresses, as callers' arrays have them.

A layout is a name. `laid_out(x, layout)` gives x in it; arrays that it does not suit (heads of a vector) stay dense.
Some layouts hold one number for several entries: `tied(x, layout)` are values that they can hold, and cases are drawn
with such values, so that whatever is computed from these (golden values too) is the same for every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import EllipsisType

import numpy as np
from numpy.lib.stride_tricks import as_strided

Array = np.ndarray
ALIGNMENT = 64  # bytes, as in torch and JAX
GAP = 0xFF  # bytes that are not read: of a float they are NaN
DENSE = "dense"
WHOLE = "expanded_whole"  # of cotangents, as that of a sum


def align(x: Array) -> Array:
    """A dense array aligned to 64 bytes. A BLAS may sum in another order if arrays are aligned otherwise, and NumPy's
    alignment varies, while reruns and prefixes are compared bit by bit.
    """
    return place_at(x, 0)


def place_at(x: Array, offset: int) -> Array:
    """A copy that begins `offset` bytes after an aligned address."""
    room = np.empty(x.nbytes + ALIGNMENT + offset, np.uint8)
    copy = np.ndarray(x.shape, x.dtype, room, -room.ctypes.data % ALIGNMENT + offset, x.strides)
    copy[...] = x
    return copy


def block(x: Array) -> Array:
    """The same as `align`, row after row whatever the strides of x are."""
    return align(x.copy(order="C"))


def turn_heads(x: Array) -> Array:
    """(B, L, H, d) in memory, seen as (B, H, L, d), as of a projection to all heads; columns of a matrix."""
    if x.ndim < 2:
        return x
    axes = (-3, -2) if x.ndim > 2 else (-2, -1)
    return np.swapaxes(block(np.swapaxes(x, *axes)), *axes)


def step_rows(x: Array) -> Array:
    """Every second number of every second row."""
    if not x.ndim:
        return x
    steps = (slice(None, None, 2), slice(1, None, 2))[-x.ndim :]
    shape = (*x.shape[: -len(steps)], *(2 * n for n in x.shape[-len(steps) :]))
    wide = np.empty(shape, x.dtype)
    wide.view(np.uint8)[...] = 1 if x.dtype.kind == "b" else GAP
    part = wide[(..., *steps)]
    part[...] = x
    return part


def negative(x: Array) -> Array:
    """Rows and numbers from the last to the first."""
    back: tuple[EllipsisType | slice, ...] = (..., *(slice(None, None, -1) for _ in range(min(x.ndim, 2))))
    return block(x[back])[back]


def unalign(x: Array) -> Array:
    """One byte after an aligned address, as in the middle of a file."""
    return place_at(x.copy(order="C"), 1) if x.itemsize > 1 else x


def read_only(x: Array) -> Array:
    """Not writeable, as the memory of another."""
    view = x.view()
    view.flags.writeable = False
    return view


def overlapping(x: Array) -> Array:
    """Windows of a sequence: the last number of a row is the first of the next one."""
    if not overlaps(x):
        return x
    rows, columns = x.shape[-2:]
    most = x[..., :-1].reshape(*x.shape[:-2], rows * (columns - 1))
    sequence = align(np.concatenate([most, x[..., -1, -1:]], axis=-1))
    return as_strided(sequence, x.shape, (*sequence.strides[:-1], (columns - 1) * x.itemsize, x.itemsize))


def overlaps(x: Array) -> bool:
    return x.ndim > 1 and x.shape[-2] > 1 and x.shape[-1] > 1


def expanded_first(x: Array) -> Array:
    """Stride 0 along the first axis: one item of all of a batch."""
    return along(x, leading(x)[:1])


def expanded_last(x: Array) -> Array:
    """Stride 0 along the last leading axis: one head for all, as in multi-query attention."""
    return along(x, leading(x)[-1:])


def expanded_all(x: Array) -> Array:
    """Stride 0 along all leading axes."""
    return along(x, leading(x))


def leading(x: Array) -> range:
    """The axes before rows of numbers: batch and heads; of masks and lengths all but the last."""
    return range(x.ndim - 1 if x.dtype.kind in "biu" else x.ndim - 2)


def along(x: Array, several: range) -> Array:
    """Stride 0 along these axes: their last entry is that of all."""
    axes = [n for n in several if x.shape[n] > 1]
    if not axes:
        return x
    one = block(x[tuple(slice(-1, None) if n in axes else slice(None) for n in range(x.ndim))])
    return as_strided(one, x.shape, [0 if n in axes else stride for n, stride in enumerate(one.strides)])


def dense(x: Array) -> Array:
    """Row after row."""
    return x


def whole(x: Array) -> Array:
    """One number, as the cotangent of a sum."""
    return along(x, range(x.ndim))


MAKERS: Mapping[str, Callable[[Array], Array]] = {
    DENSE: dense,
    "turned": turn_heads,
    "stepped": step_rows,
    "negative": negative,
    "unaligned": unalign,
    "read_only": read_only,
    "overlapping": overlapping,
    "expanded_first": expanded_first,
    "expanded_last": expanded_last,
    "expanded_all": expanded_all,
    WHOLE: whole,
}
TIED = tuple(name for name in MAKERS if name.startswith(("expanded", "overlapping")))
"""The layouts in which one number in memory is several entries."""


def tie(x: Array, layout: str) -> Array:
    """Values that the layout can hold: x with entries of one place in memory made equal."""
    if layout == "overlapping" and overlaps(x):
        x = x.copy()
        x[..., 1:, 0] = x[..., :-1, -1]
        return x
    return MAKERS[layout](x).copy() if layout in TIED and x.size else x


def suits(x: Array, layout: str) -> bool:
    """Whether an array differs from a dense one in this layout."""
    if layout in ("unaligned", "read_only"):
        return bool(x.size) and (layout == "read_only" or x.dtype.kind != "b")
    return bool(x.size) and MAKERS[layout](x).strides != x.copy(order="C").strides


def laid_out(x: Array, layout: str) -> Array:
    """A dense x in a layout; ValueError if the layout cannot hold its values."""
    y = MAKERS[layout](x) if x.size else x
    if layout in TIED and y.tobytes() != x.tobytes():
        raise ValueError(f"layout {layout}: entries in one place in memory differ; draw the case with tied values")
    return y
