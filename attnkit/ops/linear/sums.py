"""What linear, cosine and Performer attention have in common: features, sums over keys, a denominator, a state.

    num_i = Σ_j scale·φ(q_i)·φ(k_j) v_j + scale·φ(q_i)·S,   raw_i the same with 1 for v and z for S,   o = num/den(raw)

In one array: with values [v, 1] and a state [S, z] the sums are [num, raw]. Features that are exponentials come as φ =
values·exp(level); all sums of a row are divided by exp of the largest level that it sees, which cancels from o. With
a decay what came before is multiplied by exp(g) at every token. The state that a call returns, and gradients through
it, are here too.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from attnkit._core import check, quadratic
from attnkit._core.mask import Rows, positions
from attnkit._core.special import quotient, stop_gradient
from attnkit._core.tokens import chosen, join_heads, split_heads, zeros
from attnkit._core.typing import Array, Bindings, Factor, Namespace, OfLibrary
from attnkit.ops.linear import decay
from attnkit.ops.linear.scan import anticausal, causal, fading, finite, largest, levels_of_queries, total
from attnkit.ops.linear.states import (
    Parts,
    State,
    cast_like,
    check_parts,
    gathered,
    leading_of_keys,
    of_keys,
    of_queries,
    ones_beside,
    parts_of,
)

LAST_HEAD = -1  # the axis of heads in a level (..., H)


class Features(NamedTuple):
    """φ of tokens (..., n, d) in their own layout: values (..., n, f), `pull(dvalues) -> dx`, and a constant level
    (..., n) or None. Where there is one, `exponents` (..., n, f) are those whose largest it is."""

    values: OfLibrary  # (..., n, f)
    pull: Callable[[Array], Array]
    level: Array | None = None  # (..., n)
    exponents: Array | None = None  # (..., n, f)


class Rule(NamedTuple):
    """An op with its own options bound."""

    op: str
    of_queries: Callable[[Namespace, Array], Features]
    of_keys: Callable[[Namespace, Array], Features]
    divide: Callable[[Namespace, Array], tuple[Array, Factor, Array | None]]  # raw -> den, its slope, where o is not 0
    scale: float = 1.0
    levels: bool = False
    log_decay: Factor | None = None  # a number, (), (H,) or (..., S)


class Call(NamedTuple):
    """Arrays in the compute dtype with heads split under GQA, ready for the sums."""

    rule: Rule
    parts: Parts
    size: int  # of chunks
    q: Features
    k: Features
    x: Array  # (..., L, f): scale·φ(q), 0 in rows that take no part
    y: Array  # (..., S, f): φ(k), faded to `level` or to the level of the row; 0 at keys without query
    c: Array  # (..., S, e + 1): [v, 1]
    fade: Array | None  # (..., S, 1): by which y was multiplied
    level: Array | None  # (..., S, 1), under causality
    pairs: Array | None  # (..., L, S): what the quadratic form multiplies scores by, a mask or fades
    before: Factor  # what the initial state is multiplied by: a number, (..., 1, 1), or (..., L, 1) for each query
    start: Array | None  # the level of the initial state (..., 1, 1), under causality
    state: Array | None  # (..., f, e + 1): [S, z] as given
    c0: Array | None  # (...): its level as given
    g: Array | None = None  # (..., S, 1): the logarithms of a decay, 0 at hidden tokens
    heads: bool = False  # whether there is an axis of heads


def call_of(
    xp: Namespace,
    rule: Rule,
    q: Array,
    k: Array,
    v: Array,
    initial: State | None,
    keeps: bool,
    size: int,
    common: Bindings,
) -> Call:
    """Features of the tokens that take part. `keeps`: keys without a query stay, for the state."""
    parts = parts_of(xp, q, k, initial is not None, **common)
    q, k, v = cast_like(xp, q, q, k, v)
    shared = parts.shared
    of_q = rule.of_queries(xp, of_queries(xp, q, parts.live, shared))
    of_k = rule.of_keys(xp, of_keys(xp, k, parts.valid if keeps else parts.seen, shared))
    x = chosen(xp, parts.live, split_heads(xp, of_q.values, shared))
    x = x if rule.scale == 1 else x * rule.scale
    y = chosen(xp, parts.seen, split_heads(xp, of_k.values, shared))
    c = ones_beside(xp, split_heads(xp, of_keys(xp, v, parts.seen, shared), shared))
    state = c0 = None
    if initial is not None:
        state, c0 = _checked_state(xp, rule, q, k, v, initial, of_k, parts)
    m = Call(rule, parts, size, of_q, of_k, x, y, c, None, None, parts.pairs, 1.0, None, state, c0)
    if rule.log_decay is not None:  # of one token, too, which has no order
        return _decayed(xp, m, rule.log_decay, max(q.ndim, k.ndim, v.ndim) > 2)
    return m if of_k.level is None else _levelled(xp, m, of_k.level)


def widths(rule: Rule, f: int, e: int) -> dict[str, tuple[int, ...]]:
    """The parts of a state and their last axes."""
    return {"S": (f, e), "z": (f,)} | ({"c": ()} if rule.levels else {})


def _checked_state(
    xp: Namespace, rule: Rule, q: Array, k: Array, v: Array, initial: State, of_k: Features, parts: Parts
) -> tuple[Array, Array | None]:
    own = leading_of_keys(rule.op, q, k, v, parts.shared)
    check_parts(rule.op, "initial_state", initial, q, widths(rule, of_k.values.shape[-1], v.shape[-1]), own, False)
    S, z, *rest = cast_like(xp, q, *initial)
    z = z[..., None]
    lead = [tuple(a.shape[:-2]) for a in (S, z)]
    common = check.broadcast(rule.op, "leading axes", *lead)
    S, z = (xp.broadcast_to(a, (*common, *a.shape[-2:])) for a in (S, z))
    state = split_heads(xp, xp.concat([S, z], axis=-1), parts.shared)
    if not rest:
        return state, None
    c0 = split_heads(xp, rest[0], parts.shared, axis=LAST_HEAD)
    # [S, z] stand for [S, z]·exp(c): the factor is exactly 1, and gives c its gradient
    moved = xp.where(c0 == -math.inf, 0.0, c0 - stop_gradient(finite(xp, c0)))
    return state * xp.exp(moved)[..., None, None], c0


def _levelled(xp: Namespace, m: Call, level: Array) -> Call:
    """The call with features that fade: to the largest level of all keys, of the keys so far, or of a row's keys."""
    parts = m.parts
    level = split_heads(xp, level, parts.shared, axis=-2)
    if parts.seen is not None:
        level = xp.where(parts.seen, level, -math.inf)
    c0 = None if m.c0 is None else stop_gradient(m.c0)[..., None, None]
    if parts.pairs is not None:
        levels = xp.where(parts.pairs, level[..., None, :], -math.inf)
        top = largest(xp, levels)
        top = finite(xp, top if c0 is None else xp.maximum(top, c0))
        return m._replace(pairs=xp.exp(levels - top), before=1.0 if c0 is None else xp.exp(c0 - top))
    ordered = parts.shift is not None and level.shape[-1] > 0
    top, before, start = fading(xp, level[..., None], c0, ordered)
    fade = xp.exp(level[..., None] - top)
    return m._replace(y=m.y * fade, fade=fade, level=top if ordered else None, before=before, start=start)


