"""Softpick attention: softmax of rectified scores, with exact zeros and rows that may sum to 0."""

from typing import NamedTuple, Unpack

from attnkit._core import quadratic
from attnkit._core.family import Family, always, op, vjp_of, weights_of
from attnkit._core.special import magnitude, relu, stop_gradient
from attnkit._core.tokens import first_maximum
from attnkit._core.typing import A, Array, Common, Impl, Namespace

EPS = 1e-6


class _Excess(NamedTuple):
    """exp(s) - 1 over the visible keys, divided by exp(m) so that it is at most 1, m = max(0, max s)."""

    s: Array  # (..., L, S), 0 on invisible pairs
    a: Array  # (..., L, S): exp(s - m) - exp(-m)
    p: Array  # (..., L, S): exp(s - m), its derivative
    eps: Array  # (..., L, 1), times exp(max s - m) to automatic differentiation
    total: Array  # (..., L, 1): Σ |a| + eps
    first: Array  # (..., L, S) boolean: the first maximum of the row, if it is above 0


def _excess(xp: Namespace, s: Array, a: quadratic.Inputs, eps: float) -> _Excess:
    """Scores near 0 keep their digits: exp(-m) (exp(s) - 1) is no difference of two numbers that are near. Others do
    without expm1, whose derivative torch computes as expm1(s) + 1, with no digits left far below 0.

    m is a constant to automatic differentiation: it cancels everywhere but beside eps, which has its derivative.
    """
    s = quadratic.masked(xp, a, s)
    top, first = first_maximum(xp, s)
    above = relu(xp, top)
    m = stop_gradient(above)
    near = xp.abs(stop_gradient(s)) < 1
    base, beyond = xp.exp(-m), xp.exp(xp.where(near, 0.0, s) - m)
    below = xp.where(near, s, 0.0)
    small = base * xp.expm1(below)
    excess = xp.where(near, small, beyond - base)
    beside = eps * xp.exp(above - m)
    total = xp.sum(magnitude(xp, excess), axis=-1, keepdims=True) + beside
    p = xp.where(near, base * xp.exp(below), beyond)
    return _Excess(s, excess, p, beside, total, first & (top > 0))


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs, eps: float = EPS) -> tuple[Array, Array]:
    """u = relu(exp(s - m) - exp(-m)) and the row factor 1/(Σ |exp(s - m) - exp(-m)| + eps)."""
    e = _excess(xp, s, a, eps)
    return relu(xp, e.a), 1.0 / e.total


def score_gradient(xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array, eps: float = EPS) -> Array:
    """ds = p ([s > 0] dw - sign(s) c)/D with c = Σ w dw, and -c eps/D more at the first maximum if it is above 0."""
    e = _excess(xp, s, a, eps)
    c = xp.sum(w * dw, axis=-1, keepdims=True) / e.total
    ds = e.p * xp.where(e.s > 0, dw / e.total - c, xp.where(e.s < 0, c, 0.0))
    return xp.where(e.first, ds - e.eps * c, ds)


SOFTPICK = Family("softpick_attention", weigh, score_gradient, exact_zeros=always)


@op(SOFTPICK)
def softpick_attention(q: A, k: A, v: A, *, eps: float = EPS, impl: Impl = "auto", **common: Unpack[Common]) -> A:
    """o_i = Σ_j w_ij v_j with w_ij = relu(a_ij) / (Σ_t |a_it| + eps), a_ij = exp(s_ij - m_i) - exp(-m_i), over the
    keys t visible to query i; s_ij = scale·q_i·k_j + bias_ij and m_i = max(0, max_t s_it).

    Zuhri, Fuadi and Aji 2025. Softmax of exp(s) - 1, rectified above the line: a key with a score of 0 or less has
    weight exactly 0, and one below 0 still enlarges the sum. Rows sum to at most 1, and to 0 where no score is above 0,
    so that no token has to take the attention that a query has no use for.

    Args:
        q, k, v, impl, **common: as in `softmax_attention`, but bias is finite.
        eps: a number above 0 beside the sum, relative to exp(m). It matters where all scores are near 0 or below, where
            it decides between 0/0 and 0. The authors' code has 1e-8, which is lost beside most float32 sums.

    Returns, raises: as `softmax_attention`, without lse; a row that sees no key, or no score above 0, is 0.
    """


softpick_attention_weights = weights_of(softpick_attention, SOFTPICK)
softpick_attention_vjp = vjp_of(
    softpick_attention,
    SOFTPICK,
    """With dw = do vᵀ ⊙ dropout, p = exp(s - m), D = Σ_t |a_t| + eps and c = Σ_t w_t dw_t: ds = p ⊙ ([s > 0] dw -
    sign(s) c)/D, and -c·eps/D more at the first maximum of a row where it is above 0; slopes at s = 0 are 0.""",
)
