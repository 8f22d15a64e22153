"""A quarter of the time of Triton's interpreter, for the process of an adapter: `install` changes it for all kernels.

The interpreter puts its own functions in the place of those of triton.language before a launch, and looks through all
of the language again for each call of a function of the kernel, which found them replaced. It makes its table of dtypes
and the constants of a shape anew for each operation, and asks by a dozen operations whether integers overflow, without
saying so. Here such things are done once, and an overflow is an error; what is computed stays as it is, but for fused
products before Triton 3.9, which are rounded once as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from types import FunctionType, ModuleType

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from attnkit.kernels.triton import sizes


@cache
def languages_of(function: FunctionType) -> tuple[ModuleType, ...]:
    """The modules of the language among the globals of a function."""
    return tuple(x for x in function.__globals__.values() if x is tl or x is tl.core)


def once(replace: Callable[[FunctionType], object]) -> Callable[[FunctionType], object]:
    """The interpreter's replacement of the language, but for what is replaced already."""

    def replace_rest(function: FunctionType) -> object:
        languages = languages_of(function)
        samples = (tl.tensor.to, *(language.load for language in languages))  # are replaced with all others
        if not languages or any(map(tl.core.is_builtin, samples)):
            return replace(function)
        return interpreter._LangPatchScope()  # of nothing, since whoever launched restores it

    return replace_rest


UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def refuse_overflow(semantic: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor, op: Callable[..., tl.tensor]) -> None:
    """Signed integers that a GPU would wrap around: the interpreter looks for them, and keeps to itself what it finds.

    Unsigned ones are meant to wrap around, where numbers are drawn.
    """
    scalar = lhs.type.scalar
    if scalar.is_int_signed() and scalar.int_bitwidth < 64:
        wide = UFUNCS[op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if wide.min() < scalar.get_int_min_value() or wide.max() > scalar.get_int_max_value():
            raise OverflowError(f"{scalar} of operation {op.__name__}: {wide.min()} to {wide.max()}")


def fuse(builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """x·y + z of float32: the product is exact in float64, and the sum is rounded there and to float32."""
    product = np.multiply(x.data, y.data, dtype=np.float64)
    return TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)


def remember(dtype_of: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """The NumPy dtype of each dtype of the language, looked up once."""
    known = cache(dtype_of)

    def dtype_of_elements(dtype: tl.dtype) -> np.dtype:
        element = dtype.scalar
        return dtype_of(element) if element.is_ptr() else known(element)

    return dtype_of_elements


@cache
def shape_of_block(sizes: tuple[int, ...]) -> tuple[tl.tuple, int]:
    """What the type of blocks holds of a shape."""
    return tl.tuple(sizes), validate_block_shape(sizes)


def describe_block(block: tl.block_type, element_ty: tl.dtype, shape: Sequence[int] | tl.tuple) -> None:
    """Initialise the type of blocks of a shape."""
    sizes = tuple(x.value if isinstance(x, tl.constexpr) else x for x in getattr(shape, "values", shape))
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    block.element_ty = element_ty
    block.shape, block.numel = shape_of_block(sizes)
    block.name = f"<{sizes}, {element_ty}>"


@cache
def shape_of_tensor(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """What a tensor holds of its shape."""
    return tl.tuple([tl.constexpr(x) for x in sizes]), tl.constexpr(prod(sizes))


def describe_tensor(tensor: tl.tensor, handle: object, dtype: tl.dtype) -> None:
    """Initialise a tensor of a type, whose values the handle has."""
    tensor.handle, tensor.type, tensor.dtype = handle, dtype, dtype.scalar
    tensor.shape, tensor.numel = shape_of_tensor(tuple(dtype.shape.values) if dtype.is_block() else ())


def install() -> None:
    """Change the interpreter of this process, once."""
    if interpreter._patch_lang.__name__ != "replace_rest":
        interpreter._patch_lang = once(interpreter._patch_lang)
        interpreter._get_np_dtype = remember(interpreter._get_np_dtype)
        tl.block_type.__init__, tl.tensor.__init__ = describe_block, describe_tensor
        if sizes.BEFORE_3_9:
            InterpreterBuilder.create_fma = fuse
        TritonSemantic.binary_op_sanitize_overflow_impl = refuse_overflow
