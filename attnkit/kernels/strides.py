"""Strides of arrays as kernels see them: (items, heads, ...), with 0 for broadcast axes."""

from collections.abc import Sequence
from itertools import pairwise


def strides_of(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> list[int]:
    """Strides with which an array of `shape` is read as one of `target`: 0 on broadcast axes."""
    extra = len(target) - len(shape)
    result = [0] * extra
    for have, want, stride in zip(shape, target[extra:], strides, strict=True):
        result.append(0 if have == 1 or want == 1 else stride)
    return result


def as_items(
    shape: Sequence[int], strides: Sequence[int], leading: Sequence[int], *rest: int
) -> tuple[int, ...] | None:
    """Strides with which an array that broadcasts to (*leading, *rest) is read as (items, heads, *rest), heads being
    the last leading axis; None if the others cannot be merged into one.
    """
    own = strides_of(shape, strides, (*leading, *rest))
    own = own if leading else [0, *own]
    outer = max(len(leading), 1) - 1
    items = joined(leading[:outer], own[:outer])
    return None if items is None else (items, *own[outer:])


def joined(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several axes merged into one, None if they cannot be merged."""
    axes = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    for (_, outer), (size, inner) in pairwise(axes):
        if outer != inner * size:
            return None
    return axes[-1][1] if axes else 0


def row_major(shape: Sequence[int]) -> list[int]:
    """Row-major strides, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]
