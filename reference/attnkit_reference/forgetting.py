"""Forgetting attention: softmax of scores that fade by what was forgotten between key and query."""

from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from attnkit_reference._check import Array, as_float, broadcast, integers
from attnkit_reference._core import Scores, WithoutCausal, attend, contract, reduce_to, scores
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of, without_common
from attnkit_reference.softmax import SoftmaxRows, log_sum_exp, pull_softmax, softmax_of


@dataclass(frozen=True)
class ForgettingRows(SoftmaxRows):
    """Rows of softmax whose scores fade."""

    kept: Array = field(default_factory=lambda: np.zeros(0))  # (..., S) tokens whose gates count
    of_gates: tuple[int, ...] = ()  # the shape of log_forget

    def to_inputs(self, ds: Array, do: Array | None, absolute: bool = False) -> dict[str, Array]:
        """With dlog_forget_l = Σ_{i >= l > j} ds_ij: row by row the sum over the keys before l, which is one of
        summands that belong to l, where sums of whole rows and columns would cancel."""
        before = np.zeros_like(ds)
        before[..., 1:] = np.cumsum(ds[..., :-1], axis=-1)
        L, S = ds.shape[-2:]
        crossing = np.sum(np.where(np.tri(L, S, S - L, dtype=bool), before, 0.0), axis=-2)
        crossing = reduce_to(np.where(self.kept, crossing, 0.0), self.of_gates)
        return contract(self, ds, do, absolute) | {"log_forget": crossing}


def kept_tokens(shape: tuple[int, ...], mask: Array | None, key_lengths: int | Array | None) -> Array:
    """The tokens (..., S) that neither a key mask, which has size 1 on the axis of queries, nor key_lengths hides."""
    kept = np.ones(shape, dtype=bool)
    if mask is not None and (mask.ndim < 2 or mask.shape[-2] == 1):
        kept &= mask if mask.ndim < 2 else mask[..., 0, :]
    if key_lengths is not None:
        kept &= np.arange(shape[-1]) < np.asarray(integers("", "key_lengths", key_lengths))[..., None]
    return kept


def running_sum(x: Array) -> tuple[Array, Array]:
    """The running sums of x along its last axis as high + low: low adds up what rounding took from high, exactly."""
    high = np.cumsum(x, axis=-1)
    before = np.zeros_like(high)
    before[..., 1:] = high[..., :-1]
    part = high - before
    low = np.cumsum((before - (high - part)) + (x - part), axis=-1)
    return high, low


def fading(log_forget: Array, queries: int) -> Array:
    """c_i - c_j (..., L, S), c the running sum and i the position of a query; 0 for keys behind it."""
    S = log_forget.shape[-1]
    high, low = running_sum(log_forget)
    at = np.arange(queries) + S - queries
    own = np.maximum(at, 0)
    difference = high[..., own, None] - high[..., None, :] + (low[..., own, None] - low[..., None, :])
    return np.where(np.arange(S) <= at[:, None], difference, 0.0)


def gates_of(sc: Scores, log_forget: Array, kept: Array) -> Array:
    """log_forget (..., S) in float64 with the leading axes of the call, 0 for hidden tokens."""
    gates = as_float(sc.op, "log_forget", log_forget)
    if gates.shape[-1:] != kept.shape[-1:]:
        text = f"log_forget has another number of tokens than k; expected {kept.shape}, got {gates.shape}"
        raise ValueError(f"{sc.op}: {text}")
    gates = np.where(kept, broadcast(sc.op, "log_forget", gates, kept.shape), 0.0)
    if np.any((gates > 0) | np.isinf(gates)):
        raise ValueError(f"{sc.op}: log_forget; expected finite numbers <= 0, got {log_forget!r}")
    return gates


def forgetting_scores(
    op: str, q: Array, k: Array, v: Array | None = None, *, log_forget: Array, **options: Unpack[WithoutCausal]
) -> Scores:
    """s_ij + c_i - c_j on visible pairs, whose keys are at positions up to the query's."""
    sc = scores(op, q, k, v, causal=True, **options)
    gates = gates_of(sc, log_forget, kept_by(sc, options))
    if 0 in sc.s.shape:
        return sc
    with np.errstate(invalid="ignore"):
        return replace(sc, s=np.where(sc.visible, sc.s + fading(gates, sc.s.shape[-2]), 0.0))


def kept_by(sc: Scores, options: WithoutCausal) -> Array:
    """The tokens (..., S) whose gates count."""
    return kept_tokens((*sc.leading, sc.k.shape[-2]), options.get("mask"), options.get("key_lengths"))


@without_common("causal")
def forgetting_rows(
    op: str, q: Array, k: Array, v: Array | None = None, *, log_forget: Array, **options: Unpack[WithoutCausal]
) -> ForgettingRows:
    """w = softmax of s_ij + c_i - c_j over visible keys at positions up to the query's; ds = w (dw - Σ w dw)."""
    sc = forgetting_scores(op, q, k, v, log_forget=log_forget, **options)
    return ForgettingRows(**vars(softmax_of(sc)), kept=kept_by(sc, options), of_gates=log_forget.shape)


@keywords_of(forgetting_rows, "log_forget")
def forgetting_attention(
    q: Array, k: Array, v: Array, log_forget: Array, *, return_lse: bool = False, **params: Unpack[WithoutCausal]
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = exp(t_ij)/Σ_j exp(t_ij), t_ij = s_ij + c_i - c_j, s = scale q k^T + bias and c the
    running sum of log_forget, over the keys visible to i at positions up to its own.

    log_forget (..., S) <= 0, whose leading axes broadcast to those of the output, heads of q among them: the logarithm
    of what a token leaves of all before it, so that w_ij ∝ exp(s_ij) Π_{j < l <= i} f_l, f = exp(log_forget). Gates of
    tokens that key_lengths or a key mask, with size 1 on the axis of queries, hides are read as 0, may hold NaN and get
    the gradient 0. Positions are aligned at the last token: that of query i is i + S - L.

    return_lse: also log Σ_j exp(t_ij), (..., L). The other arguments are those of `softmax_attention` without causal
    and sink. A query that sees no key, or only scores of -inf, gets o = 0 and lse = -inf, and passes no gradient.
    ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source: Lin et al. 2025, "Forgetting
    Transformer: Softmax Attention with a Forget Gate".
    """
    rows = forgetting_rows("forgetting_attention", q, k, v, log_forget=log_forget, **params)
    return (attend(rows), log_sum_exp(rows)) if return_lse else attend(rows)


forgetting_attention_weights = derived_weights(forgetting_attention, forgetting_rows)
forgetting_attention_vjp, forgetting_attention_magnitudes = derived_gradients(
    forgetting_attention,
    forgetting_rows,
    """Gradients of `forgetting_attention`: {"q", "k", "v", "log_forget"}, "bias" if given and "scale" if it is an
    array, each in the shape of its input.

    do (..., L, e) and dlse (..., L) are the cotangents of o and lse; None is 0. With dt as ds in
    `softmax_attention_vjp`: ds = dt and dlog_forget_l = Σ_{i >= l > j} dt_ij, i and j positions; 0 for hidden tokens.
    """,
    """What rounding errors of "o", "lse" and the gradients are measured against: the summands of the last contraction
    in absolute value, for example Σ_{i >= l > j} w_ij (|dw_ij| + |Σ w dw| + |dlse_i|) for log_forget.
    """,
    pull=pull_softmax,
)