def _decayed(xp: Namespace, m: Call, log_decay: Factor, heads: bool) -> Call:
    """The call with its decay."""
    g = decay.gates(xp, log_decay, m.y, heads, m.parts.valid, m.parts.shared)
    m = m._replace(g=g, heads=heads)
    if m.pairs is None:
        return m
    pairs, before = decay.of_pairs(xp, g, _tokens_so_far(xp, m))
    return m._replace(pairs=pairs, before=before)


def _tokens_so_far(xp: Namespace, m: Call) -> Array:
    """Which tokens have come when a query sees, (L, S)."""
    queries = m.x.shape[-2]
    return decay.tokens_so_far(xp, m.x, Rows(0, queries, queries), m.y.shape[-2])


def _faded_state(m: Call) -> Array:
    """The initial [S, z] as it enters the sums of the linear-time forms."""
    assert m.state is not None
    return m.state * m.before


def _scores(xp: Namespace, m: Call) -> Array:
    """x·y of pairs, 0 where they are invisible, faded."""
    assert m.pairs is not None
    s = xp.where(m.parts.pairs, m.x @ xp.matrix_transpose(m.y), 0.0)
    return s if m.pairs is m.parts.pairs else s * m.pairs


def sums(xp: Namespace, m: Call) -> Array:
    """[num, raw] (..., L, e + 1)."""
    if m.pairs is not None:
        out = _scores(xp, m) @ m.c
        return out if m.state is None else out + (m.x * m.before) @ m.state
    if m.g is not None:
        return decay.causal_sums(xp, m.x, m.y, m.c, m.g, m.state, m.size)
    if m.parts.shift is None:
        totals = total(xp, m.y, m.c)
        return m.x @ (totals if m.state is None else totals + _faded_state(m))
    state = None if m.state is None else _faded_state(m)
    return causal(xp, m.x, m.y, m.c, m.parts.shift, m.size, state, m.start, m.level)


