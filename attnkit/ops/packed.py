"""Packed sequences: the tokens of several sequences one after the other, each attending within itself only (A13).

Kernels serve all sequences in one call. Without one, boundaries in a tuple are known before the call runs: the op
processes one sequence after the other. Boundaries in an array are not read, so that the call can be traced: the op sees
all tokens at once and a mask of pairs.
"""

import inspect
import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Concatenate, Literal, NamedTuple, ParamSpec, Protocol, overload

from attnkit._core import check, quadratic
from attnkit._core.derived import DO, DROPOUT, POSITIONAL, WithRows, WithState, derived_signature, signature_like
from attnkit._core.dispatch import explains, namespace, repeated_call_checked_by
from attnkit._core.mask import positions
from attnkit._core.typing import A, AnyFunction, Array, Keywords, Namespace, OfLibrary, Outputs
from attnkit.ops.linear.attention import LINEAR, linear_attention, linear_attention_vjp
from attnkit.ops.pointwise import pointwise_attention, pointwise_attention_vjp
from attnkit.ops.softmax import softmax_attention, softmax_attention_vjp

P = ParamSpec("P")
Checks = Mapping[str, check.OptionCheck]
Edges = tuple[int, ...] | Array


# ---------------------------------------------------------------------------------------------- checks


def _edges(op: str, name: str, cu: object, first: Array, tokens: int) -> int:
    """The number of sequences, after checking the boundaries; the contents of arrays are not read."""
    if check.is_array(cu):
        check.same_home(op, "q", first, name, cu)
        if check.dtype_name(cu) not in ("int32", "int64"):
            check.wrong_dtype(op, name, cu, "int32 or int64")
        if cu.ndim != 1 or cu.shape[0] == 0:
            check.wrong_shape(op, name, cu, "(number of sequences + 1,)")
        return int(cu.shape[0]) - 1
    if not (isinstance(cu, tuple) and cu and all(isinstance(x, numbers.Integral) for x in cu)):
        raise TypeError(f"{op}: {name} must be a tuple of integers or an integer array; got {cu!r}")
    if cu[0] != 0 or cu[-1] != tokens or any(a > b for a, b in itertools.pairwise(cu)):
        raise ValueError(f"{op}: {name} must rise from 0 to the {tokens} tokens; got {check.shown(cu)}")
    return len(cu) - 1


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    """Three axes, tokens first; otherwise as in every attention op."""
    q, k = arrays["q"], arrays["k"]
    for name in ("q", "k", "v"):
        if arrays[name].ndim != 3:
            check.wrong_shape(op, name, arrays[name], "three axes, (tokens, heads, features)")
    turned = {name: _Shaped(x) for name, x in arrays.items() if name in ("q", "k", "v")}
    c = check.attention_context(op, turned, options)
    counts = [
        _edges(op, name, arrays[name], q, tokens)
        for name, tokens in (("cu_seqlens_q", q.shape[0]), ("cu_seqlens_k", k.shape[0]))
    ]
    if counts[0] != counts[1]:
        raise ValueError(f"{op}: cu_seqlens_q and cu_seqlens_k must bound as many sequences; got {counts}")
    if isinstance(arrays["cu_seqlens_q"], tuple) != isinstance(arrays["cu_seqlens_k"], tuple):
        raise TypeError(f"{op}: cu_seqlens_q and cu_seqlens_k must both be tuples or both be arrays")
    rows = (c.queries, *c.leading)
    for name, shape in (("do", (*rows, arrays["v"].shape[-1])), ("dlse", rows)):
        if arrays.get(name) is not None and tuple(arrays[name].shape) != shape:
            check.wrong_shape(op, name, arrays[name], f"{shape}, the shape of the output")
    return c._replace(first=q)


class _Shaped:
    """The shape that tokens-first x has with its heads first."""

    def __init__(self, x: Array) -> None:
        self.shape, self.ndim = (x.shape[1], x.shape[0], *x.shape[2:]), x.ndim


# ---------------------------------------------------------------------------------------------- from tokens to calls


class _Call(NamedTuple):
    """One call of the op: the tokens of q, those of k and v, and the options."""

    queries: slice
    keys: slice
    options: Keywords


def _calls(q: Array, k: Array, edges: tuple[Edges, Edges], options: Keywords) -> Iterator[_Call]:
    cu_q, cu_k = edges
    if not (isinstance(cu_q, tuple) and isinstance(cu_k, tuple)):
        yield _Call(slice(None), slice(None), _masked(namespace(q), q, k, cu_q, cu_k, options))
        return
    if len(cu_q) == 1:
        yield _Call(slice(None), slice(None), options)
    both = zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True)
    for queries, keys in ((slice(*a), slice(*b)) for a, b in both):
        length = options.get("length")
        per_query = check.is_array(length) and length.ndim > 0 and length.shape[-1] == q.shape[0]
        yield _Call(queries, keys, {**options, "length": options["length"][..., queries]} if per_query else options)


