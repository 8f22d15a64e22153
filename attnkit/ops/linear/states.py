"""The arguments of linear attention: which tokens contribute, and the states from which a sequence can be resumed.

A state is (S, z), S (..., f, e) = Σ φ(k) vᵀ and z (..., f) = Σ φ(k), or (S, z, c) with the level c that S and z are
divided by the exponential of. Inside, S and z are one array (..., f, e + 1): values get a last feature that is 1.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple, TypedDict, TypeVar

from attnkit._core import check
from attnkit._core.mask import Rows, Visibility, positions
from attnkit._core.quadratic import cast, compute_dtype
from attnkit._core.tokens import both, chosen, gradient_like, split_heads, valid_keys, whole, zeros
from attnkit._core.typing import A, Array, Bindings, Causal, Keywords, Namespace, OfLibrary

State = tuple[Array, ...]
INITIAL = ("initial_S", "initial_z")
"""The parts of initial_state (S, z) as arguments of kernels."""
Function = TypeVar("Function", bound=Callable[..., object])


class Tokens(TypedDict, total=False):
    """Which query may see which key."""

    mask: Array | None
    causal: Causal
    key_lengths: Array | int | None
    query_mask: Array | None
    enable_gqa: bool


class Scaled(Tokens, total=False):
    """`Tokens`, and a factor of φ(q)·φ(k) (None = 1)."""

    scale: float | None


class WholeOptions(NamedTuple):
    """The options of a whole call beside those that its features have."""

    initial_state: State | None  # S (..., f, e), z (..., f) and, of levels, c
    chunk_size: int
    common: Bindings  # Tokens or Scaled


# ---------------------------------------------------------------------------------------------- checks


def not_negative(c: check.Context, name: str, value: object) -> None:
    if check.number(c.op, name, value) < 0:
        raise ValueError(f"{c.op}: {name} must not be negative; got {value}")


def _chunk_size(c: check.Context, name: str, value: object) -> None:
    whole(c.op, name, value, 1)


def _checked_elsewhere(c: check.Context, name: str, value: object) -> None:
    """The parts of a state are validated where their widths are known."""


STATE_CHECKS = {
    "chunk_size": _chunk_size,
    "initial_state": _checked_elsewhere,
    "dstate": _checked_elsewhere,
    "state": _checked_elsewhere,
    "return_state": check.flag,
}


def check_parts(
    op: str,
    name: str,
    state: State | None,
    like: Array,
    widths: dict[str, tuple[int, ...]],
    leading: tuple[int, ...],
    exact: bool,
) -> None:
    """A tuple of float arrays (leading..., width), leading axes exact or broadcast to `leading` without enlarging it.
    With `exact` a part may be None. What a whole call takes as initial_state is the `state` of a step."""
    name = "state" if name == "initial_state" and "_step" in op else name
    if not isinstance(state, (tuple, list)) or len(state) != len(widths):
        got = f"{len(state)} parts" if isinstance(state, (tuple, list)) else type(state).__name__
        raise ValueError(f"{op}: {name} must be a tuple ({', '.join(widths)}); got {got}")
    for (part, width), x in zip(widths.items(), state, strict=True):
        if x is None and exact:
            continue
        context = check.Context(op, like, leading, 0, 0, {})
        shape = (*leading, *width)
        check.option_array(context, f"{name}'s {part}", x, check.FLOATS, "a real float dtype", shape, "its place")
        actual = tuple(x.shape)
        if actual[len(actual) - len(width) :] != width or len(actual) < len(width) or (exact and actual != shape):
            check.wrong_shape(op, f"{name}'s {part}", x, f"{shape}{'' if exact else ' or what broadcasts to it'}")


def widths_of(k: Array, v: Array) -> dict[str, tuple[int, ...]]:
    """The axes of S and z behind the leading ones, if features are k itself."""
    return {"S": (k.shape[-1], v.shape[-1]), "z": (k.shape[-1],)}


def with_parts(
    op: str, q: Array, k: Array, v: Array, *, initial_state: State | None = None, **options: object
) -> Keywords:
    """The arguments of a call, the parts of its initial state validated and under names of their own."""
    arguments = {"q": q, "k": k, "v": v, **options}
    if initial_state is None:
        return arguments
    leading = leading_of_keys(op, q, k, v, k.shape[-3] if options.get("enable_gqa") else None)
    check_parts(op, "initial_state", initial_state, q, widths_of(k, v), leading, False)
    return arguments | dict(zip(INITIAL, initial_state, strict=True))


def causal_fits(op: str, causal: Causal, queries: int, keys: int) -> None:
    if causal and queries != keys:
        raise ValueError(f"{op}: initial_state with causal needs as many queries as keys; got {queries} and {keys}")


def one_head(op: str, mask: Array | None, key_lengths: Array | int | None, heads: int) -> None:
    """Under GQA a state belongs to all query heads of a group: they must see the same keys."""
    shapes = [tuple(mask.shape[:-2])] if mask is not None and check.is_array(mask) else []
    if check.is_array(key_lengths):
        shapes.append(tuple(key_lengths.shape))
    for shape in shapes:
        if shape and shape[-1] != 1 and shape[-1] != heads:
            raise ValueError(
                f"{op}: mask and key_lengths must not have {shape[-1]} heads with a state and enable_gqa: the query "
                "heads of a group share their state"
            )


def state_context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    """Shapes of q, k, v, of do, and what a state asks of the other options."""
    context = check.attention_context(op, arrays, options)
    stateful = options.get("return_state") or options.get("dstate") is not None
    if stateful and options.get("enable_gqa"):
        one_head(op, options.get("mask"), options.get("key_lengths"), arrays["k"].shape[-3])
    if options.get("initial_state") is not None:
        causal_fits(op, options.get("causal", False), context.queries, context.keys)
    return context


def step_context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    """Shapes of one token: q_t, k_t (..., d), v_t (..., e)."""
    tokens = {name: arrays[name] for name in ("q_t", "k_t", "v_t")}
    for name, x in tokens.items():
        if x.ndim < 1:
            check.wrong_shape(op, name, x, "at least one axis, (..., features)")
    d, heads = tokens["q_t"].shape[-1], options.get("enable_gqa", False)
    if not isinstance(heads, bool):
        raise TypeError(f"{op}: enable_gqa must be True or False; got {heads!r}")
    if d == 0:
        check.wrong_shape(op, "q_t", tokens["q_t"], "at least one feature")
    if tokens["k_t"].shape[-1] != d:
        check.wrong_shape(op, "k_t", tokens["k_t"], f"(..., {d}) as q_t has {d} features")
    alike = [_Shape((*x.shape[:-1], 1, x.shape[-1])) for x in tokens.values()]
    whole_context = check.attention_context(op, dict(zip("qkv", alike, strict=True)), {"enable_gqa": heads})
    expected = (*whole_context.leading, tokens["v_t"].shape[-1])
    if arrays.get("do_t") is not None and tuple(arrays["do_t"].shape) != expected:
        check.wrong_shape(op, "do_t", arrays["do_t"], f"{expected}, the shape of the output")
    return whole_context._replace(first=tokens["q_t"], options=options)


class _Shape(NamedTuple):
    """A stand-in for a sequence of one token, with its shape."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def stepping(op: Function) -> Function:
    """Let a step take its state as the first argument: what is dispatched on are arrays, and a state is a tuple."""

    @wraps(op)
    def call(state: State | None, *arrays: Array, **options: object) -> object:
        return op(*arrays, state=state, **options)

    signature = inspect.signature(op)
    state = signature.parameters["state"]
    rest = [p for p in signature.parameters.values() if p.name != "state"]
    first = state.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, default=inspect.Parameter.empty)
    call.__signature__ = signature.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- tokens


