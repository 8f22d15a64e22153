"""The GPU that CuPy sees, as the `Device` of launches: one module per template instance and device."""

import ctypes
from functools import cache

import cupy
import numpy
from numpy.typing import DTypeLike

from attnkit._core.poison import poisons
from attnkit._core.typing import AnyFunction
from attnkit.backends.cupy.launch import Launch
from attnkit.kernels.cuda import SOURCES, program

PLAIN_SHARED = 48 * 1024  # bytes of shared memory available without opting in


@cache
def compiled(source: str, name: str, shared_bytes: int, device: int) -> AnyFunction:
    """A template instance, compiled by NVRTC for the current device; CuPy keeps machine code by the text of a program.

    The sources fix the numbers of registers and threads; only shared memory needs an attribute.
    """
    options = ("--std=c++17", f"-I{SOURCES}")
    module = cupy.RawModule(code=program(source), options=options, name_expressions=(name,))
    kernel = module.get_function(name)
    if shared_bytes > PLAIN_SHARED:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


@cache
def shared_bytes_of(device: int) -> int:
    """The most shared memory that a block may have there, with an attribute."""
    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def by_value(arguments: ctypes.Structure) -> numpy.ndarray:
    """A structure as CuPy passes one to a kernel: an array of one element."""
    return numpy.frombuffer(bytes(arguments), numpy.dtype((numpy.void, ctypes.sizeof(arguments))))


class Gpu:
    """`Device` of `attnkit.backends.cupy.views` on the current device, in the current stream."""

    @property
    def shared_bytes(self) -> int:
        return shared_bytes_of(cupy.cuda.Device().id)

    def pointer(self, x: cupy.ndarray) -> int:
        """Where the first element is in the memory of the device."""
        return int(x.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """Uninitialised memory, or NaN."""
        memory = cupy.empty(shape, dtype)
        if poisons():
            memory.data.memset_async(0xFF, memory.nbytes)
        return memory

    def word(self, value: int) -> cupy.ndarray:
        """An unsigned 64-bit word in the memory of the device."""
        return cupy.asarray(value, dtype=cupy.uint64)

    def run(self, launch: Launch) -> None:
        """Enqueue a launch."""
        kernel = compiled(launch.source, launch.name, launch.shared_bytes, cupy.cuda.Device().id)
        arguments = (by_value(launch.arguments),)
        kernel((launch.blocks,), (launch.threads,), arguments, shared_mem=launch.shared_bytes)
