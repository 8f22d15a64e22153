"""Sparsemax and α-entmax attention: rows sum to 1 and are exactly 0 below a threshold."""

from dataclasses import dataclass
from typing import Unpack, cast

import numpy as np
from scipy.special import xlogy

from attnkit_reference._check import Array, as_float, broadcast, number
from attnkit_reference._core import Common, Rows, Scores, attend, gradients, reduce_to, scores
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of

STEPS = 24  # of Newton; among a million equal scores, the slowest case, 19 are enough
SMALLEST_ALPHA = 1.01  # closer to 1, (α-1)s loses the differences between scores


class Entmax(Common, total=False):
    """The keyword arguments of `entmax_attention`."""

    alpha: float | Array


@dataclass(frozen=True)
class EntmaxRows(Rows):
    """Rows whose weights also depend on an array α."""

    alphas: Array | None = None  # (..., L, 1); None if α is a number
    alpha_shape: tuple[int, ...] = ()  # of the argument α
    p_tilde: Array | None = None  # u/Σu

    def to_own(self, dw: Array, size: Array) -> dict[str, tuple[Array, Array]]:
        """dα for the cotangent dw, and the sum of the absolute values of its summands, `size` being that of dw."""
        if self.alphas is None or self.p_tilde is None:
            return {}
        slope, slope_size = _slope_in_alpha(self.w, self.p_tilde, self.alphas)
        row, row_size = (x.sum(axis=-1, keepdims=True) for x in (dw * slope, size * slope_size))
        return {"alpha": (reduce_to(row, self.alpha_shape), reduce_to(row_size, self.alpha_shape))}


def entmax_rows(
    op: str, q: Array, k: Array, v: Array | None = None, *, alpha: float | Array = 1.5, **options: Unpack[Common]
) -> EntmaxRows:
    """p = [(α-1)s - τ]₊^{1/(α-1)} with Σp = 1 over visible keys; ds = u (dw - Σ u dw/Σu), u = p^{2-α} where p > 0.

    A row whose visible scores are all -inf is null.
    """
    sc = scores(op, q, k, v, **options)
    alphas = _alphas(sc, alpha)
    maximum = np.max(sc.s, axis=-1, initial=-np.inf, where=sc.visible)
    live = (sc.n > 0) & (maximum != -np.inf)
    with np.errstate(invalid="ignore"):
        z = np.where(sc.visible & live[..., None], sc.s - np.where(live, maximum, 0.0)[..., None], -np.inf)
    p = np.where(alphas == 1, _softmax(z), _entmax(z, np.where(alphas == 1, 2.0, alphas)))
    u = np.where(p > 0, np.where(p > 0, p, 1.0) ** (2.0 - alphas), 0.0)
    u_total = np.where(live[..., None], u.sum(axis=-1, keepdims=True), 1.0)

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        inner = np.sum(u * dw, axis=-1, keepdims=True) / u_total
        return u * (dw - inner), u * (size + np.abs(inner))

    if not isinstance(alpha, np.ndarray):
        return EntmaxRows(sc, p, live, pull, exact_zeros=alpha != 1)
    return EntmaxRows(sc, p, live, pull, exact_zeros=True, alphas=alphas, alpha_shape=alpha.shape, p_tilde=u / u_total)


def sparsemax_rows(op: str, q: Array, k: Array, v: Array | None = None, **options: Unpack[Common]) -> EntmaxRows:
    """p = [s - τ]₊ with Σp = 1 over visible keys: α-entmax at α = 2."""
    return entmax_rows(op, q, k, v, alpha=2.0, **options)


def _alphas(sc: Scores, alpha: float | Array) -> Array:
    """α of every row, (..., L, 1)."""
    if isinstance(alpha, np.ndarray):
        values = broadcast(sc.op, "alpha", as_float(sc.op, "alpha", alpha), (*sc.n.shape, 1))
        smallest = float(np.asarray(SMALLEST_ALPHA).astype(alpha.dtype))  # 1.01 rounded to α's dtype
    else:
        values, smallest = np.full((*sc.n.shape, 1), number(sc.op, "alpha", alpha)), SMALLEST_ALPHA
    if not np.all((values == 1) | ((values >= min(smallest, SMALLEST_ALPHA)) & (values <= 2))):
        raise ValueError(f"{sc.op}: alpha; expected 1 or {SMALLEST_ALPHA} <= alpha <= 2, got {alpha!r}")
    return values


def _softmax(z: Array) -> Array:
    e = np.exp(z)
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1.0, total)


