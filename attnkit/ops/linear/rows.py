"""Rows of the weights of linear, cosine and Performer attention, tile by tile, and gradients through them."""

import math
from collections.abc import Callable
from typing import Any

from attnkit._core import check, quadratic
from attnkit._core.tokens import join_heads, split_heads
from attnkit._core.typing import Array, Namespace
from attnkit.ops.linear.scan import finite, largest
from attnkit.ops.linear.states import gathered
from attnkit.ops.linear.sums import Rule

FoundRows = tuple[Array, Any, Callable[..., dict[str, Array]]]


def rows_of_rule(xp: Namespace, rule: Rule, a: quadratic.Inputs) -> FoundRows:
    """The weights r·u of the queries in `a`, u (..., L, S) and r (..., L, 1), and back(dw, like) -> {"q", "k"}: their
    gradients in the compute dtype, for the arguments `like` of which `a` holds a tile of queries."""
    of_q, of_k = rule.of_queries(xp, a.q), rule.of_keys(xp, a.k)
    heads, own = (x.shape[-3] if x.ndim > 2 else 1 for x in (a.q, a.k))
    shared = own if own not in (1, heads) and heads != 1 else None
    x, y = split_heads(xp, of_q.values * rule.scale, shared), split_heads(xp, of_k.values, shared)
    fade = None
    if of_k.level is not None:
        level = split_heads(xp, of_k.level, shared, axis=-2)[..., None, :]
        if a.pairs is not None:
            level = xp.where(split_heads(xp, a.pairs, shared), level, -math.inf)
        fade = xp.exp(level - finite(xp, largest(xp, level)))
    s = x @ y.mT
    u = quadratic.masked(xp, a, join_heads(xp, s if fade is None else s * fade, shared))
    den, slope, gives = rule.divide(xp, xp.sum(u, axis=-1, keepdims=True))
    r = 1.0 / den if gives is None else xp.where(gives, 1.0 / xp.where(gives, den, 1.0), 0.0)

    def back(dw: Array, like: dict[str, Array]) -> dict[str, Array]:
        ds = quadratic.masked(xp, a, (dw - slope * xp.sum(u * r * dw, axis=-1, keepdims=True)) * r)
        ds = split_heads(xp, ds, shared)
        ds = (ds if fade is None else ds * fade) * rule.scale
        dq = of_q.pull(gathered(xp, [ds @ y], of_q.values, shared))
        dk = of_k.pull(gathered(xp, [ds.mT @ split_heads(xp, of_q.values, shared)], of_k.values, shared))
        q_shape = (*like["q"].shape[:-2], a.q.shape[-2], a.q.shape[-1])
        return {"q": quadratic.sum_to(xp, dq, q_shape), "k": quadratic.sum_to(xp, dk, tuple(like["k"].shape))}

    return u, r, back


def weights(xp: Namespace, rule: Rule, q: Array, k: Array, common: Any) -> Array:
    """w (..., L, S) in the dtype of q."""
    own = {name: x for name, x in common.items() if name != "scale"}
    a = quadratic.prepare(xp, q, k, scale=1.0, **own)
    u, r, _ = rows_of_rule(xp, rule, a)
    own_axes = quadratic.leading_axes(q, k, None, common.get("enable_gqa", False))
    lead = check.broadcast(rule.op, "leading axes", tuple(u.shape[:-2]), own_axes)
    return quadratic.cast(xp, xp.broadcast_to(u * r, (*lead, *u.shape[-2:])), q.dtype)
