"""bfloat16 as on a GPU in Triton's interpreter, for the process of an adapter: `install` changes it for all kernels.

The interpreter keeps bfloat16 as 16-bit integers. It rounds float32 to it towards zero, and multiplies and adds the
integers. Here numbers are rounded to nearest even, and arithmetic is that of float32, rounded once; products of
matrices are exact and added in float32. Loads, stores, selections and changes of shape move bits and stay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from attnkit_conformance.model.case import HAS_BFLOAT16, numpy_dtype


def is_bfloat16(x: TensorHandle) -> bool:
    """Whether a handle has numbers in bfloat16, not pointers to them."""
    return bool(x.dtype.scalar == tl.bfloat16)


def float32_of(x: TensorHandle) -> TensorHandle:
    """A handle in float32 for one in bfloat16, any other as it is."""
    if not is_bfloat16(x):
        return x
    return TensorHandle(x.data.view(numpy_dtype("bfloat16")).astype(np.float32), tl.float32)


def bfloat16_of(x: TensorHandle) -> TensorHandle:
    """A handle of numbers of any dtype in bfloat16."""
    return TensorHandle(x.data.astype(np.float32).astype(numpy_dtype("bfloat16")).view(np.uint16), tl.bfloat16)


def cast(convert: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """A conversion of the interpreter, through float32 if it is from or to bfloat16."""

    def cast_or_round(self: InterpreterBuilder, x: TensorHandle, dtype: tl.dtype, *mode: object) -> TensorHandle:
        if is_bfloat16(x):
            x = float32_of(x)
            return x if dtype.scalar == tl.float32 else cast_or_round(self, x, dtype, *mode)
        return bfloat16_of(x) if dtype.scalar == tl.bfloat16 else convert(self, x, dtype, *mode)

    return cast_or_round


def arithmetic(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """An operation of the interpreter on numbers, in float32 for those in bfloat16; the results of comparisons stay."""

    def in_float32(self: InterpreterBuilder, *operands: TensorHandle) -> TensorHandle:
        if not is_bfloat16(operands[0]):
            return operation(self, *operands)
        result = operation(self, *(float32_of(x) if isinstance(x, TensorHandle) else x for x in operands))
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else bfloat16_of(result)

    return in_float32


def product(dot: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The interpreter's product of matrices, of numbers in float32 for those in bfloat16."""

    def in_float32(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, *rest: object) -> TensorHandle:
        return dot(self, float32_of(x), float32_of(y), *rest)

    return in_float32


def install() -> None:
    """Change the interpreter of this process, unless NumPy has no bfloat16: then none is judged."""
    if not HAS_BFLOAT16:
        return
    builder = InterpreterBuilder
    builder.cast_impl, builder.create_fp_to_fp = cast(builder.cast_impl), cast(builder.create_fp_to_fp)
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, arithmetic(getattr(builder, name)))
    builder.create_dot = product(builder.create_dot)
