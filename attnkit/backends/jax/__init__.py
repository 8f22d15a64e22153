"""Kernels for JAX arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit._core.family import learned_numbers, special_cases
from attnkit.backends.jax import blocked, native, pallas, transforms, triton

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    triton.KERNELS,
    native.KERNELS,
    blocked.KERNELS,
    pallas.KERNELS,
    special_cases=special_cases(),
    numbers=learned_numbers,
    refusal=transforms.unsupported,
)
"""By op, in the order in which `impl="auto"` tries them."""
