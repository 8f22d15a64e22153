"""Attention and statistics of its rows by the compiled kernels for CPUs, as custom calls of XLA.

Gradients are explicit (`jax.custom_vjp`); those of gradients are derived from the generic formula. An axis that
`jax.vmap` maps becomes one more leading axis, which the counter of dropout does not count.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnkit._core.check import dtype_name
from attnkit._core.quadratic import leading_shape
from attnkit._core.special import is_key, words_of_key
from attnkit.backends.native import linear, load, lower, native_status, packed, rows, served
from attnkit.kernels.plan import is_array
from attnkit.ops import gated, lsh, rela
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.lowrank import linformer, nystrom, soft
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX

TARGET = "attnkit"
OLDEST = (0, 8, 2)  # registers handlers of version 0.2 of XLA's interface of foreign functions
Arrays = dict[str, Array]


class Static(NamedTuple):
    """The static arguments of a program."""

    op: str
    plain: lower.Plain
    seed: int | None  # of dropout, where it is a number
    outputs: tuple[str, ...] = ("o",)


class Call(NamedTuple):
    """A custom call: the names of its arguments and results, and how many of the leading axes are those of vmap."""

    op: str
    backward: bool
    plain: lower.Plain
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    mapped: int = 0

    def leading(self, arrays: Mapping[str, Any]) -> int:
        """The number of leading axes."""
        v = arrays.get("v")
        gqa = dict(self.plain).get("enable_gqa", False)
        return len(leading_shape(arrays["q"].shape, arrays["k"].shape, None if v is None else v.shape, gqa))


@lru_cache(maxsize=1)
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(load.library().jax), platform="cpu", api_version=1)


def _dtype(name: str, x: Array) -> Any:
    """A seed of 64 bits is two words of 32 in JAX without integers of 64 bits."""
    return "uint64" if name == "seed" and x.ndim == 1 else x.dtype


@lru_cache(maxsize=4096)
def program(call: Call) -> Callable[..., list[Array]]:
    """The compiled function of the arrays of a call; under vmap one call with one more leading axis."""

    @jax.custom_batching.custom_vmap
    def run(*arrays: Array) -> list[Array]:
        shapes = [() if name == "seed" else x.shape for name, x in zip(call.names, arrays, strict=True)]
        operands = tuple(
            (name, shape, lower.contiguous(shape), _dtype(name, x))
            for name, shape, x in zip(call.names, shapes, arrays, strict=True)
        )
        prepared = lower.prepare(call.op, call.backward, operands, call.plain, call.outputs, call.mapped)
        if prepared.reason is not None:
            raise NotImplementedError(lower.refusal_text(call.op, prepared.reason))
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in prepared.outputs]
        _register()
        outputs = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")(
            *arrays,
            places=np.array(prepared.places, np.int64),
            plan=np.frombuffer(ctypes.string_at(prepared.address, ctypes.sizeof(prepared.plan)), np.int64),
            threads=np.array([lower.threads_of_environment()], np.int64),
        )
        return list(outputs)

    @run.def_vmap
    def mapped(size: int, are_mapped: list[bool], *arrays: Array) -> tuple[list[Array], list[bool]]:
        by_name = dict(zip(call.names, arrays, strict=True))
        mapped_names = {name for name, is_mapped in zip(call.names, are_mapped, strict=True) if is_mapped}
        apart = "seed" in mapped_names or "edges_q" in call.names
        outputs = (_one_by_one if apart else _together)(call, size, by_name, mapped_names)
        return outputs, [True] * len(call.outputs)

    compiled: Callable[..., list[Array]] = jax.jit(run)
    return compiled


def _one_by_one(call: Call, size: int, arrays: Arrays, mapped: set[str]) -> list[Array]:
    """Process the elements one by one: each has its own seed, or its own boundaries."""

    def one(i: Array) -> list[Array]:
        return program(call)(*(x[i] if name in mapped else x for name, x in arrays.items()))

    outputs: list[Array] = jax.lax.map(one, jnp.arange(size))
    return outputs


def _together(call: Call, size: int, arrays: Arrays, mapped: set[str]) -> list[Array]:
    """The mapped axis is the first of the leading axes."""
    single = {name: jax.ShapeDtypeStruct(x.shape[name in mapped :], x.dtype) for name, x in arrays.items()}
    leading = call.leading(single)
    own = {name[1:] for name in call.outputs if name[0] == "d"}  # gradients are those of every element
    lifted = []
    for name, x in arrays.items():
        if name in mapped or name in own or name == "q" or name.startswith("dfinal_"):
            shape = single[name].shape
            missing = leading + lower.trailing_axes(name) - len(shape)
            x = x if name in mapped else jnp.broadcast_to(x, (size, *shape))
            x = jnp.reshape(x, (size, *(1,) * missing, *shape))
        lifted.append(x)
    outputs = program(call._replace(mapped=call.mapped + 1))(*lifted)
    shapes = {f"d{name}": x.shape for name, x in single.items()}
    if call.op in linear.OPS:
        shapes |= linear.state_shapes(call.op, {name: x.shape for name, x in single.items()})
    pairs = zip(call.outputs, outputs, strict=True)
    return [_of_every_element(x, size, shapes[name]) if name in shapes else x for name, x in pairs]


def _of_every_element(x: Array, size: int, shape: tuple[int, ...]) -> Array:
    """An output of all elements together as (size, *shape); the state of keys that are not mapped is one for all."""
    if x.size == math.prod(shape):
        return jnp.broadcast_to(jnp.reshape(x, shape), (size, *shape))
    return jnp.reshape(x, (size, *shape))


# ---------------------------------------------------------------------------------------------- with gradients


def divided(op: str, arguments: dict[str, Any], outputs: tuple[str, ...] = ("o",)) -> tuple[Static, Arrays]:
    """A call, split into static arguments and arrays."""
    arrays, plain = lower.split(arguments, is_array)
    seed, number = arrays.get("seed"), None
    if seed is not None and not is_array(seed):
        number = int(seed)
        arrays["seed"] = jnp.array([number & 0xFFFFFFFF, number >> 32], jnp.uint32)
    elif is_key(seed):
        arrays["seed"] = jnp.stack(words_of_key(seed))
    elif seed is not None and seed.dtype.itemsize < 4:
        arrays["seed"] = seed.astype(jnp.int32)
    arrays |= {name: jnp.array(arrays[name], jnp.int32) for name in lower.EDGES if isinstance(arrays.get(name), tuple)}
    return Static(op, plain, number, outputs), arrays


def _serve(static: Static, arrays: Arrays, outputs: tuple[str, ...], backward: bool = False) -> Arrays:
    call = Call(static.op, backward, static.plain, tuple(arrays), outputs)
    return dict(zip(outputs, program(call)(*arrays.values()), strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attended(static: Static, arrays: Arrays) -> tuple[Array, ...]:
    """o, and the other outputs that were named."""
    return tuple(_serve(static, arrays, static.outputs).values())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def remembered(static: Static, arrays: Arrays) -> tuple[tuple[Array, ...], Arrays]:
    """The same, and numbers of rows for the gradients: constants, for gradients do not depend on them."""
    extra = ("rows",) if static.op in lower.SAVES_ROWS else ()
    results = _serve(static, arrays, static.outputs + extra)
    saved = {name: results[name] for name in lower.saved(static.op, arrays["q"].dtype) if name in results}
    return tuple(results[name] for name in static.outputs), saved


def _remember(static: Static, arrays: Arrays) -> tuple[Any, tuple[Arrays, Arrays]]:
    outputs, saved = remembered(static, arrays)
    return (outputs, saved), (arrays, saved)


def _attend(static: Static, arrays: Arrays) -> tuple[tuple[Array, ...], tuple[Arrays, Arrays]]:
    (outputs, _), residuals = _remember(static, arrays)
    return outputs, residuals


def _gradients(static: Static, residuals: tuple[Arrays, Arrays], cotangents: Any) -> tuple[dict[str, Array | None]]:
    arrays, saved = residuals
    named = zip(static.outputs, cotangents, strict=True)
    grads = differentiated(static, arrays, saved, {f"d{name}": x for name, x in named if name not in rows.COUNTS})
    return ({name: grads.get(name) for name in arrays},)


attended.defvjp(_attend, _gradients)
remembered.defvjp(_remember, lambda static, residuals, cotangents: _gradients(static, residuals, cotangents[0]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiated(static: Static, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Gradients of the arguments that have one; `saved` are numbers of the forward pass."""
    names = tuple(name for name in lower.DIFFERENTIABLE if name in arrays)
    outputs = tuple(f"d{name}" for name in names)
    grads = _serve(static, arrays | saved | cotangents, outputs, backward=True)
    return {name: grads[f"d{name}"] for name in names}


