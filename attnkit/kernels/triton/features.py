"""The feature maps φ of linear attention and their derivatives, in float32, by name.

A kernel takes them as compile-time arguments. φ'(0) is 1 for elu_plus_one and 0 for relu, and NaN stays NaN.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import d_identity, d_relu, exp, identity, relu


@triton.jit
def elu_plus_one(x):
    """x + 1 for x > 0, exp(x) below."""
    return tl.where(x > 0.0, x + 1.0, exp(tl.where(x > 0.0, 0.0, x)))


@triton.jit
def d_elu_plus_one(x):
    """1 for x > 0, exp(x) below."""
    return exp(tl.where(x > 0.0, 0.0, x))


FEATURE_MAPS = {
    "elu_plus_one": (elu_plus_one, d_elu_plus_one),
    "relu": (relu, d_relu),
    "identity": (identity, d_identity),
}

PRODUCTS = {"bfloat16": (tl.bfloat16, "ieee"), "float16": (tl.float32, "tf32"), "float32": (tl.float32, "tf32x3")}
"""By dtype: the dtype of the operands of matrix products, and their precision; gradients and states have those of
float32.

Features and sums of float16 inputs may overflow float16; TF32 has the same precision.
"""
