"""Point-wise attention: a non-linearity of each score replaces softmax (Wortsman et al. 2023); and its named variants.

`qk_layernorm`, which these models apply before the scores, is here too; ReLUFormer's regulariser is in `statistics`.
"""

import math
from typing import NamedTuple, Unpack

from attnkit._core import quadratic
from attnkit._core.activations import ACTIVATIONS
from attnkit._core.check import is_learned, layernorm_context
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.family import Family, never, op, vjp_of, weights_of
from attnkit._core.mask import log, raise_to
from attnkit._core.typing import A, ActivationName, Array, Common, Factor, Impl, Keywords, Length, Namespace


def _shifted(xp: Namespace, s: Array, a: quadratic.Inputs, length: Length, shift: Factor | str) -> Array:
    """s + shift, with a finite value at invisible pairs."""
    if isinstance(shift, str):
        s = s - log(xp, quadratic.length_of_rows(xp, a, length))
    elif not (isinstance(shift, (int, float)) and shift == 0):
        s = s + quadratic.number(xp, shift, a.dtype)
    return quadratic.masked(xp, a, s)


def weigh(
    xp: Namespace,
    s: Array,
    a: quadratic.Inputs,
    *,
    activation: ActivationName = "relu",
    alpha: float | Array = 1.0,
    gain: float | Array = 1.0,
    length: Length = "visible",
    shift: float | Array = 0.0,
) -> tuple[Array, Factor]:
    """u = h(s + shift), 0 on invisible pairs, and the row factor gain·n^-alpha."""
    function = ACTIVATIONS[activation]
    u = function.h(xp, _shifted(xp, s, a, length, shift))
    return u if function.through_zero else quadratic.masked(xp, a, u), row_factor(xp, a, alpha, gain, length)


def row_factor(xp: Namespace, a: quadratic.Inputs, alpha: Factor, gain: Factor, length: Length) -> Factor:
    return of_length(xp, a, alpha, length) * quadratic.number(xp, gain, a.dtype)


def of_length(xp: Namespace, a: quadratic.Inputs, alpha: Factor, length: Length) -> Factor:
    """n^-alpha."""
    alpha = quadratic.number(xp, alpha, a.dtype)
    if isinstance(alpha, float) and alpha == 0:
        return 1.0
    return raise_to(quadratic.length_of_rows(xp, a, length), -alpha)


def score_gradient(
    xp: Namespace,
    s: Array,
    a: quadratic.Inputs,
    u: Array,
    du: Factor,
    *,
    activation: ActivationName = "relu",
    length: Length = "visible",
    shift: float | Array = 0.0,
    **factor: object,
) -> Array:
    """ds = h'(s + shift)·du."""
    return ACTIVATIONS[activation].slope(xp, _shifted(xp, s, a, length, shift)) * du


def beside(
    xp: Namespace,
    s: Array,
    a: quadratic.Inputs,
    u: Array,
    dw: Array,
    ds: Array,
    like: dict[str, Array],
    *,
    alpha: Factor = 1.0,
    gain: Factor = 1.0,
    length: Length = "visible",
    **own: object,
) -> dict[str, Array]:
    """dgain = Σ dw n^-alpha u, dalpha = -Σ dw w log n and dshift = Σ ds, where they are arrays."""
    summands = dict[str, Array]()
    if "gain" in like or "alpha" in like:
        of_rows = xp.sum(quadratic.masked(xp, a, u * dw), axis=-1, keepdims=True) * of_length(xp, a, alpha, length)
        summands["gain"] = of_rows
        if "alpha" in like:
            n = quadratic.length_of_rows(xp, a, length)
            summands["alpha"] = -of_rows * quadratic.number(xp, gain, a.dtype) * log(xp, n)
    if "shift" in like:
        summands["shift"] = quadratic.masked(xp, a, ds)
    return {name: quadratic.number_gradient(xp, g, like[name]) for name, g in summands.items() if name in like}


def has_signed_weights(*, activation: ActivationName = "relu", gain: Factor = 1.0, **own: object) -> bool:
    """Whether a weight can be negative: a gain that is learned may become so."""
    return ACTIVATIONS[activation].signed or is_learned(gain) or bool(gain < 0)


def has_exact_zeros(*, activation: ActivationName = "relu", **own: object) -> bool:
    """Whether weights of 0 are exact and not underflow."""
    return ACTIVATIONS[activation].exact_zeros


POINTWISE = Family(
    "pointwise_attention",
    weigh,
    score_gradient,
    beside=beside,
    numbers=("alpha", "gain", "shift"),
    constant_factor=True,
    signed=has_signed_weights,
    exact_zeros=has_exact_zeros,
)