class SumsGradients(NamedTuple):
    """Of x, y, c, the initial [S, z] and the gates."""

    x: Array  # (..., L, f)
    y: Array  # (..., S, f)
    c: Array  # (..., S, e + 1)
    state: Array | None  # (..., f, e + 1)
    g: Array | None = None  # (..., S, 1)


def _pairs_backward(xp: Namespace, m: Call, d: Array) -> SumsGradients:
    """`sums_backward` of the quadratic form."""
    scores = _scores(xp, m)
    of_scores = xp.where(m.parts.pairs, d @ m.c.mT, 0.0)
    ds = of_scores if m.pairs is m.parts.pairs else of_scores * m.pairs
    dx, dy, dc, dstate = ds @ m.y, ds.mT @ m.x, scores.mT @ d, None
    of_rows = None
    if m.state is not None:
        dx, dstate = dx + (d @ m.state.mT) * m.before, (m.x * m.before).mT @ d
        of_rows = None if m.g is None else xp.sum(((m.x * m.before) @ m.state) * d, axis=-1, keepdims=True)
    dg = None if m.g is None else decay.pull_pairs(xp, _tokens_so_far(xp, m), of_scores * scores, of_rows)
    return SumsGradients(dx, dy, dc, dstate, dg)


def sums_backward(xp: Namespace, m: Call, d: Array) -> SumsGradients:
    """For the gradients of [num, raw]; the sums are recomputed, not stored."""
    if m.pairs is not None:
        return _pairs_backward(xp, m, d)
    if m.g is not None:
        grads = SumsGradients(*decay.pull_causal_sums(xp, m.x, m.y, m.c, m.g, m.state, m.size, d))
        return grads if m.state is not None else grads._replace(state=None)
    shift, dstate = m.parts.shift, None
    if shift is None:
        totals = total(xp, m.y, m.c)
        totals = totals if m.state is None else totals + _faded_state(m)
        later = total(xp, m.x, d)
        if m.parts.shared is not None and m.y.shape[-3] == 1:
            later = xp.sum(later, axis=-3, keepdims=True)
        dstate = None if m.state is None else later * m.before
        return SumsGradients(d @ totals.mT, m.c @ later.mT, m.y @ later, dstate)
    state = None if m.state is None else _faded_state(m).mT
    level = None if m.level is None else levels_of_queries(xp, m.level, m.x.shape[-2], shift)
    dx = causal(xp, d, m.c, m.y, shift, m.size, state, m.start, m.level)
    dy = anticausal(xp, m.c, d, m.x, shift, m.size, m.level, level)
    dc = anticausal(xp, m.y, m.x, d, shift, m.size, m.level, level)
    if m.state is not None:
        x = m.x if level is None or m.start is None else m.x * xp.exp(m.start - level)
        dstate = total(xp, x, d) * m.before
    return SumsGradients(dx, dy, dc, dstate)


def divided(xp: Namespace, m: Call, out: Array) -> Array:
    """o from [num, raw]."""
    den, _, gives = m.rule.divide(xp, out[..., -1:])
    if gives is None:
        return quotient(xp, out[..., :-1], den)
    return xp.where(gives, quotient(xp, out[..., :-1], xp.where(gives, den, 1.0)), 0.0)


