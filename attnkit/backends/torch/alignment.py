"""Tensors whose memory is not aligned to their elements, as in the middle of a file: kernels cannot load those."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit._core.typing import Array
from attnkit.backends.torch import watchers
from attnkit.kernels.plan import UNALIGNED


def are_aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether the memory of plain tensors is aligned to their elements."""
    return not any(x.data_ptr() % x.itemsize for x in tensors)


def in_aligned_memory(x: Tensor) -> Tensor:
    """A cotangent, or its copy where it is not aligned: a backward pass has no other implementation to go on to."""
    return x if are_aligned([x]) else x.clone()


def refusing_unaligned(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """A table of kernels that load whole elements."""
    return {op: _refusing(kernel) for op, kernel in kernels.items()}


def _refusing(kernel: Kernel) -> Kernel:
    def unsupported(*arrays: Array, **options: object) -> str | None:
        if not watchers.watched():
            tensors = [*_tensors((*arrays, *options.values()))]
            if watchers.plain(tensors) and not are_aligned(tensors):
                return UNALIGNED
        return kernel.unsupported(*arrays, **options)

    return kernel._replace(unsupported=unsupported)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Those among arguments, and those of states and of dropout."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)
