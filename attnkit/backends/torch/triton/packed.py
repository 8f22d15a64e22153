"""Packed sequences by the Triton kernels of the op, all in one launch: tokens first, heads second."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit.backends.torch.triton import linear, pointwise, rows
from attnkit.backends.torch.triton.pointwise import is_faster

Edges = tuple[int, ...] | Tensor
Attend = Callable[..., Any]
Pull = Callable[..., dict[str, Tensor]]


def _edges(q: Tensor, given: Edges) -> Tensor:
    """Boundaries in the memory of the device."""
    return given.contiguous() if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int32, device=q.device)


def _heads_first(*arrays: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.transpose(0, 1) for x in arrays]


def attend(op: Attend, q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, **options: Any) -> Any:
    """The outputs of `op` on arrays (heads, tokens, features) with edges, tokens first."""
    answer = op(*_heads_first(q, k, v), edges_q=_edges(q, cu_q), edges_k=_edges(q, cu_k), **options)
    if isinstance(answer, tuple):
        return tuple(x.transpose(0, 1) for x in answer)
    return answer.transpose(0, 1)


def pull(
    op: Pull, q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, *cotangents: Tensor | None, **options: Any
) -> dict[str, Tensor]:
    """Its gradients, tokens first."""
    arrays = _heads_first(q, k, v, *cotangents)
    grads = op(*arrays, edges_q=_edges(q, cu_q), edges_k=_edges(q, cu_k), **options)
    return {name: x.transpose(0, 1) for name, x in grads.items()}


def unsupported_options(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why the kernels do not serve a call, whatever the device; only linear attention has such calls."""
    return linear.unsupported_options(q, k, v, **options)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, *cotangents: Tensor | None, **options: Any
) -> str | None:
    """Why a call is not served by Triton."""
    return pointwise.unsupported(q, k, v, *cotangents[:1]) or unsupported_options(q, k, v, **options)


OPS: dict[str, tuple[Attend, Pull]] = {
    "softmax_attention": (
        partial(rows.attend, "softmax_attention"),
        partial(rows.pull, "softmax_attention"),
    ),
    "pointwise_attention": (pointwise.attend, pointwise.pull),
    "linear_attention": (linear.attend, linear.pull),
}
KERNELS = {
    f"{op}_packed{suffix}": Kernel("triton", partial(serve, function), unsupported, is_faster)
    for op, functions in OPS.items()
    for suffix, serve, function in zip(("", "_vjp"), (attend, pull), functions, strict=True)
}
