"""A recurrent op is one record; its gradients, states and steps follow from it.

A call is cut into chunks of tokens. What an op adds is how a chunk is computed, and one token; arguments, hidden
tokens, states, and the way back to the shapes and dtypes of arguments are here.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Concatenate, NamedTuple, TypedDict

from attnkit._core import check
from attnkit._core.derived import DO, P, Weights, WithState, derived_signature, signature_like
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.special import inverse_root
from attnkit._core.tokens import checked_with_arrays, chosen, cotangent, diagonal, key_mask, zeros
from attnkit._core.typing import AnyFunction, Array, Decorator, Factor, Keywords, Namespace, Option, Results
from attnkit.ops.linear.chunks import chunk_length, cut, joined
from attnkit.ops.linear.record import STATEFUL, Step, StepVjp, Vjp
from attnkit.ops.linear.states import STATE_CHECKS, State, check_parts, parts_of, step_context, stepping

ONE = ("causal", "chunk_size", "initial_state", "return_state", "mask", "key_lengths")
"""The options of sequences, which a step has not."""
WHOLE_DO = DO.replace(annotation=Array | None)


class Tokens(TypedDict, total=False):
    """The tokens that are not hidden, and the factor of q·S."""

    mask: Array | None
    key_lengths: Array | int | None
    scale: float | None


class Call(NamedTuple):
    """Arrays (..., chunks, size, ·) in the compute dtype, 0 at tokens that take no part; of a step (..., ·)."""

    q: Array  # (..., chunks, size, d), times the scale
    k: Array  # (..., chunks, size, d)
    v: Array  # (..., chunks, size, e)
    gates: dict[str, Array]  # (..., w), w = 1 for a number per token
    first: Array  # (..., d, e)

    def gate(self, name: str) -> Array | None:
        return self.gates.get(name)


class Recurrent(NamedTuple):
    """What defines a recurrent op.

    `gates` are its arrays beside q, k and v, then its options that are such arrays. `numbers` says which of them are a
    number per token.
    """

    name: str
    arrays: tuple[str, ...]
    optional: tuple[str, ...]
    numbers: Callable[[Mapping[str, Array]], tuple[str, ...]]
    forward: Callable[[Namespace, Call], tuple[Array, Array]]  # o in chunks and the last state
    backward: Callable[[Namespace, Call, Array, Array], Keywords]  # of do in chunks and dS, by field or gate
    token: Callable[[Namespace, Call], tuple[Array, Array]]  # o_t (..., e) and the state after it

    def gates_of(self, arrays: tuple[Array, ...], options: Keywords, end: str = "") -> dict[str, Array]:
        """The gates of a call by name; takes the optional ones out of the options."""
        own = dict(zip(self.arrays, arrays, strict=True))
        optional = {name: options.pop(name + end, None) for name in self.optional}
        return own | {name: x for name, x in optional.items() if x is not None}

    def attend(
        self, q: Array, k: Array, v: Array, *arrays: Array, return_state: bool = False, **options: Option
    ) -> Results:
        """o in the dtype of q, or (o, state)."""
        p = chunk_call(self, q, k, v, self.gates_of(arrays, options), **options)
        o, state = self.forward(p.xp, p.call)
        o = chosen(p.xp, p.live, joined(p.xp, o, q.shape[-2]))  # the cotangent of a row that sees nothing may be NaN
        o = cast(p.xp, p.xp.broadcast_to(o, (*p.leading, q.shape[-2], v.shape[-1])), q.dtype)
        return (o, (state,)) if return_state else o

    def weights(self, q: Array, k: Array, *arrays: Array, **options: Option) -> Results:
        """w (..., T, T): the output for values of which each is a token of its own."""
        xp = namespace(q)
        return self.attend(q, k, xp.astype(diagonal(xp, k[..., 0]), q.dtype), *arrays, **options)

    def vjp(self, *arrays: Array, **options: Option) -> Keywords:
        return self.gradients(f"{self.name}_vjp", *arrays, **options)

    def gradients(
        self,
        op: str,
        q: Array,
        k: Array,
        v: Array,
        *others: Array,
        dstate: State | None = None,
        **options: Option,
    ) -> Keywords:
        """Gradients in the shapes and dtypes of their arguments; `op` is the function that was called."""
        *arrays, do = others
        gates = self.gates_of(tuple(arrays), options)
        p = chunk_call(self, q, k, v, gates, **options)
        xp, call = p.xp, p.call
        if do is None:
            do = zeros(xp, call.v, (*p.leading, q.shape[-2], v.shape[-1]))
        do = cut(xp, chosen(xp, p.live, cast(xp, do, call.q.dtype)), call.q.shape[-2])
        grads = self.backward(xp, call, do, _state_cotangent(op, xp, call.first, dstate))
        like: dict[str, Array] = {"q": q, "k": k, "v": v, **gates}
        results: Keywords = {}
        for name, x in like.items():
            g = grads[name] * p.scale if name == "q" else grads[name]
            g = chosen(xp, p.live if name == "q" else p.valid, joined(xp, g, q.shape[-2]))
            g = g[..., 0] if name in p.numbers else g
            results[name] = cast(xp, sum_to(xp, g, tuple(x.shape)), x.dtype)
        initial = options.get("initial_state")
        if initial is not None:
            S = initial[0]
            results["initial_state"] = (cast(xp, sum_to(xp, grads["first"], tuple(S.shape)), S.dtype),)
        return results

    def step(
        self, q_t: Array, k_t: Array, v_t: Array, *arrays: Array, state: State | None = None, **options: Option
    ) -> tuple[Array, State]:
        gates = self.gates_of(arrays, options, "_t")
        xp, dtype = namespace(q_t), compute_dtype(namespace(q_t), q_t)
        q, k, v, *_ = (cast(xp, x, dtype) for x in (q_t, k_t, v_t))
        numbers = self.numbers(gates)
        wide = {n: cast(xp, x[..., None] if n in numbers else x, dtype) for n, x in gates.items()}
        leading = check.broadcast(self.name, "leading axes", *(tuple(x.shape[:-1]) for x in (k, v, *wide.values())))
        first = _first(xp, k, v, leading, state)
        o, S = self.token(xp, Call(q * _scale(xp, q_t, **options), k, v, wide, first))
        shape = check.broadcast(self.name, "leading axes", tuple(q.shape[:-1]), leading)
        return cast(xp, xp.broadcast_to(o, (*shape, v.shape[-1])), q_t.dtype), (S,)

    def step_vjp(
        self,
        q_t: Array,
        k_t: Array,
        v_t: Array,
        *others: Array,
        state: State | None = None,
        dstate: State | None = None,
        **options: object,
    ) -> Keywords:
        *arrays, do_t = others
        gates = self.gates_of(tuple(arrays), options, "_t")
        numbers = self.numbers(gates)
        rows = {n: x[..., None] if n in numbers else x[..., None, :] for n, x in gates.items()}
        q, k, v = (x[..., None, :] for x in (q_t, k_t, v_t))
        do = None if do_t is None else do_t[..., None, :]
        named = [rows.pop(name) for name in self.arrays]
        grads = self.gradients(
            f"{self.name}_step_vjp", q, k, v, *named, do, dstate=dstate, initial_state=state, **rows, **options
        )
        states = {} if state is None else {"state": grads.pop("initial_state")}
        return {f"{n}_t": x[..., 0] if n in numbers else x[..., 0, :] for n, x in grads.items()} | states


RECURRENT: dict[str, Recurrent] = {}
"""Every op that takes gates of tokens beside q, k and v, registered when its module is imported."""


class Chunked(NamedTuple):
    """A call, and what leads back to its arguments."""

    xp: Namespace
    call: Call
    scale: float | Array  # a number, or () of a traced size
    leading: tuple[int, ...]  # of the output
    valid: Array | None  # (..., T): tokens that are not hidden, None = all
    live: Array | None  # (..., T): rows that see a key or a state
    numbers: tuple[str, ...]


def _scale(xp: Namespace, q: Array, scale: float | None = None) -> Factor:
    return inverse_root(xp, q.shape[-1], compute_dtype(xp, q)) if scale is None else float(scale)


def chunk_call(
    record: Recurrent,
    q: Array,
    k: Array,
    v: Array,
    gates: dict[str, Array],
    *,
    mask: Array | None = None,
    causal: bool = True,
    key_lengths: Array | int | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
) -> Chunked:
    """Arrays in the compute dtype, in chunks, 0 where a token is hidden."""
    xp, size = namespace(q), chunk_length(chunk_size, q.shape[-2])
    dtype, factor, numbers = compute_dtype(xp, q), _scale(xp, q, scale), record.numbers(gates)
    parts = parts_of(xp, q, k, initial_state is not None, mask=mask, causal=causal, key_lengths=key_lengths)
    wide = {"q": q, "k": k, "v": v, **{n: x[..., None] if n in numbers else x for n, x in gates.items()}}
    leading = check.broadcast(record.name, "leading axes", *(tuple(x.shape[:-2]) for x in wide.values()))
    for name, x in wide.items():
        kept = chosen(xp, parts.live if name == "q" else parts.valid, cast(xp, x, dtype))
        wide[name] = kept * factor if name == "q" else kept
    outer = check.broadcast(record.name, "leading axes", *(tuple(x.shape[:-2]) for n, x in wide.items() if n != "q"))
    first = _first(xp, wide["k"], wide["v"], outer, initial_state)
    chunked = {name: cut(xp, x, size) for name, x in wide.items()}
    q, k, v = (chunked.pop(name) for name in "qkv")
    return Chunked(xp, Call(q, k, v, chunked, first), factor, leading, parts.valid, parts.live, numbers)


def _first(xp: Namespace, k: Array, v: Array, leading: tuple[int, ...], state: State | None) -> Array:
    """The state before the first token, with the leading axes of those after it."""
    if state is None:
        return zeros(xp, k, (*leading, k.shape[-1], v.shape[-1]))
    S = cast(xp, state[0], k.dtype)
    leading = check.broadcast("attention", "leading axes", leading, tuple(S.shape[:-2]))
    return xp.broadcast_to(S, (*leading, *S.shape[-2:]))


def _state_cotangent(op: str, xp: Namespace, first: Array, dstate: State | None) -> Array:
    """dS, 0 for None."""
    if dstate is None:
        return xp.zeros_like(first)
    check_parts(op, "dstate", dstate, first, {"S": tuple(first.shape[-2:])}, tuple(first.shape[:-2]), True)
    return xp.zeros_like(first) if dstate[0] is None else cast(xp, dstate[0], first.dtype)


# ---------------------------------------------------------------------------------------------- checks


def _only_causal(c: check.Context, name: str, value: object) -> None:
    if value is not True:
        raise ValueError(f"{c.op}: causal must be True, as a recurrence is causal; got {value!r}")


def _scale_number(c: check.Context, name: str, value: object) -> None:
    if value is not None:
        check.plain_number(c, name, value)


def checks_of(record: Recurrent) -> dict[str, check.OptionCheck]:
    """The checks of options; the shapes of gates and states are those of the arrays."""
    gates = dict.fromkeys((*record.optional, *(f"{name}_t" for name in record.optional)), checked_with_arrays)
    return {"mask": key_mask, "causal": _only_causal, "scale": _scale_number, **gates, **STATE_CHECKS}


def _gates_among(record: Recurrent, op: str, arrays: Keywords, options: Keywords, end: str) -> dict[str, Array]:
    """The gates of a call by name, the optional ones checked as the others have been."""
    q, found = arrays[f"q{end}"], {name: arrays[name + end] for name in record.arrays}
    for name in record.optional:
        x = options.get(name + end)
        if x is not None:
            check.float_array(op, name + end, x)
            check.same_home(op, f"q{end}", q, name + end, x)
            found[name] = x
    return found


def context_of(record: Recurrent) -> check.ContextOf:
    """The shapes of whole sequences."""

    def context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
        whole = check.attention_context(op, {name: arrays.get(name) for name in ("q", "k", "v")}, options)
        if whole.queries != whole.keys:
            check.wrong_shape(op, "k", arrays["k"], f"(..., {whole.queries}, d), the tokens of q")
        tail = (whole.keys, arrays["k"].shape[-1])
        leading = _with_gates(record, op, arrays, options, whole.leading, tail)
        if "v" not in arrays:  # weights
            return whole._replace(leading=leading)
        cotangent(op, "do", arrays.get("do"), (*leading, whole.queries, arrays["v"].shape[-1]))
        return _with_state(op, "initial_state", whole._replace(leading=leading), arrays["k"], arrays["v"], options)

    return context


def context_of_one(record: Recurrent) -> check.ContextOf:
    """The shapes of one token."""

    def context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
        tokens = {name: arrays[name] for name in ("q_t", "k_t", "v_t")}
        one = step_context(op, tokens, options)
        leading = _with_gates(record, op, arrays, options, one.leading, (arrays["k_t"].shape[-1],), "_t")
        cotangent(op, "do_t", arrays.get("do_t"), (*leading, arrays["v_t"].shape[-1]))
        return _with_state(op, "state", one._replace(leading=leading), arrays["k_t"], arrays["v_t"], options)

    return context


def _with_gates(
    record: Recurrent,
    op: str,
    arrays: Keywords,
    options: Keywords,
    leading: tuple[int, ...],
    tail: tuple[int, ...],
    end: str = "",
) -> tuple[int, ...]:
    """The leading axes of a call with those of its gates, whose last axes are `tail`, or are checked to be."""
    gates = _gates_among(record, op, arrays, options, end)
    numbers = record.numbers(gates)
    shapes = [leading]
    for name, x in gates.items():
        own = tail[:-1] if name in numbers else tail
        at = x.ndim - len(own)
        if at < 0 or tuple(x.shape[at:]) != own:
            axes = ", ".join(map(str, own))
            check.wrong_shape(
                op, name + end, x, f"(..., {axes}), {'a number' if name in numbers else 'd numbers'} per token of k"
            )
        shapes.append(tuple(x.shape[:at]))
    return check.broadcast(op, f"the leading axes of q, k, v and {', '.join(gates)}", *shapes)


def _with_state(op: str, name: str, c: check.Context, k: Array, v: Array, options: Keywords) -> check.Context:
    """The context, the state in its options checked."""
    state = options.get(name)
    if state is not None:
        check_parts(op, name, state, c.first, {"S": (k.shape[-1], v.shape[-1])}, c.leading, False)
    return c


# ---------------------------------------------------------------------------------------------- public functions


def _state(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=State | None)


def op(record: Recurrent) -> Callable[[Callable[Concatenate[Array, Array, Array, P], object]], WithState[P]]:
    """Make a documented signature (q, k, v, *arrays, *, own..., **common) the op of a record."""
    RECURRENT[record.name] = record
    return _operation(record, record.attend)


def weights_of(forward: WithState[P], record: Recurrent, formula: str) -> Weights[P]:
    """`<op>_weights`, with the signature of the op but for v and states."""
    signature = signature_like(forward, Array, ("v", *STATEFUL))
    doc = f"""The weights of `{record.name}` without a state, in the dtype of q: o = w v.

    {formula}

    A recurrence forms none: these cost O(T²·d).
    """
    documented = derived_signature(forward, f"{record.name}_weights", signature, doc)
    weights: Weights[P] = _operation(record, record.weights)(documented)
    return weights


def vjp_of(forward: WithState[P], record: Recurrent, doc: str) -> Vjp[P]:
    """`<op>_vjp`, with the signature of the op and the cotangents do, behind its arrays, and dstate."""
    signature = signature_like(forward, Keywords, ("return_state",), [WHOLE_DO, _state("dstate")])
    documented = derived_signature(forward, f"{record.name}_vjp", signature, doc)
    vjp: Vjp[P] = _operation(record, record.vjp)(documented)
    return vjp


def step_of(forward: WithState[P], record: Recurrent, doc: str) -> Step[P]:
    """`<op>_step`, which takes a state and one token."""
    signature = _of_token(record, forward, tuple[Array, State], [_state("state")])
    return _checked_step(record, record.step, derived_signature(forward, f"{record.name}_step", signature, doc))


def step_vjp_of(forward: WithState[P], record: Recurrent, doc: str) -> StepVjp[P]:
    more = [WHOLE_DO.replace(name="do_t"), _state("state"), _state("dstate")]
    signature = _of_token(record, forward, Keywords, more)
    return _checked_step(record, record.step_vjp, derived_signature(forward, f"{record.name}_step_vjp", signature, doc))


def _operation(record: Recurrent, body: AnyFunction) -> Decorator:
    return operation_checked_by(context_of(record), checks_of(record), body)


def _of_token(
    record: Recurrent, forward: AnyFunction, returns: object, more: list[inspect.Parameter]
) -> inspect.Signature:
    signature = signature_like(forward, returns, ONE, more)
    names = ("q", "k", "v", *record.arrays, *record.optional)
    parameters = signature.parameters.values()
    return signature.replace(parameters=[p.replace(name=f"{p.name}_t") if p.name in names else p for p in parameters])


def _checked_step(record: Recurrent, body: AnyFunction, documented: AnyFunction) -> AnyFunction:
    return stepping(operation_checked_by(context_of_one(record), checks_of(record), body)(documented))