def _pulled_generic(static: Static, arrays: Arrays, cotangents: Arrays) -> Arrays:
    options: dict[str, Any] = {**arrays, **dict(static.plain)}
    if "edges_q" in arrays:
        return packed.formula(static.op, options, cotangents)
    if static.op in linear.OPS:
        return _pulled_linear(static.op, options, arrays, cotangents)
    if "seed" in options:
        seed: Any = options.pop("seed")
        if static.seed is not None:
            seed = static.seed
        elif seed.ndim:  # the words of a key
            seed = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")
        options["dropout"] = (options["dropout"], seed)
    return rows.formula(static.op, options, cotangents)


def _pulled_linear(op: str, arguments: dict[str, Any], arrays: Arrays, cotangents: Arrays) -> Arrays:
    """The same for linear attention: the generic body differentiated."""
    moved = {name: x for name, x in arrays.items() if name in lower.DIFFERENTIABLE}
    names = [name[1:] for name in cotangents]

    def outputs(moved: Arrays) -> list[Array]:
        results = linear.formula(op, arguments | moved, names)
        return [results[name] for name in names]

    primals_out, pull_back = jax.vjp(outputs, moved)
    grads: Arrays = pull_back(
        [cotangents[f"d{name}"].astype(x.dtype) for name, x in zip(names, primals_out, strict=True)]
    )[0]
    return grads