class _Place(NamedTuple):
    """For each token its sequence, its position in it, and the numbers of queries and keys of the sequence."""

    sequence: Array  # (tokens,)
    position: Array  # (tokens,)


def _place(xp: Namespace, x: Array, cu: Array, tokens: int) -> _Place:
    index = positions(xp, x, 0, tokens)
    sequence = xp.sum(xp.astype(cu[1:] <= index[:, None], cu.dtype), axis=-1, dtype=cu.dtype)
    return _Place(sequence, xp.astype(index, cu.dtype) - xp.take(cu, sequence))


def _masked(xp: Namespace, q: Array, k: Array, cu_q: OfLibrary, cu_k: OfLibrary, options: Keywords) -> Keywords:
    """The options with a mask of pairs in place of causal and window, which count positions within a sequence."""
    of_q, of_k = _place(xp, q, cu_q, q.shape[0]), _place(xp, k, cu_k, k.shape[0])
    own = dict(options)
    causal, (left, right) = own.pop("causal", False), own.pop("window", None) or (None, None)
    keys = xp.take(cu_k[1:] - cu_k[:-1], of_q.sequence)
    shift = keys - xp.take(cu_q[1:] - cu_q[:-1], of_q.sequence)
    ahead = of_k.position - of_q.position[:, None]
    mask = of_k.sequence == of_q.sequence[:, None]
    if causal:
        mask = mask & (ahead <= (0 if causal == "upper_left" else shift[:, None]))
    if left is not None:
        mask = mask & (ahead - shift[:, None] >= -left)
    if right is not None:
        mask = mask & (ahead - shift[:, None] <= right)
    if isinstance(own.get("length"), str) and own["length"] == "all":
        own["length"] = xp.astype(xp.where(keys == 0, 1, keys), quadratic.compute_dtype(xp, q))
    return {**own, "mask": mask}


def _turned(xp: Namespace, x: Array) -> Array:
    """(tokens, heads, ...) and (heads, tokens, ...) exchanged."""
    return xp.permute_dims(x, (1, 0, *range(2, x.ndim)))


def _forward(
    attention: AnyFunction, q: Array, k: Array, v: Array, edges: tuple[Edges, Edges], options: Keywords
) -> Outputs:
    xp, parts = namespace(q), []
    for call in _calls(q, k, edges, options):
        inputs = (_turned(xp, x) for x in (q[call.queries, ...], k[call.keys, ...], v[call.keys, ...]))
        answer = attention(*inputs, **call.options)
        if explains(options["impl"]):
            return answer
        parts.append([_turned(xp, x) for x in (answer if isinstance(answer, tuple) else (answer,))])
    outputs = [_joined(xp, list(column)) for column in zip(*parts, strict=True)]
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _backward(
    vjp: Callable[..., dict[str, Array]],
    q: Array,
    k: Array,
    v: Array,
    edges: tuple[Edges, Edges],
    cotangents: tuple[Array | None, ...],
    options: Keywords,
) -> dict[str, Array]:
    xp, parts = namespace(q), []
    for call in _calls(q, k, edges, options):
        inputs = [_turned(xp, x) for x in (q[call.queries, ...], k[call.keys, ...], v[call.keys, ...])]
        of_outputs = [None if x is None else _turned(xp, x[call.queries, ...]) for x in cotangents]
        grads = vjp(*inputs, *of_outputs, **call.options)
        if explains(options["impl"]):
            return grads
        parts.append(grads)
    return {name: _joined(xp, [_turned(xp, part[name]) for part in parts]) for name in parts[0]}


def _joined(xp: Namespace, parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)


# ---------------------------------------------------------------------------------------------- public


class Packed(Protocol[P]):
    """The type of `<op>_packed`, with the options of the op."""

    __name__: str

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the keyword decides
        self, q: A, k: A, v: A, cu_seqlens_q: Edges, cu_seqlens_k: Edges, *, return_lse: Literal[True], **own: object
    ) -> tuple[A, A]: ...
    @overload
    def __call__(
        self, q: A, k: A, v: A, cu_seqlens_q: Edges, cu_seqlens_k: Edges, *args: P.args, **own: P.kwargs
    ) -> A: ...


class PackedVjp(Protocol[P]):
    """The type of its gradients."""

    __name__: str

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        cu_seqlens_q: Edges,
        cu_seqlens_k: Edges,
        do: Array | None,
        dlse: Array | None = None,
        *args: P.args,
        **own: P.kwargs,
    ) -> dict[str, Array]: ...


EDGES = [inspect.Parameter(name, POSITIONAL, annotation=Edges) for name in check.INTEGER_ARGUMENTS]
HAVE_NO_PLACE = (
    *("mask", "bias", "key_lengths", "query_mask", "sink", "log_decay"),
    *DROPOUT,
    *("initial_state", "return_state"),
)


