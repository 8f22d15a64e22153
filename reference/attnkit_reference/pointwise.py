"""Pointwise, ReLUFormer and sigmoid attention: an elementwise function of the score; qk-layernorm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Unpack, cast

import numpy as np
from scipy.special import erfc

from attnkit_reference._check import Array, as_float, number
from attnkit_reference._core import Common, Rows, Scores, attend, gradients, learned, reduce_to, row_lengths, scores
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of, refuse_others


class Sigmoid(Common, total=False):
    """The keyword arguments of `sigmoid_attention`."""

    length: str | float | Array


class Reluformer(Sigmoid, total=False):
    """Those of `reluformer_attention`."""

    gamma: float | Array


class Pointwise(Sigmoid, total=False):
    """Those of `pointwise_attention`."""

    activation: str
    alpha: float | Array
    gain: float | Array
    shift: float | str | Array


class ScoreFunction(NamedTuple):
    """h, its derivative, and what statistics and a judge want to know: can h be negative, and is it 0 on an interval?
    Where does it or its slope jump? What is the size of the exponent that it takes of x, with which errors grow?
    """

    name: str
    h: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    signed: bool = False
    exact_zeros: bool = False
    kinks: tuple[float, ...] = ()
    growth: Callable[[Array], Array] | None = None  # None: h takes no exponential


def sigmoid(x: Array) -> Array:
    """1/(1 + exp(-x)) for x >= 0, exp(x)/(1 + exp(x)) below: small relative error in both tails."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def sigmoid_slope(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return e / (1.0 + e) ** 2


def relu(x: Array) -> Array:
    return np.where(x <= 0, 0.0, x)


def relu_slope(x: Array) -> Array:
    return np.where(x <= 0, 0.0, np.where(x > 0, 1.0, x))


def relu6(x: Array) -> Array:
    return np.where(x <= 0, 0.0, np.where(x >= 6, 6.0, x))


def relu6_slope(x: Array) -> Array:
    return np.where((x <= 0) | (x >= 6), 0.0, np.where(x > 0, 1.0, x))


def normal_cdf(x: Array) -> Array:
    """Φ(x) = erfc(-x/√2)/2, which 1 + erf would lose for negative x."""
    return 0.5 * cast(Array, erfc(-x / np.sqrt(2.0)))


def gelu_slope(x: Array) -> Array:
    slope: Array = normal_cdf(x) + x * np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)
    return slope


def _tanh_argument(x: Array) -> Array:
    # 0.5 (1 + tanh(y)) = sigmoid(2 y), without the cancellation for negative y
    y: Array = 2.0 * np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    return y


def gelu_tanh_slope(x: Array) -> Array:
    y, dy = _tanh_argument(x), 2.0 * np.sqrt(2.0 / np.pi) * (1.0 + 3.0 * 0.044715 * x * x)
    slope: Array = sigmoid(y) + x * sigmoid_slope(y) * dy
    return slope


_ROWS = (
    ScoreFunction("relu", relu, relu_slope, exact_zeros=True, kinks=(0.0,)),
    ScoreFunction("relu_squared", lambda x: relu(x) ** 2, lambda x: 2.0 * relu(x), exact_zeros=True, kinks=(0.0,)),
    ScoreFunction("relu6", relu6, relu6_slope, exact_zeros=True, kinks=(0.0, 6.0)),
    ScoreFunction("identity", lambda x: x, lambda x: np.where(np.isnan(x), x, 1.0), signed=True),
    ScoreFunction("softplus", lambda x: np.logaddexp(x, 0.0), sigmoid, growth=np.abs),
    ScoreFunction("sigmoid", sigmoid, sigmoid_slope, growth=np.abs),
    ScoreFunction(
        "silu",
        lambda x: x * sigmoid(x),
        lambda x: sigmoid(x) + x * sigmoid_slope(x),
        signed=True,
        growth=np.abs,
    ),
    ScoreFunction(
        "gelu",
        lambda x: x * normal_cdf(x),
        gelu_slope,
        signed=True,
        growth=lambda x: x**2 / 2,  # of the density in its slope
    ),
    ScoreFunction(
        "gelu_tanh",
        lambda x: x * sigmoid(_tanh_argument(x)),
        gelu_tanh_slope,
        signed=True,
        growth=lambda x: np.abs(_tanh_argument(x)),
    ),
)
SCORE_FUNCTIONS = {row.name: row for row in _ROWS}
ACTIVATIONS = tuple(SCORE_FUNCTIONS)


