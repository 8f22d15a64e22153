"""Packed sequences: the tokens of several sequences one after the other, each attending within itself only."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from attnkit_reference._check import Array, as_float, integers, number
from attnkit_reference._op import DROPOUT, Gradients, derived_gradients, keywords_of
from attnkit_reference.linear.attention import linear_attention, linear_attention_magnitudes, linear_attention_vjp
from attnkit_reference.linear.states import State
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

LEFT_OUT = (  # packing replaces padding
    *("mask", "key_lengths", "query_mask", "bias", *DROPOUT),
    *("initial_state", "return_state"),
    *("sink", "log_decay"),
)
Boundaries = Array | Sequence[int]
Vjp = Callable[..., Mapping[str, Array | State]]  # without a state all are arrays


class Segment(NamedTuple):
    """The ranges of one sequence in the tokens of q and in those of k and v."""

    queries: slice
    keys: slice


def segments(
    op: str, q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries
) -> list[Segment]:
    """Sequence b has the queries cu_seqlens_q[b] .. cu_seqlens_q[b+1] - 1, and keys likewise."""
    edges = []
    for name, boundaries, tokens in (("cu_seqlens_q", cu_seqlens_q, len(q)), ("cu_seqlens_k", cu_seqlens_k, len(k))):
        cu = integers(op, name, np.asarray(boundaries))
        if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0 or cu[-1] != tokens or np.any(np.diff(cu) < 0):
            raise ValueError(f"{op}: {name}; expected 0 <= ... <= {tokens}, from 0 to the tokens, got {boundaries!r}")
        edges.append([slice(int(a), int(b)) for a, b in itertools.pairwise(cu)])
    if len(edges[0]) != len(edges[1]):
        counts = len(edges[0]), len(edges[1])
        raise ValueError(f"{op}: cu_seqlens_k; expected {counts[0]} sequences as cu_seqlens_q has, got {counts[1]}")
    return [Segment(*pair) for pair in zip(*edges, strict=True)]


@dataclass(frozen=True)
class Packed:
    """One call: the arrays, tokens first, and the ranges of each sequence."""

    q: Array
    k: Array
    v: Array
    parts: list[Segment]
    options: Mapping[str, object]

    def sequences(self) -> Iterator[tuple[Segment, list[Array], dict[str, object]]]:
        """Every sequence as the op takes it, (heads, tokens, features), with its part of a `length` given per query."""
        length = self.options.get("length")
        per_query = isinstance(length, np.ndarray) and length.ndim > 0 and length.shape[-1] == len(self.q)
        for part in self.parts:
            cut = ((self.q, part.queries), (self.k, part.keys), (self.v, part.keys))
            own = {"length": cast(Array, length)[..., part.queries]} if per_query else {}
            yield part, [np.swapaxes(x[where], 0, 1) for x, where in cut], {**self.options, **own}

    def forward(self, attention: Callable[..., object]) -> Array | tuple[Array, ...]:
        """The outputs of all sequences, tokens first, one after the other."""
        tokens, heads = self.q.shape[:2]
        outputs = [np.zeros((tokens, heads, self.v.shape[-1])), np.zeros((tokens, heads))]
        results = outputs if self.options.get("return_lse") else outputs[:1]
        for part, inputs, own in self.sequences():
            answer = attention(*inputs, **own)
            for whole, x in zip(results, answer if isinstance(answer, tuple) else (answer,), strict=True):
                whole[part.queries] = np.swapaxes(x, 0, 1)
        return tuple(results) if len(results) > 1 else results[0]

    def backward(self, vjp: Vjp, *cotangents: Array | None) -> Gradients:
        """Gradients of q, k and v (or results of `vjp` with those shapes), tokens first; also outputs per query."""
        whole = {"q": np.zeros(self.q.shape), "k": np.zeros(self.k.shape), "v": np.zeros(self.v.shape)}
        for part, inputs, own in self.sequences():
            of_outputs = [None if x is None else np.swapaxes(x[part.queries], 0, 1) for x in cotangents]
            for name, x in vjp(*inputs, *of_outputs, **own).items():
                x = np.swapaxes(x, 0, 1)
                whole.setdefault(name, np.zeros((len(self.q), *x.shape[1:])))
                whole[name][part.keys if name in ("k", "v") else part.queries] = x
        return whole


def _packed(
    op: str, q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, **options: object
) -> Packed:
    for name in ("scale", "alpha", "gain", "shift"):
        if options.get(name) is not None and not isinstance(options[name], str):
            number(op, name, options[name])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if as_float(op, name, x).ndim != 3:
            raise ValueError(f"{op}: {name} needs three axes; expected (tokens, heads, features), got {x.shape}")
    return Packed(q, k, v, segments(op, q, k, v, cu_seqlens_q, cu_seqlens_k), options)


def _pull(vjp: Vjp, magnitudes: Vjp) -> Callable[..., Gradients]:
    def pull(call: Packed, do: Array, absolute: bool = False) -> Gradients:
        return call.backward(magnitudes if absolute else vjp, do)

    return pull


def _softmax_pull(call: Packed, do: Array | None, dlse: Array | None = None, absolute: bool = False) -> Gradients:
    return call.backward(softmax_attention_magnitudes if absolute else softmax_attention_vjp, do, dlse)


@keywords_of(softmax_rows, *LEFT_OUT)
def softmax_attention_packed(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    *,
    return_lse: bool = False,
    **params: object,
) -> Array | tuple[Array, ...]:
    """`softmax_attention` of each of several sequences, whose tokens are concatenated.

    q (T_q, H, d), k (T_k, H, d), v (T_k, H, e) -> o (T_q, H, e), with return_lse (o, lse (T_q, H)). Sequence b has the
    queries cu_seqlens_q[b] to cu_seqlens_q[b+1] - 1 and the keys cu_seqlens_k[b] to cu_seqlens_k[b+1] - 1; sequences
    may be empty. causal and window count positions within the sequence. ValueError for shapes and boundaries.
    """
    call = _packed("softmax_attention_packed", q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, **params)
    return call.forward(softmax_attention)


softmax_attention_packed_vjp, softmax_attention_packed_magnitudes = derived_gradients(
    softmax_attention_packed,
    _packed,
    'Gradients {"q", "k", "v"} of `softmax_attention_packed` for the cotangents do and dlse (None = 0).',
    "Magnitudes of `softmax_attention_packed`, those of `softmax_attention_magnitudes` for each sequence.",
    pull=_softmax_pull,
)


@keywords_of(pointwise_rows, *LEFT_OUT)
def pointwise_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, **params: object
) -> Array:
    """`pointwise_attention` of each of several sequences, laid out as in `softmax_attention_packed`.

    length is the divisor of the op: "visible", "all" (the keys of the sequence), a number, or an array that broadcasts
    to (H, T_q).
    """
    call = _packed("pointwise_attention_packed", q, k, v, cu_seqlens_q, cu_seqlens_k, **params)
    return cast(Array, call.forward(pointwise_attention))


pointwise_attention_packed_vjp, pointwise_attention_packed_magnitudes = derived_gradients(
    pointwise_attention_packed,
    _packed,
    'Gradients {"q", "k", "v"} of `pointwise_attention_packed`.',
    "Magnitudes of `pointwise_attention_packed`, those of `pointwise_attention_magnitudes` for each sequence.",
    pull=_pull(pointwise_attention_vjp, pointwise_attention_magnitudes),
)


@keywords_of(linear_attention, *LEFT_OUT)
def linear_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, **params: object
) -> Array:
    """`linear_attention` of each of several sequences, laid out as in `softmax_attention_packed`, without states."""
    call = _packed("linear_attention_packed", q, k, v, cu_seqlens_q, cu_seqlens_k, **params)
    return cast(Array, call.forward(linear_attention))


linear_attention_packed_vjp, linear_attention_packed_magnitudes = derived_gradients(
    linear_attention_packed,
    _packed,
    'Gradients {"q", "k", "v"} of `linear_attention_packed`.',
    "Magnitudes of `linear_attention_packed`, those of `linear_attention_magnitudes` for each sequence.",
    pull=_pull(linear_attention_vjp, linear_attention_magnitudes),
)
