"""Kernels for JAX arrays."""

from attnkit._core.dispatch import Kernel, kernels_by_op
from attnkit._core.family import special_cases
from attnkit._core.learned import served
from attnkit.backends.jax import blocked, custom_call, native, transforms
from attnkit.backends.jax.triton import linear, pointwise
from attnkit.backends.jax.triton import rows as triton_rows

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    pointwise.KERNELS,
    triton_rows.KERNELS,
    linear.KERNELS,
    native.KERNELS,
    blocked.KERNELS,
    special_cases=special_cases(),
    served=served,
    refusal=transforms.unsupported,
)
"""By op, in the order in which `impl="auto"` tries them."""

custom_call.register()
