"""Sparsemax and α-entmax attention: rows sum to 1 and are exactly 0 below a threshold.

With x = (α-1)(s - max s) and power = 1/(α-1), the weights are [x - τ]₊^power, with τ in [-1, 0). τ is found without
automatic differentiation; Newton steps with a constant slope then restore its derivatives. Each step multiplies the
error, which is of first order in a change of x or α, by another factor of that order, so after three steps the first
three derivatives are exact. The bodies are differentiable in the scores and in α.
"""

import math
import numbers
from typing import Unpack

from attnkit._core import check, quadratic
from attnkit._core.family import Family, op, vjp_of, weights_of
from attnkit._core.mask import positions, raise_to
from attnkit._core.special import cumulative_sum, falling, real, relu, stop_gradient
from attnkit._core.typing import A, Array, Common, Factor, Impl, Keywords, Namespace, OfLibrary
from attnkit.ops import softmax

SMALLEST_ALPHA = 1.01
_STEPS = 3  # until third derivatives are exact
_UNDERFLOW = -800.0  # exp of this underflows to 0 in every dtype
_HALVINGS = {"float32": 24, "float64": 53}  # of a bracket of width 1, down to its spacing


def _check_alpha(c: check.Context, name: str, value: object) -> None:
    """1, or 1.01 to 2; for an array only shape and dtype are checked."""
    if isinstance(value, numbers.Real) or not check.is_array(value):
        alpha = check.number(c.op, name, value)
        if alpha != 1 and not SMALLEST_ALPHA <= alpha <= 2:
            raise ValueError(f"{c.op}: alpha must be 1 or lie in [{SMALLEST_ALPHA}, 2]; got {value}")
    else:
        shape = (*c.leading, c.queries, 1)
        check.option_array(c, name, value, check.FLOATS, "a real float dtype", shape, "(..., L, 1)")


OWN = {"alpha": _check_alpha}


def _of_rows(xp: Namespace, a: quadratic.Inputs, alpha: float | Array) -> OfLibrary:
    """α for these rows: a number, or an array in the compute dtype."""
    if not check.is_learned(alpha):
        return float(alpha)
    if alpha.ndim >= 2 and alpha.shape[-2] == a.rows.total != 1:
        alpha = alpha[..., a.rows.start : a.rows.stop, :]
    return quadratic.cast(xp, alpha, a.dtype)


# ---------------------------------------------------------------------------------------------- the threshold


def _scaled(xp: Namespace, s: Array, a: quadratic.Inputs, above: Factor) -> Array:
    """x = above·(s - max s) over the visible keys, at least -1: smaller ones have weight 0 for every τ."""
    if a.pairs is not None:
        s = xp.where(a.pairs, s, -math.inf)
    top = stop_gradient(xp.max(s, axis=-1, keepdims=True))
    below = s - xp.where(top == -math.inf, 0.0, top)
    out = below * above <= -1
    return xp.where(out, -1.0, above * xp.where(out, 0.0, below))


def _raised(xp: Namespace, t: Array, power: float | Array) -> Array:
    """t^power of t >= 0, and 0 at t = 0 for every power, with finite derivatives."""
    if isinstance(power, float) and power in (1.0, 2.0):
        return t if power == 1.0 else t * t
    none = t <= 0
    return xp.where(none, 0.0, xp.exp(power * xp.log(xp.where(none, 1.0, t))))


def _slope(xp: Namespace, above: Array, power: float | Array) -> Array:
    """power·Σ[x - τ]₊^(power - 1), minus the derivative of Σ[x - τ]₊^power in τ; 1 in place of 0. `above` is x - τ."""
    t = relu(xp, above)
    each = xp.astype(t > 0, t.dtype) if _is_one(power) else _raised(xp, t, power - 1.0)
    slope = power * xp.sum(each, axis=-1, keepdims=True)
    return xp.where(slope == 0, 1.0, slope)


