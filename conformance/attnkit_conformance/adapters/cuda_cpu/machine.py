"""A device for launches: arrays between protected pages, and kernels that run on the CPU."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from attnkit.backends.cupy.launch import Launch
from attnkit_conformance.adapters.cuda_cpu.build import Library

PAGE = mmap.PAGESIZE
POISON = 0xFF  # NaN in every float type
AMPLE = 227 * 1024  # bytes of shared memory for a block, as compute capability 9.0 has
LIBC = ctypes.CDLL(None, use_errno=True)


class KernelFault(RuntimeError):
    """A kernel broke a rule; the text says which, with block and threads."""


@dataclass
class Region:
    """An array's bytes in separate pages, between two protected ones."""

    pages: mmap.mmap
    usable: np.ndarray  # all bytes between the protected pages
    start: int  # of the array among them
    size: int
    what: str
    expected: np.ndarray | None = None  # the unchanged contents of an input; None for outputs

    @property
    def address(self) -> int:
        return int(self.usable.ctypes.data) + self.start

    def changed(self) -> str | None:
        """A forbidden write, or None."""
        outside = np.ones(self.usable.size, bool)
        outside[self.start : self.start + self.size] = False
        if np.any(self.usable[outside] != POISON):
            return f"wrote beside {self.what}"
        inside = self.usable[self.start : self.start + self.size]
        if self.expected is not None and not np.array_equal(inside, self.expected):
            return f"wrote into {self.what}, which is an input"
        return None


def protect(size: int, behind: bool, what: str) -> Region:
    """Poisoned memory whose last byte (`behind`) or first byte is next to a protected page."""
    room = max(-(-size // PAGE), 1) * PAGE
    pages = mmap.mmap(-1, room + 2 * PAGE)
    usable = np.frombuffer(pages, np.uint8, room, PAGE)
    usable[:] = POISON
    for at in (usable.ctypes.data - PAGE, usable.ctypes.data + room):
        if LIBC.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return Region(pages, usable, room - size if behind else 0, size, what)


class Machine:
    """`Device` of attnkit.backends.cupy. With `behind`, arrays end where memory ends, otherwise they begin where it
    begins; with `descending`, threads run from the last to the first. A block may have `shared_bytes`."""

    def __init__(self, library: Library, behind: bool, descending: bool, shared_bytes: int = AMPLE) -> None:
        self.library, self.behind, self.descending = library, behind, descending
        self.shared_bytes = shared_bytes
        self.regions: list[Region] = []
        self.known: dict[tuple[object, ...], int] = {}
        self.keepalive: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Poisoned memory that kernels may write to."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        region = protect(size, self.behind, f"an output {shape} of {kind.name}")
        self.regions.append(region)
        return np.ndarray(shape, kind, region.usable.data, region.start)

    def word(self, value: int) -> np.ndarray:
        """An unsigned 64-bit word."""
        return np.array(value, np.uint64)

    def pointer(self, x: np.ndarray) -> int:
        """The address of an output, or of a copy of an input with its strides and NaN between its elements."""
        if any(0 <= x.ctypes.data - region.address < max(region.size, 1) for region in self.regions):
            return int(x.ctypes.data)
        key = (x.ctypes.data, x.shape, x.strides, x.dtype)
        if key not in self.known:
            self.keepalive.append(x)
            self.known[key] = self.copied(x)
        return self.known[key]

    def copied(self, x: np.ndarray) -> int:
        low, high = np.lib.array_utils.byte_bounds(x) if x.size else (x.ctypes.data,) * 2
        region = protect(high - low, self.behind, f"an input {x.shape} of {x.dtype.name}")
        first = region.start + x.ctypes.data - low
        if x.size:
            np.ndarray(x.shape, x.dtype, region.usable.data, first, x.strides)[...] = x
        region.expected = region.usable[region.start : region.start + region.size].copy()
        self.regions.append(region)
        return int(region.usable.ctypes.data) + first

    def run(self, launch: Launch) -> None:
        """All blocks; KernelFault for any broken rule."""
        answer = self.library.run(launch, self.descending)
        if answer.failed:
            place = self.place(answer.address) if answer.address else ""
            raise KernelFault(f"{launch.kernel}: {answer.message.decode()}{place}")
        for region in self.regions:
            if wrong := region.changed():
                raise KernelFault(f"{launch.kernel}: {wrong}")

    def place(self, address: int) -> str:
        """The array that an address is nearest to."""
        if not self.regions:
            return ""
        near = min(self.regions, key=lambda r: min(abs(address - r.address), abs(address - r.address - r.size)))
        if address >= near.address + near.size:
            return f"; {address - near.address - near.size} bytes behind {near.what}"
        return f"; {near.address - address} bytes before {near.what}"
