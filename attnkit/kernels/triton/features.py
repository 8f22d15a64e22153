"""The feature maps φ of linear attention and their derivatives, in float32, by name.

A kernel takes them as compile-time arguments. φ'(0) is 1 for elu_plus_one and 0 for relu, and NaN stays NaN.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import LOG2_E, d_identity, d_relu, exp, identity, relu
from attnkit.kernels.triton.special import fast_exp2


@triton.jit
def elu_plus_one(x):
    """x + 1 for x > 0, exp(x) below."""
    return tl.where(x > 0.0, x + 1.0, exp(tl.where(x > 0.0, 0.0, x)))


@triton.jit
def d_elu_plus_one(x):
    """1 for x > 0, exp(x) below."""
    return exp(tl.where(x > 0.0, 0.0, x))


@triton.jit
def half_elu_plus_one(x):
    """max(x, 0) + exp(min(x, 0)), to 2^-15: a root of exp(x) is a normal number where exp(x) is not."""
    root = fast_exp2(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * (LOG2_E * 0.5))
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + root * root


FEATURE_MAPS = {
    "elu_plus_one": (elu_plus_one, d_elu_plus_one),
    "relu": (relu, d_relu),
    "identity": (identity, d_identity),
}

HALF_FEATURE_MAPS = FEATURE_MAPS | {"elu_plus_one": (half_elu_plus_one, d_elu_plus_one)}
"""For features that are rounded to the precision of half types."""


@triton.jit
def slope_below_one(phi):
    """1 for φ > 1, φ below: elu_plus_one's."""
    return tl.minimum(phi, 1.0, propagate_nan=tl.PropagateNan.ALL)


SLOPES_OF_FEATURES = {"elu_plus_one": slope_below_one, "relu": d_relu, "identity": d_identity}
"""φ'(x) as a function of φ(x): one exponential for both."""

PRODUCTS = {"bfloat16": (tl.bfloat16, "ieee"), "float16": (tl.float32, "tf32"), "float32": (tl.float32, "tf32x3")}
"""By dtype: the dtype of the operands of matrix products, and their precision; returned states have those of
float32, and so have gradients but those of `linear_sweeps`.

Features and sums of float16 inputs may overflow float16; TF32 has the same precision.
"""