def _differentiate(static: Static, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> tuple[Arrays, Any]:
    return differentiated(static, arrays, saved, cotangents), (arrays, saved, cotangents)


def _second(static: Static, residuals: tuple[Arrays, Arrays, Arrays], of_gradients: Arrays) -> tuple[Any, ...]:
    arrays, saved, cotangents = residuals
    constants = {name: x for name, x in arrays.items() if name not in lower.DIFFERENTIABLE}
    moved = {name: x for name, x in arrays.items() if name in lower.DIFFERENTIABLE}

    def gradients(moved: Arrays, cotangents: Arrays) -> Arrays:
        return _pulled_generic(static, moved | constants, cotangents)

    of_arrays, of_cotangents = jax.vjp(gradients, moved, cotangents)[1](of_gradients)
    return dict.fromkeys(arrays) | of_arrays, dict.fromkeys(saved), of_cotangents


differentiated.defvjp(_differentiate, _second)


# ---------------------------------------------------------------------------------------------- a call


def evaluate(op: str, arguments: dict[str, Any], outputs: tuple[str, ...]) -> tuple[Array, ...]:
    """The named outputs of an op."""
    results: tuple[Array, ...] = attended(*divided(op, arguments, outputs))
    return results


def pulled(op: str, arguments: dict[str, Any], cotangents: Mapping[str, Array | None]) -> Arrays:
    """The explicit gradients of an op."""
    compute = jnp.float64 if arguments["q"].dtype == jnp.float64 else jnp.float32
    of = {name: x if name == "do" else x.astype(compute) for name, x in cotangents.items() if x is not None}
    static, arrays = divided(op, arguments)
    grads: Arrays = differentiated(static, arrays, {}, of)
    return grads


def unsupported(op: str, *arrays: Any, **options: Any) -> str | None:
    """Why the library does not support a call or its gradients."""
    if jax.default_backend() != "cpu":  # a traced array has no device
        return "it is for the CPU"
    if jax.__version_info__ < OLDEST:
        return f"needs JAX {'.'.join(map(str, OLDEST))} or later, for its calls of foreign functions"
    status = native_status()
    if status.level is None:
        return status.reason
    static, operands = divided(op, {**dict(zip("qkv", arrays, strict=False)), **options})
    dtypes = tuple((name, dtype_name(x)) for name, x in operands.items() if name != "seed")
    own = tuple(option for option in static.plain if option[0] in lower.ASKED)
    return lower.refused_axes(*arrays, **options) or lower.refusal(op, dtypes, own)


LSH_PAIRS = 1 << 23
"""Pairs of LSH attention from which the library takes less time: 8 heads of 64 features, 2 rounds, chunks of 64, at
n = 4096 0.88 of the generic time forward and 0.85 with gradients, at n = 1024 0.99 and 1.25."""

CALLS = (evaluate, pulled, unsupported)
KERNELS = served.Served(*CALLS).kernels() | linear.Linear(*CALLS).kernels() | rows.Rows(*CALLS).kernels()
KERNELS |= packed.Packed(*CALLS).kernels() | rela.kernels(KERNELS[POINTWISE.name])
KERNELS |= gated.kernels(KERNELS[POINTWISE.name])
KERNELS |= linformer.kernels(KERNELS[SOFTMAX.name]) | nystrom.kernels(KERNELS[SOFTMAX.name])
KERNELS |= soft.kernels(KERNELS[GAUSSIAN.name]) | lsh.kernels(KERNELS[SOFTMAX.name], LSH_PAIRS)
