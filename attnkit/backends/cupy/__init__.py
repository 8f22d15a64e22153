"""Kernels for CuPy arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit.backends.cupy import cuda

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(cuda.KERNELS)
"""By op, in the order in which `impl="auto"` tries them."""