def divided_backward(xp: Namespace, m: Call, out: Array, do: Array) -> Array:
    """Gradients of [num, raw]: do/den and -(do·o)/den, the latter times the slope of den."""
    den, slope, gives = m.rule.divide(xp, out[..., -1:])
    den = den if gives is None else xp.where(gives, den, 1.0)
    dn = do / den if gives is None else xp.where(gives, do / den, 0.0)
    return xp.concat([dn, -slope * xp.sum(dn * out[..., :-1], axis=-1, keepdims=True) / den], axis=-1)


class StateTerms(NamedTuple):
    """What a returned state is made of."""

    y: Array  # (..., S, f) scaled to the level of the state, 0 at keys that are not valid
    c: Array  # (..., S, e + 1): [v, 1]
    fade: Array | None  # (..., S, 1)
    before: Factor  # a number or (..., 1, 1)
    level: Array | None  # (..., S), -inf at keys that are not valid
    top: Array | None  # (...): the level of the state


def state_terms(xp: Namespace, m: Call, v: Array) -> StateTerms:
    parts, shared = m.parts, m.parts.shared
    y = chosen(xp, parts.valid, split_heads(xp, m.k.values, shared))
    c = ones_beside(xp, split_heads(xp, of_keys(xp, v, parts.valid, shared), shared))
    if m.g is not None:
        of_decay, whole = decay.until_end(xp, m.g)
        return StateTerms(y * of_decay, c, of_decay, whole, None, None)
    if m.k.level is None:
        return StateTerms(y, c, None, 1.0, None, None)
    level = split_heads(xp, m.k.level, shared, axis=-2)
    if parts.valid is not None:
        level = xp.where(parts.valid, level, -math.inf)
    top = largest(xp, level)[..., 0]
    c0 = None if m.c0 is None else stop_gradient(m.c0)
    top = top if c0 is None else xp.maximum(top, c0)
    safe = finite(xp, top)
    fade = xp.exp(level - safe[..., None])[..., None]
    before = 1.0 if c0 is None else xp.exp(c0 - safe)[..., None, None]
    return StateTerms(y * fade, c, fade, before, level, top)


def state_sums(xp: Namespace, m: Call, terms: StateTerms) -> Array:
    totals = total(xp, terms.y, terms.c)
    return totals if m.state is None else totals + m.state * terms.before


def _from_first(xp: Namespace, m: Call, terms: StateTerms) -> tuple[Array, Array]:
    """(..., S, f): the exponent that the level of the state is, 1 there and 0 elsewhere; or whether (...) it is the
    initial level."""
    level, exponents = terms.level, m.k.exponents
    assert level is not None
    assert exponents is not None
    assert terms.top is not None
    old = terms.top == -math.inf
    if m.c0 is not None:
        old = stop_gradient(m.c0) >= terms.top
    exponents = split_heads(xp, stop_gradient(exponents), m.parts.shared)
    if level.shape[-1] == 0:
        return exponents, old
    key = positions(xp, level, 0, level.shape[-1]) == xp.argmax(level, axis=-1, keepdims=True)
    feature = positions(xp, exponents, 0, exponents.shape[-1]) == xp.argmax(exponents, axis=-1, keepdims=True)
    first = (key & ~old[..., None])[..., None] & feature
    return xp.astype(first, level.dtype), old


def _moving_level(xp: Namespace, m: Call, terms: StateTerms) -> Array:
    """The level of the state, differentiable: it moves with the first largest exponent or with the initial level."""
    first, old = _from_first(xp, m, terms)
    assert terms.top is not None
    assert m.k.exponents is not None
    exponents = split_heads(xp, m.k.exponents, m.parts.shared)
    moved = xp.sum(xp.where(first > 0, exponents - stop_gradient(exponents), 0.0), axis=(-2, -1))
    if m.c0 is not None:
        level = xp.where(m.c0 == -math.inf, 0.0, m.c0)
        change = level - stop_gradient(level)
        moved = moved + xp.where(old, change, 0.0)
    return moved


def final_state(xp: Namespace, m: Call, terms: StateTerms, totals: Array) -> State:
    """(S, z) or (S, z, c) from `state_sums`."""
    shared, top = m.parts.shared, terms.top
    if top is not None:
        moved = _moving_level(xp, m, terms)
        top = xp.broadcast_to(top + moved, tuple(totals.shape[:-2]))
        totals = totals * xp.exp(-moved)[..., None, None]
    totals = join_heads(xp, totals, shared)
    parts = totals[..., :-1], totals[..., -1]
    return parts if top is None else (*parts, xp.reshape(top, tuple(totals.shape[:-2])))


