"""Softmax attention, the baseline of every comparison."""

from typing import Any

import numpy as np

from attnkit_reference._core import (
    Array,
    Rows,
    Scores,
    attend,
    contract,
    output_cotangent,
    row_cotangent,
    scores,
    weight_cotangent,
)
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of


def softmax_rows(op: str, q: Array, k: Array, v: Array | None = None, **options: Any) -> Rows:
    """w = exp(s - m)/Σ exp(s - m) over visible keys, m the maximum of the visible scores; ds = w (dw - Σ w dw).

    A row whose visible scores are all -inf is null.
    """
    return softmax_of(scores(op, q, k, v, **options))


def softmax_of(sc: Scores) -> Rows:
    maximum = _maximum(sc.s, sc.visible)
    live = (sc.n > 0) & (maximum != -np.inf)
    with np.errstate(invalid="ignore"):
        e = np.exp(np.where(sc.visible, sc.s - np.where(live, maximum, 0.0)[..., None], -np.inf))
    w = e / np.where(live, e.sum(axis=-1), 1.0)[..., None]

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        inner = np.sum(w * dw, axis=-1, keepdims=True)
        return w * (dw - inner), w * (size + np.abs(inner))

    return Rows(sc, w, live, pull)


def log_sum_exp(rows: Rows, absolute: bool = False) -> Array:
    """lse = m + log Σ exp(s - m) over visible keys; -inf on null rows. With `absolute` |m| + log Σ exp(s - m), or 0."""
    sc, live = rows.scores, rows.live
    maximum = np.where(live, _maximum(sc.s, sc.visible), 0.0)
    with np.errstate(invalid="ignore"):
        total = np.exp(np.where(sc.visible, sc.s - maximum[..., None], -np.inf)).sum(axis=-1)
    size, null = (np.abs(maximum), 0.0) if absolute else (maximum, -np.inf)
    return np.where(live, size + np.log(np.where(live, total, 1.0)), null)


def _maximum(s: Array, visible: Array) -> Array:
    return np.max(s, axis=-1, initial=-np.inf, where=visible)


def _pull(rows: Rows, do: Array | None, dlse: Array | None = None, absolute: bool = False) -> dict[str, Array]:
    """ds = w (dw - Σ_j w dw) + dlse w, and back to the arguments."""
    do = output_cotangent(rows, do)
    dw = weight_cotangent(rows, do)
    ds, size = rows.pull(dw, np.abs(dw))
    through_lse = row_cotangent(rows, "dlse", dlse)[..., None] * rows.w
    if not absolute:
        return contract(rows, ds + through_lse, do)
    sizes = contract(rows, size + np.abs(through_lse), do, absolute=True)
    return {"o": attend(rows, absolute=True), "lse": log_sum_exp(rows, absolute=True), **sizes}


@keywords_of(softmax_rows)
def softmax_attention(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, **params: Any
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = exp(s_ij)/Σ_j exp(s_ij) over the keys visible to i, s = scale q k^T + bias.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e), or (o, lse) with lse (..., L) = log Σ_j exp(s_ij) if
    `return_lse`. Leading axes broadcast; heads are axis -3.

    mask (..., L, S) boolean, True = may attend; bias (..., L, S) is added to the scores, -inf allowed; causal False,
    True (lower right: j <= i + S - L) or "upper_left" (j <= i); window (left, right) keeps -left <= j - (i + S - L) <=
    right; key_lengths keeps j < key_lengths; query_mask (..., L) boolean; scale None is 1/sqrt(d), an array () or (H,)
    is learned; enable_gqa lets groups of query heads share a head of k and v; dropout_mask multiplies the weights just
    before the product with v, dropout = (p, seed) computes it.

    A query that sees no key, or only scores of -inf, gets weights and output 0, gradients 0 and lse -inf. ValueError
    for shapes, values and unknown arguments, TypeError for dtypes. Source: Vaswani et al. 2017 eq 1.
    """
    rows = softmax_rows("softmax_attention", q, k, v, **params)
    return (attend(rows), log_sum_exp(rows)) if return_lse else attend(rows)


softmax_attention_weights = derived_weights(softmax_attention, softmax_rows)
softmax_attention_vjp, softmax_attention_magnitudes = derived_gradients(
    softmax_attention,
    softmax_rows,
    """Gradients of `softmax_attention`: {"q", "k", "v"}, "bias" if given and "scale" if it is an array, each in the
    shape of its input.

    do (..., L, e) and dlse (..., L) are the cotangents of o and lse; None is 0. With dw = dropout ⊙ do v^T: ds = w (dw
    - Σ_j w dw) + dlse w, dq = scale ds k, dk = scale ds^T q, dv = (dropout ⊙ w)^T do, dbias = ds and dscale =
    Σ ds ⊙ q k^T.
    """,
    """What rounding errors are measured against: "o", "lse" and the gradients with the summands of their last
    contraction in absolute value, for example |scale| Σ_j w (|dw| + |Σ w dw|) |k| for q; |m| + log Σ exp(s - m) for
    lse, 0 in null rows.
    """,
    pull=_pull,
)
