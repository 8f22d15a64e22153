"""The memory in which an array lies, to be sent to another process or device with its layout."""

from __future__ import annotations

from ctypes import c_uint8
from typing import NamedTuple

import numpy as np

from attnkit_conformance.model.case import numpy_dtype
from attnkit_conformance.model.layout import ALIGNMENT, Array, place_at, read_only


class Memory(NamedTuple):
    """The bytes from the first to the last of an array, and how it lies in them."""

    content: Array  # (bytes,)
    offset: int  # of the first byte from an aligned address
    start: int  # of the array in the bytes: with strides below 0 it is not the first
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writeable: bool

    def array(self) -> Array:
        """The array in another copy of its memory."""
        dtype = numpy_dtype(self.dtype)
        x = np.ndarray(self.shape, dtype, place_at(self.content, self.offset), self.start, self.strides)
        return x if self.writeable else read_only(x)


def memory_of(x: Array) -> Memory:
    """A copy of the memory of an array."""
    ends = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)] if x.size else []
    start = -sum(end for end in ends if end < 0)
    size = start + sum(end for end in ends if end > 0) + x.itemsize if x.size else 0
    first = x.__array_interface__["data"][0] - start
    content = place_at(np.ctypeslib.as_array((c_uint8 * size).from_address(first)), first % ALIGNMENT)
    return Memory(content, first % ALIGNMENT, start, x.dtype.name, x.shape, x.strides, x.flags.writeable)
