"""One instruction of the GPU for a function that Triton computes in many: relative errors of 2^-22, subnormals as 0.

Triton's interpreter, which has no assembler, computes the function itself.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # normal number


@triton.jit
def fast_log2(x):
    """log2(x) for x > 0; the absolute error is 2^-22 between 1/2 and 2."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def fast_exp2(x):
    """2^x."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def step(x):
    """1 for x > 0, of the order of 2^-100 at least, and 0 for others and NaN."""
    if INTERPRETED:
        y = tl.where(x > 0.0, 1.0, 0.0)
    else:
        y = tl.inline_asm_elementwise(
            "mul.ftz.sat.f32 $0, $1, 0f71800000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def fast_power(x, power):
    """x^power for x ≥ 0 and a power above 0: to power·2^-22, times -log2(x) for x below 1/2."""
    if INTERPRETED:
        none = x == 0.0
        y = tl.where(none, 0.0, tl.exp2(tl.log2(tl.where(none, 1.0, x)) * power))
    else:
        y = fast_exp2(fast_log2(x) * power)
    return y


@triton.jit
def fast_reciprocal(x):
    """1/x; 0 from 2^126 on."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def by_four(x):
    """A tile as four tiles of a quarter of its columns, each with numbers of all threads of a product."""
    rows: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (rows, x.shape[1] // 16, 2, 4, 2))
    even, odd = tl.split(x)
    a, b = tl.split(tl.permute(even, (0, 1, 3, 2)))
    c, d = tl.split(tl.permute(odd, (0, 1, 3, 2)))
    return a, b, c, d


@triton.jit
def from_four(a, b, c, d):
    """The inverse of `by_four`."""
    even, odd = tl.permute(tl.join(a, b), (0, 1, 3, 2)), tl.permute(tl.join(c, d), (0, 1, 3, 2))
    x = tl.join(even, odd)
    return tl.reshape(x, (x.shape[0], x.shape[1] * 16))


@triton.jit
def shared_reciprocal(x):
    """1/x of a tile with one reciprocal for four of its numbers, whose product must be below 2^126."""
    a, b, c, d = by_four(x)
    ab, cd = a * b, c * d
    r = fast_reciprocal(ab * cd)
    of_ab, of_cd = r * cd, r * ab
    return from_four(of_ab * b, of_ab * a, of_cd * d, of_cd * c)