def _excess(xp: Namespace, above: Array, power: float | Array) -> Array:
    """Σ[x - τ]₊^power - 1."""
    return xp.sum(_raised(xp, relu(xp, above), power), axis=-1, keepdims=True) - 1.0


def _is_one(power: float | Array) -> bool:
    return isinstance(power, float) and power == 1.0


def _sorted_threshold(xp: Namespace, x: Array, power: float | Array) -> Array:
    """τ for power 1 or 2 in closed form. Entry r of the sorted row is in the support iff the mass with x_(r) as
    threshold, a sum over the entries before it, is below 1."""
    ordered = falling(xp, x)
    rank = xp.astype(positions(xp, x, 1, x.shape[-1] + 1), x.dtype)
    total = cumulative_sum(xp, ordered, axis=-1)
    if power == 1.0:
        inside = total - rank * ordered < 1
    else:
        squares = cumulative_sum(xp, ordered * ordered, axis=-1)
        inside = squares - 2.0 * ordered * total + rank * ordered * ordered < 1
    count = xp.sum(xp.astype(inside, x.dtype), axis=-1, keepdims=True)
    count = xp.where(count == 0, 1.0, count)
    mean = xp.sum(xp.where(inside, ordered, 0.0), axis=-1, keepdims=True) / count
    if power == 1.0:
        return mean - 1.0 / count
    off = xp.where(inside, ordered - mean, 0.0)
    room = (1.0 - xp.sum(off * off, axis=-1, keepdims=True)) / count
    return mean - xp.sqrt(xp.where(room <= 0, 0.0, room))


def _halved_threshold(xp: Namespace, x: Array, power: float | Array) -> Array:
    """τ by bisection of [-1, -keys^-1/power] in a fixed number of steps."""
    low = xp.zeros_like(x[..., :1]) - 1.0
    if x.shape[-1] == 1:  # the bracket is a point, and XLA fails when it fuses bisections without a sum
        return low
    high = low + (1.0 - raise_to(real(xp, x.shape[-1], x.dtype), -1.0 / power))
    for _ in range(_HALVINGS[check.dtype_name(x)]):
        middle = 0.5 * (low + high)
        left = xp.sum(relu(xp, x - middle) ** power, axis=-1, keepdims=True) >= 1
        low, high = xp.where(left, middle, low), xp.where(left, high, middle)
    return low


def _unnormalised(xp: Namespace, x: Array, power: float | Array) -> Array:
    """[x - τ]₊^power, differentiable in x and in an array `power`."""
    fixed, constant = stop_gradient(x), power if isinstance(power, float) else stop_gradient(power)
    exact = isinstance(power, float) and power in (1.0, 2.0)
    threshold = (_sorted_threshold if exact else _halved_threshold)(xp, fixed, constant)
    above = fixed - threshold
    slope = _slope(xp, above, constant)
    threshold = threshold + _excess(xp, above, constant) / slope
    # further steps are not added to τ: it has too few digits when thousands of small weights depend on it
    above = x - threshold
    for _ in range(1 if _is_one(power) else _STEPS):
        above = above - _excess(xp, above, power) / slope
    return _raised(xp, xp.where(x <= -1, 0.0, relu(xp, above)), power)


# ---------------------------------------------------------------------------------------------- the family


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs, *, alpha: float | Array = 1.5) -> tuple[Array, Factor]:
    """u = [x - τ]₊^power and the row factor 1/Σu, which is 1 on rows without a finite visible score."""
    if isinstance(alpha, numbers.Real) and alpha == 1:
        return softmax.weigh(xp, s, a)
    alpha = _of_rows(xp, a, alpha)
    if a.keys == 0:
        return s * alpha, 1.0
    if isinstance(alpha, float):
        u = _unnormalised(xp, _scaled(xp, s, a, alpha - 1.0), 1.0 / (alpha - 1.0))
    else:
        one = alpha == 1
        above = xp.where(one, 1.0, alpha - 1.0)
        u = _unnormalised(xp, _scaled(xp, s, a, above), 1.0 / above)
        u = xp.where(one, _at_one(xp, s, a, alpha), u)
    total = xp.sum(u, axis=-1, keepdims=True)
    return u, 1.0 / xp.where(total == 0, 1.0, total)


