"""The non-linearities h of point-wise attention and their derivatives dh, in float32, by name.

A kernel takes them as compile-time arguments. Derivatives at kinks are 0, and NaN stays NaN. Constants are written to
the right of a tensor because Triton's interpreter requires it.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.special import shared_reciprocal

LOG2_E = tl.constexpr(1.4426950408889634)  # rounded to float32 in products ...
LOG2_E_REST = tl.constexpr(1.925963033500011e-08)  # ... and the rounding error
LN_2 = tl.constexpr(0.6931471805599453)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
TWO_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2√(2/π)
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def exp(x):
    """exp(x) for x ≤ 0 with an error of a few units however small the result.

    The rounding of x·log2(e) grows with |x|: it is computed exactly and corrected by a factor 1 + ln(2)·error.
    """
    x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * LOG2_E
    error = tl.fma(x, LOG2_E, -y) + x * LOG2_E_REST
    result = tl.exp2(y)
    return tl.fma(result, error * LN_2, result)


@triton.jit
def log1p(z):
    """log(1 + z) for 0 ≤ z ≤ 1: log(w)·z/(w - 1) with w = 1 + z rounded, since w - 1 is exact."""
    w = 1.0 + z
    rounded = w - 1.0
    return tl.where(rounded == 0.0, z, tl.log(w) * (z / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def gated(y, x):
    """y·σ(x). It can be normal where σ(x) underflows: y is multiplied by exp(x/2) twice."""
    root = exp(-0.5 * tl.abs(x))
    return tl.where(x < 0.0, y * root * root, y) / (1.0 + root * root)


@triton.jit
def mirrored_sigmoid(x):
    """σ(-x), from the exponential in `gated`."""
    root = exp(-0.5 * tl.abs(x))
    return tl.where(x < 0.0, 1.0, root * root) / (1.0 + root * root)


@triton.jit
def mills_ratio(x):
    """m(x) = (1 - Φ(x))/φ(x) for x ≥ 0, Φ the distribution function of the normal distribution and φ its density.

    (1 + x)·m(x) as a polynomial in (x - 4)/(x + 4): interpolation at Chebyshev nodes for x from 0 to 14, where φ is 0
    in float32. The relative error is 7e-8, half a unit of the last place; with rounding, below 2 units.
    """
    q = 1.0 - 8.0 / (x + 4.0)
    value = q * 0.000247430202 + 0.00186496507
    value = value * q - 0.00100717472
    value = value * q - 0.0126840863
    value = value * q + 0.045018442
    value = value * q - 0.0806730092
    value = value * q + 0.0716858357
    value = value * q + 0.0350893252
    value = value * q - 0.242399558
    value = value * q + 1.18326199
    return value / (1.0 + x)


@triton.jit
def bounded_size(s):
    """|s|, or 64, where φ is 0."""
    return tl.minimum(tl.abs(s), 64.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def identity(s):
    """s."""
    return s


@triton.jit
def d_identity(s):
    """1."""
    return s * 0.0 + 1.0


@triton.jit
def relu(s):
    """max(s, 0)."""
    return tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def d_relu(s):
    """1 for s > 0."""
    return tl.where(s <= 0.0, 0.0, 1.0)


@triton.jit
def relu_squared(s):
    """max(s, 0)²."""
    r = relu(s)
    return r * r


@triton.jit
def d_relu_squared(s):
    """2·max(s, 0)."""
    return 2.0 * relu(s)


@triton.jit
def relu6(s):
    """min(max(s, 0), 6)."""
    return tl.where(s <= 0.0, 0.0, tl.where(s >= 6.0, 6.0, s))


@triton.jit
def d_relu6(s):
    """1 for 0 < s < 6."""
    return tl.where((s <= 0.0) | (s >= 6.0), 0.0, 1.0)


@triton.jit
def sigmoid(s):
    """1/(1 + exp(-s)), or exp(s)/(1 + exp(s)) below 0: the tail is exact and nothing overflows."""
    z = exp(-tl.abs(s))
    return tl.where(s < 0.0, z, 1.0) / (1.0 + z)


@triton.jit
def d_sigmoid(s):
    """σ(s)·σ(-s) = z/(1 + z)² with z = exp(-|s|)."""
    z = exp(-tl.abs(s))
    return z / ((1.0 + z) * (1.0 + z))


@triton.jit
def softplus(s):
    """log(1 + exp(s)) = max(s, 0) + log(1 + exp(-|s|))."""
    return relu(s) + log1p(exp(-tl.abs(s)))


@triton.jit
def silu(s):
    """s·σ(s)."""
    return gated(s, s)


@triton.jit
def d_silu(s):
    """σ(s)·(1 + s·σ(-s))."""
    return gated(1.0 + s * mirrored_sigmoid(s), s)


@triton.jit
def gelu(s):
    """s·Φ(s) = max(s, 0) - |s|·m(|s|)·φ(s): not by 1 + erf, which loses the tail."""
    a = bounded_size(s)
    return relu(s) - a * mills_ratio(a) * (exp(-0.5 * a * a) * INVERSE_SQRT_2PI)


@triton.jit
def d_gelu(s):
    """Φ(s) + s·φ(s), which is φ(s)·(m(|s|) - |s|) below 0. φ is split into two factors, whose product may underflow."""
    a = bounded_size(s)
    root = exp(-0.25 * a * a)
    rest = (a - mills_ratio(a)) * root * (root * INVERSE_SQRT_2PI)
    return tl.where(s > 0.0, 1.0 + rest, -rest)


@triton.jit
def doubled(s):
    """2t with t = √(2/π)·(s + 0.044715 s³)."""
    return s * (s * s * (TANH_CUBIC * TWO_TANH_SCALE) + TWO_TANH_SCALE)


@triton.jit
def gelu_tanh(s):
    """s·(1 + tanh(t))/2 = s·σ(2t)."""
    return gated(s, doubled(s))


@triton.jit
def d_gelu_tanh(s):
    """σ(2t)·(1 + s·σ(-2t)·2t')."""
    x = doubled(s)
    slope = s * s * (TANH_CUBIC * TWO_TANH_SCALE * 3.0) + TWO_TANH_SCALE
    return gated(1.0 + s * mirrored_sigmoid(x) * slope, x)


@triton.jit
def exponential(s):
    """exp(s) for any s; infinite beyond 88.7, where float32 ends."""
    return tl.where(s > 88.7, float("inf"), exp(tl.minimum(s, 88.7, propagate_nan=tl.PropagateNan.ALL)))


ACTIVATIONS = {
    "relu": (relu, d_relu),
    "relu_squared": (relu_squared, d_relu_squared),
    "gelu": (gelu, d_gelu),
    "gelu_tanh": (gelu_tanh, d_gelu_tanh),
    "softplus": (softplus, sigmoid),
    "identity": (identity, d_identity),
    "relu6": (relu6, d_relu6),
    "sigmoid": (sigmoid, d_sigmoid),
    "silu": (silu, d_silu),
}
"""(h, h') by the name of the score function."""
OF_DISTANCES = {"exp": (exponential, exponential)}
"""The same with distances instead of products: Gaussian attention. No score function of products has these names."""

# ---------------------------------------------------------------------------------------------- for half types
# Weights and gradients of scores that are rounded to half types are computed to 2^-12 at least, tails included. Most
# functions take s·log2(e), which costs nothing where scores are scaled. h and dh have their exponential in common, and
# the compiler computes it once. A reciprocal shared by four numbers of a row carries NaN from one to the others.


@triton.jit
def bounded_exp2(y):
    """2^y, 2^31 at most, so that four of 1 + 2^y can be multiplied."""
    return tl.exp2(tl.minimum(y, 31.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def bounded_sigmoid(y):
    """u/(1 + u) with u = 2^y."""
    u = bounded_exp2(y)
    return u * shared_reciprocal(1.0 + u)


@triton.jit
def half_sigmoid(y):
    """1/(1 + u), or u/(1 + u) below 0, with u = 2^-|y|, which its slope needs for the tail on the other side."""
    u = tl.exp2(-tl.abs(y))
    return tl.where(y < 0.0, u, 1.0) * shared_reciprocal(1.0 + u)


@triton.jit
def half_d_sigmoid(y):
    """u/(1 + u)² with u = 2^-|y|, since σ' is even."""
    u = tl.exp2(-tl.abs(y))
    r = shared_reciprocal(1.0 + u)
    return u * r * r


@triton.jit
def half_silu(y):
    """s·u/(1 + u)."""
    return y * LN_2 * bounded_sigmoid(y)


@triton.jit
def half_d_silu(y):
    """σ(s)·(1 + s·σ(-s)), σ(-s) being 1/(1 + u)."""
    u = bounded_exp2(y)
    r = shared_reciprocal(1.0 + u)
    return u * r * (1.0 + y * LN_2 * r)


@triton.jit
def half_softplus(y):
    """max(s, 0) + z·p(z) with z = exp(-|s|) and p(z) a polynomial for log(1 + z)/z, to 2^-14."""
    z = tl.exp2(-tl.abs(y))
    p = z * 0.0413472579 - 0.157427118
    p = p * z + 0.306300873
    p = p * z - 0.496977794
    p = p * z + 0.999943278
    return relu(y) * LN_2 + z * p


@triton.jit
def half_exponential(y):
    """2^y."""
    return tl.exp2(y)


@triton.jit
def normal_tail(a):
    """Φ(-a) for 0 ≤ a ≤ 13.5, where float32 ends: 2 to the power of a polynomial, to 2^-12."""
    p = a * 2.51331517e-08 - 1.63102892e-06
    p = p * a + 4.55520259e-05
    p = p * a - 0.000722900842
    p = p * a + 0.00729975764
    p = p * a - 0.0504401363
    p = p * a - 0.463314832
    p = p * a - 1.14874337
    return tl.exp2(p * a - 1.00021038)


@triton.jit
def half_size(s):
    """|s|, or 13.5, where Φ(-|s|) is below the numbers of float32."""
    return tl.minimum(tl.abs(s), 13.5, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def half_gelu(s):
    """s·Φ(s) = max(s, 0) - |s|·Φ(-|s|)."""
    a = half_size(s)
    return relu(s) - a * normal_tail(a)


@triton.jit
def half_d_gelu(s):
    """Φ(s) + s·φ(s), which is Φ(-|s|) - |s|·φ(s) below 0."""
    a = half_size(s)
    rest = normal_tail(a) - a * tl.exp2(a * a * (-0.5 * LOG2_E)) * INVERSE_SQRT_2PI
    return tl.where(s > 0.0, 1.0 - rest, rest)


@triton.jit
def half_gelu_tanh(s):
    """s·σ(2t)."""
    return s * bounded_sigmoid(doubled(s) * LOG2_E)


@triton.jit
def half_d_gelu_tanh(s):
    """σ(2t)·(1 + s·σ(-2t)·2t')."""
    u = bounded_exp2(doubled(s) * LOG2_E)
    r = shared_reciprocal(1.0 + u)
    slope = s * s * (TANH_CUBIC * TWO_TANH_SCALE * 3.0) + TWO_TANH_SCALE
    return u * r * (1.0 + s * r * slope)


BINARY = {
    "sigmoid": (half_sigmoid, half_d_sigmoid),
    "silu": (half_silu, half_d_silu),
    "softplus": (half_softplus, half_sigmoid),
    "exp": (half_exponential, half_exponential),
}
HALF_ACTIVATIONS = BINARY | {
    "gelu": (half_gelu, half_d_gelu),
    "gelu_tanh": (half_gelu_tanh, half_d_gelu_tanh),
}
"""For weights that are rounded to half types; those of BINARY take s·log2(e). The others are exact as they are."""
WITHOUT_SLOPE = {"sigmoid": bounded_sigmoid}
"""h where no slope is computed beside it, if that is cheaper."""

SHARING = ("sigmoid", "silu", "gelu_tanh")
"""Those that share reciprocals in half types."""


def forms(activation: str, pieces: bool, half: bool, statistics: bool, lean: bool, open_rows: bool) -> tuple[str, ...]:
    """The tables of `sizes` whose exceptions a call takes. `pieces`: h is a polynomial in pieces, whose slope takes few
    registers. `open_rows`: nothing but causality hides a pair."""
    sharing = half and not statistics and activation in SHARING
    names = ("distances",) * (activation in OF_DISTANCES) + ("statistics",) * statistics + ("sharing",) * sharing
    return names + ("lean sharing" if sharing else "lean", *("lean pieces",) * (open_rows and pieces)) * lean


OF_BINARY = frozenset(h.fn.__name__ for pair in (*BINARY.values(), (*WITHOUT_SLOPE.values(),)) for h in pair)


@triton.constexpr_function
def unit_of(h):
    """What scores are multiplied by for a function."""
    return LOG2_E.value if h.fn.__name__ in OF_BINARY else 1.0


def functions(activation, rounded, slope=True):
    """h and dh; `rounded`: for weights and gradients of scores that are rounded to half types and summed over keys or
    queries; without `slope`, h alone is asked for."""
    exact = ACTIVATIONS | OF_DISTANCES
    h, dh = (HALF_ACTIVATIONS if rounded else {}).get(activation, exact[activation])
    return (h if slope or not rounded else WITHOUT_SLOPE.get(activation, h)), dh
