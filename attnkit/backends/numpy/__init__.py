"""Kernels for NumPy arrays."""

from numpy import ndarray

from attnkit._core.dispatch import Kernel, kernels_by_op, remember_by
from attnkit._core.family import learned_numbers, special_cases
from attnkit.backends.numpy import blocked, native, signature

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    native.KERNELS, blocked.KERNELS, special_cases=special_cases(), numbers=learned_numbers
)
"""By op, in the order in which `impl="auto"` tries them."""

remember_by(ndarray, signature.signature)
