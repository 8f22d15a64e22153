"""Quadratic and linear attention by the compiled kernels for CPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attnkit._core.check import dtype_name
from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS, measured
from attnkit.backends.native import linear, lower, native_status
from attnkit.kernels.plan import is_array
from attnkit.ops import rela, statistics
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.statistics import RowStatistics
from attnkit.ops.vjps import VJPS

Array = np.ndarray
OPS = tuple(VJPS)


def serve(op: str, backward: bool, given: dict[str, Any], outputs: tuple[str, ...]) -> list[Array]:
    """The named outputs for the arrays and plain options of a call."""
    arrays, plain = lower.split(given, is_array)
    if "seed" in arrays:
        arrays["seed"] = _seed(arrays["seed"])
    for name in linear.COTANGENTS:
        if name in arrays:
            arrays[name] = np.ascontiguousarray(arrays[name])
    plan = lower.prepare(op, backward, _operands(arrays), plain, outputs)
    made = [np.empty(shape, dtype) for shape, dtype in plan.outputs]
    lower.run(plan, [x.ctypes.data for x in (*arrays.values(), *made)], lower.threads_of_environment())
    return made


def _operands(arrays: dict[str, Array]) -> tuple[tuple[str, Any, Any, Any], ...]:
    return tuple(
        [(name, x.shape, tuple([stride // x.itemsize for stride in x.strides]), x.dtype) for name, x in arrays.items()]
    )


def _seed(seed: Any) -> Array:
    if not is_array(seed):
        return np.array(int(seed), np.uint64)
    return seed if seed.itemsize >= 4 else seed.astype(np.int32)


def attend(op: str, q: Array, k: Array, v: Array, *, return_lse: bool = False, **options: Any) -> Any:
    """An op of `OPS`."""
    given = {"q": q, "k": k, "v": v, **options}
    if return_lse:
        return tuple(serve(op, False, given, ("o", "lse")))
    return serve(op, False, given, ("o",))[0]


def prepared(op: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Array] | None:
    """`attend` for calls with the same signature, in which only pointers change."""
    if options.get("return_lse") or options.get("dropout") is not None or len(arrays) != 3:
        return None
    return _again(op, dict(zip("qkv", arrays, strict=True)) | options)


def _again(op: str, given: dict[str, Any]) -> Callable[..., Array]:
    """A callable that gives o of an op for arguments like these, whether by position or by name."""
    named, plain = lower.split(given, is_array)
    plan = lower.prepare(op, False, _operands(named), plain, ("o",))
    ((shape, dtype),) = plan.outputs
    order, of_o = tuple(named), np.dtype(dtype)
    threads = lower.threads_of_environment()

    def again(*arrays: Array, **options: Any) -> Array:
        o = np.empty(shape, of_o)
        inputs = (*arrays, *[options[name] for name in order[len(arrays) :]])
        lower.run(plan, [x.ctypes.data for x in (*inputs, o)], threads)
        return o

    return again


def pull(
    op: str, q: Array, k: Array, v: Array, do: Array | None, dlse: Array | None = None, **options: Any
) -> dict[str, Array]:
    """The explicit gradients of an op of `OPS`."""
    return _pulled(op, {"q": q, "k": k, "v": v, **options}, {"do": do, "dlse": dlse})


def _pulled(op: str, given: dict[str, Any], cotangents: dict[str, Array | None]) -> dict[str, Array]:
    compute = np.float64 if given["q"].dtype == np.float64 else np.float32
    of = {name: x if name == "do" else x.astype(compute, copy=False) for name, x in cotangents.items() if x is not None}
    wanted = [name for name in lower.DIFFERENTIABLE if is_array(given.get(name))]
    found = serve(op, True, given | of, tuple(f"d{name}" for name in wanted))
    return dict(zip(wanted, found, strict=True))


def unsupported(op: str, backward: bool, *arrays: Any, **options: Any) -> str | None:
    """Why the library does not support a call."""
    status = native_status()
    if status.level is None:
        return status.reason
    if not all(x.flags.aligned for x in (*arrays, *options.values()) if isinstance(x, Array)):
        return "an array is not aligned to its elements"
    given, plain = lower.split({**dict(zip("qkv", arrays, strict=False)), **options}, is_array)
    dtypes = tuple((name, dtype_name(x)) for name, x in given.items() if name != "seed")
    if "seed" in given:
        dtypes += (("seed", "uint64"),)
    return lower.refusal(op, backward, dtypes, tuple(option for option in plain if option[0] in lower.ASKED))


KERNELS = {
    op: Kernel("native", partial(attend, op), partial(unsupported, op, False), prepared=partial(prepared, op))
    for op in OPS
}
KERNELS |= {f"{op}_vjp": Kernel("native", partial(pull, op), partial(unsupported, op, True)) for op in OPS}
KERNELS |= rela.kernels(KERNELS[POINTWISE.name])


# ---------------------------------------------------------------------------------------------- linear attention


def attend_linear(op: str, *arrays: Array, **options: Any) -> Any:
    """An op of `linear.OPS`."""
    given, outputs = linear.call(op, arrays, **options)
    return linear.answer(op, options, serve(op, False, given, outputs))


def prepared_linear(op: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Array] | None:
    """`prepared` for such an op."""
    given, outputs = linear.call(op, arrays, **options)
    return _again(op, given) if outputs == ("o",) else None


def pull_linear(op: str, *arrays: Any, dstate: Any = None, **options: Any) -> dict[str, Any]:
    """Its explicit gradients."""
    *inputs, do = arrays
    found = _pulled(op, linear.call(op, inputs, **options).given, linear.cotangents(op, options, do, dstate))
    return linear.gradients(op, options, found)


KERNELS |= linear.Served(attend_linear, pull_linear, unsupported).kernels()
KERNELS |= {name: KERNELS[name]._replace(prepared=partial(prepared_linear, name)) for name in linear.OPS}


# ---------------------------------------------------------------------------------------------- statistics of rows


def _measured(op: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The op of `OPS` that serves, and its arguments."""
    called, exact = measured(op, options)
    return called, {**dict(zip("qkv", arrays, strict=False)), **options, "exact_zeros": exact}