def _entmax(z: Array, alphas: Array) -> Array:
    """α-entmax of rows whose maximum is 0; invisible entries are -inf, and a row of them gives 0.

    With x = (α-1)z, the threshold lies in [-1, 0): entries x <= -1 never count.
    """
    if z.shape[-1] == 0:
        return z
    powers = np.unique(1.0 / (alphas - 1.0))
    power = powers[0] if powers.size == 1 else 1.0 / (alphas - 1.0)  # NumPy multiplies for 1 and 2 as one number
    far = (alphas - 1.0) * np.where(z == -np.inf, 0.0, z) <= -1
    x = np.where(far | (z == -np.inf), -1.0, (alphas - 1.0) * np.where(z == -np.inf, 0.0, z))
    support = _support(x, power)
    threshold = _threshold(x, support, power)
    p = np.where(support, np.where(x <= threshold, 0.0, x - threshold) ** power, 0.0)
    total = p.sum(axis=-1, keepdims=True)
    return p / np.where(total == 0, 1.0, total)


def _mass(x: Array, threshold: Array, power: Array) -> Array:
    """Σ_j [x_j - τ]₊^{1/(α-1)}, decreasing in τ."""
    return cast(Array, np.sum(np.where(x <= threshold, 0.0, x - threshold) ** power, axis=-1, keepdims=True))


def _support(x: Array, power: Array) -> Array:
    """The entries above the threshold: x_j > τ iff with x_j as threshold the mass would be below 1.

    This is a prefix of the sorted row. Its length is found by bisection; only a strict < is exact if an entry lies on
    the threshold.
    """
    ordered = -np.sort(-x, axis=-1)
    shortest = np.ones((*x.shape[:-1], 1), dtype=np.int64)
    longest = np.full_like(shortest, x.shape[-1])
    for _ in range(x.shape[-1].bit_length()):
        middle = (shortest + longest + 1) // 2
        inside = _mass(x, np.take_along_axis(ordered, middle - 1, axis=-1), power) < 1
        shortest, longest = np.where(inside, middle, shortest), np.where(inside, longest, middle - 1)
    return ~(x < np.take_along_axis(ordered, shortest - 1, axis=-1)) & ~(x <= -1)


def _threshold(x: Array, support: Array, power: Array) -> Array:
    """τ of a known support: (Σx - 1)/|S| at α = 2, the smaller root of a quadratic at α = 1.5, Newton's steps else.

    Martins & Astudillo 2016 Alg. 1; Peters et al. 2019 Alg. 2. The mass is convex and decreases in τ: steps from below,
    where it is at least 1, stay below its root. Halving, Alg. 1 of Peters et al., takes sixty for all digits.
    """
    number_in = np.maximum(support.sum(axis=-1, keepdims=True), 1)
    mean = np.sum(np.where(support, x, 0.0), axis=-1, keepdims=True) / number_in
    if np.all(power == 1):
        return cast(Array, mean - 1.0 / number_in)
    if np.all(power == 2):
        spread = np.sum(np.where(support, x - mean, 0.0) ** 2, axis=-1, keepdims=True)
        return cast(Array, mean - np.sqrt(np.maximum(1.0 - spread, 0.0) / number_in))
    threshold = np.full(mean.shape, -1.0)
    for _ in range(STEPS):
        gap = np.where(support & (x > threshold), x - threshold, 0.0)
        slopes = np.where(gap > 0, gap ** (power - 1.0), 0.0)
        mass, slope = (np.sum(y, axis=-1, keepdims=True) for y in (gap * slopes, power * slopes))
        threshold = threshold + np.where(mass > 1, (mass - 1.0) / np.where(slope == 0, 1.0, slope), 0.0)
    return cast(Array, threshold)


def _slope_in_alpha(p: Array, p_tilde: Array, alphas: Array) -> tuple[Array, Array]:
    """dp/dα and the sum of the absolute values of its terms.

    dp/dα = (p - p̃)/(α-1)² - (p log p - p̃ Σ p log p)/(α-1) with p̃ = u/Σu; at α = 1, -½ p (log² p - Σ p log² p).
    """
    above = np.where(alphas == 1, 1.0, alphas - 1.0)
    plogp = xlogy(p, p)
    entropy = -plogp.sum(axis=-1, keepdims=True)
    slope = (p - p_tilde) / above**2 - (plogp + p_tilde * entropy) / above
    size = (p + p_tilde) / above**2 + (p_tilde * entropy - plogp) / above
    squares = xlogy(plogp, p)
    mean = squares.sum(axis=-1, keepdims=True)
    one = alphas == 1
    return np.where(one, 0.5 * (p * mean - squares), slope), np.where(one, 0.5 * (p * mean + squares), size)


