"""Packed sequences: the tokens of several sequences one after the other, each attending within itself only."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from attnkit_reference._check import as_float, integers
from attnkit_reference._core import Array, Rows
from attnkit_reference._op import DROPOUT, Function, keywords_of, refuse_others
from attnkit_reference.linear.attention import linear_attention, linear_attention_magnitudes, linear_attention_vjp
from attnkit_reference.pointwise import (
    pointwise_attention,
    pointwise_attention_magnitudes,
    pointwise_attention_vjp,
    pointwise_rows,
)
from attnkit_reference.softmax import (
    softmax_attention,
    softmax_attention_magnitudes,
    softmax_attention_vjp,
    softmax_rows,
)

LEFT_OUT = (  # padding is what packing does away with
    *("mask", "key_lengths", "query_mask", "bias"),
    *("initial_state", "return_state"),
)
Boundaries = Array | Sequence[int]


class Segment(NamedTuple):
    """Where one sequence lies among the tokens of q, and among those of k and v."""

    queries: slice
    keys: slice


def _three_axes(op: str, **arrays: Array) -> None:
    for name, x in arrays.items():
        if as_float(op, name, x).ndim != 3:
            raise ValueError(f"{op}: {name} needs three axes; expected (tokens, heads, features), got {x.shape}")


def segments(
    op: str, q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries
) -> list[Segment]:
    """Sequence b has the queries cu_seqlens_q[b] .. cu_seqlens_q[b+1] - 1, and keys likewise."""
    edges = []
    for name, given, tokens in (("cu_seqlens_q", cu_seqlens_q, len(q)), ("cu_seqlens_k", cu_seqlens_k, len(k))):
        cu = integers(op, name, np.asarray(given))
        if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0 or cu[-1] != tokens or np.any(np.diff(cu) < 0):
            raise ValueError(f"{op}: {name}; expected 0 <= ... <= {tokens}, from 0 to the tokens, got {given!r}")
        edges.append([slice(int(a), int(b)) for a, b in itertools.pairwise(cu)])
    if len(edges[0]) != len(edges[1]):
        counts = len(edges[0]), len(edges[1])
        raise ValueError(f"{op}: cu_seqlens_k; expected {counts[0]} sequences as cu_seqlens_q has, got {counts[1]}")
    return [Segment(*pair) for pair in zip(*edges, strict=True)]


def _each(
    op: str, q: Array, k: Array, v: Array, cu_q: Boundaries, cu_k: Boundaries, params: dict[str, Any]
) -> Iterator[tuple[Segment, list[Array], dict[str, Any]]]:
    """Every sequence as the op takes it, (heads, tokens, features), with its part of a `length` given per query."""
    tokens = len(q)
    for part in segments(op, q, k, v, cu_q, cu_k):
        inputs = [np.swapaxes(x[where], 0, 1) for x, where in ((q, part.queries), (k, part.keys), (v, part.keys))]
        length: Any = params.get("length")
        per_query = isinstance(length, np.ndarray) and length.ndim > 0 and length.shape[-1] == tokens
        yield part, inputs, {**params, "length": length[..., part.queries]} if per_query else params


def _forward(
    op: str, attention: Callable[..., Any], q: Array, k: Array, v: Array, cu_q: Any, cu_k: Any, params: dict[str, Any]
) -> Any:
    """The outputs of all sequences, tokens first, one after the other."""
    _three_axes(op, q=q, k=k, v=v)
    heads = q.shape[1]
    found = [np.zeros((len(q), heads, v.shape[-1])), np.zeros((len(q), heads))][: 1 + params.get("return_lse", False)]
    for part, inputs, own in _each(op, q, k, v, cu_q, cu_k, params):
        answer = attention(*inputs, **own)
        for whole, x in zip(found, answer if isinstance(answer, tuple) else (answer,), strict=True):
            whole[part.queries] = np.swapaxes(x, 0, 1)
    return tuple(found) if len(found) > 1 else found[0]


def _backward(
    op: str,
    vjp: Callable[..., dict[str, Array]],
    arrays: tuple[Array, Array, Array],
    edges: tuple[Boundaries, Boundaries],
    cotangents: tuple[Array | None, ...],
    params: dict[str, Any],
) -> dict[str, Array]:
    """Gradients of q, k and v (or what `vjp` gives of that shape), tokens first; outputs of one row per query too."""
    _three_axes(op, **dict(zip("qkv", arrays, strict=True)))
    whole = {name: np.zeros(x.shape) for name, x in zip("qkv", arrays, strict=True)}
    for part, inputs, own in _each(op, *arrays, *edges, params):
        pulled = [None if x is None else np.swapaxes(x[part.queries], 0, 1) for x in cotangents]
        for name, x in vjp(*inputs, *pulled, **own).items():
            x = np.swapaxes(x, 0, 1)
            whole.setdefault(name, np.zeros((len(arrays[0]), *x.shape[1:])))
            whole[name][part.keys if name in ("k", "v") else part.queries] = x
    return whole


def _keywords(rows: Callable[..., Rows]) -> Callable[[Function], Function]:
    """Give a public function the keyword arguments of `rows`, but for masks, bias and dropout."""
    return keywords_of(rows, *DROPOUT, *LEFT_OUT)


@_keywords(softmax_rows)
def softmax_attention_packed(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    *,
    return_lse: bool = False,
    **params: Any,
) -> Any:
    """`softmax_attention` of each of several sequences, whose tokens stand one after the other.

    q (T_q, H, d), k (T_k, H, d), v (T_k, H, e) -> o (T_q, H, e), with return_lse (o, lse (T_q, H)). Sequence b has the
    queries cu_seqlens_q[b] to cu_seqlens_q[b+1] - 1 and the keys cu_seqlens_k[b] to cu_seqlens_k[b+1] - 1; sequences
    may be empty. causal and window count positions within the sequence. ValueError for shapes and boundaries.
    """
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    return _forward("softmax_attention_packed", softmax_attention, *given, {**params, "return_lse": return_lse})


@_keywords(softmax_rows)
def softmax_attention_packed_vjp(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    do: Array | None,
    dlse: Array | None = None,
    **params: Any,
) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} of `softmax_attention_packed` for the cotangents do and dlse (None = 0)."""
    arrays, edges = (q, k, v), (cu_seqlens_q, cu_seqlens_k)
    return _backward("softmax_attention_packed_vjp", softmax_attention_vjp, arrays, edges, (do, dlse), params)


