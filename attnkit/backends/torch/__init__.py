"""Kernels for torch tensors."""

from attnkit._dispatch import Kernel
from attnkit.backends.torch import (
    blocked,
    blocked_statistics,
    chunked,
    recomputed,
    rela,
    softmax,
    triton_linear,
    triton_newton,
    triton_packed,
    triton_pointwise,
    triton_rows,
    triton_statistics,
)

KERNELS: dict[str, tuple[Kernel, ...]] = {}
"""By op, in the order in which `impl="auto"` tries them."""
for _rows in (
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
):
    for _op, _kernel in _rows.items():
        KERNELS[_op] = (*KERNELS.get(_op, ()), _kernel)
SPECIAL_CASES = {
    "reluformer_attention": "pointwise_attention",
    "sigmoid_attention": "pointwise_attention",
    "sparsemax_attention": "entmax_attention",
}
KERNELS |= {
    f"{op}{suffix}": KERNELS[f"{called}{suffix}"] for op, called in SPECIAL_CASES.items() for suffix in ("", "_vjp")
}
