"""Attention and statistics of its rows by the compiled kernels for CPUs, as custom calls of XLA.

Gradients are explicit (`jax.custom_vjp`); those of gradients are derived from the generic formula.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from attnkit._core.check import spelt
from attnkit._core.special import is_key, varying_alike, words_of_key
from attnkit._core.typing import Keywords, Option
from attnkit.backends.jax import formula
from attnkit.backends.jax.custom_call import program
from attnkit.backends.jax.formula import Call
from attnkit.backends.native import OLDEST_JAX, linear, lower, native_status, packed, rows, served
from attnkit.backends.native.load import warn_of_absence
from attnkit.kernels.plan import is_array
from attnkit.ops import gated, lsh, rela, ssmax
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.lowrank import linformer, nystrom, soft
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX

Arrays = dict[str, Array]


class Static(NamedTuple):
    """The static arguments of a program."""

    op: str
    plain: lower.Plain
    outputs: tuple[str, ...] = ("o",)


# ---------------------------------------------------------------------------------------------- with gradients


def divided(op: str, arguments: Keywords, outputs: tuple[str, ...] = ("o",)) -> tuple[Static, Arrays]:
    """A call, split into static arguments and arrays."""
    arrays, plain = lower.split_arguments(arguments, is_array)
    seed = arrays.get("seed")
    if seed is not None and not is_array(seed):
        arrays["seed"] = jnp.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], jnp.uint32)
    elif is_key(seed):
        arrays["seed"] = jnp.stack(words_of_key(seed))
    elif seed is not None and seed.dtype.itemsize < 4:
        arrays["seed"] = seed.astype(jnp.int32)
    arrays |= {name: jnp.array(arrays[name], jnp.int32) for name in lower.EDGES if isinstance(arrays.get(name), tuple)}
    return Static(op, plain, outputs), varying_alike(arrays)


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


def _remember(static: Static, arrays: Arrays) -> tuple[tuple[tuple[Array, ...], Arrays], tuple[Arrays, Arrays]]:
    outputs, saved = remembered(static, arrays)
    return (outputs, saved), (arrays, saved)


def _attend(static: Static, arrays: Arrays) -> tuple[tuple[Array, ...], tuple[Arrays, Arrays]]:
    (outputs, _), residuals = _remember(static, arrays)
    return outputs, residuals


def _gradients(
    static: Static, residuals: tuple[Arrays, Arrays], cotangents: Sequence[Array]
) -> tuple[dict[str, Array | None]]:
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


def _differentiate(
    static: Static, arrays: Arrays, saved: Arrays, cotangents: Arrays
) -> tuple[Arrays, tuple[Arrays, Arrays, Arrays]]:
    return differentiated(static, arrays, saved, cotangents), (arrays, saved, cotangents)


def _second(
    static: Static, residuals: tuple[Arrays, Arrays, Arrays], of_gradients: Arrays
) -> tuple[dict[str, Array | None], dict[str, None], Arrays]:
    arrays, saved, cotangents = residuals
    constants = {name: x for name, x in arrays.items() if name not in lower.DIFFERENTIABLE}
    moved = {name: x for name, x in arrays.items() if name in lower.DIFFERENTIABLE}

    def gradients(moved: Arrays, cotangents: Arrays) -> Arrays:
        return formula.gradients(static.op, static.plain, moved | constants, cotangents)

    of_arrays, of_cotangents = jax.vjp(gradients, moved, cotangents)[1](of_gradients)
    return dict.fromkeys(arrays) | of_arrays, dict.fromkeys(saved), of_cotangents


differentiated.defvjp(_differentiate, _second)


# ---------------------------------------------------------------------------------------------- a call


def evaluate(op: str, arguments: Keywords, outputs: tuple[str, ...]) -> tuple[Array, ...]:
    """The named outputs of an op."""
    results: tuple[Array, ...] = attended(*divided(op, arguments, outputs))
    return results


def pulled(op: str, arguments: Keywords, cotangents: Mapping[str, Array | None]) -> Arrays:
    """The explicit gradients of an op."""
    compute = jnp.float64 if arguments["q"].dtype == jnp.float64 else jnp.float32
    of = {name: x if name == "do" else x.astype(compute) for name, x in cotangents.items() if x is not None}
    static, arrays = divided(op, arguments)
    alike = varying_alike((arrays, of))
    grads: Arrays = differentiated(static, alike[0], {}, alike[1])
    return grads


def unsupported(op: str, *arrays: Array, **options: Option) -> str | None:
    """Why the library does not support a call or its gradients."""
    if jax.default_backend() != "cpu":  # a traced array has no device
        return "it is for the CPU"
    if jax.__version_info__ < OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, OLDEST_JAX))} or later, for its calls of foreign functions"
    status = native_status()
    if status.level is None:
        return status.reason
    static, operands = divided(op, {**dict(zip("qkv", arrays, strict=False)), **options})
    dtypes = tuple((name, spelt(x.dtype)) for name, x in operands.items() if name != "seed")
    own = tuple(option for option in static.plain if option[0] in lower.ASKED)
    return lower.refused_axes(*arrays, **options) or lower.refusal(op, dtypes, own)


def regret(*arrays: Array, **options: object) -> None:
    """A call that another implementation serves: without the library that takes more time."""
    if jax.default_backend() == "cpu" and jax.__version_info__ >= OLDEST_JAX:
        warn_of_absence()


LSH_PAIRS = 1 << 23
"""Pairs of LSH attention from which the library takes less time: 8 heads of 64 features, 2 rounds, chunks of 64, at
n = 4096 0.88 of the generic time forward and 0.85 with gradients, at n = 1024 0.99 and 1.25."""

CALLS = (evaluate, pulled, unsupported)
KERNELS = served.Served(*CALLS).kernels() | linear.Linear(*CALLS).kernels() | rows.Rows(*CALLS).kernels()
KERNELS |= packed.Packed(*CALLS).kernels() | rela.kernels(KERNELS[POINTWISE.name])
KERNELS |= gated.kernels(KERNELS[POINTWISE.name])
KERNELS |= linformer.kernels(KERNELS[SOFTMAX.name]) | nystrom.kernels(KERNELS[SOFTMAX.name])
KERNELS |= soft.kernels(KERNELS[GAUSSIAN.name]) | ssmax.kernels(KERNELS) | lsh.kernels(KERNELS[SOFTMAX.name], LSH_PAIRS)
KERNELS = {op: kernel._replace(regret=regret) for op, kernel in KERNELS.items()}
