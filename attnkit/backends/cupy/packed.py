"""Packed sequences by the CUDA kernels of an op, all in one launch: tokens first, heads second."""

from itertools import pairwise

import array_api_compat

from attnkit._core.typing import AnyFunction, Keywords
from attnkit.backends.cupy.pointwise import Array, Device
from attnkit.kernels import predicted

Edges = tuple[int, ...] | Array


def _edges(q: Array, edges: Edges) -> Array:
    """Boundaries as kernels read them."""
    if isinstance(edges, tuple):
        return array_api_compat.array_namespace(q).asarray(edges, dtype="int64")
    return edges.astype("int64")


def _heads_first(*arrays: Array | None) -> list[Array | None]:
    return [None if x is None else x.swapaxes(0, 1) for x in arrays]


def _with_edges(q: Array, cu_q: Edges, cu_k: Edges, options: Keywords) -> Keywords:
    """The options with boundaries on the device; "all", the keys of a sequence, as a number for each query."""
    edges_q = _edges(q, cu_q)
    edges_k = edges_q if cu_k is cu_q else _edges(q, cu_k)
    if isinstance(options.get("length"), str) and options["length"] == "all":
        xp = array_api_compat.array_namespace(q)
        sequence = xp.searchsorted(edges_q[1:], xp.arange(q.shape[0]), side="right")
        options = {**options, "length": xp.maximum(edges_k[1:] - edges_k[:-1], 1)[sequence]}
    return {**options, "edges_q": edges_q, "edges_k": edges_k}


def forward(
    op: AnyFunction, device: Device, q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges,
    **options: object,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """The outputs of `op` on arrays (heads, tokens, features) with edges, tokens first."""
    answer = op(device, *_heads_first(q, k, v), **_with_edges(q, cu_seqlens_q, cu_seqlens_k, options))
    return tuple(x.swapaxes(0, 1) for x in answer) if isinstance(answer, tuple) else answer.swapaxes(0, 1)


def backward(
    op: AnyFunction, device: Device, q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges,
    *cotangents: Array | None, **options: object,
) -> dict[str, Array]:  # fmt: skip
    """The gradients, tokens first."""
    arrays = _heads_first(q, k, v, *cotangents)
    grads = op(device, *arrays, **_with_edges(q, cu_seqlens_q, cu_seqlens_k, options))
    return {name: x.swapaxes(0, 1) for name, x in grads.items()}


def unsupported_options(of: AnyFunction, q: Array, k: Array, v: Array, *edges: Edges, **options: object) -> str | None:
    """Why a call is not supported on any device, for the reason that `of` gives for the op."""
    return of(*_heads_first(q, k, v), **options)


def keeps(q: Array, k: Array, v: Array, cu_q: Edges, cu_k: Edges, *cotangents: Array | None, **options: object) -> bool:
    """Whether the generic body would make large arrays of weights: one for each sequence if boundaries are numbers."""
    pairs = q.shape[0] * k.shape[0]
    if isinstance(cu_q, tuple) and isinstance(cu_k, tuple):
        sizes = zip(pairwise(cu_q), pairwise(cu_k), strict=True)
        pairs = max(((b - a) * (d - c) for (a, b), (c, d) in sizes), default=0)
    return predicted.keeps(q.shape[1] * pairs, q.dtype.itemsize)


def keeps_mask(
    q: Array, k: Array, v: Array, cu_q: Edges, cu_k: Edges, *cotangents: Array | None, **options: object
) -> bool:
    """The same of an op that makes arrays of weights only where boundaries are arrays, and pairs are masked."""
    return not isinstance(cu_q, tuple) and keeps(q, k, v, cu_q, cu_k)
