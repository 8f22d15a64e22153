"""Kernels for torch tensors."""

from attnkit._dispatch import Kernel
from attnkit.backends.torch import softmax, triton_pointwise

KERNELS: dict[str, tuple[Kernel, ...]] = {
    "softmax_attention": (Kernel("sdpa", softmax.sdpa, softmax.sdpa_unsupported),),
}
KERNELS |= {op: (kernel, *KERNELS.get(op, ())) for op, kernel in triton_pointwise.KERNELS.items()}
