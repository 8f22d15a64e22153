"""Kernels for NumPy arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit.backends.numpy import blocked
from attnkit.ops.records import SPECIAL_CASES

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(blocked.KERNELS, special_cases=SPECIAL_CASES)
"""By op, in the order in which `impl="auto"` tries them."""
