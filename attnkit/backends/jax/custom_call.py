"""A call of the CPU library as one operation of JAX, and what becomes of it in a program.

On the CPU it is a custom call of XLA. In a program for another platform, whatever the platform of this process, and in
one that `jax.export` writes, which outlives this build of the library, it is the generic body. Under vmap it is a call
with one more leading axis.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding

from attnkit._core.special import varying
from attnkit._core.typing import AnyFunction, OfLibrary
from attnkit.backends.jax import formula, partition
from attnkit.backends.jax.formula import Call
from attnkit.backends.native import OLDEST_JAX, linear, load, lower

TARGET = "attnkit"
Arrays = dict[str, Array]
Lowered = Sequence[OfLibrary]  # values of a program


@lru_cache(maxsize=1)
def register() -> None:
    """Make the library's function known to XLA, which programs call by name: compiled ones that are loaded too."""
    if load.load()[0] is not None and jax.__version_info__ >= OLDEST_JAX:
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(load.library().jax), platform="cpu", api_version=1)


operation = Primitive(TARGET)
operation.multiple_results = True
with contextlib.suppress(ImportError, AttributeError):  # it has no public name; without it sharded arrays are gathered
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(operation)  # a rule is told the mesh of no other operation


@lru_cache(maxsize=4096)
def program(call: Call) -> Callable[..., list[Array]]:
    """The compiled function of the arrays of a call."""
    compiled: Callable[..., list[Array]] = jax.jit(partial(operation.bind, call=call))
    return compiled


def _run(*arrays: Array, call: Call) -> list[Array]:
    return program(call)(*arrays)


operation.def_impl(_run)


def _dtype(name: str, x: partition.Typed) -> str | np.dtype:
    """A seed of 64 bits is two words of 32 in JAX without integers of 64 bits."""
    return "uint64" if name == "seed" and len(x.shape) == 1 else x.dtype


def plan_of(call: Call, arrays: Sequence[partition.Typed]) -> lower.PlacedPlan:
    """The plan of a call on such arrays."""
    shapes = [() if name == "seed" else tuple(x.shape) for name, x in zip(call.names, arrays, strict=True)]
    operands = tuple(
        (name, shape, lower.contiguous(shape), _dtype(name, x))
        for name, shape, x in zip(call.names, shapes, arrays, strict=True)
    )
    plan = lower.prepare(call.op, call.backward, operands, call.plain, call.outputs, call.mapped)
    if plan.reason is not None:
        raise NotImplementedError(lower.refusal_text(call.op, plan.reason))
    return plan


def _results(*arrays: jax.core.ShapedArray, call: Call) -> list[jax.core.ShapedArray]:
    """Outputs vary along the axes of a shard_map along which the arguments do, which are the same for all; on a mesh
    with explicit axes leading axes are sharded as those of the arguments, and gradients as their arguments."""
    like = next((x for x in arrays if not x.sharding.mesh.empty), arrays[0])
    if any(varying(x) != varying(like) for x in arrays):
        raise TypeError(f"{call.op}: arguments vary along different axes of a mesh")
    outputs, by_name = plan_of(call, arrays).outputs, dict(zip(call.names, arrays, strict=True))
    specs = partition.explicit(call, arrays, [x.shape for x in outputs])
    return [
        by_name[name[1:]].update(weak_type=False)
        if name[1:] in by_name and call.backward
        else like.update(
            shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=NamedSharding(like.sharding.mesh, spec)
        )
        for name, (shape, _, dtype), spec in zip(call.outputs, outputs, specs, strict=True)
    ]


operation.def_abstract_eval(_results)


# ---------------------------------------------------------------------------------------------- in a program


def foreign(call: Call, *arrays: Array) -> list[Array]:
    """The custom call of XLA."""
    plan = plan_of(call, arrays)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.outputs]
    outputs = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")(
        *arrays,
        places=np.array(plan.places, np.int64),
        plan=np.frombuffer(ctypes.string_at(plan.address, ctypes.sizeof(plan.plan)), np.int64),
        threads=np.array([lower.threads_of_environment()], np.int64),
    )
    return list(outputs)


