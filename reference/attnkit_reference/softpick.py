"""Softpick attention: softmax of rectified scores, with exact zeros and rows that may sum to 0."""

from typing import Unpack

import numpy as np

from attnkit_reference._check import Array, number
from attnkit_reference._core import Common, Rows, attend, gradients, scores
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of


class Softpick(Common, total=False):
    """Its keyword arguments."""

    eps: float


def softpick_rows(
    op: str, q: Array, k: Array, v: Array | None = None, *, eps: float = 1e-6, **options: Unpack[Common]
) -> Rows:
    """w = relu(a)/D, D = Σ |a| + eps, a = exp(s - m) - exp(-m) over visible keys, m = max(0, max s).

    With p = exp(s - m) and c = Σ w dw: ds = p ([s > 0] dw - sign(s) c)/D, and -c eps/D more at the first maximum of the
    row if it is above 0, since m is a function of it.
    """
    eps = number(op, "eps", eps, positive=True)
    sc = scores(op, q, k, v, **options)
    m = np.max(sc.s, axis=-1, initial=0.0, where=sc.visible)[..., None]
    p = np.where(sc.visible, np.exp(sc.s - m), 0.0)
    a = _excess(sc.s, m)  # 0 where invisible, for s is
    D = np.abs(a).sum(axis=-1, keepdims=True) + eps
    w = np.maximum(a, 0.0) / D
    top = sc.visible & (sc.s == m) & (m > 0)
    first = top & (np.cumsum(top, axis=-1) == 1)

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        c, c_size = (np.sum(w * x, axis=-1, keepdims=True) for x in (dw, size))
        ds = p * np.where(sc.s > 0, dw - c, np.where(sc.s < 0, c, 0.0)) - first * eps * c
        sizes = p * np.where(sc.s > 0, size + c_size, np.where(sc.s < 0, c_size, 0.0)) + first * eps * c_size
        return ds / D, sizes / D

    return Rows(sc, w, sc.n > 0, pull, exact_zeros=True)


def _excess(s: Array, m: Array) -> Array:
    """exp(s - m) - exp(-m); as exp(-m) (exp(s) - 1) where the two are near, so that small scores keep their digits."""
    near = s < 1
    return np.where(near, np.exp(-m) * np.expm1(np.where(near, s, 0.0)), np.exp(s - m) - np.exp(-m))


@keywords_of(softpick_rows)
def softpick_attention(q: Array, k: Array, v: Array, **params: Unpack[Softpick]) -> Array:
    """o_i = Σ_j w_ij v_j with w_ij = relu(a_ij)/(Σ_j |a_ij| + eps), a_ij = exp(s_ij - m_i) - exp(-m_i), over the keys
    visible to i; s = scale q k^T + bias and m_i = max(0, max_j s_ij).

    So w_ij = relu(exp(s_ij) - 1)/(Σ_j |exp(s_ij) - 1| + eps exp(m_i)): keys with scores up to 0 have weight 0, yet
    those below 0 enlarge the sum. Rows sum to at most 1, and to 0 where no score is above 0. eps is a number above 0.

    The other arguments are those of `softmax_attention`; bias is finite on visible pairs. A query that sees no key gets
    0 and passes no gradient. ValueError for shapes, values and unknown arguments, TypeError for dtypes. Source: Zuhri,
    Fuadi and Aji 2025, "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax"; there m_i = max_j
    s_ij, which overflows where all scores are far below 0 and differs nowhere else.
    """
    return attend(softpick_rows("softpick_attention", q, k, v, **params))


softpick_attention_weights = derived_weights(softpick_attention, softpick_rows)
softpick_attention_vjp, softpick_attention_magnitudes = derived_gradients(
    softpick_attention,
    softpick_rows,
    """Gradients of `softpick_attention`: {"q", "k", "v"}, "bias" if given and "scale" if it is an array.

    do (..., L, e). With dw = dropout ⊙ do v^T, p = exp(s - m), D = Σ_j |a| + eps and c = Σ_j w dw: ds = p ([s > 0] dw -
    sign(s) c)/D, and -c eps/D more at the first maximum of a row where it is above 0; slopes at s = 0 are 0. Then as in
    `softmax_attention_vjp`.
    """,
    """What rounding errors of "o" and the gradients are measured against: the summands of the last contraction in
    absolute value, for example |scale| Σ_j p ([s > 0] |dw| + Σ w |dw|)/D |k| for q.
    """,
    pull=gradients,
)
