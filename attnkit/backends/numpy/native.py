"""Attention and statistics of its rows by the compiled kernels for CPUs."""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from attnkit._core.check import spelt
from attnkit._core.typing import Keywords, Option
from attnkit.backends.native import linear, lower, native_status, packed, rows, served
from attnkit.backends.native.load import warn_of_absence
from attnkit.kernels.plan import UNALIGNED, is_array
from attnkit.ops import gated, lsh, rela, ssmax
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.lowrank import linformer, nystrom, soft
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.vjps import VJPS

Array = np.ndarray
HEAD = object.__basicsize__


def address(x: Array) -> int:
    """Where the data of an array begin, read where compiled extensions read it (PyArray_DATA): right behind the head of
    the object. `x.ctypes.data` is the same number and takes six times as long."""
    return ctypes.c_size_t.from_address(id(x) + HEAD).value


def serve(op: str, backward: bool, arguments: Keywords, outputs: tuple[str, ...]) -> list[Array]:
    """The named outputs for the arrays and plain options of a call."""
    arrays, plain = lower.split_arguments(arguments, is_array)
    if "seed" in arrays:
        arrays["seed"] = _seed(arrays["seed"])
    arrays = {name: np.asarray(x, np.int64 if name in lower.EDGES else None) for name, x in arrays.items()}
    for name in linear.COTANGENTS:
        if name in arrays:
            arrays[name] = np.ascontiguousarray(arrays[name])
    plan = lower.prepare(op, backward, _operands(arrays), plain, outputs)
    results = [np.empty(x.shape, x.dtype) for x in plan.outputs]
    lower.run(plan, [address(x) for x in (*arrays.values(), *results)], lower.threads_of_environment())
    return results


def _operands(arrays: dict[str, Array]) -> tuple[tuple[str, lower.Shape, lower.Shape, np.dtype], ...]:
    return tuple(
        [(name, x.shape, tuple([stride // x.itemsize for stride in x.strides]), x.dtype) for name, x in arrays.items()]
    )


def _seed(seed: Array | int) -> Array:
    if not isinstance(seed, Array):
        return np.array(int(seed), np.uint64)
    return seed if seed.itemsize >= 4 else seed.astype(np.int32)


def evaluate(op: str, arguments: Keywords, outputs: tuple[str, ...]) -> list[Array]:
    """The named outputs of an op."""
    return serve(op, False, arguments, outputs)


def prepared(op: str, arrays: tuple[Array, ...], options: Keywords) -> Callable[..., Array] | None:
    """o of quadratic attention for calls with the same signature, in which only pointers change."""
    if options.get(served.further(op)[0]) or options.get("dropout") is not None or len(arrays) != 3:
        return None
    return _again(op, dict(zip("qkv", arrays, strict=True)) | options)


def _again(op: str, arguments: Keywords) -> Callable[..., Array]:
    """A callable that gives o of an op for arguments like these, whether by position or by name."""
    named, plain = lower.split_arguments(arguments, is_array)
    plan = lower.prepare(op, False, _operands(named), plain, ("o",))
    ((shape, _, dtype),) = plan.outputs
    order, of_o = tuple(named), np.dtype(dtype)
    threads = lower.threads_of_environment()

    def again(*arrays: Array, **options: Option) -> Array:
        o = np.empty(shape, of_o)
        inputs = (*arrays, *[options[name] for name in order[len(arrays) :]])
        lower.run(plan, [address(x) for x in (*inputs, o)], threads)
        return o

    return again


def pulled(op: str, arguments: Keywords, cotangents: Mapping[str, Array | None]) -> dict[str, Array]:
    """The explicit gradients of an op."""
    compute = np.float64 if arguments["q"].dtype == np.float64 else np.float32
    of = {name: x if name == "do" else x.astype(compute, copy=False) for name, x in cotangents.items() if x is not None}
    arrays, _ = lower.split_arguments(arguments, is_array)
    names = [name for name in lower.DIFFERENTIABLE if name in arrays]
    grads = serve(op, True, arguments | of, tuple(f"d{name}" for name in names))
    return dict(zip(names, grads, strict=True))


def unsupported(op: str, *arrays: Array, **options: Option) -> str | None:
    """Why the library does not support a call."""
    status = native_status()
    if status.level is None:
        return status.reason
    if not all(x.flags.aligned for x in (*arrays, *options.values()) if isinstance(x, Array)):
        return UNALIGNED
    pairs = [*zip("qkv", arrays, strict=False), *options.items()]
    dtypes = tuple([(name, spelt(x.dtype)) for name, x in pairs if isinstance(x, Array)])
    own = tuple([(name, options[name]) for name in lower.ASKED if name in options])
    return lower.refused_axes(*arrays, **options) or lower.refusal(op, dtypes, own)


def regret(*arrays: Array, **options: object) -> None:
    """A call that another implementation serves: without the library that takes more time."""
    warn_of_absence()


def prepared_linear(op: str, arrays: tuple[Array, ...], options: Keywords) -> Callable[..., Array] | None:
    """The same for linear attention."""
    arguments, outputs = linear.call(op, arrays, **options)
    as_they_are = linear.comes_as_it_is(op, arrays, options)
    return _again(op, arguments) if outputs == ("o",) and as_they_are else None


def is_finite(q: Array) -> bool:
    """Whether nothing in q is NaN or infinite, by their sum; False where that is too large."""
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(np.sum(q)))


CALLS = (evaluate, pulled, unsupported)
KERNELS = served.Served(*CALLS).kernels() | linear.Linear(*CALLS).kernels() | rows.Rows(*CALLS).kernels()
KERNELS |= packed.Packed(*CALLS).kernels() | rela.kernels(KERNELS[POINTWISE.name])
KERNELS |= gated.kernels(KERNELS[POINTWISE.name])
KERNELS |= linformer.kernels(KERNELS[SOFTMAX.name]) | nystrom.kernels(KERNELS[SOFTMAX.name])
KERNELS |= soft.kernels(KERNELS[GAUSSIAN.name]) | ssmax.kernels(KERNELS, is_finite) | lsh.kernels(KERNELS[SOFTMAX.name])
KERNELS |= {op: KERNELS[op]._replace(prepared=partial(prepared, op)) for op in VJPS}
KERNELS |= {op: KERNELS[op]._replace(prepared=partial(prepared_linear, op)) for op in linear.OPS}
KERNELS = {op: kernel._replace(regret=regret) for op, kernel in KERNELS.items()}
