"""Softmax attention, the baseline of every comparison."""

from dataclasses import dataclass, field
from typing import Unpack

import numpy as np

from attnkit_reference._check import Array
from attnkit_reference._core import (
    Common,
    Rows,
    Scores,
    attend,
    learned,
    output_cotangent,
    reduce_to,
    row_cotangent,
    scores,
    weight_cotangent,
)
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of


class Softmax(Common, total=False):
    """Its keyword arguments."""

    sink: float | Array | None


@dataclass(frozen=True)
class SoftmaxRows(Rows):
    """Rows of softmax with a sink: a further score c that has a share of the sum, and no value."""

    top: Array = field(default_factory=lambda: np.zeros(0))  # m (..., L), 0 in null rows
    log_total: Array = field(default_factory=lambda: np.zeros(0))  # log(Σ exp(s - m) + exp(c - m)) (..., L), or 0
    share: Array = field(default_factory=lambda: np.zeros(0))  # p = exp(c - m)/total (..., L), 0 in null rows
    shape: tuple[int, ...] | None = None  # of the sink where it is an array

    def to_own(self, dw: Array, size: Array, dlse: float | Array = 0.0) -> dict[str, tuple[Array, Array]]:
        """dsink = Σ_i p_i (dlse_i - Σ_j w_ij dw_ij)."""
        if self.shape is None:
            return {}
        summands = self.share * (dlse - np.sum(self.w * dw, axis=-1))
        sizes = self.share * (np.abs(dlse) + np.sum(self.w * size, axis=-1))
        of_sink, of_sizes = (reduce_to(x.sum(axis=-1), self.shape) for x in (summands, sizes))
        return {"sink": (of_sink, of_sizes)}


def softmax_rows(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    sink: float | Array | None = None,
    **options: Unpack[Common],
) -> SoftmaxRows:
    """w = exp(s - m)/(Σ exp(s - m) + exp(c - m)) over visible keys, m the maximum of the visible scores and of the sink
    c, None = -inf; ds = w (dw - Σ w dw).

    A row whose visible scores are all -inf is null.
    """
    sc = scores(op, q, k, v, **options)
    c = np.asarray(-np.inf if sink is None else learned(op, "sink", sink, sc.leading, lowest=True))
    return softmax_of(sc, c[..., 0] if c.ndim else c, sink.shape if isinstance(sink, np.ndarray) else None)


NO_SINK = np.asarray(-np.inf)


def softmax_of(sc: Scores, sink: Array = NO_SINK, shape: tuple[int, ...] | None = None) -> SoftmaxRows:
    """The rows of scores and of a sink that broadcasts to (..., L)."""
    maximum = np.max(sc.s, axis=-1, initial=-np.inf, where=sc.visible)
    live = (sc.n > 0) & (maximum != -np.inf)
    top = np.where(live, np.maximum(maximum, sink), 0.0)
    with np.errstate(invalid="ignore"):
        e = np.exp(np.where(sc.visible, sc.s - top[..., None], -np.inf))
        of_sink = np.exp(np.where(live, sink - top, -np.inf))
    of_scores = e.sum(axis=-1)
    total = np.where(live, of_scores + of_sink, 1.0)
    log_total = np.where(
        live & (of_sink == 1), np.log1p(of_scores), np.log(total)
    )  # of which c = 0 leaves nothing else
    w = e / total[..., None]

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        inner = np.sum(w * dw, axis=-1, keepdims=True)
        return w * (dw - inner), w * (size + np.abs(inner))

    return SoftmaxRows(sc, w, live, pull, top=top, log_total=log_total, share=of_sink / total, shape=shape)


def log_sum_exp(rows: SoftmaxRows, absolute: bool = False) -> Array:
    """lse = m + log(Σ exp(s - m) + exp(c - m)); -inf on null rows. With `absolute` |m| in place of m, or 0."""
    size, null = (np.abs(rows.top), 0.0) if absolute else (rows.top, -np.inf)
    return np.where(rows.live, size + rows.log_total, null)