@_keywords(softmax_rows)
def softmax_attention_packed_magnitudes(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    do: Array | None,
    dlse: Array | None = None,
    **params: Any,
) -> dict[str, Array]:
    """Magnitudes of `softmax_attention_packed`, those of `softmax_attention_magnitudes` for each sequence."""
    arrays, edges = (q, k, v), (cu_seqlens_q, cu_seqlens_k)
    op = "softmax_attention_packed_magnitudes"
    return _backward(op, softmax_attention_magnitudes, arrays, edges, (do, dlse), params)


@_keywords(pointwise_rows)
def pointwise_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, **params: Any
) -> Array:
    """`pointwise_attention` of each of several sequences, laid out as in `softmax_attention_packed`.

    length is the divisor of the op: "visible", "all" (the keys of the sequence), a number, or an array that broadcasts
    to (H, T_q).
    """
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    return cast(Array, _forward("pointwise_attention_packed", pointwise_attention, *given, params))


@_keywords(pointwise_rows)
def pointwise_attention_packed_vjp(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, do: Array, **params: Any
) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} of `pointwise_attention_packed`."""
    arrays, edges = (q, k, v), (cu_seqlens_q, cu_seqlens_k)
    return _backward("pointwise_attention_packed_vjp", pointwise_attention_vjp, arrays, edges, (do,), params)


@_keywords(pointwise_rows)
def pointwise_attention_packed_magnitudes(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, do: Array, **params: Any
) -> dict[str, Array]:
    """Magnitudes of `pointwise_attention_packed`, those of `pointwise_attention_magnitudes` for each sequence."""
    arrays, edges = (q, k, v), (cu_seqlens_q, cu_seqlens_k)
    op = "pointwise_attention_packed_magnitudes"
    return _backward(op, pointwise_attention_magnitudes, arrays, edges, (do,), params)


def _linear_keywords(function: Function) -> Function:
    """Give a public function the keyword arguments of `linear_attention`, but for masks and states."""
    given = inspect.signature(linear_attention).parameters.values()
    return refuse_others(function, [p for p in given if p.kind is p.KEYWORD_ONLY and p.name not in LEFT_OUT])


@_linear_keywords
def linear_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, **params: Any
) -> Array:
    """`linear_attention` of each of several sequences, laid out as in `softmax_attention_packed`, without states."""
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    return cast(Array, _forward("linear_attention_packed", linear_attention, *given, params))


@_linear_keywords
def linear_attention_packed_vjp(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, do: Array, **params: Any
) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} of `linear_attention_packed`."""
    arrays, edges = (q, k, v), (cu_seqlens_q, cu_seqlens_k)
    return _backward("linear_attention_packed_vjp", linear_attention_vjp, arrays, edges, (do,), params)


@_linear_keywords
def linear_attention_packed_magnitudes(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, do: Array, **params: Any
) -> dict[str, Array]:
    """Magnitudes of `linear_attention_packed`, those of `linear_attention_magnitudes` for each sequence."""
    arrays, edges = (q, k, v), (cu_seqlens_q, cu_seqlens_k)
    return _backward("linear_attention_packed_magnitudes", linear_attention_magnitudes, arrays, edges, (do,), params)