class Parts(NamedTuple):
    """Which tokens take part. None = all. Masks are over (heads of k, queries per head) where heads are grouped."""

    live: Array | None  # (..., L): queries that see a key or a state
    seen: Array | None  # (..., S): keys that some query sees
    valid: Array | None  # (..., S): keys that go into a state
    pairs: Array | None  # (..., L, S), where a mask of pairs asks for the quadratic form
    shift: int | None  # key j is seen by query i if j <= i + shift; None: no order
    shared: int | None  # heads of k, where they are fewer than those of q


def _first(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Whether any of (..., n) is True, and the index of the first that is, both (..., 1)."""
    return xp.any(x, axis=-1, keepdims=True), xp.argmax(xp.astype(x, xp.int32), axis=-1, keepdims=True)


def _wide(xp: Namespace, x: Array, n: int) -> Array:
    return x if x.shape[-1:] == (n,) else xp.broadcast_to(x, (*x.shape[:-1], n))


def _live(xp: Namespace, q: Array, keys: int, valid: Array | None, shift: int | None) -> Array | None:
    """Queries (..., L) that some key is shown to."""
    i = positions(xp, q, 0, q.shape[-2])
    if keys == 0:
        return i < 0
    if valid is None:
        return None if shift is None or shift >= 0 else i + shift >= 0
    some, first = _first(xp, _wide(xp, valid, keys))
    return some if shift is None else some & (i + shift >= first)


def _seen(
    xp: Namespace, q: Array, keys: int, valid: Array | None, query_mask: Array | None, shift: int | None
) -> Array | None:
    """Keys (..., S) that are shown to some query."""
    queries = q.shape[-2]
    j = positions(xp, q, 0, keys)
    if queries == 0:
        return j < 0
    if query_mask is None:
        reached = None if shift is None or keys - shift <= queries else j - shift < queries
    else:
        some, first = _first(xp, xp.flip(_wide(xp, query_mask, queries), axis=-1))
        reached = some if shift is None else some & (j - shift < queries - first)
    return both(*(x for x in (valid, reached) if x is not None))


def _is_of_keys(mask: Array) -> bool:
    return mask.ndim < 2 or mask.shape[-2] == 1


def shown_keys(
    xp: Namespace, q: Array, keys: int, mask: Array | None = None, key_lengths: Array | int | None = None
) -> Array | None:
    """Keys (..., S) that key_lengths and, for some query, mask allow; None = all."""
    if mask is None or _is_of_keys(mask):
        return valid_keys(xp, q, keys, mask, key_lengths)
    return both(xp.any(mask, axis=-2), valid_keys(xp, q, keys, None, key_lengths))


def parts_of(
    xp: Namespace,
    q: Array,
    k: Array,
    stateful: bool,
    *,
    mask: Array | None = None,
    causal: Causal = False,
    key_lengths: Array | int | None = None,
    query_mask: Array | None = None,
    enable_gqa: bool = False,
    scale: float | None = None,
) -> Parts:
    """Visibility from shapes and masks alone; `stateful`: every unmasked query sees an initial state."""
    queries, keys = q.shape[-2], k.shape[-2]
    shared = k.shape[-3] if enable_gqa and q.shape[-3] != k.shape[-3] else None
    shift = None if not causal else 0 if causal == "upper_left" else keys - queries
    pairs = None
    if mask is not None and not _is_of_keys(mask):
        visibility = Visibility(mask, causal, None, key_lengths, query_mask)
        pairs = visibility.pairs(xp, q, keys, Rows(0, queries, queries))
    valid = shown_keys(xp, q, keys, mask, key_lengths)
    live: Array | None
    seen: Array | None
    if pairs is not None:
        live, seen = xp.any(pairs, axis=-1), xp.any(pairs, axis=-2)
    else:
        live = both(*(x for x in (_live(xp, q, keys, valid, shift), query_mask) if x is not None))
        seen = _seen(xp, q, keys, valid, query_mask, shift)
    live = query_mask if stateful else live
    live, seen, valid = (split_heads(xp, x, shared, axis=-2) for x in (live, seen, valid))
    return Parts(live, seen, valid, split_heads(xp, pairs, shared), shift, shared)


def of_queries(xp: Namespace, x: A, live: Array | None, shared: int | None) -> A:
    """q in its own layout with 0 in rows that take no part."""
    if live is not None and shared is not None and live.ndim > 2:
        live = xp.reshape(live, (*live.shape[:-3], live.shape[-3] * live.shape[-2], live.shape[-1]))
    return chosen(xp, live, x)


def of_keys(xp: Namespace, x: A, seen: Array | None, shared: int | None) -> A:
    """k or v in its own layout with 0 at keys that no query of any head sees."""
    return chosen(xp, group_any(xp, seen, shared), x)


def group_any(xp: Namespace, seen: Array | None, shared: int | None) -> Array | None:
    """A mask over keys as the heads of k have it: True if it is for some query head of the group."""
    if seen is None or shared is None or seen.ndim < 3:
        return seen
    return xp.any(seen, axis=-2)


def ones_beside(xp: Namespace, v: Array) -> Array:
    """[v, 1]."""
    return xp.concat([v, zeros(xp, v, (*v.shape[:-1], 1)) + 1.0], axis=-1)


def cast_like(xp: Namespace, q: Array, *arrays: Array | None) -> list[OfLibrary]:
    """Arrays in the compute dtype of q."""
    dtype = compute_dtype(xp, q)
    return [None if x is None else cast(xp, x, dtype) for x in arrays]


def leading_of_keys(op: str, q: Array, k: Array, v: Array, shared: int | None) -> tuple[int, ...]:
    """The leading axes of a call with the heads of k: the largest that a state may have."""
    end = -3 if shared else -2
    lead = check.broadcast(op, "leading axes", *(tuple(a.shape[:end]) for a in (q, k, v)))
    return (*lead, shared) if shared else lead


def gathered(xp: Namespace, terms: Sequence[Array | None], like: Array, shared: int | None) -> Array:
    """Gradients with split heads, each summed to the shape of `like`, added up; None is 0."""
    grads = [gradient_like(xp, g, like, shared) for g in terms if g is not None]
    return sum(grads[1:], start=grads[0]) if grads else xp.zeros_like(like)