@op(POINTWISE, POINTWISE.attend)
def pointwise_attention(
    q: A,
    k: A,
    v: A,
    *,
    activation: ActivationName = "relu",
    alpha: float | Array = 1.0,
    gain: float | Array = 1.0,
    length: Length = "visible",
    shift: float | str | Array = 0.0,
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> A:
    """o_i = Σ_j w_ij v_j with w_ij = gain·n_i^-alpha·h(s_ij + shift) on the keys j visible to query i, and 0 elsewhere.

    Wortsman et al. 2023 §3: φ = L^-α h with h = `activation`, α = `alpha`, L = n_i. The length factor is outside h.
    s_ij = scale·q_i·k_j + bias_ij.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        activation: h, one of `attnkit.ACTIVATIONS`. "gelu" is the exact one, "gelu_tanh" its approximation, which the
            paper's code base most likely used. "relu" is the paper's choice. Gradients at kinks are 0.
        alpha: the exponent of the length. 1 (the paper's best) keeps the mean weight O(1/n) as softmax does. `alpha`,
            `gain`, `shift` and `scale` may be arrays of any real float dtype, () or (H,) with a number for each head,
            which are differentiable; their values are not read.
        gain: a factor on the weights, a number or an array () or (H,).
        length: n_i. "visible": the number of keys that query i sees, which makes the result independent of padding and
            of batch-mates; "all": S; or a number or an array > 0 broadcast to (..., L), used as given.
        shift: added to the scores inside h, a number or an array () or (H,); "-log_length" is -log n_i.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias`, `causal`, `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d), `enable_gqa`,
            `dropout_mask`, `dropout`; see docs/semantics.md.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64). A row that sees no key is 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


pointwise_attention_weights = weights_of(pointwise_attention, POINTWISE)
pointwise_attention_vjp = vjp_of(
    pointwise_attention,
    POINTWISE,
    """ds = gain·n^-alpha·h'(s + shift) ⊙ (do vᵀ ⊙ dropout), dq = scale·ds k, dk = scale·dsᵀ q, dv = (w ⊙ dropout)ᵀ do,
    dbias = ds, dscale = Σ ds ⊙ q kᵀ, and with dw = do vᵀ ⊙ dropout: dgain = Σ dw ⊙ n^-alpha h(s + shift), dalpha =
    -Σ dw ⊙ w log n, dshift = Σ ds. Nothing but q, k, v is needed: no row statistic is saved.""",
)


def reluformer_options(gamma: Factor = 1.0, length: Length = "visible") -> Keywords:
    """ReLUFormer's scale as point-wise options: relu(s)/(gamma·√(n/2)) = (√2/gamma)·n^-½·relu(s)."""
    gain = math.sqrt(2.0) / gamma
    if is_learned(gamma):  # NumPy makes a number of an array ()
        gain = namespace(gamma).broadcast_to(gain, gamma.shape)
    return {
        "activation": "relu",
        "alpha": 0.5,
        "gain": gain,
        "length": length,
        "shift": 0.0,
    }


def gradient_of_gamma(grads: dict[str, Array], gamma: Factor = 1.0, **own: object) -> dict[str, Array]:
    """dgamma = -(√2/gamma²)·dgain, where it is an array."""
    if "gain" not in grads:
        return grads
    assert is_learned(gamma)
    of_gain, xp = grads["gain"], namespace(gamma)
    wide = quadratic.cast(xp, gamma, of_gain.dtype)
    of_gamma = quadratic.cast(xp, of_gain * (-math.sqrt(2.0) / (wide * wide)), gamma.dtype)
    return {name: x for name, x in grads.items() if name != "gain"} | {"gamma": of_gamma}


def sigmoid_options(length: Length = "visible") -> Keywords:
    """Sigmoid attention as point-wise options."""
    return {"activation": "sigmoid", "alpha": 0.0, "gain": 1.0, "length": length, "shift": "-log_length"}


RELUFORMER = POINTWISE.special("reluformer_attention", reluformer_options, gradient_of_gamma)._replace(signed=never)
SIGMOID = POINTWISE.special("sigmoid_attention", sigmoid_options)


@op(RELUFORMER, calls=pointwise_attention)
def reluformer_attention(
    q: A,
    k: A,
    v: A,
    *,
    gamma: float | Array = 1.0,
    length: Length = "visible",
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> A:
    """o_i = Σ_j w_ij v_j with w_ij = relu(s_ij) / (gamma·√(n_i/2)), ReLUFormer's attention.

    Shen et al. 2023 eq 6, γ = `gamma`, n = n_i. It is `pointwise_attention` with relu, alpha = ½ and gain = √2/gamma,
    and keeps the variance of the output independent of n (their Theorem 4.1). The factor 1/√d stays (their §2.2 puts
    it into q). Under causality n_i is counted per query; in cross-attention it is the number of valid source tokens.

    Args:
        gamma: > 0. The paper gives no value: the default 1 is ours. It may be an array, as `scale`.
        length: n_i, as in `pointwise_attention`.
        q, k, v, impl, **common: as in `pointwise_attention`.

    Returns, raises: as `pointwise_attention`.
    """


reluformer_attention_weights = weights_of(reluformer_attention, RELUFORMER, pointwise_attention_weights)
reluformer_attention_vjp = vjp_of(
    reluformer_attention,
    RELUFORMER,
    "As in `pointwise_attention_vjp`, and dgamma = -Σ dw ⊙ w/gamma.",
    pointwise_attention_vjp,
)


@op(SIGMOID, calls=pointwise_attention)
def sigmoid_attention(
    q: A, k: A, v: A, *, length: Length = "visible", impl: Impl = "auto", **common: Unpack[Common]
) -> A:
    """o_i = Σ_j w_ij v_j with w_ij = σ(s_ij - log n_i).

    `pointwise_attention` with sigmoid, alpha = 0 and shift = "-log_length" (the bias b ≈ -log n of Ramapuram et al.
    2024). The tail is exact: no tanh approximation, whose absolute error would exceed the weights themselves at long n.

    Args:
        length: n_i, as in `pointwise_attention`.
        q, k, v, impl, **common: as in `pointwise_attention`; bias may be -inf (weight 0).

    Returns, raises: as `pointwise_attention`.
    """


sigmoid_attention_weights = weights_of(sigmoid_attention, SIGMOID, pointwise_attention_weights)
sigmoid_attention_vjp = vjp_of(sigmoid_attention, SIGMOID, "As in `pointwise_attention_vjp`.", pointwise_attention_vjp)


class _Normed(NamedTuple):
    centred: Array  # (..., d): (x - mean)/σ
    inverse: Array  # (..., 1): 1/σ


def normalise(xp: Namespace, x: Array, eps: float) -> _Normed:
    """(x - mean)/√(var + eps) over the last axis, the population variance taken in a second pass."""
    difference = x - quadratic.mean(xp, x, (-1,))
    inverse = 1.0 / xp.sqrt(quadratic.mean(xp, difference * difference, (-1,)) + eps)
    return _Normed(difference * inverse, inverse)


@operation_checked_by(layernorm_context)
def qk_layernorm(q: A, k: A, q_weight: A, k_weight: A, *, eps: float = 1e-6, impl: Impl = "auto") -> tuple[A, A]:
    """LayerNorm of queries and keys over the head axis, before the scores: (x - mean)/√(var + eps) ⊙ weight.

    Dehghani et al. 2023, used by Wortsman et al. 2023 §4; 1/√d of the scores comes after it. No bias; the weights are
    shared by the heads; the population variance is taken in two passes in float32 (float64 for float64).

    Args:
        q: (..., L, d).
        k: (..., S, d).
        q_weight, k_weight: (d,), any real float dtype.
        eps: added to the variance; 1e-6 as in the public ViT code of the paper's authors.

    Returns:
        (q, k) normalised, in the dtype of q.

    Raises:
        ValueError, TypeError: shapes, dtypes or libraries that do not fit; eps ≤ 0.
    """
    xp = namespace(q)
    dtype = quadratic.compute_dtype(xp, q)

    def one(x: A, weight: A) -> A:
        wide = normalise(xp, quadratic.cast(xp, x, dtype), eps).centred * quadratic.cast(xp, weight, dtype)
        return quadratic.cast_for(x, xp, wide, x.dtype)

    return one(q, q_weight), one(k, k_weight)


@operation_checked_by(layernorm_context)
def qk_layernorm_vjp(
    q: Array,
    k: Array,
    q_weight: Array,
    k_weight: Array,
    dq_normed: Array | None,
    dk_normed: Array | None,
    *,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> dict[str, Array]:
    """Gradients {"q", "k", "q_weight", "k_weight"} of `qk_layernorm` for the cotangents of both outputs (None = 0).

    With x̂ the normalised x and g = dy ⊙ weight: dx = (g - mean(g) - x̂·mean(g ⊙ x̂))/σ, dweight = Σ dy ⊙ x̂ over all
    axes but the last.
    """
    xp = namespace(q)
    dtype = quadratic.compute_dtype(xp, q)

    def one(x: Array, weight: Array, dy: Array | None) -> tuple[Array, Array]:
        if dy is None:
            return xp.zeros_like(x), xp.zeros_like(weight)
        normed = normalise(xp, quadratic.cast(xp, x, dtype), eps)
        dy = quadratic.cast(xp, dy, dtype)
        g = dy * quadratic.cast(xp, weight, dtype)
        along = quadratic.mean(xp, g * normed.centred, (-1,))
        dx = (g - quadratic.mean(xp, g, (-1,)) - normed.centred * along) * normed.inverse
        dweight = xp.sum(dy * normed.centred, axis=tuple(range(x.ndim - 1)))
        return quadratic.cast(xp, dx, x.dtype), quadratic.cast(xp, dweight, weight.dtype)

    dq, dq_weight = one(q, q_weight, dq_normed)
    dk, dk_weight = one(k, k_weight, dk_normed)
    return {"q": dq, "k": dk, "q_weight": dq_weight, "k_weight": dk_weight}
