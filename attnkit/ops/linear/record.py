"""A linear op is one record; its weights, gradients, steps and statistics follow from it."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, Unpack, overload

from attnkit._core import check, quadratic
from attnkit._core.derived import DO, Weights, WithState, derived_signature, signature_like
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.family import Family, FeatureWeights, never, nothing, recorded
from attnkit._core.typing import A, AnyFunction, Array, Decorator, Factor, Keywords, Namespace, Option, Options, Results
from attnkit.ops.linear.decay import tokens_so_far
from attnkit.ops.linear.states import (
    Scaled,
    State,
    Tokens,
    WholeOptions,
    shown_keys,
    state_context,
    step_context,
    stepping,
)

P = ParamSpec("P")
OfState = tuple[Array | None, ...] | None  # the cotangent of a state; None, or a part that is None, is 0
STATEFUL = ("chunk_size", "initial_state", "return_state")
DECAY = "log_decay"
OF_TOKENS = frozenset(Scaled.__annotations__)
OF_SEQUENCES = frozenset(Tokens.__annotations__) - {"enable_gqa"}  # a step sees all that came before


class Bodies(NamedTuple):
    """What serves the calls of an op. `rule` is the answer of the record's rule: the own options of a call, bound."""

    attend: Callable[..., Results]  # (xp, rule, q, k, v, options, return_state) -> o, or (o, state)
    vjp: Callable[..., Keywords]  # (xp, rule, q, k, v, do, dstate, options)
    step: Callable[..., tuple[Array, State]]  # (xp, rule, q_t, k_t, v_t, state, enable_gqa)
    weights: Callable[..., FeatureWeights]  # (xp, rule, inputs)


class Linear(NamedTuple):
    """What defines a linear op.

    `rule(op, *arrays, **options)` binds those options that are its own, and ignores the others; `arrays` are those
    beside q, k and v.
    """

    name: str
    rule: AnyFunction
    bodies: Bodies
    checks: Mapping[str, check.OptionCheck]
    context: check.ContextOf = state_context
    step_context: check.ContextOf = step_context
    signed: Callable[..., bool] = never  # of the options: can a weight be negative

    def attend(
        self, q: Array, k: Array, v: Array, *arrays: Array, return_state: bool = False, **options: Option
    ) -> Results:
        bound = self.rule(self.name, *arrays, **options)
        return self.bodies.attend(namespace(q), bound, q, k, v, _whole(**options), return_state)

    def weights(self, q: Array, k: Array, *arrays: Array, **options: Option) -> Array:
        xp, bound = namespace(q), self.rule(f"{self.name}_weights", *arrays, **options)
        a = _prepare(xp, q, k, **{**_whole(**options).common, DECAY: options.get(DECAY), "scale": 1.0})
        u, r, _ = self.bodies.weights(xp, bound, a)
        own_axes = quadratic.leading_axes(q, k, None, options.get("enable_gqa", False))
        lead = check.broadcast(self.name, "leading axes", tuple(u.shape[:-2]), own_axes)
        return quadratic.cast(xp, xp.broadcast_to(u * r, (*lead, *u.shape[-2:])), q.dtype)

    def vjp(
        self, q: Array, k: Array, v: Array, *others: Array, dstate: OfState = None, **options: Unpack[Options]
    ) -> Results:
        *arrays, do = others
        bound = self.rule(f"{self.name}_vjp", *arrays, **options)
        return self.bodies.vjp(namespace(q), bound, q, k, v, do, dstate, _whole(**options))

    def step(
        self, q_t: Array, k_t: Array, v_t: Array, *arrays: Array, state: State | None = None, **options: object
    ) -> tuple[Array, State]:
        bound = self.rule(f"{self.name}_step", *arrays, **options)
        return self.bodies.step(namespace(q_t), bound, q_t, k_t, v_t, state, options.get("enable_gqa", False))

    def step_vjp(
        self,
        q_t: Array,
        k_t: Array,
        v_t: Array,
        *others: Array | None,
        state: State | None = None,
        dstate: OfState = None,
        **options: object,
    ) -> Keywords:
        *arrays, do_t = others
        bound = self.rule(f"{self.name}_step_vjp", *arrays, **options)
        q, k, v, do = (None if x is None else x[..., None, :] for x in (q_t, k_t, v_t, do_t))
        grads = self.bodies.vjp(namespace(q_t), bound, q, k, v, do, dstate, _whole(state, 1, **options))
        of_state = {} if state is None else {"state": grads["initial_state"]}
        if "log_decay" in grads:
            g = grads["log_decay"]
            of_state["log_decay_t"] = g[..., 0] if g.ndim else g
        return {f"{name}_t": grads[name][..., 0, :] for name in "qkv"} | of_state


def _whole(initial_state: State | None = None, chunk_size: int = 64, **options: object) -> WholeOptions:
    """The options of a whole call beside those of a rule."""
    return WholeOptions(initial_state, chunk_size, {name: x for name, x in options.items() if name in OF_TOKENS})


def _prepare(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    log_decay: Factor | None = None,
    **common: Unpack[quadratic.Preparing],
) -> quadratic.Inputs:
    """`quadratic.prepare`, with a decay and the tokens that do."""
    a = quadratic.prepare(xp, q, k, v, **common)
    if log_decay is None:
        return a
    valid = shown_keys(xp, q, a.keys, common.get("mask"), common.get("key_lengths"))
    return a._replace(log_decay=log_decay, passed=tokens_so_far(xp, a.q, a.rows, a.keys, valid))


