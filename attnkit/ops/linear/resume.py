"""The state that a call of linear, cosine or Performer attention returns, and gradients through states."""

import math
from typing import Any, NamedTuple

from attnkit._core import check, quadratic
from attnkit._core.mask import positions
from attnkit._core.special import stop_gradient
from attnkit._core.tokens import chosen, join_heads, split_heads, zeros
from attnkit._core.typing import Array, Namespace
from attnkit.ops.linear.scan import finite, largest, total
from attnkit.ops.linear.states import State, cast_like, check_parts, gathered, of_keys, ones_beside
from attnkit.ops.linear.sums import LAST_HEAD, Call, widths


class Kept(NamedTuple):
    """What a returned state is made of."""

    y: Array  # (..., S, f) faded to the level of the state, 0 at keys that are not valid
    c: Array
    fade: Array | None  # (..., S, 1)
    before: Any  # a number or (..., 1, 1)
    level: Array | None  # (..., S), -inf at keys that are not valid
    top: Array | None  # (...): the level of the state


def kept_of(xp: Namespace, m: Call, v: Array) -> Kept:
    parts, shared = m.parts, m.parts.shared
    y = chosen(xp, parts.valid, split_heads(xp, m.k.values, shared))
    c = ones_beside(xp, split_heads(xp, of_keys(xp, v, parts.valid, shared), shared))
    if m.k.level is None:
        return Kept(y, c, None, 1.0, None, None)
    level = split_heads(xp, m.k.level, shared, axis=-2)
    if parts.valid is not None:
        level = xp.where(parts.valid, level, -math.inf)
    top = largest(xp, level)[..., 0]
    c0 = None if m.c0 is None else stop_gradient(m.c0)
    top = top if c0 is None else xp.maximum(top, c0)
    safe = finite(xp, top)
    fade = xp.exp(level - safe[..., None])[..., None]
    before = 1.0 if c0 is None else xp.exp(c0 - safe)[..., None, None]
    return Kept(y * fade, c, fade, before, level, top)


def state_sums(xp: Namespace, m: Call, kept: Kept) -> Array:
    held = total(xp, kept.y, kept.c)
    return held if m.state is None else held + m.state * kept.before


def _from_first(xp: Namespace, m: Call, kept: Kept) -> tuple[Array, Array]:
    """(..., S, f): the exponent that the level of the state is, 1 there and 0 elsewhere; or whether (...) it is the
    initial level."""
    level, exponents = kept.level, m.k.exponents
    assert level is not None
    assert exponents is not None
    assert kept.top is not None
    old = kept.top == -math.inf
    if m.c0 is not None:
        old = stop_gradient(m.c0) >= kept.top
    exponents = split_heads(xp, stop_gradient(exponents), m.parts.shared)
    if level.shape[-1] == 0:
        return exponents, old
    key = positions(xp, level, 0, level.shape[-1]) == xp.argmax(level, axis=-1, keepdims=True)
    feature = positions(xp, exponents, 0, exponents.shape[-1]) == xp.argmax(exponents, axis=-1, keepdims=True)
    first = (key & ~old[..., None])[..., None] & feature
    return xp.astype(first, level.dtype), old


def _moving_level(xp: Namespace, m: Call, kept: Kept) -> Array:
    """The level of the state, differentiable: it moves with the first largest exponent or with the initial level."""
    first, old = _from_first(xp, m, kept)
    assert kept.top is not None
    assert m.k.exponents is not None
    exponents = split_heads(xp, m.k.exponents, m.parts.shared)
    moved = xp.sum(xp.where(first > 0, exponents - stop_gradient(exponents), 0.0), axis=(-2, -1))
    if m.c0 is not None:
        change = xp.where(m.c0 == -math.inf, 0.0, m.c0 - stop_gradient(m.c0))
        moved = moved + xp.where(old, change, 0.0)
    return moved


