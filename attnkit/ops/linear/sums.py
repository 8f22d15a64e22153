"""What linear, cosine and Performer attention have in common: features, sums over keys, a denominator, a state.

    num_i = Σ_j scale·φ(q_i)·φ(k_j) v_j + scale·φ(q_i)·S,   raw_i the same with 1 for v and z for S,   o = num/den(raw)

In one array: with values [v, 1] and a state [S, z] the sums are [num, raw]. Features that are exponentials come as φ =
values·exp(level); all sums of a row are divided by exp of the largest level that it sees, which cancels from o.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from attnkit._core import check
from attnkit._core.special import stop_gradient
from attnkit._core.tokens import chosen, split_heads
from attnkit._core.typing import Array, Namespace
from attnkit.ops.linear.scan import anticausal, causal, fading, finite, largest, levels_of_queries, total
from attnkit.ops.linear.states import (
    Parts,
    State,
    cast_like,
    check_parts,
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

    values: Array
    pull: Callable[[Array], Array]
    level: Array | None = None
    exponents: Array | None = None


class Rule(NamedTuple):
    """An op with its own options bound."""

    op: str
    of_queries: Callable[[Namespace, Array], Features]
    of_keys: Callable[[Namespace, Array], Features]
    divide: Callable[[Namespace, Array], tuple[Array, Any, Array | None]]  # raw -> den, its slope, where o is not 0
    scale: float = 1.0
    levels: bool = False


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
    before: Any  # what the initial state is multiplied by: a number, (..., 1, 1), or (..., L, 1) for each query
    start: Array | None  # the level of the initial state (..., 1, 1), under causality
    state: Array | None  # (..., f, e + 1): [S, z] as given
    c0: Array | None  # (...): its level as given


def prepared(
    xp: Namespace,
    rule: Rule,
    q: Array,
    k: Array,
    v: Array,
    initial: State | None,
    keeps: bool,
    size: int,
    common: Any,
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
        shown = xp.where(parts.pairs, level[..., None, :], -math.inf)
        top = largest(xp, shown)
        top = finite(xp, top if c0 is None else xp.maximum(top, c0))
        return m._replace(pairs=xp.exp(shown - top), before=1.0 if c0 is None else xp.exp(c0 - top))
    ordered = parts.shift is not None and level.shape[-1] > 0
    top, before, start = fading(xp, level[..., None], c0, ordered)
    fade = xp.exp(level[..., None] - top)
    return m._replace(y=m.y * fade, fade=fade, level=top if ordered else None, before=before, start=start)


def _faded_state(m: Call) -> Array:
    """The initial [S, z] as it enters the sums of the linear-time forms."""
    return m.state * m.before


def _scores(xp: Namespace, m: Call) -> Array:
    """x·y of pairs, 0 where they are invisible, faded."""
    assert m.pairs is not None
    s = xp.where(m.parts.pairs, m.x @ m.y.mT, 0.0)
    return s if m.pairs is m.parts.pairs else s * m.pairs


def sums(xp: Namespace, m: Call) -> Array:
    """[num, raw] (..., L, e + 1)."""
    if m.pairs is not None:
        out = _scores(xp, m) @ m.c
        return out if m.state is None else out + (m.x * m.before) @ m.state
    if m.parts.shift is None:
        held = total(xp, m.y, m.c)
        return m.x @ (held if m.state is None else held + _faded_state(m))
    state = None if m.state is None else _faded_state(m)
    return causal(xp, m.x, m.y, m.c, m.parts.shift, m.size, state, m.start, m.level)


def sums_backward(xp: Namespace, m: Call, d: Array) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of x, y, c and the initial [S, z] for those of [num, raw]; the sums are made again, not kept."""
    if m.pairs is not None:
        ds = xp.where(m.parts.pairs, d @ m.c.mT, 0.0)
        ds = ds if m.pairs is m.parts.pairs else ds * m.pairs
        dx, dy, dc = ds @ m.y, ds.mT @ m.x, _scores(xp, m).mT @ d
        if m.state is None:
            return dx, dy, dc, None
        return dx + (d @ m.state.mT) * m.before, dy, dc, (m.x * m.before).mT @ d
    shift, dstate = m.parts.shift, None
    if shift is None:
        held = total(xp, m.y, m.c)
        held = held if m.state is None else held + _faded_state(m)
        later = total(xp, m.x, d)
        if m.parts.shared is not None and m.y.shape[-3] == 1:
            later = xp.sum(later, axis=-3, keepdims=True)
        dstate = None if m.state is None else later * m.before
        return d @ held.mT, m.c @ later.mT, m.y @ later, dstate
    state = None if m.state is None else _faded_state(m).mT
    level = None if m.level is None else levels_of_queries(xp, m.level, m.x.shape[-2], shift)
    dx = causal(xp, d, m.c, m.y, shift, m.size, state, m.start, m.level)
    dy = anticausal(xp, m.c, d, m.x, shift, m.size, m.level, level)
    dc = anticausal(xp, m.y, m.x, d, shift, m.size, m.level, level)
    if m.state is not None:
        x = m.x if level is None or m.start is None else m.x * xp.exp(m.start - level)
        dstate = total(xp, x, d) * m.before
    return dx, dy, dc, dstate


def divided(xp: Namespace, m: Call, out: Array) -> Array:
    """o from [num, raw]."""
    den, _, gives = m.rule.divide(xp, out[..., -1:])
    if gives is None:
        return out[..., :-1] / den
    return xp.where(gives, out[..., :-1] / xp.where(gives, den, 1.0), 0.0)


def divided_backward(xp: Namespace, m: Call, out: Array, do: Array) -> Array:
    """Gradients of [num, raw]: do/den and -(do·o)/den, the latter times the slope of den."""
    den, slope, gives = m.rule.divide(xp, out[..., -1:])
    den = den if gives is None else xp.where(gives, den, 1.0)
    dn = do / den if gives is None else xp.where(gives, do / den, 0.0)
    return xp.concat([dn, -slope * xp.sum(dn * out[..., :-1], axis=-1, keepdims=True) / den], axis=-1)
