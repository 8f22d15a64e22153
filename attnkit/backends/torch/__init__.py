"""Kernels for torch tensors."""

from attnkit._dispatch import Kernel
from attnkit.backends.torch import softmax

KERNELS: dict[str, tuple[Kernel, ...]] = {
    "softmax_attention": (Kernel("sdpa", softmax.sdpa, softmax.sdpa_unsupported),),
}
