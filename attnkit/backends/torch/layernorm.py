"""`qk_layernorm` through torch's own fused `layer_norm`.

Half types are cast to float32 first: on CPUs torch saves means of theirs, and sums gradients of weights, in 16 bits.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from attnkit._core.dispatch import Kernel
from attnkit.ops.pointwise import qk_layernorm


def unsupported(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, **options: float) -> str | None:
    """Why torch's function cannot serve this call, or None."""
    return None if q.shape[-1] else "no features"


def fused(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Both normalised, in the dtype of q."""
    dtype = torch.promote_types(q.dtype, torch.float32)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return layer_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), eps=eps).to(x.dtype)

    return one(q, q_weight), one(k, k_weight)


KERNELS = {qk_layernorm.__name__: Kernel("fused", fused, unsupported)}
