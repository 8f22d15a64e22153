"""Packed sequences by the Triton kernels of the op, all in one launch: tokens first, heads second."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TypeAlias, Unpack

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel, with_gradients
from attnkit._core.typing import AnyFunction, Keywords, Options, Results
from attnkit.backends.torch.triton import linear, pointwise, recorded, rows
from attnkit.kernels import linear_calls, predicted
from attnkit.ops.packed import linear_attention_packed, pointwise_attention_packed, softmax_attention_packed
from attnkit.ops.softmax import SOFTMAX

Edges: TypeAlias = tuple[int, ...] | Tensor
Attend = AnyFunction
Pull = Callable[..., dict[str, Tensor]]
Prepare = Callable[..., recorded.Repeated]


def _edges(q: Tensor, edges: Edges) -> Tensor:
    """Boundaries in the memory of the device."""
    return edges.contiguous() if isinstance(edges, Tensor) else torch.tensor(edges, dtype=torch.int32, device=q.device)


def _heads_first(*arrays: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.transpose(0, 1) for x in arrays]


def attend(op: Attend, q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, **options: object) -> Results:
    """The outputs of `op` on arrays (heads, tokens, features) with edges, tokens first."""
    answer = op(*_heads_first(q, k, v), edges_q=_edges(q, cu_q), edges_k=_edges(q, cu_k), **options)
    if isinstance(answer, tuple):
        return tuple(x.transpose(0, 1) for x in answer)
    return answer.transpose(0, 1)


def pull(
    op: Pull, q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, *cotangents: Tensor | None, **options: object
) -> dict[str, Tensor]:
    """The gradients, tokens first."""
    arrays = _heads_first(q, k, v, *cotangents)
    grads = op(*arrays, edges_q=_edges(q, cu_q), edges_k=_edges(q, cu_k), **options)
    return {name: x.transpose(0, 1) for name, x in grads.items()}


def prepared(op: Prepare, arrays: tuple[Tensor, ...], options: Keywords) -> recorded.Repeated | None:
    """The answers to calls with the same signature whose edges, behind q, k and v, are on the device."""
    *of_heads, cu_q, cu_k = arrays
    edges = {"edges_q": cu_q, "edges_k": cu_k}
    if not all(isinstance(x, Tensor) and x.is_contiguous() for x in edges.values()):
        return None
    return op(tuple(_heads_first(*of_heads)), edges | options).with_tokens_first()


def unsupported_options(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> str | None:
    """Why the kernels do not support a call on any device: its score function, or an option of linear attention."""
    return pointwise.unsupported_options(**options) or linear_calls.unsupported_options(q, k, v, **options)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, *cotangents: Tensor | None, **options: Unpack[Options]
) -> str | None:
    """Why Triton does not support a call."""
    return pointwise.unsupported(q, k, v, *cotangents[:1]) or unsupported_options(q, k, v, **options)


def is_faster(
    kind: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Edges, cu_k: Edges, *cotangents: Tensor | None, **options: object
) -> bool:
    """Beside the generic body, which calls the op for every sequence, or masks all pairs if boundaries are arrays."""
    heads, calls, masked = q.shape[1], len(cu_q) - 1, isinstance(cu_q, Tensor)
    if masked or isinstance(cu_k, Tensor):
        pairs, calls = heads * q.shape[0] * k.shape[0], 1
    else:
        both = zip(pairwise(cu_q), pairwise(cu_k), strict=True)
        pairs = heads * sum((b - a) * (d - c) for (a, b), (c, d) in both)
    units = linear_calls.units(q, k) if kind == "linear" else None
    kept = pairs if masked or units is None else 0
    width = max(q.shape[-1], v.shape[-1])
    kind, major = linear_calls.kind(kind, options), pointwise.major(q)
    return predicted.takes(kind, q.dtype.itemsize, kept, width, units, max(calls, 1), major=major)


OPS: dict[AnyFunction, tuple[str, Attend, Pull, Prepare]] = {
    softmax_attention_packed: (
        "softmax",
        partial(rows.attend, SOFTMAX.name),
        partial(rows.pull, SOFTMAX.name),
        partial(rows.prepared, SOFTMAX.name),
    ),
    pointwise_attention_packed: ("pointwise", pointwise.attend, pointwise.pull, partial(pointwise.prepared, {})),
    linear_attention_packed: ("linear", linear.attend, linear.pull, linear.prepared),
}
KERNELS: dict[str, Kernel] = {}
for op, (kind, forward, backward, prepare) in OPS.items():
    kernel = pointwise.kernel("", partial(attend, forward), unsupported)
    KERNELS |= with_gradients(op, kernel._replace(is_faster=partial(is_faster, kind)), partial(pull, backward))
    KERNELS[op.__name__] = KERNELS[op.__name__]._replace(prepared=partial(prepared, prepare))
