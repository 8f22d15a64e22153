"""The non-linearities h of point-wise attention and their derivatives dh, in float32, by name.

A kernel takes them as compile-time arguments. Derivatives at kinks are 0, and NaN stays NaN. Constants stand to the
right of a tensor: Triton's interpreter needs that.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # a product with it rounds it to float32 ...
LOG2_E_REST = tl.constexpr(1.925963033500011e-08)  # ... and this is what the rounding took away
LN_2 = tl.constexpr(0.6931471805599453)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
TWO_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2√(2/π)
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def exp(x):
    """exp(x) for x ≤ 0 with an error of a few units however small the result.

    The rounding of x·log2(e) grows with |x|: it is computed exactly and put back as a factor 1 + ln(2)·error.
    """
    x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * LOG2_E
    error = tl.fma(x, LOG2_E, -y) + x * LOG2_E_REST
    result = tl.exp2(y)
    return tl.fma(result, error * LN_2, result)


@triton.jit
def log1p(z):
    """log(1 + z) for 0 ≤ z ≤ 1: log(w)·z/(w - 1) with w = 1 + z as rounded, for w - 1 is exact."""
    w = 1.0 + z
    rounded = w - 1.0
    return tl.where(rounded == 0.0, z, tl.log(w) * (z / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def normal_cdf(s):
    """Φ(s), the distribution function of the normal distribution."""
    return 0.5 * (1.0 + tl.erf(s * SQRT_HALF))


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
    """1/(1 + exp(-s)), or exp(s)/(1 + exp(s)) below 0: no rounding of the tail, no overflow."""
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
    return s * sigmoid(s)


@triton.jit
def d_silu(s):
    """σ(s) + s·σ'(s)."""
    return sigmoid(s) + s * d_sigmoid(s)


@triton.jit
def gelu(s):
    """s·Φ(s)."""
    return s * normal_cdf(s)


@triton.jit
def d_gelu(s):
    """Φ(s) + s·exp(-s²/2)/√(2π)."""
    return normal_cdf(s) + s * exp(-0.5 * s * s) * INVERSE_SQRT_2PI


@triton.jit
def gelu_tanh(s):
    """s·(1 + tanh(t))/2 = s·σ(2t) with t = √(2/π)·(s + 0.044715 s³)."""
    return s * sigmoid((s + s * s * s * TANH_CUBIC) * TWO_TANH_SCALE)


@triton.jit
def d_gelu_tanh(s):
    """σ(2t) + s·σ'(2t)·2t'."""
    twice = (s + s * s * s * TANH_CUBIC) * TWO_TANH_SCALE
    slope = (s * s * TANH_CUBIC * 3.0 + 1.0) * TWO_TANH_SCALE
    return sigmoid(twice) + s * d_sigmoid(twice) * slope


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
    "exp": (exponential, exponential),
}