def pull_softmax(
    rows: SoftmaxRows, do: Array | None, dlse: Array | None = None, absolute: bool = False
) -> dict[str, Array]:
    """ds = w (dw - Σ_j w dw) + dlse w, and back to the arguments."""
    do = output_cotangent(rows, do)
    dw, dlse = weight_cotangent(rows, do), row_cotangent(rows, "dlse", dlse)
    ds, size = rows.pull(dw, np.abs(dw))
    through_lse = dlse[..., None] * rows.w
    own = {name: both[absolute] for name, both in rows.to_own(dw, np.abs(dw), dlse).items()}
    if not absolute:
        return rows.to_inputs(ds + through_lse, do) | own
    sizes = rows.to_inputs(size + np.abs(through_lse), do, absolute=True) | own
    return {"o": attend(rows, absolute=True), "lse": log_sum_exp(rows, absolute=True), **sizes}


@keywords_of(softmax_rows)
def softmax_attention(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, **params: Unpack[Softmax]
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = exp(s_ij)/(exp(c) + Σ_j exp(s_ij)) over the keys visible to i, s = scale q k^T +
    bias and c = sink, -inf if it is None.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e), or (o, lse) with lse (..., L) = log(exp(c) + Σ_j
    exp(s_ij)) if `return_lse`. Leading axes broadcast; heads are axis -3. sink is a number or an array () or (H,), a
    number for each head, which is learned; -inf is softmax without one, and with 0 a row sums to less than 1 by what a
    key with score 0 and value 0 would get.

    mask (..., L, S) boolean, True = may attend; bias (..., L, S) is added to the scores, -inf allowed; causal False,
    True (lower right: j <= i + S - L) or "upper_left" (j <= i); window (left, right) keeps -left <= j - (i + S - L) <=
    right; key_lengths keeps j < key_lengths; query_mask (..., L) boolean; scale None is 1/sqrt(d), an array () or (H,)
    is learned; enable_gqa lets groups of query heads share a head of k and v; dropout_mask multiplies the weights just
    before the product with v, dropout = (p, seed) computes it.

    A query that sees no key, or only scores of -inf, gets weights and output 0, gradients 0 and lse -inf, whatever the
    sink. ValueError for shapes, values and unknown arguments, TypeError for dtypes. Sources: Vaswani et al. 2017 eq 1;
    OpenAI 2025, gpt-oss (its sinks).
    """
    rows = softmax_rows("softmax_attention", q, k, v, **params)
    return (attend(rows), log_sum_exp(rows)) if return_lse else attend(rows)


softmax_attention_weights = derived_weights(softmax_attention, softmax_rows)
softmax_attention_vjp, softmax_attention_magnitudes = derived_gradients(
    softmax_attention,
    softmax_rows,
    """Gradients of `softmax_attention`: {"q", "k", "v"}, "bias" if given, "scale" and "sink" where they are arrays,
    each in the shape of its input.

    do (..., L, e) and dlse (..., L) are the cotangents of o and lse; None is 0. With dw = dropout ⊙ do v^T: ds = w (dw
    - Σ_j w dw) + dlse w, dq = scale ds k, dk = scale ds^T q, dv = (dropout ⊙ w)^T do, dbias = ds, dscale =
    Σ ds ⊙ q k^T and dsink = Σ_i p_i (dlse_i - Σ_j w_ij dw_ij), p_i = exp(c - lse_i), 0 on null rows.
    """,
    """What rounding errors are measured against: "o", "lse" and the gradients with the summands of their last
    contraction in absolute value, for example |scale| Σ_j w (|dw| + |Σ w dw|) |k| for q; |m| + log(Σ exp(s - m) +
    exp(c - m)) for lse, 0 in null rows.
    """,
    pull=pull_softmax,
)