def _generic(context: mlir.LoweringRuleContext, *arrays: Array, call: Call) -> Lowered:
    specs = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in zip(call.outputs, context.avals_out, strict=True)
    }
    return _lowered(context, partial(formula.served, call, specs), arrays)


def _for_the_cpu(context: mlir.LoweringRuleContext, *arrays: Array, call: Call) -> Lowered:
    module = context.module_context
    if module.lowering_parameters.for_export:
        return _generic(context, *arrays, call=call)
    function: AnyFunction = partial(foreign, call)
    if partition.is_divided(module.axis_context):
        if "seed" in call.names:  # the counter of dropout begins with the first item and head of a call
            return _generic(context, *arrays, call=call)
        function = partition.over_leading_axes(call, foreign, context.avals_in, context.avals_out)
    return _lowered(context, function, arrays)


def _lowered(context: mlir.LoweringRuleContext, function: AnyFunction, arrays: Sequence[Array]) -> Lowered:
    """The program of a function; types on a mesh with explicit axes are those of the call, not of its parts."""
    types = [x for x in context.avals_in if isinstance(x, jax.core.ShapedArray)]
    if any(entry for x in types for entry in x.sharding.spec):
        context = context.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in types])
    return mlir.lower_fun(function, multiple_results=True)(context, *arrays)


mlir.register_lowering(operation, _generic)
mlir.register_lowering(operation, _for_the_cpu, platform="cpu")


# ---------------------------------------------------------------------------------------------- under vmap


def _map(arrays: Sequence[Array], axes: Sequence[int | None], *, call: Call) -> tuple[list[Array], list[int]]:
    by_name = dict(zip(call.names, arrays, strict=True))
    mapped = {name: axis for name, axis in zip(call.names, axes, strict=True) if axis is not None}
    by_name |= {name: jnp.moveaxis(by_name[name], axis, 0) for name, axis in mapped.items()}
    size = by_name[next(iter(mapped))].shape[0]
    apart = "seed" in mapped or "edges_q" in call.names
    outputs = (_one_by_one if apart else _together)(call, size, by_name, set(mapped))
    return outputs, [0] * len(outputs)


batching.primitive_batchers[operation] = _map


def _one_by_one(call: Call, size: int, arrays: Arrays, mapped: set[str]) -> list[Array]:
    """Process the elements one by one: each has its own seed, or its own boundaries."""

    def one(i: Array) -> list[Array]:
        return program(call)(*(x[i] if name in mapped else x for name, x in arrays.items()))

    outputs: list[Array] = jax.lax.map(one, jnp.arange(size))
    return outputs


def _together(call: Call, size: int, arrays: Arrays, mapped: set[str]) -> list[Array]:
    """The mapped axis is the first of the leading axes."""
    shapes = {name: x.shape[name in mapped :] for name, x in arrays.items()}
    leading = len(call.leading(shapes))
    own = {name[1:] for name in call.outputs if name[0] == "d"}  # gradients are those of every element
    lifted = []
    for name, x in arrays.items():
        if name in mapped or name in own or name == "q" or name.startswith("dfinal_"):
            shape = shapes[name]
            missing = leading + lower.trailing_axes(name) - len(shape)
            x = x if name in mapped else jnp.broadcast_to(x, (size, *shape))
            x = jnp.expand_dims(x, tuple(range(1, 1 + missing)))
        lifted.append(x)
    outputs = program(call._replace(mapped=call.mapped + 1))(*lifted)
    of_outputs = {f"d{name}": shape for name, shape in shapes.items()}
    if {*linear.FINAL} & {*call.outputs}:
        of_outputs |= linear.state_shapes(call.op, shapes)
    pairs = zip(call.outputs, outputs, strict=True)
    return [_of_every_element(x, size, of_outputs[name]) if name in of_outputs else x for name, x in pairs]


def _of_every_element(x: Array, size: int, shape: tuple[int, ...]) -> Array:
    """An output of all elements together as (size, *shape); the state of keys that are not mapped is one for all."""
    if x.size == math.prod(shape):
        return jnp.broadcast_to(jnp.reshape(x, shape), (size, *shape))
    return jnp.squeeze(x, tuple(range(1, x.ndim - len(shape))))