def final_state(xp: Namespace, m: Call, kept: Kept, held: Array) -> State:
    """(S, z) or (S, z, c) from `state_sums`."""
    shared, top = m.parts.shared, kept.top
    if top is not None:
        moved = _moving_level(xp, m, kept)
        lead = check.broadcast(m.rule.op, "leading axes", tuple(held.shape[:-2]), tuple(top.shape))
        top = xp.broadcast_to(top + moved, lead)
        held = xp.broadcast_to(held * xp.exp(-moved)[..., None, None], (*lead, *held.shape[-2:]))
    held = join_heads(xp, held, shared)
    parts = held[..., :-1], held[..., -1]
    return parts if top is None else (*parts, xp.reshape(top, tuple(held.shape[:-2])))


def _state_cotangent(xp: Namespace, m: Call, kept: Kept, dstate: State) -> tuple[Array, Array | None]:
    """[dS, dz] with split heads and dc, 0 for None."""
    held = state_sums(xp, m, kept)
    lead = tuple(held.shape[:-2])
    if kept.top is not None:
        lead = check.broadcast(m.rule.op, "leading axes", lead, tuple(kept.top.shape))
    shared = m.parts.shared
    own = (*lead[:-2], lead[-2]) if shared else lead
    f, e = held.shape[-2], held.shape[-1] - 1
    check_parts(m.rule.op, "dstate", dstate, held, widths(m.rule, f, e), own, True)
    dS, dz, *rest = cast_like(xp, held, *dstate)
    dS = zeros(xp, held, (*own, f, e)) if dS is None else dS
    dz = zeros(xp, held, (*own, f)) if dz is None else dz
    joint = split_heads(xp, xp.concat([dS, dz[..., None]], axis=-1), shared)
    if not rest:
        return joint, None
    dc = zeros(xp, held, own) if rest[0] is None else rest[0]
    return joint, split_heads(xp, dc, shared, axis=LAST_HEAD)


def state_backward(xp: Namespace, m: Call, kept: Kept, dstate: State) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of φ(k) (its values), of [v, 1], of the initial [S, z] and of its level."""
    d, dc = _state_cotangent(xp, m, kept, dstate)
    dy, dvalues = kept.c @ d.mT, kept.y @ d
    dy = dy if kept.fade is None else dy * kept.fade
    dy = chosen(xp, m.parts.valid, dy)
    if dc is None:
        return dy, dvalues, d * kept.before, None
    dtop = dc - xp.sum(state_sums(xp, m, kept) * d, axis=(-2, -1))
    first, old = _from_first(xp, m, kept)
    # φ = values·exp(level) is 1/√m where the exponent is the level: moving the value moves the level by √m
    inverse = math.sqrt(kept.y.shape[-1])
    dy = dy + first * xp.where(old, 0.0, dtop)[..., None, None] * inverse
    return dy, dvalues, d * kept.before, xp.where(old, dtop, 0.0)


def initial_gradients(
    xp: Namespace, m: Call, initial: State, terms: list[Array | None], dlevels: list[Array | None]
) -> State:
    """Gradients like the parts of an initial state. Its level gets <[S, z], d[S, z]> besides: see `_checked_state`."""
    shared, wide = m.parts.shared, cast_like(xp, m.x, *initial)
    given = [g for g in terms if g is not None]
    parts = [
        gathered(xp, [g[..., :-1] for g in given], wide[0], shared),
        gathered(xp, [g[..., -1:] for g in given], wide[1][..., None], shared)[..., 0],
    ]
    if len(wide) > 2:
        scaled = [xp.sum(m.state * g, axis=(-2, -1)) for g in given] + dlevels
        columns = [None if g is None else g[..., None, None] for g in scaled]
        parts.append(gathered(xp, columns, wide[2][..., None, None], shared)[..., 0, 0])
    return tuple(quadratic.cast(xp, g, x.dtype) for g, x in zip(parts, initial, strict=True))