@dataclass(frozen=True)
class PointwiseRows(Rows):
    """Rows whose weights also depend on learned numbers."""

    slopes: Mapping[str, Array] = field(default_factory=dict)  # dw/dx (..., L, S) of the number x
    numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of those that are arrays

    def to_own(self, dw: Array, size: Array) -> dict[str, tuple[Array, Array]]:
        """dx = Σ dw dw/dx, and the sum of the absolute values of its summands, `size` being that of dw."""

        def summed(summands: Array, shape: tuple[int, ...]) -> Array:
            return reduce_to(summands.sum(axis=(-2, -1)), shape)

        return {
            name: (summed(dw * self.slopes[name], shape), summed(size * np.abs(self.slopes[name]), shape))
            for name, shape in self.numbers.items()
        }


def shapes_of_arrays(**numbers: object) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in numbers.items() if isinstance(x, np.ndarray)}


def pointwise_rows(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    activation: str = "relu",
    alpha: float | Array = 1.0,
    gain: float | Array = 1.0,
    length: str | float | Array = "visible",
    shift: float | str | Array = 0.0,
    **options: Unpack[Common],
) -> PointwiseRows:
    """w = gain n^-alpha h(s + shift) on visible keys; ds = gain n^-alpha h'(s + shift) dw."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation; expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if isinstance(shift, str) and shift != "-log_length":
        raise ValueError(f"{op}: shift; expected a number or '-log_length', got {shift!r}")
    sc = scores(op, q, k, v, **options)
    of_alpha, of_gain = (learned(op, name, x, sc.leading) for name, x in (("alpha", alpha), ("gain", gain)))
    of_shift = shift if isinstance(shift, str) else learned(op, "shift", shift, sc.leading)
    rows = weighed(sc, activation, of_alpha, of_gain, length, of_shift)
    return replace(rows, numbers=shapes_of_arrays(alpha=alpha, gain=gain, shift=shift))


def weighed(
    sc: Scores,
    activation: str,
    alpha: float | Array,
    gain: float | Array,
    length: str | float | Array,
    shift: float | str | Array,
) -> PointwiseRows:
    """The rows of scores, with dw/dgain = n^-alpha h, dw/dalpha = -w log n and dw/dshift = gain n^-alpha h'."""
    if activation != "sigmoid" and sc.bias is not None and np.any(sc.bias == -np.inf):
        raise ValueError(f"{sc.op}: bias; expected finite values on visible pairs (hide pairs by `mask`), got -inf")
    function, n = SCORE_FUNCTIONS[activation], row_lengths(sc, length)[..., None]
    x = sc.s + (-np.log(n) if isinstance(shift, str) else shift)
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.where(sc.visible, gain * n**-alpha * function.h(x), 0.0)
        slope = np.where(sc.visible, gain * n**-alpha * function.slope(x), 0.0)
        slopes = {"gain": np.where(sc.visible, n**-alpha * function.h(x), 0.0), "alpha": -np.log(n) * w, "shift": slope}

    def pull(dw: Array, size: Array) -> tuple[Array, Array]:
        return slope * dw, np.abs(slope) * size

    signed = function.signed or isinstance(gain, np.ndarray) or gain < 0  # what is learned may become negative
    return PointwiseRows(sc, w, sc.n > 0, pull, signed, function.exact_zeros, slopes)


def reluformer_rows(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    gamma: float | Array = 1.0,
    length: str | float | Array = "visible",
    **options: Unpack[Common],
) -> PointwiseRows:
    """w = relu(s)/(gamma √(n/2)); dw/dgamma = -w/gamma."""
    sc = scores(op, q, k, v, **options)
    value = learned(op, "gamma", gamma, sc.leading, positive=True)
    rows = weighed(sc, "relu", 0.5, np.sqrt(2.0) / value, length, 0.0)
    return replace(rows, signed=False, slopes={"gamma": -rows.w / value}, numbers=shapes_of_arrays(gamma=gamma))


def sigmoid_rows(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    length: str | float | Array = "visible",
    **options: Unpack[Common],
) -> Rows:
    """w = 1/(1 + exp(-(s - log n)))."""
    return pointwise_rows(op, q, k, v, activation="sigmoid", alpha=0.0, length=length, shift="-log_length", **options)


