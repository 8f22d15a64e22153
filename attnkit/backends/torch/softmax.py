"""Softmax attention through torch's own fused `scaled_dot_product_attention`."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnkit._dispatch import Kernel


def sdpa_unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str | None:
    """Why torch's function cannot serve this call with attnkit's semantics, or None.

    Its masks let padding that holds NaN reach the output, its causality is upper-left, and it returns no statistics.
    """
    allowed = ("causal", "scale", "enable_gqa")
    for name, value in options.items():
        if name not in allowed and value is not None and value is not False:
            return f"{name} is served by the generic implementation"
    if options.get("causal") and q.shape[-2] != k.shape[-2]:
        return "causal needs as many queries as keys"
    if q.shape[-2] == 0 or k.shape[-2] == 0:
        return "no queries or no keys"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not (q.shape[0] == k.shape[0] == v.shape[0]):
        return "needs q, k and v of shape (B, H, tokens, features) with one B"
    if not options.get("enable_gqa") and not (q.shape[1] == k.shape[1] == v.shape[1]):
        return "needs as many heads in q, k and v"
    return None


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=bool(options.get("causal", False)),
        scale=options.get("scale"),
        enable_gqa=options.get("enable_gqa", False),
    )


KERNELS = {"softmax_attention": Kernel("sdpa", sdpa, sdpa_unsupported)}
