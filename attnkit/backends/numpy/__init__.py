"""Kernels for NumPy arrays."""

from numpy import ndarray

from attnkit._core.dispatch import Kernel, kernels_by_op, remember_by
from attnkit._core.family import special_cases
from attnkit._core.learned import served
from attnkit.backends.numpy import blocked, native, signature

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    native.KERNELS, blocked.KERNELS, special_cases=special_cases(), served=served
)
"""By op, in the order in which `impl="auto"` tries them."""

remember_by(ndarray, signature.signature)
