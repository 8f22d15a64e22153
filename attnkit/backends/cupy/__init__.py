"""Kernels for CuPy arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit._core.family import special_cases
from attnkit._core.learned import served
from attnkit.backends.cupy import cuda

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(cuda.KERNELS, special_cases=special_cases(), served=served)
"""By op, in the order in which `impl="auto"` tries them."""