@keywords_of(pointwise_rows)
def pointwise_attention(q: Array, k: Array, v: Array, **params: Unpack[Pointwise]) -> Array:
    """o_i = Σ_j w_ij v_j with w_ij = gain n_i^-alpha h(s_ij + shift) on the keys visible to i, s = scale q k^T + bias.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e). Leading axes broadcast; heads are axis -3.

    activation names h: relu (default), relu_squared, gelu (with the exact erf), gelu_tanh, softplus, identity, relu6,
    sigmoid, silu. The length factor is outside h; the paper finds alpha close to 1 best. length is n_i, the number
    of keys visible to query i ("visible", the default), S ("all": then the amount of padding matters), or a number or
    array (..., L) > 0. shift is added to the scores: a number, or "-log_length" for -log n_i. alpha, gain and shift may
    be arrays () or (H,), a number for each head; they are learned. The kinks have derivative 0: relu'(0) = relu6'(0) =
    relu6'(6) = 0.

    The other arguments are those of `softmax_attention`; bias is finite on visible pairs (sigmoid accepts -inf). A
    query that sees no key gets weights, output and gradients 0. ValueError for shapes, values and unknown arguments,
    TypeError for dtypes. Source: Wortsman et al. 2023 §3.
    """
    return attend(pointwise_rows("pointwise_attention", q, k, v, **params))


pointwise_attention_weights = derived_weights(pointwise_attention, pointwise_rows)
pointwise_attention_vjp, pointwise_attention_magnitudes = derived_gradients(
    pointwise_attention,
    pointwise_rows,
    """Gradients of `pointwise_attention`: {"q", "k", "v"}, "bias" if given, and "scale", "gain", "alpha" and "shift"
    where they are arrays, each in the shape of its input.

    do (..., L, e) is the cotangent of o. With ds = gain n^-alpha h'(s + shift) ⊙ dropout ⊙ (do v^T): dq = scale ds k,
    dk = scale ds^T q, dv = (dropout ⊙ w)^T do, dbias = ds, dscale = Σ ds ⊙ q k^T, and with dw = dropout ⊙ do v^T:
    dgain = Σ dw ⊙ n^-alpha h(s + shift), dalpha = -Σ dw ⊙ w log n, dshift = Σ ds. length is not differentiated.
    """,
    """What rounding errors are measured against: "o" and the gradients with the summands of their last contraction in
    absolute value, for example Σ_j |w| |v| for o and |scale| Σ_j |ds| |k| for q.
    """,
    pull=gradients,
)


@keywords_of(reluformer_rows)
def reluformer_attention(q: Array, k: Array, v: Array, **params: Unpack[Reluformer]) -> Array:
    """o_i = Σ_j w_ij v_j with w_ij = relu(s_ij)/(gamma √(n_i/2)): pointwise_attention(relu, alpha=1/2, gain=√2/gamma).

    For independent normal scores and values of unit variance the output variance is 1/gamma² whatever the length. The
    1/sqrt(d) of the scores is kept (§2.2). Under causal masking n_i counts the keys visible to each query; in
    cross-attention it is the source length without padding. The paper does not give a value of gamma: the default 1 is
    ours. Shapes, other arguments and errors as in `pointwise_attention`. Source: Shen et al. 2023 eq 6, §4.1.
    """
    return attend(reluformer_rows("reluformer_attention", q, k, v, **params))


reluformer_attention_weights = derived_weights(reluformer_attention, reluformer_rows)
reluformer_attention_vjp, reluformer_attention_magnitudes = derived_gradients(
    reluformer_attention,
    reluformer_rows,
    "Gradients of `reluformer_attention`, as in `pointwise_attention_vjp`, and dgamma = -Σ dw ⊙ w/gamma of an array.",
    "Magnitudes of `reluformer_attention`, as in `pointwise_attention_magnitudes`.",
    pull=gradients,
)


@keywords_of(sigmoid_rows)
def sigmoid_attention(q: Array, k: Array, v: Array, **params: Unpack[Sigmoid]) -> Array:
    """o_i = Σ_j w_ij v_j with w_ij = 1/(1 + exp(-(s_ij - log n_i))): pointwise_attention(sigmoid, alpha=0,
    shift="-log_length").

    The shift makes a row sum to about 1 at initialisation. Weights are exact in both tails: a tanh formula is not.
    bias may be -inf (weight and gradient 0). Shapes, other arguments and errors as in `pointwise_attention`. Source:
    Ramapuram et al. 2024 "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" §3.
    """
    return attend(sigmoid_rows("sigmoid_attention", q, k, v, **params))


sigmoid_attention_weights = derived_weights(sigmoid_attention, sigmoid_rows)
sigmoid_attention_vjp, sigmoid_attention_magnitudes = derived_gradients(
    sigmoid_attention,
    sigmoid_rows,
    "Gradients of `sigmoid_attention`, as in `pointwise_attention_vjp`.",
    "Magnitudes of `sigmoid_attention`, as in `pointwise_attention_magnitudes`.",
    pull=gradients,
)