@keywords_of(entmax_rows)
def entmax_attention(q: Array, k: Array, v: Array, **params: Unpack[Entmax]) -> Array:
    """o_i = Σ_j p_ij v_j with p_ij = [(α-1)s_ij - τ_i]₊^{1/(α-1)} and τ_i such that Σ_j p_ij = 1 over the keys visible
    to i, s = scale q k^T + bias.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e). Leading axes broadcast; heads are axis -3.

    alpha is 1 (softmax) or 1.01 <= alpha <= 2 (sparsemax): a number, 1.5 by default, or an array broadcast to
    (..., L, 1), which is differentiable. Nearer to 1 rounding of (α-1)s destroys the weights. The support is p > 0.

    The other arguments are those of `softmax_attention`; bias may be -inf (weight 0). A query that sees no key, or only
    scores of -inf, gets weights, output and gradients 0. ValueError for shapes, values and unknown arguments, TypeError
    for dtypes. Source: Peters et al. 2019 "Sparse Sequence-to-Sequence Models" eq 8-11; Correia et al. 2019 "Adaptively
    Sparse Transformers" §3 for the gradient in α. Shen et al. 2023 App. C, where it is a baseline, swaps the two ends.
    """
    return attend(entmax_rows("entmax_attention", q, k, v, **params))


def _weights_size(r: EntmaxRows) -> dict[str, Array]:
    """p + u (|scale| |q| |k|^T + |bias|): scores have the digits of their summands, and p moves by u with them."""
    sc, ones = r.scores, np.ones(r.w.shape)
    _, u = r.pull(0.0 * ones, ones)
    size = np.abs(sc.scale) * (np.abs(sc.q) @ np.abs(sc.k).mT) + (0.0 if sc.bias is None else np.abs(sc.bias))
    return {"w": r.w + u * np.where(u > 0, size, 0.0)}


entmax_attention_weights = derived_weights(
    entmax_attention,
    entmax_rows,
    doc="The weights p (..., L, S) of `entmax_attention`, before dropout; rows sum to 1, null rows to 0.",
)


@keywords_of(entmax_rows, "dropout_mask", "dropout")
def entmax_attention_weights_magnitudes(q: Array, k: Array, **params: Unpack[Entmax]) -> dict[str, Array]:
    """What rounding errors of the weights are measured against: themselves, and the summands of their scores."""
    return _weights_size(entmax_rows("entmax_attention_weights", q, k, None, **params))


entmax_attention_vjp, entmax_attention_magnitudes = derived_gradients(
    entmax_attention,
    entmax_rows,
    """Gradients of `entmax_attention`: {"q", "k", "v"}, "bias" if given, "alpha" and "scale" if arrays.

    With dp = dropout ⊙ do v^T, u = p^{2-α} where p > 0 and p̃ = u/Σu: ds = u (dp - Σ_j p̃ dp), dα = Σ_j dp_j ((p_j -
    p̃_j)/(α-1)² - (p_j log p_j - p̃_j Σ p log p)/(α-1)), and its limit -½ Σ_j dp_j p_j (log² p_j - Σ p log² p) at α = 1;
    dq, dk, dv, dbias as in `softmax_attention_vjp`.
    """,
    """What rounding errors are measured against: "o" and the gradients with the summands of their last contraction in
    absolute value, for example |scale| Σ_j u (|dp| + |Σ p̃ dp|) |k| for q; dp_j/dα of alpha as the sum of its terms.
    """,
    pull=gradients,
)


@keywords_of(sparsemax_rows)
def sparsemax_attention(q: Array, k: Array, v: Array, **params: Unpack[Common]) -> Array:
    """o_i = Σ_j p_ij v_j with p_i the point of the simplex that is nearest to s_i: p_ij = [s_ij - τ_i]₊, Σ_j p_ij = 1.

    It is `entmax_attention` with alpha = 2; shapes, other arguments and errors as there. Source: Martins & Astudillo
    2016 "From Softmax to Sparsemax" Prop. 1 and Alg. 1.
    """
    return attend(sparsemax_rows("sparsemax_attention", q, k, v, **params))


sparsemax_attention_weights = derived_weights(
    sparsemax_attention,
    sparsemax_rows,
    doc="The weights p (..., L, S) of `sparsemax_attention`, before dropout; rows sum to 1, null rows to 0.",
)


@keywords_of(sparsemax_rows, "dropout_mask", "dropout")
def sparsemax_attention_weights_magnitudes(q: Array, k: Array, **params: Unpack[Common]) -> dict[str, Array]:
    """What rounding errors of the weights are measured against: themselves, and the summands of their scores."""
    return _weights_size(sparsemax_rows("sparsemax_attention_weights", q, k, None, **params))


sparsemax_attention_vjp, sparsemax_attention_magnitudes = derived_gradients(
    sparsemax_attention,
    sparsemax_rows,
    "Gradients of `sparsemax_attention`: ds = [p > 0] (dp - mean of dp over the support), the rest as for softmax.",
    "Magnitudes of `sparsemax_attention`, as in `entmax_attention_magnitudes`.",
    pull=gradients,
)