def _at_one(xp: Namespace, s: Array, a: quadratic.Inputs, alpha: Array) -> Array:
    """The weights at α = 1, softmax, with the derivatives of their limit in the scores and in α.

    With y = s - θ and ε = α - 1 they are (1 + εy)^(1/ε) = exp(y - εy²/2 + ε²y³/3 - …), with θ such that they sum to 1.
    θ is log Σ exp(s) at ε = 0, and steps with slope 1 give it its derivatives. The value of ε is 0 here.
    """
    e = softmax.exponentials(xp, stop_gradient(s), a)
    y = s - e.m - xp.log(xp.where(e.total == 0, 1.0, e.total))
    support = y > _UNDERFLOW if a.pairs is None else (y > _UNDERFLOW) & a.pairs
    y, eps = xp.where(support, y, 0.0), alpha - stop_gradient(alpha)

    def weights(y: Array) -> Array:
        return xp.where(support, xp.exp(y * (1.0 - eps * y * (0.5 - eps * y * (1.0 / 3.0 - eps * y * 0.25)))), 0.0)

    for _ in range(_STEPS):
        y = y - (xp.sum(weights(y), axis=-1, keepdims=True) - 1.0)
    return weights(y)


def _log(xp: Namespace, p: Array) -> Array:
    """log p, and 0 where p = 0."""
    return xp.log(xp.where(p <= 0, 1.0, p))


def _slope_at_one(xp: Namespace, p: Array) -> Array:
    """dp/dα at α = 1: -½ p (log² p - Σ p log² p)."""
    squares = _log(xp, p) ** 2
    return -0.5 * p * (squares - xp.sum(p * squares, axis=-1, keepdims=True))


def _tilted(xp: Namespace, p: Array, alpha: float | Array) -> Array:
    """u = p^{2-α} where p > 0, else 0."""
    if isinstance(alpha, float) and alpha in (1.0, 1.5):
        return p if alpha == 1.0 else xp.where(p <= 0, 0.0, xp.sqrt(xp.where(p <= 0, 1.0, p)))
    if isinstance(alpha, float) and alpha == 2.0:
        return xp.astype(p > 0, p.dtype)
    return _raised(xp, p, 2.0 - alpha)


def _average(xp: Namespace, u: Array, x: Array) -> Array:
    """Σ u x/Σu, 0 on rows without weights."""
    total = xp.sum(u, axis=-1, keepdims=True)
    return xp.sum(u * x, axis=-1, keepdims=True) / xp.where(total == 0, 1.0, total)


def score_gradient(
    xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array, *, alpha: float | Array = 1.5
) -> Array:
    """ds = u (dw - Σ u dw/Σu) with u = p^{2-α} on the support."""
    u = _tilted(xp, w, _of_rows(xp, a, alpha))
    return u * (dw - _average(xp, u, dw))


def beside(
    xp: Namespace,
    s: Array,
    a: quadratic.Inputs,
    w: Array,
    dw: Array,
    ds: Array,
    like: dict[str, Array],
    *,
    alpha: float | Array = 1.5,
) -> dict[str, Array]:
    """dα = Σ_j dw_j dp_j/dα of these rows in the compute dtype, if α is an array."""
    if isinstance(alpha, numbers.Real):
        return {}
    rows = _of_rows(xp, a, alpha)
    one = rows == 1
    above = xp.where(one, 1.0, rows - 1.0)
    u = _tilted(xp, w, rows)
    total = xp.sum(u, axis=-1, keepdims=True)
    tilted = u / xp.where(total == 0, 1.0, total)
    plogp = w * _log(xp, w)
    entropy = xp.sum(plogp, axis=-1, keepdims=True)
    slope = ((w - tilted) / above - (plogp - tilted * entropy)) / above
    slope = xp.where(one, _slope_at_one(xp, w), slope)
    of_rows = xp.sum(quadratic.masked(xp, a, dw * slope), axis=-1, keepdims=True)
    return {"alpha": quadratic.sum_to(xp, of_rows, tuple(rows.shape))}


