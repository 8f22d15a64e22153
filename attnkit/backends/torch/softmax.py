"""Softmax attention through torch's own fused `scaled_dot_product_attention`."""

from typing import NoReturn

import torch
from torch.autograd.graph import Node
from torch.nn.functional import scaled_dot_product_attention

from attnkit._core.dispatch import Kernel
from attnkit._core.typing import Option
from attnkit.backends.torch import watchers
from attnkit.ops.softmax import SOFTMAX

LEAST_KEYS = 16
"""Keys from which torch's kernel for CPUs shows a NaN in a query. It takes the maximum of a row by vectors of up to 16
scores, which keep a NaN, and that of the rest one by one, which drops it. A row of nothing but NaN then has no maximum,
and its output is 0, as that of a row without a visible key; its gradients are NaN.
"""


def sdpa_unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> str | None:
    """Why torch's function cannot serve this call with attnkit's semantics, or None.

    Its masks let padding that holds NaN reach the output, its causality is upper-left, and it returns no statistics.
    Under causality the first query sees one key, but its scores are as many as there are keys.
    """
    allowed = ("causal", "scale", "enable_gqa")
    for name, value in options.items():
        if name not in allowed and value is not None and value is not False:
            return f"{name} is served by the generic implementation"
    if options.get("causal") and q.shape[-2] != k.shape[-2]:
        return "causal needs as many queries as keys"
    scale = options.get("scale")
    if options.get("causal") and isinstance(scale, int | float) and scale < torch.finfo(torch.float32).tiny:
        return f"torch hides keys by -∞ before it multiplies; got scale={scale}"
    if q.shape[-2] == 0 or k.shape[-2] == 0:
        return "no queries or no keys"
    if q.device.type == "cpu" and q.dtype == torch.float16:
        return "torch multiplies weights rounded to float16, and gradients are off by more than D allows"
    if q.device.type == "cpu" and k.shape[-2] < LEAST_KEYS:
        return f"with fewer than {LEAST_KEYS} keys torch turns a query that holds NaN into 0"
    if watchers.maps():  # torch has no batching rule for its CPU kernel: it loops and warns
        return watchers.MAPS
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not (q.shape[0] == k.shape[0] == v.shape[0]):
        return "needs q, k and v of shape (B, H, tokens, features) with one B"
    if not options.get("enable_gqa") and not (q.shape[1] == k.shape[1] == v.shape[1]):
        return "needs as many heads in q, k and v"
    return None


class _Final(torch.autograd.Function):
    """Gradients that raise an error when they are differentiated."""

    @staticmethod
    def forward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> NoReturn:
        raise NotImplementedError("softmax_attention: impl='sdpa' has no second derivatives; impl='generic' has")


def _final(
    grads: tuple[torch.Tensor | None, ...], do: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """A hook that makes `grads` raise an error if autograd differentiates them (`create_graph`)."""
    if not torch.is_grad_enabled():
        return None
    final = iter(_Final.apply(*(g for g in grads if g is not None)))
    return tuple(g if g is None else next(final) for g in grads)


def _fused(node: Node | None) -> Node | None:
    """The node of a fused kernel in the graph of an output, possibly below a transpose or a slice to the head size.

    None if torch used its plain formula, which has all derivatives.
    """
    for _ in range(4):
        if node is None or node.name().startswith("ScaledDotProduct"):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Option) -> torch.Tensor:
    """torch's function; second derivatives, which its fused kernels lack, raise an error of attnkit's."""
    o = scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=bool(options.get("causal", False)),
        scale=options.get("scale"),
        enable_gqa=options.get("enable_gqa", False),
    )
    if o.requires_grad and not torch.compiler.is_compiling():
        node = _fused(o.grad_fn)
        if node is not None:
            node.register_hook(_final)
    return o


KERNELS = {SOFTMAX.name: Kernel("sdpa", sdpa, sdpa_unsupported)}
