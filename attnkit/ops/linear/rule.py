"""Whole calls, steps and gradients of linear, cosine and Performer attention, each a `Rule`; and their weights, tile by
tile, with gradients through them.
"""

import math

from attnkit._core import quadratic
from attnkit._core.check import is_learned
from attnkit._core.family import FeatureWeights
from attnkit._core.tokens import chosen, join_heads, split_heads
from attnkit._core.typing import Array, Keywords, Namespace, Results
from attnkit.ops.linear import decay
from attnkit.ops.linear.record import Bodies
from attnkit.ops.linear.scan import finite, largest
from attnkit.ops.linear.states import State, WholeOptions, cast_like, gathered
from attnkit.ops.linear.sums import (
    Call,
    Rule,
    StateGradients,
    SumsGradients,
    call_of,
    divided,
    divided_backward,
    final_state,
    initial_gradients,
    state_backward,
    state_sums,
    state_terms,
    sums,
    sums_backward,
)


def attend(
    xp: Namespace, rule: Rule, q: Array, k: Array, v: Array, options: WholeOptions, return_state: bool
) -> Results:
    """o in the dtype of q, or (o, state)."""
    m = call_of(xp, rule, q, k, v, options.initial_state, return_state, options.chunk_size, options.common)
    o = divided(xp, m, sums(xp, m))
    o = quadratic.cast(xp, join_heads(xp, o, m.parts.shared), q.dtype)
    if not return_state:
        return o
    terms = state_terms(xp, m, cast_like(xp, q, v)[0])
    return o, final_state(xp, m, terms, state_sums(xp, m, terms))


def step(
    xp: Namespace, rule: Rule, q_t: Array, k_t: Array, v_t: Array, state: State | None, enable_gqa: bool
) -> tuple[Array, State]:
    """(o_t, state): the new key is added first, and the query sees what there is then."""
    q, k, v = (a[..., None, :] for a in (q_t, k_t, v_t))
    m = call_of(xp, rule, q, k, v, state, True, 1, {"enable_gqa": enable_gqa})
    terms = state_terms(xp, m, cast_like(xp, q, v)[0])
    totals = state_sums(xp, m, terms)
    o = divided(xp, m, m.x @ totals)
    o = quadratic.cast(xp, join_heads(xp, o, m.parts.shared), q.dtype)
    return o[..., 0, :], final_state(xp, m, terms, totals)


def _outputs_backward(xp: Namespace, m: Call, do: Array) -> SumsGradients:
    """Gradients of φ(q), φ(k) (their values), of [v, 1], of the initial [S, z] and of the gates for do."""
    parts = m.parts
    do = chosen(xp, parts.live, split_heads(xp, do, parts.shared))
    grads = sums_backward(xp, m, divided_backward(xp, m, sums(xp, m), do))
    dx = grads.x if m.rule.scale == 1 else grads.x * m.rule.scale
    dy = grads.y if m.fade is None else grads.y * m.fade
    dx, dy, dc = chosen(xp, parts.live, dx), chosen(xp, parts.seen, dy), chosen(xp, parts.seen, grads.c)
    return grads._replace(x=dx, y=dy, c=dc)


