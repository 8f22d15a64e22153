"""Kernels for torch tensors."""

from attnkit._dispatch import Kernel, kernels_by_op
from attnkit.backends.torch import (
    blocked,
    blocked_statistics,
    chunked,
    recomputed,
    rela,
    softmax,
    transforms,
    triton_linear,
    triton_newton,
    triton_packed,
    triton_pointwise,
    triton_rows,
    triton_statistics,
)

KERNELS: dict[str, tuple[Kernel, ...]] = kernels_by_op(
    triton_pointwise.KERNELS,
    triton_pointwise.ATOMIC,
    triton_linear.KERNELS,
    triton_rows.KERNELS,
    triton_statistics.KERNELS,
    triton_newton.KERNELS,
    triton_packed.KERNELS,
    rela.TRITON,
    softmax.KERNELS,
    blocked.KERNELS,
    blocked_statistics.KERNELS,
    rela.BLOCKED,
    chunked.KERNELS,
    recomputed.KERNELS,
    refusal=transforms.unsupported,
)
"""By op, in the order in which `impl="auto"` tries them."""
