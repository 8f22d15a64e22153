"""Surroundings of JAX: strict modes, control flow, transformations of programs, export, threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.jax import light
from attnkit_conformance.adapters.surroundings import Function, Surrounding
from attnkit_conformance.adapters.surroundings.together import InThreads
from attnkit_conformance.model.types import Arrays, Foreign

Tree = Foreign  # arrays in dicts and tuples
Program = Callable[..., Tree]
OfTwo = Callable[[Tree, Tree], Tree]
Around = Callable[[OfTwo], OfTwo]
AXIS = "surrounding"


def run_compiled(program: Program, *arguments: Tree) -> Tree:
    """A program under jit; what is compiled of it is not kept."""
    jitted: Foreign = jax.jit(program, compiler_options=light())
    try:
        return jitted(*arguments)
    finally:
        jitted.clear_cache()


def program(
    name: str,
    text: str,
    around: Around = lambda function: function,
    run: Callable[..., Tree] = run_compiled,
    gradient_inside: bool = False,
) -> Surrounding:
    """`around` a function of two trees, the floats and the rest, or around its gradient; and how the whole is `run`."""

    def call(function: Function, arrays: Arrays) -> Arrays:
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        rest = {name: x for name, x in arrays.items() if name not in floats}
        answer: Arrays = run(around(lambda floats, rest: function({**floats, **rest})), floats, rest)
        return answer

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        def outputs(leaves: Arrays, rest: Arrays) -> Arrays:
            return function({**leaves, **rest})

        inner = outputs if gradient_inside else around(outputs)

        def pull(floats: tuple[Arrays, Arrays], rest: Arrays) -> Arrays:
            leaves, cotangents = floats
            grads: Arrays = jax.vjp(lambda leaves: inner(leaves, rest), leaves)[1](cotangents)[0]
            return grads

        answer: Arrays = run(around(pull) if gradient_inside else pull, (dict(leaves), dict(cotangents)), rest)
        return answer

    return Surrounding(name, text, call, vjp)


def within(name: str, text: str, context: Callable[[], AbstractContextManager[object]]) -> Surrounding:
    """A context in which a program is traced, compiled and run."""

    def run(program: Program, *arguments: Tree) -> Tree:
        with context():
            return run_compiled(program, *arguments)

    return program(name, text, run=run)


def at_once(program: Program, *arguments: Tree) -> Tree:
    """Operation by operation."""
    return program(*arguments)


def stack_twice(tree: Tree) -> Tree:
    """Everything twice, on a new first axis."""
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def second(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[1], tree)


def in_scan(function: OfTwo) -> OfTwo:
    """The second step of two."""

    def outputs(floats: Arrays, rest: Tree) -> Tree:
        def step(carry: Tree, floats: Arrays) -> tuple[Tree, Tree]:
            return carry, function(floats, rest)

        return second(jax.lax.scan(step, 0, stack_twice(floats))[1])

    return outputs


def in_vmap(function: OfTwo) -> OfTwo:
    """The second item of two, on an axis with a name."""
    mapped = jax.vmap(function, in_axes=(0, None), axis_name=AXIS)
    return lambda floats, rest: second(mapped(stack_twice(floats), rest))


def in_branch(function: OfTwo) -> OfTwo:
    """A branch that is taken."""

    def outputs(floats: Arrays, rest: Tree) -> Tree:
        shapes = jax.eval_shape(function, floats, rest)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        yes = jax.tree.leaves(floats)[0].size > -1
        return jax.lax.cond(jnp.asarray(yes), lambda: function(floats, rest), lambda: zeros)

    return outputs


def on_mesh(function: OfTwo) -> OfTwo:
    """The floats vary over a mesh of one device, the rest is the same everywhere."""
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,))
    split, same = PartitionSpec(AXIS), PartitionSpec()

    def shard(floats: Arrays, rest: Tree) -> Tree:
        outputs = function(jax.tree.map(lambda x: x[0], floats), rest)
        return jax.tree.map(lambda x: x[None], outputs)

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(split, same), out_specs=split)

    def outputs(floats: Arrays, rest: Tree) -> Tree:
        return jax.tree.map(lambda x: x[0], mapped(jax.tree.map(lambda x: x[None], floats), rest))

    return outputs


def with_checkpoints(function: OfTwo) -> OfTwo:
    return jax.checkpoint(function)


def run_exported(program: Program, *arguments: Tree) -> Tree:
    """Written by jax.export, read and run; Unsupported where the library that it writes with is not installed."""
    if find_spec("flatbuffers") is None:
        raise Unsupported("jax.export writes with flatbuffers, which is not installed")
    written = jax.export.export(jax.jit(program))(*arguments).serialize()
    return jax.export.deserialize(written).call(*arguments)


def run_donating(program: Program, *arguments: Tree) -> Tree:
    """The memory of the arguments may become that of the results."""
    copies = jax.tree.map(jnp.copy, arguments)
    numbers = tuple(range(len(arguments)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable", UserWarning)
        return jax.jit(program, donate_argnums=numbers, compiler_options=light())(*copies)


def beside_a_thread() -> Callable[..., Tree]:
    """A program that is traced, compiled and run several times while the one before it runs."""
    run = InThreads()

    def compiled_once(program: Program, *arguments: Tree) -> Tree:
        jitted = jax.jit(program, compiler_options=light())
        return run(lambda: jitted(*arguments))

    return compiled_once


SURROUNDINGS = (
    within("rank_promotion", 'jax_numpy_rank_promotion="raise"', lambda: jax.numpy_rank_promotion("raise")),
    within("dtype_promotion", 'jax_numpy_dtype_promotion="strict"', lambda: jax.numpy_dtype_promotion("strict")),
    within("debug_nans", "jax_debug_nans=True", lambda: jax.debug_nans(True)),
    within("x64", "jax_enable_x64=True, with arrays of single precision", lambda: jax.enable_x64(True)),
    within("leaks", "jax_check_tracer_leaks=True", jax.checking_leaks),
    program("eager", "without jit", run=at_once),
    program("scan", "a step of lax.scan", in_scan),
    program("vmap", "vmap over an axis with a name", in_vmap),
    program("cond", "a branch of lax.cond", in_branch),
    program("shard_map", "shard_map, its outputs differentiated", on_mesh),
    program("shard_map_gradient", "shard_map around the gradient", on_mesh, gradient_inside=True),
    program("shard_map_scan", "a step of lax.scan inside shard_map", lambda function: on_mesh(in_scan(function))),
    program("checkpoint", "jax.checkpoint", with_checkpoints),
    program("export", "jax.export to bytes, and back", run=run_exported),
    program("donation", "jit with donated arguments", run=run_donating),
    program("threads", "two threads at the same time, each with a call of its own", run=beside_a_thread()),
)
