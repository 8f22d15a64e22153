"""Packed sequences by the Triton kernels of the op, all in one launch: tokens first, heads second."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel, with_gradients
from attnkit.backends.torch.triton import linear, pointwise, rows
from attnkit.backends.torch.triton.pointwise import is_faster
from attnkit.ops.packed import linear_attention_packed, pointwise_attention_packed, softmax_attention_packed
from attnkit.ops.softmax import SOFTMAX

Edges = tuple[int, ...] | Tensor
Attend = Callable[..., Any]
Pull = Callable[..., dict[str, Tensor]]


def _edges(q: Tensor, edges: Edges) -> Tensor:
    """Boundaries in the memory of the device."""
    return edges.contiguous() if isinstance(edges, Tensor) else torch.tensor(edges, dtype=torch.int32, device=q.device)


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
    """The gradients, tokens first."""
    arrays = _heads_first(q, k, v, *cotangents)
    grads = op(*arrays, edges_q=_edges(q, cu_q), edges_k=_edges(q, cu_k), **options)
    return {name: x.transpose(0, 1) for name, x in grads.items()}


def unsupported_options(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why the kernels do not support a call on any device; only linear attention has such calls."""
    return linear.unsupported_options(q, k, v, **options)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, *cotangents: Tensor | None, **options: Any
) -> str | None:
    """Why Triton does not support a call."""
    return pointwise.unsupported(q, k, v, *cotangents[:1]) or unsupported_options(q, k, v, **options)


OPS: dict[Callable[..., Any], tuple[Attend, Pull]] = {
    softmax_attention_packed: (partial(rows.attend, SOFTMAX.name), partial(rows.pull, SOFTMAX.name)),
    pointwise_attention_packed: (pointwise.attend, pointwise.pull),
    linear_attention_packed: (linear.attend, linear.pull),
}
KERNELS: dict[str, Kernel] = {}
for op, (forward, backward) in OPS.items():
    kernel = Kernel("triton", partial(attend, forward), unsupported, is_faster)
    KERNELS |= with_gradients(op, kernel, partial(pull, backward))
