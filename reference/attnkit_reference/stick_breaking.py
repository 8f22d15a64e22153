"""Stick-breaking attention: from the nearest key to the farthest, each takes its share of what is left of a stick."""

from typing import Unpack

import numpy as np

from attnkit_reference._check import Array, boolean, broadcast, tokens
from attnkit_reference._core import (
    Rows,
    Scores,
    WithoutCausal,
    attend,
    output_cotangent,
    row_cotangent,
    scores,
    weight_cotangent,
)
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of, without_common


def stick_breaking_scores(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    attend_current: bool = False,
    **options: Unpack[WithoutCausal],
) -> Scores:
    """Scores of the keys before each query's own position i + S - L, and at it with `attend_current`."""
    if not isinstance(attend_current, bool):
        raise TypeError(f"{op}: attend_current; expected True or False, got {attend_current!r}")
    L, S = (tokens(op, name, x).shape[-2] for name, x in (("q", q), ("k", k)))
    earlier = np.tri(L, S, S - L if attend_current else S - L - 1, dtype=bool)
    mask = options.get("mask")
    if mask is not None:
        mask = boolean(op, "mask", mask)
        earlier = earlier & broadcast(op, "mask", mask, (*mask.shape[:-2], L, S))
    options["mask"] = earlier
    sc = scores(op, q, k, v, **options)
    if sc.bias is not None and np.any(sc.bias == -np.inf):
        raise ValueError(f"{op}: bias; expected finite values on visible pairs (hide pairs by `mask`), got -inf")
    return sc


@without_common("causal")
def stick_breaking_rows(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    attend_current: bool = False,
    **options: Unpack[WithoutCausal],
) -> Rows:
    """w_j = β_j Π_{k > j} (1 - β_k) β = sigmoid(s): log w_j = -softplus(-s_j) - Σ_{k > j} softplus(s_k).

    ds_k = (1 - β_k) w_k dw_k - β_k Σ_{j < k} w_j dw_j.
    """
    sc = stick_breaking_scores(op, q, k, v, attend_current=attend_current, **options)
    log_w = -_softplus(-sc.s) - _sum_of_nearer(_taken(sc))
    w = np.where(sc.visible, np.exp(log_w), 0.0)
    share, left = _shares(sc)

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        ds, sizes = w * dw * left, w * size * left
        return ds - share * _sum_of_farther(w * dw), sizes + share * _sum_of_farther(w * size)

    return Rows(sc, w, sc.n > 0, pull)


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)); NaN of a visible pair stays NaN without a word, as elsewhere."""
    with np.errstate(invalid="ignore"):
        return np.logaddexp(0.0, x)


def _shares(sc: Scores) -> tuple[Array, Array]:
    """β = sigmoid(s) and 1 - β on visible pairs, 0 on others."""
    share, left = (np.exp(-_softplus(x)) for x in (-sc.s, sc.s))
    return np.where(sc.visible, share, 0.0), np.where(sc.visible, left, 0.0)


def _taken(sc: Scores) -> Array:
    """softplus(s) = -log(1 - β) on visible pairs, 0 on others."""
    return np.where(sc.visible, _softplus(sc.s), 0.0)


def _sum_of_farther(x: Array) -> Array:
    """Σ_{j < k} x_j for each k."""
    before = np.zeros_like(x)
    before[..., 1:] = np.cumsum(x[..., :-1], axis=-1)
    return before


def _sum_of_nearer(x: Array) -> Array:
    """Σ_{k > j} x_k for each j."""
    return _sum_of_farther(x[..., ::-1])[..., ::-1]


def remainder(rows: Rows) -> Array:
    """r = Π (1 - β) over visible keys: what is left of the stick; 1 on rows without keys."""
    r: Array = np.exp(-_taken(rows.scores).sum(axis=-1))
    return r


def _pull(rows: Rows, do: Array | None, dr: Array | None = None, absolute: bool = False) -> dict[str, Array]:
    """ds of the weights, and -dr r β of the remainder; back to the arguments."""
    do = output_cotangent(rows, do)
    dw = weight_cotangent(rows, do)
    ds, size = rows.pull(dw, np.abs(dw))
    through_r = -(row_cotangent(rows, "dr", dr) * remainder(rows))[..., None] * _shares(rows.scores)[0]
    if not absolute:
        return rows.to_inputs(ds + through_r, do)
    sizes = rows.to_inputs(size + np.abs(through_r), do, absolute=True)
    return {"o": attend(rows, absolute=True), "r": remainder(rows), **sizes}


@keywords_of(stick_breaking_rows, "attend_current")
def stick_breaking_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    attend_current: bool = False,
    return_remainder: bool = False,
    **params: Unpack[WithoutCausal],
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = β_ij Π_{k > j} (1 - β_ik), β = sigmoid(s), over the keys visible to i that lie
    before it; s = scale q k^T + bias.

    A stick of length 1 is broken from the nearest key to the farthest: key j takes the share β_ij of what is left. Keys
    that are not visible leave it as it is. What nobody takes is the remainder r_i = Π_k (1 - β_ik) = 1 - Σ_j w_ij,
    returned as (o, r) with `return_remainder`, r (..., L); the authors add r_i times the token's own value. Positions
    are aligned at the last token: key j lies before query i if j < i + S - L, and with `attend_current` also at it.

    The other arguments are those of `softmax_attention` without causal; bias is finite on visible pairs. A query that
    sees no key, such as the first one, gets o = 0 and r = 1, and passes no gradient. ValueError for shapes, values and
    unknown arguments, TypeError for dtypes. Source: Tan et al. 2024, "Scaling Stick-Breaking Attention: An Efficient
    Implementation and In-depth Study".
    """
    rows = stick_breaking_rows("stick_breaking_attention", q, k, v, attend_current=attend_current, **params)
    return (attend(rows), remainder(rows)) if return_remainder else attend(rows)


stick_breaking_attention_weights = derived_weights(stick_breaking_attention, stick_breaking_rows)
stick_breaking_attention_vjp, stick_breaking_attention_magnitudes = derived_gradients(
    stick_breaking_attention,
    stick_breaking_rows,
    """Gradients of `stick_breaking_attention`: {"q", "k", "v"}, "bias" if given and "scale" if it is an array.

    do (..., L, e) and dr (..., L) are the cotangents of o and r; None is 0. With dw = dropout ⊙ do v^T: ds_k = (1 -
    β_k) w_k dw_k - β_k Σ_{j < k} w_j dw_j - β_k r dr. Then as in `softmax_attention_vjp`.
    """,
    """What rounding errors of "o", "r" and the gradients are measured against: the summands of the last contraction in
    absolute value, for example |scale| Σ_k ((1 - β_k) w_k |dw_k| + β_k Σ_{j < k} w_j |dw_j| + β_k r |dr|) |k| for q.
    """,
    pull=_pull,
)
