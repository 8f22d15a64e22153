"""Arrays as kernels see them: (items, heads, ...), with a stride for each axis and 0 where an array is broadcast."""

from collections.abc import Sequence
from itertools import pairwise


def strides_of(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Strides with which an array of `shape` is read as one of `wanted`: 0 on broadcast axes."""
    extra = len(wanted) - len(shape)
    found = [0] * extra
    for have, want, stride in zip(shape, wanted[extra:], strides, strict=True):
        found.append(0 if have == 1 or want == 1 else stride)
    return found


def as_items(
    shape: Sequence[int], strides: Sequence[int], leading: Sequence[int], *rest: int
) -> tuple[int, ...] | None:
    """Strides with which an array that broadcasts to (*leading, *rest) is read as (items, heads, *rest), heads being
    the last leading axis; None where the others cannot be joined to one.
    """
    own = strides_of(shape, strides, (*leading, *rest))
    own = own if leading else [0, *own]
    outer = max(len(leading), 1) - 1
    items = joined(leading[:outer], own[:outer])
    return None if items is None else (items, *own[outer:])


def joined(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several axes as one, None where there is none."""
    axes = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    for (_, outer), (size, inner) in pairwise(axes):
        if outer != inner * size:
            return None
    return axes[-1][1] if axes else 0


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of an array whose last axis lies together, in elements."""
    found = [1]
    for size in reversed(shape[1:]):
        found.insert(0, found[0] * size)
    return found[: len(shape)]
