"""Rows of the weights of efficient attention, tile by tile, and gradients through them."""

from collections.abc import Callable
from typing import Any

from attnkit._core import check, quadratic
from attnkit._core.special import unstack
from attnkit._core.tokens import join_heads, softmax, softmax_gradient, split_heads
from attnkit._core.typing import Array, Namespace
from attnkit.ops.linear.rows import FoundRows
from attnkit.ops.linear.states import gathered

Back = Callable[[Array], tuple[Array, Array]]


def _alike(xp: Namespace, x: Array, k: Array, pairs: Array | None) -> tuple[Array, Back]:
    """Σ_c x_ic p_jc for p that is the same for all queries, and back(dw) -> dx, dk."""
    p = softmax(xp, k.mT, pairs)

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


def rows(xp: Namespace, a: quadratic.Inputs) -> FoundRows:
    """The weights w (..., L, S) of the queries in `a`, the factor 1, and back(dw, like) -> {"q", "k"}: their gradients
    in the compute dtype, for the arguments `like` of which `a` holds a tile of queries."""
    heads, own = (x.shape[-3] if x.ndim > 2 else 1 for x in (a.q, a.k))
    shared = own if own not in (1, heads) and heads != 1 else None
    x, k, pairs = (split_heads(xp, y, shared) for y in (softmax(xp, a.q, None), a.k, a.pairs))
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


def weights(xp: Namespace, q: Array, k: Array, common: Any) -> Array:
    """w (..., L, S) in the dtype of q."""
    w = rows(xp, quadratic.prepare(xp, q, k, scale=1.0, **common))[0]
    lead = quadratic.leading_axes(q, k, None, common.get("enable_gqa", False))
    lead = check.broadcast("attention", "leading axes", tuple(w.shape[:-2]), lead)
    return quadratic.cast(xp, xp.broadcast_to(w, (*lead, q.shape[-2], k.shape[-2])), q.dtype)