def _state_cotangent(xp: Namespace, m: Call, terms: StateTerms, dstate: State) -> tuple[Array, Array | None]:
    """[dS, dz] with split heads and dc, 0 for None."""
    totals = state_sums(xp, m, terms)
    lead, shared = tuple(totals.shape[:-2]), m.parts.shared
    own = (*lead[:-2], lead[-2]) if shared else lead
    f, e = totals.shape[-2], totals.shape[-1] - 1
    check_parts(m.rule.op, "dstate", dstate, totals, widths(m.rule, f, e), own, True)
    dS, dz, *rest = cast_like(xp, totals, *dstate)
    dS = zeros(xp, totals, (*own, f, e)) if dS is None else dS
    dz = zeros(xp, totals, (*own, f)) if dz is None else dz
    joint = split_heads(xp, xp.concat([dS, dz[..., None]], axis=-1), shared)
    if not rest:
        return joint, None
    dc = zeros(xp, totals, own) if rest[0] is None else rest[0]
    return joint, split_heads(xp, dc, shared, axis=LAST_HEAD)


class StateGradients(NamedTuple):
    """Of φ(k) (its values), of [v, 1], of the initial [S, z], of its level and of the gates."""

    y: Array  # (..., S, f)
    c: Array  # (..., S, e + 1)
    state: Array | None  # (..., f, e + 1)
    level: Array | None = None  # (...)
    g: Array | None = None  # (..., S, 1)


def state_backward(xp: Namespace, m: Call, terms: StateTerms, dstate: State) -> StateGradients:
    """For the cotangents of the parts of a returned state."""
    d, dc = _state_cotangent(xp, m, terms, dstate)
    dy, dvalues = terms.c @ d.mT, terms.y @ d
    dy = dy if terms.fade is None else dy * terms.fade
    dy, dv = chosen(xp, m.parts.valid, dy), chosen(xp, m.parts.valid, dvalues)
    if dc is None:
        return StateGradients(dy, dv, d * terms.before, g=_gates_backward(xp, m, terms, d, dvalues))
    dtop = dc - xp.sum(state_sums(xp, m, terms) * d, axis=(-2, -1))
    first, old = _from_first(xp, m, terms)
    # φ = values·exp(level) is 1/√m where the exponent is the level: moving the value moves the level by √m
    inverse = math.sqrt(terms.y.shape[-1])
    dy = dy + first * xp.where(old, 0.0, dtop)[..., None, None] * inverse
    return StateGradients(dy, dv, d * terms.before, xp.where(old & (terms.top != -math.inf), dtop, 0.0))


def _gates_backward(xp: Namespace, m: Call, terms: StateTerms, d: Array, dvalues: Array) -> Array | None:
    """The gradient of the gates through what they leave of all tokens, of which [v, 1] have the gradients dvalues, and
    of the initial [S, z]."""
    if m.g is None:
        return None
    of_first = None if m.state is None else xp.sum(m.state * d, axis=(-2, -1), keepdims=True) * terms.before
    return decay.pull_until_end(xp, xp.sum(terms.c * dvalues, axis=-1, keepdims=True), of_first)


def initial_gradients(
    xp: Namespace, m: Call, initial: State, terms: list[Array | None], dlevels: list[Array | None]
) -> State:
    """Gradients like the parts of an initial state. Its level gets <[S, z], d[S, z]> besides: see `_checked_state`."""
    shared, wide = m.parts.shared, cast_like(xp, m.x, *initial)
    grads = [g for g in terms if g is not None]
    parts = [
        gathered(xp, [g[..., :-1] for g in grads], wide[0], shared),
        gathered(xp, [g[..., -1:] for g in grads], wide[1][..., None], shared)[..., 0],
    ]
    if len(wide) > 2:
        scaled = [xp.sum(m.state * g, axis=(-2, -1)) for g in grads] + dlevels
        columns = [None if g is None else g[..., None, None] for g in scaled]
        parts.append(gathered(xp, columns, wide[2][..., None, None], shared)[..., 0, 0])
    return tuple(quadratic.cast(xp, g, x.dtype) for g, x in zip(parts, initial, strict=True))
