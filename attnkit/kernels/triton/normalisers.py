"""The functions that turn rows of scores into weights, by name: compile-time arguments of the kernels in `rows`.

With the maximum of a row subtracted, x = (α-1)(s - max s) and power = 1/(α-1), a weight is `weigh(x - τ)` with Σ weigh
= 1; power·`slope` is its derivative, and the gradient of the scores is proportional to `tilt(p)` = p^{2-α} (Peters et
al. 2019 eq 8-11). Softmax has no threshold: `slope` is None, and weights are divided by their sum. Constants are
written to the right of a tensor because Triton's interpreter requires it.
"""

from typing import Any

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import LOG2_E, d_relu, exp, relu, relu_squared
from attnkit.kernels.triton.special import fast_exp2, fast_power, step


@triton.jit
def weigh_exp(x, power):
    """exp(x) for x ≤ 0."""
    return exp(x)


@triton.jit
def weigh_exp2(y, power):
    """2^y for y = x·log2(e), to 2^-22."""
    return fast_exp2(y)


@triton.jit
def tilt_exp(p, above):
    """p."""
    return p


@triton.jit
def weigh_relu(t, power):
    """[t]₊."""
    return relu(t)


@triton.jit
def slope_relu(t, power):
    """1 for t > 0; a NaN is left to the weight."""
    return step(t)


@triton.jit
def tilt_relu(p, above):
    """1 for p > 0."""
    return d_relu(p)


@triton.jit
def weigh_relu_squared(t, power):
    """[t]₊²."""
    return relu_squared(t)


@triton.jit
def slope_relu_squared(t, power):
    """[t]₊."""
    return relu(t)


@triton.jit
def tilt_relu_squared(p, above):
    """√p."""
    return tl.sqrt(p)


@triton.jit
def weigh_power(t, power):
    """[t]₊^power."""
    none = t <= 0.0
    return tl.where(none, 0.0, tl.exp2(tl.log2(tl.where(none, 1.0, t)) * power))


@triton.jit
def slope_power(t, power):
    """[t]₊^(power - 1)."""
    none = t <= 0.0
    return tl.where(none, 0.0, tl.exp2(tl.log2(tl.where(none, 1.0, t)) * (power - 1.0)))


@triton.jit
def half_slope_power(t, power):
    """The same in few instructions."""
    return fast_power(relu(t), power - 1.0)


@triton.jit
def half_weigh_power(t, power):
    """[t]₊^power, with the logarithm and the exponential of the slope."""
    return half_slope_power(t, power) * relu(t)


@triton.jit
def half_tilt_power(p, above):
    """p^(1 - above) in few instructions."""
    return fast_power(relu(p), 1.0 - above)


@triton.jit
def tilt_power(p, above):
    """p^(1 - above), 0 where p = 0."""
    none = p <= 0.0
    return tl.where(none, 0.0, tl.exp2(tl.log2(tl.where(none, 1.0, p)) * (1.0 - above)))


NORMALISERS = {
    "softmax": (weigh_exp, None, tilt_exp),
    "sparsemax": (weigh_relu, slope_relu, tilt_relu),
    "entmax15": (weigh_relu_squared, slope_relu_squared, tilt_relu_squared),
    "entmax": (weigh_power, slope_power, tilt_power),
}

HALF_SOFTMAX = (weigh_exp2, None, None)
"""The same for weights of softmax that are rounded to half types and summed, not for gradients."""

HALF_NORMALISERS = NORMALISERS | {"entmax": (half_weigh_power, half_slope_power, half_tilt_power)}
"""For weights and gradients of scores that are rounded to half types."""

HALF_KERNELS = ("forward_online", "softmax_parts", "statistics_of_softmax")


def functions(kernel: Any, normaliser: str, half: bool, negative: bool) -> dict[str, Any]:
    """The compile-time functions of a kernel, and whether its scale is negative."""
    named = (HALF_NORMALISERS if half else NORMALISERS)[normaliser]
    if half and normaliser == "softmax" and kernel.__name__ in HALF_KERNELS:
        named = HALF_SOFTMAX
    values = {**dict(zip(("WEIGH", "SLOPE", "TILT"), named, strict=True)), "NEGATIVE": negative}
    return {name: value for name, value in values.items() if name in kernel.arg_names}


LIFT = 7.0


@triton.constexpr_function
def unit_of(weigh):
    """What x is multiplied by for a function."""
    return LOG2_E.value if weigh.fn.__name__ == "weigh_exp2" else 1.0


@triton.constexpr_function
def lift_of(weigh):
    """The binary logarithm of what weights are multiplied by, so that all that bfloat16 has are normal in float32."""
    return LIFT if weigh.fn.__name__ == "weigh_exp2" else 0.0
