"""The layout of what kernels write: that of an argument where it is a dense permutation of axes.

So torch.empty_like lays out its answer, and joining the heads of an output whose queries came from a projection is a
view. Beside an argument that is expanded, stepped or broadcast a result is contiguous.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnkit.kernels.strides import row_major

MERGED = 4
"""Axes that kernels read by strides as they are: of more, the leading ones are merged into one."""


def strides_like(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array of this shape, which may differ from x's in its last axis, in the layout of x."""
    strides, sizes, dense = x.stride(), x.shape, 1
    if len(sizes) != len(shape) or any(a != b for a, b in zip(sizes[:-1], shape[:-1], strict=True)):
        return tuple(row_major(shape))
    inner_first = sorted(range(len(shape)), key=lambda n: (strides[n], -n))
    made = [1] * len(shape)
    size = 1
    for n in inner_first:
        if sizes[n] != 1 and strides[n] != dense:
            return tuple(row_major(shape))
        made[n], size, dense = size, size * shape[n], dense * sizes[n]
    return strides if len(shape) and shape[-1] == sizes[-1] else tuple(made)


def room_like(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory in the layout of x where kernels can write it, contiguous elsewhere."""
    if len(shape) > MERGED:
        return torch.empty(tuple(shape), dtype=dtype, device=x.device)
    return torch.empty_strided(tuple(shape), strides_like(x, shape), dtype=dtype, device=x.device)


def rooms(q: Tensor, outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Memory for outputs by name: o in the layout of q, all others contiguous."""
    return {
        name: room_like(q, shape, dtype) if name == "o" else q.new_empty(shape, dtype=dtype)
        for name, (shape, dtype) in outputs.items()
    }


def in_layout_of(x: Tensor, result: Tensor) -> Tensor:
    """The result in the layout of x, a copy unless it was written in it."""
    strides = strides_like(x, result.shape)
    if result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