@overload
def packed_form(op: WithRows[P], checks: Checks = check.PLAIN_NUMBERS) -> Callable[[AnyFunction], Packed[P]]: ...
@overload
def packed_form(op: WithState[P], checks: Checks = check.PLAIN_NUMBERS) -> Callable[[AnyFunction], Packed[P]]: ...
@overload
def packed_form(
    op: Callable[Concatenate[Array, Array, Array, P], object], checks: Checks = check.PLAIN_NUMBERS
) -> Callable[[AnyFunction], Packed[P]]: ...
def packed_form(
    op: WithRows[P] | WithState[P] | Callable[Concatenate[Array, Array, Array, P], object],
    checks: Checks = check.PLAIN_NUMBERS,
) -> Callable[[AnyFunction], Packed[P]]:
    """Make a documented `<op>_packed` run the op on sequence after sequence; its options are those of the op except
    padding, dropout, states, sinks and decays."""

    def attend(q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges, **options: object) -> Outputs:
        return _forward(op, q, k, v, (cu_seqlens_q, cu_seqlens_k), options)

    def decorate(documented: AnyFunction) -> AnyFunction:
        signature = signature_like(op, inspect.signature(documented).return_annotation, HAVE_NO_PLACE, EDGES)
        shown = derived_signature(documented, documented.__name__, signature, documented.__doc__ or "")
        return repeated_call_checked_by(_context, checks, attend)(shown)

    return decorate


def packed_vjp(forward: Packed[P], vjp: AnyFunction, checks: Checks = check.PLAIN_NUMBERS) -> PackedVjp[P]:
    """The gradients of an op on packed sequences, by those of the op."""
    cotangents = [p for p in inspect.signature(vjp).parameters.values() if p.kind is POSITIONAL][3:]
    several = len(cotangents) > 1  # a single one must not be None

    def pull(
        q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges, *cotangents: Array, **options: object
    ) -> dict[str, Array]:
        return _backward(vjp, q, k, v, (cu_seqlens_q, cu_seqlens_k), cotangents, options)

    name = forward.__name__
    doc = f'Gradients {{"q", "k", "v"}} of `{name}`{" for the cotangents do and dlse (None = 0)" if several else ""}.'
    signature = signature_like(forward, dict[str, Array], ("return_lse",), cotangents if several else [DO])
    return repeated_call_checked_by(_context, checks, pull)(derived_signature(forward, f"{name}_vjp", signature, doc))


@packed_form(softmax_attention)
def softmax_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges, **packed: object
) -> Array | tuple[Array, Array]:
    """`softmax_attention` of each of several sequences, whose tokens are concatenated.

    Args:
        q: (T_q, H, d), the queries of all sequences.
        k: (T_k, H, d); fewer heads with `enable_gqa`.
        v: (T_k, H, e).
        cu_seqlens_q: where sequences begin and end among the queries: sequence b has the queries cu_seqlens_q[b] to
            cu_seqlens_q[b+1] - 1, so that the first entry is 0 and the last T_q. A tuple of integers or an int32 or
            int64 array (B + 1,). The generic body serves a tuple one sequence after the other, and does not read an
            array: then all sequences are served at once through a mask of pairs, in memory O(H·T_q·T_k), and a NaN in
            v reaches all of them.
        cu_seqlens_k: the same among the keys, of the same kind. Sequences may be empty on either side.
        return_lse: also return lse (T_q, H).
        impl: as in `softmax_attention`; "native", "triton" and "cuda" process all sequences in one call, for both
            kinds of boundaries.
        **packed: `causal`, `window`, both counting positions within the sequence, `scale`, `enable_gqa`.

    Returns:
        o (T_q, H, e) in the dtype of q, or (o, lse). Errors as in `softmax_attention`.
    """


softmax_attention_packed_vjp = packed_vjp(softmax_attention_packed, softmax_attention_vjp)


@packed_form(pointwise_attention)
def pointwise_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges, **packed: object
) -> Array:
    """`pointwise_attention` of each of several sequences, laid out as in `softmax_attention_packed`.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, **packed: as in `softmax_attention_packed`.
        activation, alpha, gain, shift, impl: as in `pointwise_attention`.
        length: the divisor n of n^-alpha and nothing else: "visible", "all" (the keys of the sequence), a number, or an
            array that broadcasts to (H, T_q).
    """


pointwise_attention_packed_vjp = packed_vjp(pointwise_attention_packed, pointwise_attention_vjp)


@packed_form(linear_attention, LINEAR.checks)
def linear_attention_packed(
    q: Array, k: Array, v: Array, cu_seqlens_q: Edges, cu_seqlens_k: Edges, **packed: object
) -> Array:
    """`linear_attention` of each of several sequences, laid out as in `softmax_attention_packed`, without states.

    Linear in the number of tokens; but the generic body forms all pairs where boundaries are an array, and does not use
    chunk_size then.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, impl: as in `softmax_attention_packed`.
        feature_map, normalize, eps, chunk_size: as in `linear_attention`.
        **packed: `causal`, within the sequence, `scale` and `enable_gqa`.
    """


linear_attention_packed_vjp = packed_vjp(linear_attention_packed, linear_attention_vjp, LINEAR.checks)
