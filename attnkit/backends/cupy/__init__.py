"""Kernels for CuPy arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit._core.family import learned_numbers, special_cases
from attnkit.backends.cupy import cuda

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    cuda.KERNELS, special_cases=special_cases(), numbers=learned_numbers
)
"""By op, in the order in which `impl="auto"` tries them."""