def measure(*arrays: Array, op: str, fields: tuple[str, ...], **options: Any) -> Any:
    """row_statistics of (q, k), attention_with_statistics of (q, k, v)."""
    outputs = (*(("o",) if len(arrays) == 3 else ()), *fields)
    called, given = _measured(op, arrays, options)
    found = dict(zip(outputs, serve(called, False, given, outputs), strict=True)) if outputs else {}
    rows = RowStatistics(**{name: found[name] for name in fields})
    return (found["o"], rows) if len(arrays) == 3 else rows


def measure_pull(
    *arrays: Array, op: str, fields: Any, dstats: RowStatistics, do: Array | None = None, **options: Any
) -> dict[str, Array]:
    """The explicit gradients of statistics."""
    cotangents = {f"d{name}": x for name, x in dstats._asdict().items() if name not in ("nonzero", "visible")}
    return _pulled(*_measured(op, arrays, options), {"do": do} | cotangents)


def measure_unsupported(
    backward: bool, *arrays: Array, op: str, fields: Any, dstats: Any = None, do: Any = None, **options: Any
) -> str | None:
    """Why the library does not support statistics."""
    called = RECORDS[op].family.of or op
    if called not in OPS:
        return f"statistics of {op} are served by the generic implementation"
    return unsupported(called, backward, *arrays, **options)


ROWS = Kernel("native", measure, partial(measure_unsupported, False))
ROWS_VJP = Kernel("native", measure_pull, partial(measure_unsupported, True))
KERNELS |= statistics.kernels(ROWS, ROWS, ROWS_VJP, ROWS_VJP)
