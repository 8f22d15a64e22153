"""Kernels for torch tensors."""

from attnkit._dispatch import Kernel
from attnkit.backends.torch import blocked, recomputed, softmax, triton_linear, triton_pointwise, triton_statistics

KERNELS: dict[str, tuple[Kernel, ...]] = {
    op: (kernel,) for op, kernel in (*blocked.KERNELS.items(), *recomputed.KERNELS.items())
}
KERNELS["softmax_attention"] = (
    Kernel("sdpa", softmax.sdpa, softmax.sdpa_unsupported),
    *KERNELS["softmax_attention"],
)
TRITON = triton_pointwise.KERNELS | triton_linear.KERNELS | triton_statistics.KERNELS
KERNELS |= {op: (kernel, *KERNELS.get(op, ())) for op, kernel in TRITON.items()}
SPECIAL_CASES = {
    "reluformer_attention": "pointwise_attention",
    "sigmoid_attention": "pointwise_attention",
    "sparsemax_attention": "entmax_attention",
}
KERNELS |= {
    f"{op}{suffix}": KERNELS[f"{called}{suffix}"] for op, called in SPECIAL_CASES.items() for suffix in ("", "_vjp")
}
