"""Kernels for JAX arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit._core.family import special_cases
from attnkit.backends.jax import blocked, pallas_pointwise, transforms, triton_pointwise

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    triton_pointwise.KERNELS,
    blocked.KERNELS,
    pallas_pointwise.KERNELS,
    special_cases=special_cases(),
    refusal=transforms.unsupported,
)
"""By op, in the order in which `impl="auto"` tries them."""