def attend_vjp(
    xp: Namespace,
    rule: Rule,
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dstate: State | None,
    options: WholeOptions,
) -> Keywords:
    """{"q", "k", "v"}, "log_decay" of an array and "initial_state" if given, each like its argument."""
    initial = options.initial_state
    m = call_of(xp, rule, q, k, v, initial, dstate is not None, options.chunk_size, options.common)
    wide_do, wide_v = cast_like(xp, q, do, v)
    shared = m.parts.shared
    of_o = [] if do is None else [_outputs_backward(xp, m, wide_do)]
    of_state = [] if dstate is None else [state_backward(xp, m, state_terms(xp, m, wide_v), dstate)]
    every: list[SumsGradients | StateGradients] = [*of_o, *of_state]
    dq = m.q.pull(gathered(xp, [g.x for g in of_o], m.q.values, shared))
    dk = m.k.pull(gathered(xp, [g.y for g in every], m.k.values, shared))
    dv = gathered(xp, [g.c[..., :-1] for g in every], wide_v, shared)
    grads: Keywords = {
        "q": quadratic.cast(xp, quadratic.sum_to(xp, dq, tuple(q.shape)), q.dtype),
        "k": quadratic.cast(xp, quadratic.sum_to(xp, dk, tuple(k.shape)), k.dtype),
        "v": quadratic.cast(xp, dv, v.dtype),
    }
    if is_learned(rule.log_decay):
        own = decay.gradient(xp, [g.g for g in every], rule.log_decay, m.heads, m.parts.valid, shared)
        grads["log_decay"] = quadratic.cast(xp, own, rule.log_decay.dtype)
    if initial is not None:
        grads["initial_state"] = initial_gradients(
            xp, m, initial, [g.state for g in every], [g.level for g in of_state]
        )
    return grads


def weights(xp: Namespace, rule: Rule, a: quadratic.Inputs) -> FeatureWeights:
    """The weights of the queries in `a`, which has the decay."""
    of_q, of_k = rule.of_queries(xp, a.q), rule.of_keys(xp, a.k)
    heads, own = (x.shape[-3] if x.ndim > 2 else 1 for x in (a.q, a.k))
    shared = own if own not in (1, heads) and heads != 1 else None
    x, y = split_heads(xp, of_q.values * rule.scale, shared), split_heads(xp, of_k.values, shared)
    fade = passed = None
    has_heads = max(t.ndim for t in (a.q, a.k, a.v) if t is not None) > 2
    if of_k.level is not None:
        level = split_heads(xp, of_k.level, shared, axis=-2)[..., None, :]
        if a.pairs is not None:
            level = xp.where(split_heads(xp, a.pairs, shared), level, -math.inf)
        fade = xp.exp(level - finite(xp, largest(xp, level)))
    if a.log_decay is not None and a.passed is not None:
        passed = split_heads(xp, a.passed, shared)
        fade = decay.of_pairs(xp, decay.gates(xp, a.log_decay, y, has_heads, None, shared), passed)[0]
    s = x @ y.mT if fade is None else (x @ y.mT) * fade
    u = quadratic.masked(xp, a, join_heads(xp, s, shared))
    den, slope, gives = rule.divide(xp, xp.sum(u, axis=-1, keepdims=True))
    r = 1.0 / den if gives is None else xp.where(gives, 1.0 / xp.where(gives, den, 1.0), 0.0)

    def back(dw: Array, like: dict[str, Array]) -> dict[str, Array]:
        ds = quadratic.masked(xp, a, (dw - slope * xp.sum(u * r * dw, axis=-1, keepdims=True)) * r)
        ds = split_heads(xp, ds, shared)
        of_decay: dict[str, Array] = {}
        if passed is not None and "log_decay" in like:
            own = decay.pull_pairs(xp, passed, ds * split_heads(xp, u, shared))
            of_decay = {"log_decay": decay.gradient(xp, [own], like["log_decay"], has_heads, None, shared)}
        ds = (ds if fade is None else ds * fade) * rule.scale
        dq = of_q.pull(gathered(xp, [ds @ y], of_q.values, shared))
        dk = of_k.pull(gathered(xp, [ds.mT @ split_heads(xp, of_q.values, shared)], of_k.values, shared))
        q_shape = (*like["q"].shape[:-2], a.q.shape[-2], a.q.shape[-1])
        dq, dk = quadratic.sum_to(xp, dq, q_shape), quadratic.sum_to(xp, dk, tuple(like["k"].shape))
        return {"q": dq, "k": dk, **of_decay}

    return u, r, back


BODIES = Bodies(attend, attend_vjp, step, weights)
