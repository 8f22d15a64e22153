"""Arrays as kernel views: `View` of views.cuh."""

import ctypes
import math
from typing import Protocol

import array_api_compat
import numpy
from numpy.typing import DTypeLike

from attnkit.backends.cupy.launch import KINDS, Launch, View
from attnkit.kernels.plan import Layout
from attnkit.kernels.strides import as_items

Array = numpy.ndarray
"""Or CuPy's, which has its attributes and methods, and no types of its own."""


class Device(Protocol):
    """Memory and launches. Arrays have NumPy's shape, strides (in bytes), dtype and methods."""

    @property
    def shared_bytes(self) -> int:
        """The most shared memory that a block may have."""
        ...

    def pointer(self, x: Array) -> int:
        """The address of the first element, for kernels."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Uninitialised memory in row-major order."""
        ...

    def word(self, value: int) -> Array:
        """An unsigned 64-bit word."""
        ...

    def run(self, launch: Launch) -> None:
        """Launches of one call run one after the other."""
        ...


class Views:
    """The data shared by the launches of a call: device, arguments, and arrays referenced only by address."""

    device: Device
    arguments: ctypes.Structure
    layout: Layout
    compute: str  # the dtype of sums
    keepalive: list[Array]

    def view(self, name: str, what: str, x: Array) -> None:
        """Set the view `name` of the arguments to x broadcast to `Layout.shape_of(what)`."""
        shape, leading = self.layout.shape_of(what), len(self.layout.leading)
        self.view_as(name, x, shape[:leading], *shape[leading:])

    def view_as(self, name: str, x: Array, leading: tuple[int, ...], *rest: int) -> None:
        """Set a view to x broadcast to (*leading, *rest), rest being rows and columns."""
        strides = as_items(x.shape, x.strides, leading, *rest)
        if strides is None:
            x = array_api_compat.array_namespace(x).broadcast_to(x, (*leading, *rest))
            x = x.reshape(math.prod(leading[:-1]), leading[-1], *rest)
            strides = x.strides
        item, head, row, column = (*strides, 0, 0)[:4]
        setattr(self.arguments, name, View(self.pointer(x), item, head, row, column, KINDS[x.dtype.name]))

    def pointer(self, x: Array) -> int:
        """The address of an array that is referenced by nothing else."""
        self.keepalive.append(x)
        return int(self.device.pointer(x))

    @property
    def packed(self) -> tuple[str, ...]:
        """What packed sequences add to the template arguments of a kernel."""
        return ("true",) if self.layout.sequences else ()