# ---------------------------------------------------------------------------------------------- public


def has_exact_zeros(*, alpha: float | Array = 1.5) -> bool:
    """Whether weights of 0 are exact and not underflow: true except for softmax."""
    return not (isinstance(alpha, numbers.Real) and alpha == 1)


def sparsemax_options() -> Keywords:
    """Sparsemax as entmax options."""
    return {"alpha": 2.0}


ENTMAX = Family(
    "entmax_attention",
    weigh,
    score_gradient,
    beside=beside,
    exact_zeros=has_exact_zeros,
    checks=OWN,
    arrays=("alpha",),
)
SPARSEMAX = ENTMAX.special("sparsemax_attention", sparsemax_options)


@op(ENTMAX, ENTMAX.attend)
def entmax_attention(
    q: A, k: A, v: A, *, alpha: float | Array = 1.5, impl: Impl = "auto", **common: Unpack[Common]
) -> A:
    """o_i = Σ_j p_ij v_j with p_ij = [(α-1)s_ij - τ_i]₊^{1/(α-1)}, τ_i such that Σ_j p_ij = 1 over the visible keys.

    Peters et al. 2019 eq 8-11; with a learned α Correia et al. 2019 §3. Baseline of Shen et al. 2023, whose App. C
    swaps the ends: α = 1 is softmax, α = 2 sparsemax. s_ij = scale·q_i·k_j + bias_ij.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        alpha: 1 or 1.01 ≤ α ≤ 2 (nearer to 1 rounding of (α-1)s destroys the weights). A number: 1.5 (default), 1 and
            2 are exact, others take a fixed number of steps. Or an array of any real float dtype, broadcast to
            (..., L, 1), which is differentiable; its values are not validated.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias` (-inf allowed), `causal`, `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d),
            `enable_gqa`, `dropout_mask`, `dropout`; see docs/semantics.md. A
            scale that is an array, () or (H,) with a number for each head, is differentiable.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64). A row that sees no key, or only
        scores of -inf, is null: p = 0, o = 0, all its gradients 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


entmax_attention_weights = weights_of(entmax_attention, ENTMAX)
entmax_attention_vjp = vjp_of(
    entmax_attention,
    ENTMAX,
    """With dp = do vᵀ ⊙ dropout, u = p^{2-α} where p > 0 and p̃ = u/Σu: ds = u ⊙ (dp - Σ_j p̃ dp), and dα = Σ_j dp_j
    ((p_j - p̃_j)/(α-1)² - (p_j log p_j - p̃_j Σ p log p)/(α-1)), at α = 1 its limit -½ Σ_j dp_j p_j (log² p_j - Σ p log²
    p); dq = scale·ds k, dk = scale·dsᵀ q, dv = (p ⊙ dropout)ᵀ do, dbias = ds.""",
)


@op(SPARSEMAX, calls=entmax_attention)
def sparsemax_attention(q: A, k: A, v: A, *, impl: Impl = "auto", **common: Unpack[Common]) -> A:
    """o_i = Σ_j p_ij v_j with p_i the point of the simplex nearest to s_i: p_ij = [s_ij - τ_i]₊, Σ_j p_ij = 1.

    Martins & Astudillo 2016 Prop. 1. It is `entmax_attention` with alpha = 2, exact.

    Args:
        q, k, v, impl, **common: as in `entmax_attention`.

    Returns, raises: as `entmax_attention`.
    """


sparsemax_attention_weights = weights_of(sparsemax_attention, SPARSEMAX, entmax_attention_weights)
sparsemax_attention_vjp = vjp_of(
    sparsemax_attention,
    SPARSEMAX,
    "ds = [p > 0] (dp - the mean of dp over the support); others as for entmax.",
    entmax_attention_vjp,
)