def family_of(record: Linear) -> Family:
    """The record of the op's weights, for statistics."""

    def of_features(xp: Namespace, a: quadratic.Inputs, **own: object) -> FeatureWeights:
        return record.bodies.weights(xp, record.rule(f"row_statistics({record.name})", **own), a)

    def weigh(xp: Namespace, s: None, a: quadratic.Inputs, **own: object) -> tuple[Array, Factor]:
        return of_features(xp, a, **own)[:2]

    return Family(
        record.name,
        weigh,
        score_gradient=nothing,
        prepare=partial(_prepare, scale=1.0),
        scores=lambda xp, a: None,
        signed=record.signed,
        checks=record.checks,
        arrays=(DECAY,),
        common=frozenset((*quadratic.COMMON, DECAY)) - {"scale"},
        context=lambda op, arrays, options: record.context(op, {**options, **arrays}, options),
        stateful=STATEFUL,
        of_features=of_features,
    )


# ---------------------------------------------------------------------------------------------- public functions


class Vjp(Protocol[P]):
    """The type of the gradients of an op with a state."""

    __name__: str

    @overload
    def __call__(self, q: A, k: A, v: A, do: A | None, *args: P.args, **options: P.kwargs) -> Keywords: ...
    @overload
    def __call__(self, *arrays: Array, dstate: OfState, **options: object) -> Keywords: ...


class Step(Protocol[P]):
    """The type of a step."""

    __name__: str

    def __call__(
        self, state: State | None, q_t: A, k_t: A, v_t: A, *args: P.args, **options: P.kwargs
    ) -> tuple[A, tuple[A, ...]]: ...


class StepVjp(Protocol[P]):
    """The type of the gradients of a step."""

    __name__: str

    @overload
    def __call__(
        self, state: State | None, q_t: Array, k_t: Array, v_t: Array, do_t: Array, *args: P.args, **options: P.kwargs
    ) -> Keywords: ...
    @overload
    def __call__(self, state: State | None, *arrays: Array, dstate: OfState, **options: object) -> Keywords: ...


WHOLE_DO = DO.replace(annotation=Array | None)


def _state(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=State | None)


def op(
    record: Linear, runs: AnyFunction
) -> Callable[[Callable[Concatenate[Array, Array, Array, P], object]], WithState[P]]:
    """Make a documented signature (q, k, v, *arrays, own..., **common) the op of a record; it `runs` its `attend`."""
    return lambda documented: recorded(family_of(record))(_checked(record, runs)(documented))


def weights_of(forward: WithState[P], record: Linear, doc: str = "") -> Weights[P]:
    """`<op>_weights`, with the signature of the op but for v and states."""
    doc = doc or f"The weights w (..., L, S) of `{record.name}` without a state, in the dtype of q."
    signature = signature_like(forward, Array, ("v", *STATEFUL))
    documented = derived_signature(forward, f"{record.name}_weights", signature, doc)
    weights: Weights[P] = _checked(record, record.weights)(documented)
    return weights


def vjp_of(forward: WithState[P], record: Linear, doc: str) -> Vjp[P]:
    """`<op>_vjp`, with the signature of the op and the cotangents do, behind its arrays, and dstate."""
    more = [WHOLE_DO, _state("dstate")]
    signature = signature_like(forward, Keywords, ("return_state",), more)
    vjp: Vjp[P] = _checked(record, record.vjp)(derived_signature(forward, f"{record.name}_vjp", signature, doc))
    return vjp


def step_of(forward: WithState[P], record: Linear, doc: str) -> Step[P]:
    """`<op>_step`, which takes a state and one token; a mask, lengths and chunks are options of sequences."""
    signature = _of_token(forward, tuple[Array, State], [_state("state")])
    return _checked_step(record, record.step, derived_signature(forward, f"{record.name}_step", signature, doc))


def step_vjp_of(forward: WithState[P], record: Linear) -> StepVjp[P]:
    doc = """Gradients {"q_t", "k_t", "v_t"} and, where there was one, "state", for do_t and dstate (None = 0)."""
    more = [WHOLE_DO.replace(name="do_t"), _state("state"), _state("dstate")]
    signature = _of_token(forward, Keywords, more)
    return _checked_step(record, record.step_vjp, derived_signature(forward, f"{record.name}_step_vjp", signature, doc))


def _of_token(forward: AnyFunction, returns: object, more: list[inspect.Parameter]) -> inspect.Signature:
    signature = signature_like(forward, returns, (*STATEFUL, *OF_SEQUENCES), more)
    names = {name: f"{name}_t" for name in (*"qkv", DECAY)}
    return signature.replace(
        parameters=[p.replace(name=names.get(p.name, p.name)) for p in signature.parameters.values()]
    )


def _checked(record: Linear, body: AnyFunction) -> Decorator:
    return operation_checked_by(record.context, record.checks, body)


def _checked_step(record: Linear, body: AnyFunction, documented: AnyFunction) -> AnyFunction:
    return stepping(operation_checked_by(record.step_context, record.checks, body)(documented))
