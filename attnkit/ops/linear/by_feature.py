"""Sums of efficient attention: every feature c has sums over the keys and a level of its own.

S_c = Σ_j exp(k_jc - m_c) v_j and z_c = Σ_j exp(k_jc - m_c), m_c the largest k_jc so far, and o_i = Σ_c softmax(q_i)_c
S_c/z_c. Under causality m_c grows along the sequence, and older sums fade. [S, z] are one array (..., d, e + 1).
Weights are made tile by tile. A call has only the common options, so a rule is just the name of the op.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from attnkit._core import check, quadratic
from attnkit._core.family import FeatureWeights
from attnkit._core.library import namespace
from attnkit._core.mask import positions
from attnkit._core.special import stop_gradient, unstack
from attnkit._core.tokens import chosen, join_heads, softmax, softmax_gradient, split_heads, zeros
from attnkit._core.typing import Array, Factor, Keywords, Namespace, Results
from attnkit.ops.linear.record import Bodies
from attnkit.ops.linear.scan import BY_OUTPUT, anticausal, causal, fading, finite, largest, levels_of_queries, total
from attnkit.ops.linear.states import (
    Parts,
    State,
    WholeOptions,
    cast_like,
    check_parts,
    gathered,
    leading_of_keys,
    of_keys,
    of_queries,
    ones_beside,
    parts_of,
)


class _Call(NamedTuple):
    """Arrays in the compute dtype with heads split under GQA."""

    parts: Parts
    size: int  # of chunks
    x: Array  # (..., L, d): softmax of q, 0 in rows that take no part
    k: Array  # (..., S, d), finite
    v: Array  # (..., S, e), 0 at keys without query
    y: Array  # (..., S, d): exp(k - m), 0 at keys without query
    level: Array | None  # (..., S, d): m under causality
    before: Factor  # exp(m0 - m): a number or (..., 1, d)
    start: Array | None  # (..., 1, d): the level of the state under causality
    state: Array | None  # (..., d, e + 1): [S, z] as given
    m0: Array | None  # (..., 1, d): its level


def _exponents(xp: Namespace, k: Array, part: Array | None) -> Array:
    return k if part is None else xp.where(part[..., None], k, -math.inf)


def _call_of(xp: Namespace, op: str, q: Array, k: Array, v: Array, options: WholeOptions, keeps: bool) -> _Call:
    """`keeps`: keys without a query stay, for the state."""
    initial = options.initial_state
    parts = parts_of(xp, q, k, initial is not None, **options.common)
    shared = parts.shared
    state = m0 = None
    if initial is not None:
        state, m0 = _checked_state(xp, op, q, k, v, initial, shared)
    q, k, v = cast_like(xp, q, q, k, v)
    x = softmax(xp, split_heads(xp, of_queries(xp, q, parts.live, shared), shared), None)
    x = chosen(xp, parts.live, x)
    k = split_heads(xp, of_keys(xp, k, parts.valid if keeps else parts.seen, shared), shared)
    v = split_heads(xp, of_keys(xp, v, parts.seen, shared), shared)
    exponents = _exponents(xp, stop_gradient(k), parts.seen)
    ordered = parts.shift is not None and k.shape[-2] > 0
    top, before, start = fading(xp, exponents, None if m0 is None else stop_gradient(m0), ordered)
    y = chosen(xp, parts.seen, xp.exp(xp.where(exponents == -math.inf, 0.0, k - top)))
    return _Call(parts, options.chunk_size, x, k, v, y, top if ordered else None, before, start, state, m0)


def _widths(d: int, e: int) -> dict[str, tuple[int, ...]]:
    return {"S": (d, e), "z": (d,), "m": (d,)}


def _checked_state(
    xp: Namespace, op: str, q: Array, k: Array, v: Array, initial: State, shared: int | None
) -> tuple[Array, Array]:
    """[S, z] and m (..., 1, d). They stand for [S, z]·exp(m): a factor that is exactly 1 gives m its gradient."""
    own = leading_of_keys(op, q, k, v, shared)
    check_parts(op, "initial_state", initial, q, _widths(k.shape[-1], v.shape[-1]), own, False)
    S, z, m = cast_like(xp, q, *initial)
    lead = check.broadcast(op, "leading axes", *(tuple(a.shape[:-2]) for a in (S, z[..., None])))
    S, z = (xp.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (S, z[..., None]))
    state, m = (split_heads(xp, a, shared) for a in (xp.concat([S, z], axis=-1), m[..., None, :]))
    moved = xp.where(m == -math.inf, 0.0, m - stop_gradient(finite(xp, m)))
    return state * xp.matrix_transpose(xp.exp(moved)), m


# ---------------------------------------------------------------------------------------------- outputs


def _column(before: Factor) -> Factor:
    """A factor of each feature as one of the rows of [S, z]."""
    return before if isinstance(before, float) else namespace(before).matrix_transpose(before)


def _faded_state(m: _Call) -> Array:
    """The initial [S, z] as it enters the sums."""
    assert m.state is not None
    return m.state * _column(m.before)


def _means(xp: Namespace, totals: Array) -> tuple[Array, Array]:
    """S_c/z_c (..., d, e) and z (..., d, 1), 1 where nothing has been seen."""
    z = xp.where(totals[..., -1:] <= 0, 1.0, totals[..., -1:])
    return totals[..., :-1] / z, z


def _full_sums(xp: Namespace, m: _Call) -> Array:
    totals = total(xp, m.y, ones_beside(xp, m.v))
    return totals if m.state is None else totals + _faded_state(m)


def _shares(xp: Namespace, m: _Call) -> tuple[Array, Array]:
    """x_ic/z_ic and z_ic (..., L, d) under causality, z_ic the sum over what query i sees."""
    one_q, one_k = (zeros(xp, a, (*a.shape[:-2], a.shape[-2], 1)) + 1.0 for a in (m.x, m.y))
    state = None if m.state is None else _faded_state(m)[..., -1:].mT
    z = causal(xp, one_q, one_k, m.y, _shift(m), m.size, state, m.start, m.level, faded=BY_OUTPUT)
    z = xp.where(z <= 0, 1.0, z)
    return m.x / z, z


def _shift(m: _Call) -> int:
    assert m.parts.shift is not None
    return m.parts.shift


def _outputs(xp: Namespace, m: _Call) -> Array:
    if m.parts.shift is None:
        return m.x @ _means(xp, _full_sums(xp, m))[0]
    share, _ = _shares(xp, m)
    state = None if m.state is None else _faded_state(m)[..., :-1]
    return causal(xp, share, m.y, m.v, _shift(m), m.size, state, m.start, m.level)


# ---------------------------------------------------------------------------------------------- gradients


class _Gradients(NamedTuple):
    """Of softmax(q), of exp(k - m) as it stands in `_Call`, of v and of the initial [S, z]."""

    x: Array  # (..., L, d)
    y: Array  # (..., S, d)
    v: Array  # (..., S, e)
    state: Array | None  # (..., d, e + 1)


def _full_backward(xp: Namespace, m: _Call, do: Array) -> _Gradients:
    means, z = _means(xp, _full_sums(xp, m))
    dmeans = total(xp, m.x, do)
    if m.parts.shared is not None and m.y.shape[-3] == 1:
        dmeans = xp.sum(dmeans, axis=-3, keepdims=True)
    dS = dmeans / z
    dtotals = xp.concat([dS, -xp.sum(dS * means, axis=-1, keepdims=True)], axis=-1)
    state = None if m.state is None else dtotals * _column(m.before)
    return _Gradients(do @ means.mT, ones_beside(xp, m.v) @ dtotals.mT, m.y @ dS, state)


def _causal_backward(xp: Namespace, m: _Call, do: Array) -> _Gradients:
    """dx in one pass; dy and dv in a second one from the end."""
    share, z = _shares(xp, m)
    shift, queries = _shift(m), m.x.shape[-2]
    level_q = None if m.level is None else levels_of_queries(xp, m.level, queries, shift)
    state = None if m.state is None else _faded_state(m)[..., :-1].mT
    dx = causal(xp, do, m.v, m.y, shift, m.size, state, m.start, m.level, faded=BY_OUTPUT) / z
    one_q, one_k = (zeros(xp, a, (*a.shape[:-2], a.shape[-2], 1)) + 1.0 for a in (m.x, m.y))
    dy = anticausal(xp, m.v, do, share, shift, m.size, m.level, level_q, BY_OUTPUT)
    dy = dy - anticausal(xp, one_k, one_q, share * dx, shift, m.size, m.level, level_q, BY_OUTPUT)
    dv = anticausal(xp, m.y, share, do, shift, m.size, m.level, level_q)
    if m.state is None:
        return _Gradients(dx, dy, dv, None)
    initial_share = share if level_q is None or m.start is None else share * xp.exp(m.start - level_q)
    dz = -xp.sum(initial_share * dx, axis=-2, keepdims=True).mT
    return _Gradients(dx, dy, dv, xp.concat([total(xp, initial_share, do), dz], axis=-1) * _column(m.before))


# ---------------------------------------------------------------------------------------------- the state


class _StateTerms(NamedTuple):
    """What a returned state is made of."""

    k: Array  # (..., S, d), -inf at keys that are not valid
    y: Array  # (..., S, d): exp(k - m), 0 there
    values: Array  # (..., S, e + 1): [v, 1]
    before: Factor  # exp(m0 - m): a number or (..., 1, d)
    top: Array  # (..., 1, d): m


def _state_terms(xp: Namespace, m: _Call, v: Array) -> _StateTerms:
    shared, valid = m.parts.shared, m.parts.valid
    k = _exponents(xp, m.k, valid)
    values = ones_beside(xp, split_heads(xp, of_keys(xp, v, valid, shared), shared))
    fixed = None if m.m0 is None else stop_gradient(m.m0)
    top = stop_gradient(xp.matrix_transpose(largest(xp, xp.matrix_transpose(k))))
    top = top if fixed is None else xp.maximum(top, fixed)
    safe = finite(xp, top)
    y = chosen(xp, valid, xp.exp(xp.where(k == -math.inf, 0.0, k - safe)))
    return _StateTerms(k, y, values, 1.0 if fixed is None else xp.exp(fixed - safe), top)


def _state_sums(xp: Namespace, m: _Call, terms: _StateTerms) -> Array:
    totals = total(xp, terms.y, terms.values)
    return totals if m.state is None else totals + m.state * _column(terms.before)


def _from_first(xp: Namespace, m: _Call, terms: _StateTerms) -> tuple[Array, Array]:
    """(..., S, d): whether a key is the first with the largest value of a feature; whether the initial m is that."""
    old = terms.top == -math.inf
    if m.m0 is not None:
        old = stop_gradient(m.m0) >= terms.top
    if terms.k.shape[-2] == 0:
        return terms.k > 0, old
    index = xp.argmax(stop_gradient(terms.k), axis=-2, keepdims=True)
    first = (positions(xp, index, 0, terms.k.shape[-2])[:, None] == index) & ~old
    return first, old


def _final(xp: Namespace, op: str, m: _Call, terms: _StateTerms, totals: Array) -> State:
    """(S, z, m); m moves with the first largest key or with the initial m, and S and z with it."""
    first, old = _from_first(xp, m, terms)
    moved = xp.sum(xp.where(first, m.k - stop_gradient(m.k), 0.0), axis=-2, keepdims=True)
    if m.m0 is not None:
        moved = moved + xp.where(old & (m.m0 != -math.inf), m.m0 - stop_gradient(finite(xp, m.m0)), 0.0)
    totals = totals * xp.matrix_transpose(xp.exp(-moved))
    top = terms.top + moved
    lead = check.broadcast(op, "leading axes", tuple(totals.shape[:-2]), tuple(top.shape[:-2]))
    totals, top = (xp.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (totals, top))
    totals, top = (join_heads(xp, a, m.parts.shared) for a in (totals, top))
    return totals[..., :-1], totals[..., -1], top[..., 0, :]


def _state_backward(xp: Namespace, op: str, m: _Call, terms: _StateTerms, dstate: State) -> tuple[Array, ...]:
    """Gradients of k, v, the initial [S, z] and its m."""
    totals, shared = _state_sums(xp, m, terms), m.parts.shared
    lead = check.broadcast(op, "leading axes", tuple(totals.shape[:-2]), tuple(terms.top.shape[:-2]))
    own = lead[:-1] if shared else lead
    d, e = totals.shape[-2], totals.shape[-1] - 1
    check_parts(op, "dstate", dstate, totals, _widths(d, e), own, True)
    dS, dz, dm = cast_like(xp, totals, *dstate)
    dS = zeros(xp, totals, (*own, d, e)) if dS is None else dS
    dz = zeros(xp, totals, (*own, d)) if dz is None else dz
    dm = zeros(xp, totals, (*own, d)) if dm is None else dm
    joint = split_heads(xp, xp.concat([dS, dz[..., None]], axis=-1), shared)
    dtop = split_heads(xp, dm[..., None, :], shared) - xp.sum(totals * joint, axis=-1, keepdims=True).mT
    first, old = _from_first(xp, m, terms)
    dk = (terms.values @ joint.mT) * terms.y + xp.where(first, dtop, 0.0)
    dv = (terms.y @ joint)[..., :-1]
    return dk, dv, joint * _column(terms.before), xp.where(old & (terms.top != -math.inf), dtop, 0.0)


def _initial_gradients(
    xp: Namespace, m: _Call, initial: State, terms: list[Array | None], dlevel: Array | None
) -> State:
    """Like the parts of an initial state; m gets <[S, z], d[S, z]> of each feature besides: see `_checked_state`."""
    shared, (S, z, level) = m.parts.shared, cast_like(xp, m.x, *initial)
    grads = [g for g in terms if g is not None]
    scaled = [xp.sum(m.state * g, axis=-1, keepdims=True).mT for g in grads]
    parts = (
        gathered(xp, [g[..., :-1] for g in grads], S, shared),
        gathered(xp, [g[..., -1:] for g in grads], z[..., None], shared)[..., 0],
        gathered(xp, [*scaled, dlevel], level[..., None, :], shared)[..., 0, :],
    )
    return tuple(quadratic.cast(xp, g, x.dtype) for g, x in zip(parts, initial, strict=True))


# ---------------------------------------------------------------------------------------------- whole calls


def attend(xp: Namespace, op: str, q: Array, k: Array, v: Array, options: WholeOptions, return_state: bool) -> Results:
    """o in the dtype of q, or (o, state)."""
    m = _call_of(xp, op, q, k, v, options, return_state)
    o = quadratic.cast(xp, join_heads(xp, _outputs(xp, m), m.parts.shared), q.dtype)
    if not return_state:
        return o
    terms = _state_terms(xp, m, cast_like(xp, q, v)[0])
    return o, _final(xp, op, m, terms, _state_sums(xp, m, terms))


def step(
    xp: Namespace, op: str, q_t: Array, k_t: Array, v_t: Array, state: State | None, enable_gqa: bool
) -> tuple[Array, State]:
    """(o_t, state): the new key is added first, and the query sees what there is then."""
    q, k, v = (a[..., None, :] for a in (q_t, k_t, v_t))
    m = _call_of(xp, op, q, k, v, WholeOptions(state, 1, {"enable_gqa": enable_gqa}), True)
    terms = _state_terms(xp, m, cast_like(xp, q, v)[0])
    totals = _state_sums(xp, m, terms)
    o = m.x @ _means(xp, totals)[0]
    o = quadratic.cast(xp, join_heads(xp, o, m.parts.shared), q.dtype)
    return o[..., 0, :], _final(xp, op, m, terms, totals)


def attend_vjp(
    xp: Namespace, op: str, q: Array, k: Array, v: Array, do: Array | None, dstate: State | None, options: WholeOptions
) -> Keywords:
    """{"q", "k", "v"} and "initial_state" if given, each like its argument."""
    m = _call_of(xp, op, q, k, v, options, dstate is not None)
    parts, shared, initial = m.parts, m.parts.shared, options.initial_state
    wide_q, wide_k, wide_v, wide_do = cast_like(xp, q, q, k, v, do)
    dq: list[Array | None] = []
    dk: list[Array | None] = []
    dv: list[Array | None] = []
    dtotals, dlevel = [], None
    if wide_do is not None:
        wide_do = chosen(xp, parts.live, split_heads(xp, wide_do, shared))
        g = (_full_backward if parts.shift is None else _causal_backward)(xp, m, wide_do)
        dq.append(chosen(xp, parts.live, softmax_gradient(xp, m.x, g.x)))
        dk.append(m.y * g.y)
        dv.append(chosen(xp, parts.seen, g.v))
        dtotals.append(g.state)
    if dstate is not None:
        more_k, more_v, more_dtotals, dlevel = _state_backward(xp, op, m, _state_terms(xp, m, wide_v), dstate)
        dk.append(more_k)
        dv.append(chosen(xp, parts.valid, more_v))
        dtotals.append(more_dtotals)
    grads: Keywords = {
        name: quadratic.cast(xp, gathered(xp, terms, like, shared), x.dtype)
        for name, terms, like, x in (("q", dq, wide_q, q), ("k", dk, wide_k, k), ("v", dv, wide_v, v))
    }
    if initial is not None:
        grads["initial_state"] = _initial_gradients(xp, m, initial, dtotals, dlevel)
    return grads


Back = Callable[[Array], tuple[Array, Array]]


def _alike(xp: Namespace, x: Array, k: Array, pairs: Array | None) -> tuple[Array, Back]:
    """Σ_c x_ic p_jc for p that is the same for all queries, and back(dw) -> dx, dk."""
    p = softmax(xp, xp.matrix_transpose(k), pairs)

    def back(dw: Array) -> tuple[Array, Array]:
        dx = dw @ p.mT
        return dx, (p * (x.mT @ dw - xp.sum(x * dx, axis=-2, keepdims=True).mT)).mT

    return x @ p, back


def _apart(xp: Namespace, x: Array, k: Array, pairs: Array) -> tuple[Array, Back]:
    """Σ_c x_ic p_ijc for p that differs from query to query, feature by feature, so that memory is that of w."""
    columns, keys = unstack(xp, x, axis=-1), unstack(xp, k, axis=-1)

    def share(key: Array) -> Array:
        return softmax(xp, key[..., None, :], pairs)

    def back(dw: Array) -> tuple[Array, Array]:
        dx, dk = [], []
        for column, key in zip(columns, keys, strict=True):
            p = share(key)
            dx.append(xp.sum(dw * p, axis=-1))
            dk.append(xp.sum(column[..., None] * p * (dw - dx[-1][..., None]), axis=-2))
        return xp.stack(dx, axis=-1), xp.stack(dk, axis=-1)

    w = columns[0][..., None] * share(keys[0])
    for column, key in zip(columns[1:], keys[1:], strict=True):
        w = w + column[..., None] * share(key)
    return w, back


def weights(xp: Namespace, op: str, a: quadratic.Inputs) -> FeatureWeights:
    """The weights of the queries in `a`."""
    heads, own = (x.shape[-3] if x.ndim > 2 else 1 for x in (a.q, a.k))
    shared = own if own not in (1, heads) and heads != 1 else None
    x, k = split_heads(xp, softmax(xp, a.q, None), shared), split_heads(xp, a.k, shared)
    pairs = split_heads(xp, a.pairs, shared)
    if pairs is None or pairs.shape[-2] == 1:
        w, through = _alike(xp, x, k, pairs)
    else:
        w, through = _apart(xp, x, k, pairs)
    w = quadratic.masked(xp, a, join_heads(xp, w, shared))

    def back(dw: Array, like: dict[str, Array]) -> dict[str, Array]:
        dx, dk = through(split_heads(xp, quadratic.masked(xp, a, dw), shared))
        q_shape = (*like["q"].shape[:-2], a.q.shape[-2], a.q.shape[-1])
        dq = quadratic.masked_rows(xp, a, join_heads(xp, softmax_gradient(xp, x, dx), shared))
        dk = gathered(xp, [dk], quadratic.cast(xp, like["k"], a.dtype), shared)
        return {"q": quadratic.sum_to(xp, dq, q_shape), "k": dk}

    return w, 1.0, back


BODIES = Bodies(attend, attend_vjp, step, weights)