def _mean(x: Array) -> Array:
    mean: Array = x.mean(axis=-1, keepdims=True)
    return mean


def normalise(x: Array, eps: float) -> tuple[Array, Array]:
    with np.errstate(invalid="ignore"):
        centred = x - _mean(x)
    r = 1.0 / np.sqrt(_mean(centred**2) + eps)
    return centred * r, r


class _LayerNorm(NamedTuple):
    op: str
    inputs: dict[str, tuple[Array, Array]]  # of q and of k: the array and its weight
    eps: float


def _layernorm(op: str, q: Array, k: Array, q_weight: Array, k_weight: Array, *, eps: float = 1e-6) -> _LayerNorm:
    number(op, "eps", eps, positive=True)
    inputs = {}
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        wide, wide_weight = as_float(op, name, x), as_float(op, f"{name}_weight", weight)
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must share the dtype of q; expected {q.dtype}, got {x.dtype}")
        if x.ndim < 2 or x.shape[-1] == 0:
            raise ValueError(f"{op}: {name} needs tokens and features; expected (..., n, d), got {x.shape}")
        if weight.shape != x.shape[-1:]:
            text = f"{op}: {name}_weight has the wrong shape; expected {x.shape[-1:]}, got {weight.shape}"
            raise ValueError(text)
        inputs[name] = wide, wide_weight
    return _LayerNorm(op, inputs, eps)


def _layernorm_pull(
    a: _LayerNorm, dq_normed: Array | None, dk_normed: Array | None, absolute: bool = False
) -> dict[str, Array]:
    """dx = r (g - mean(g) - y mean(g y)), dweight = Σ dy ⊙ y with g = weight ⊙ dy; with `absolute`, |x| + |mean| for
    the centred x and |g| + |mean(g)| for the centred g."""
    grads = {}
    for (name, (x, weight)), cotangent in zip(a.inputs.items(), (dq_normed, dk_normed), strict=True):
        dy = np.zeros(x.shape) if cotangent is None else as_float(a.op, f"d{name}_normed", cotangent)
        if dy.shape != x.shape:
            raise ValueError(f"{a.op}: d{name}_normed has the wrong shape; expected {x.shape}, got {dy.shape}")
        y, r = normalise(x, a.eps)
        g, tokens = weight * dy, tuple(range(x.ndim - 1))
        if absolute:
            uncentred = r * (np.abs(x) + np.abs(_mean(x)))
            grads[f"{name}_normed"] = uncentred * np.abs(weight)
            grads[name] = r * (np.abs(g) + np.abs(_mean(g)) + uncentred * np.abs(_mean(g * y)))
            grads[f"{name}_weight"] = (np.abs(dy) * uncentred).sum(axis=tokens)
        else:
            grads[name] = r * (g - _mean(g) - y * _mean(g * y))
            grads[f"{name}_weight"] = (dy * y).sum(axis=tokens)
    return grads


@refuse_others
def qk_layernorm(q: Array, k: Array, q_weight: Array, k_weight: Array, *, eps: float = 1e-6) -> tuple[Array, Array]:
    """(x - mean)/√(variance + eps) ⊙ weight over the last axis of q and of k, before the scores are scaled.

    q (..., L, d), k (..., S, d), q_weight and k_weight (d,), shared by heads, no bias; population variance of the
    centred values (two passes, so that a common offset does not hurt). eps = 1e-6 is flax's default, which the paper's
    code base uses. ValueError for shapes, TypeError for dtypes. Source: Wortsman et al. 2023 §4 after Dehghani et al.
    2023 §2.
    """
    a = _layernorm("qk_layernorm", q, k, q_weight, k_weight, eps=eps)
    q_normed, k_normed = (normalise(x, eps)[0] * weight for x, weight in a.inputs.values())
    return q_normed, k_normed


qk_layernorm_vjp, qk_layernorm_magnitudes = derived_gradients(
    qk_layernorm,
    _layernorm,
    """Gradients {"q", "k", "q_weight", "k_weight"} of `qk_layernorm`; a cotangent None is 0.

    With y the normalised x, r = 1/√(variance + eps) and g = weight ⊙ cotangent: dx = r (g - mean(g) - y mean(g y)) and
    dweight = Σ cotangent ⊙ y over all tokens.
    """,
    """What rounding errors of "q_normed", "k_normed" and of the gradients are measured against: every difference
    replaced by a sum of absolute values, for example r (|x| + |mean|) |weight| for q_normed.
    """,
    pull=_layernorm_pull,
)
