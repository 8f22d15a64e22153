"""JAX's transformations of an op on a `Problem`, in float64: each reports what is wrong with its result, or nothing.

A transformation is one jitted program, in which an op sees the tracers of that transformation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import attnkit
from attnkit_conformance.adapters.base import dispatches
from attnkit_conformance.adapters.derivatives import jax as derivatives
from attnkit_conformance.adapters.derivatives.jax import product
from attnkit_conformance.adapters.jax import light
from attnkit_conformance.golden.derivatives import Problem
from attnkit_conformance.model.types import Results
from attnkit_conformance.studies.transforms.problem import missed, missed_tangents

Arrays = dict[str, jax.Array]
OfTwo = Callable[[Arrays, Arrays], Mapping[str, jax.Array] | Mapping[str, Arrays]]


class Jax:
    """A problem as JAX arrays, and the op as a function of its differentiable arguments under one `impl`."""

    name = "jax"

    def __init__(self, problem: Problem, impl: str, function: Callable[..., object] | None = None) -> None:
        self.problem, self.op, self.case = problem, problem.op, problem.case
        self.module: object = attnkit if function is None else SimpleNamespace(**{self.op.name: function})
        self.options = {"impl": impl} if function is None and dispatches(self.op) else {}
        self.x, self.u = arrays(problem.inputs), arrays(problem.direction)
        self.do, self.samples = arrays(problem.case.cotangents), arrays(problem.samples)
        self.rest = arrays({n: x for n, x in problem.case.arrays.items() if n not in self.x})

    def outputs(self, x: Mapping[str, jax.Array]) -> Arrays:
        """Those with a gradient."""
        answer = self.op.binding.forward(self.module, self.op, {**self.rest, **x}, {**self.options, **self.case.params})
        return {name: y for name, y in answer.items() if name not in self.op.not_differentiable}

    def total(self, x: Mapping[str, jax.Array]) -> jax.Array:
        """The function that is differentiated."""
        return product(self.outputs(x), self.do)

    def run(self, function: OfTwo) -> Results:
        """Run `function(x, u)` as a jitted program; the results are NumPy arrays."""
        compiled = jax.jit(function, compiler_options=light())
        results: Results = jax.tree.map(np.asarray, compiled(self.x, self.u))
        return results


def arrays(values: Mapping[str, np.ndarray]) -> Arrays:
    placed: Arrays = jax.device_put(dict(values))
    return placed


def wrong_tangents(t: Jax, function: OfTwo) -> str | None:
    return missed_tangents(t.run(function), t.problem)


def wrong_gradient(t: Jax, function: OfTwo) -> str | None:
    return missed("the gradient", t.run(function), t.problem.gradient)


def wrong_second(t: Jax, function: OfTwo) -> str | None:
    return missed("the second derivative", t.run(function), t.problem.truth.hvp)


def jvp(t: Jax) -> str | None:
    return wrong_tangents(t, lambda x, u: derivatives.jvp(t.outputs, x, u))


def jacfwd(t: Jax) -> str | None:
    def along(x: Arrays, u: Arrays) -> Arrays:
        tangents: Arrays = jax.jacfwd(lambda step: t.outputs({name: x[name] + step * u[name] for name in x}))(0.0)
        return tangents

    return wrong_tangents(t, along)


def grad(t: Jax) -> str | None:
    return wrong_gradient(t, lambda x, u: jax.grad(t.total)(x))


def jacrev(t: Jax) -> str | None:
    """Of the function and of its negative."""
    got = t.run(lambda x, u: jax.jacrev(lambda x: jnp.stack([t.total(x), -t.total(x)]))(x))
    rows = ({name: sign * x[n] for name, x in got.items()} for n, sign in enumerate((1, -1)))
    return next(filter(None, (missed("the gradient", row, t.problem.gradient) for row in rows)), None)


def vmap_grad(t: Jax) -> str | None:
    got = t.run(lambda x, u: derivatives.vmap_grad(t.outputs, x, t.do, t.samples))
    return missed("the gradient", got, t.problem.truth.vmap_grad)


def checkpoint(t: Jax) -> str | None:
    return wrong_gradient(t, lambda x, u: jax.grad(jax.checkpoint(t.total))(x))


def shard_map(t: Jax) -> str | None:
    """Within jax.shard_map as it checks types, of a sum that jax.lax.scan adds up: arrays vary over a mesh of one
    device, and those without a gradient do not."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("device",))
    spec = jax.sharding.PartitionSpec("device")

    def total(x: Arrays) -> jax.Array:
        def step(x: Arrays, number: jax.Array) -> tuple[Arrays, jax.Array]:
            return x, number * t.total(x)

        return jnp.sum(jax.lax.scan(step, x, jnp.asarray([0.25, 0.75]))[1])

    def local(x: Arrays) -> Arrays:
        grads = jax.grad(total)({name: value[0] for name, value in x.items()})
        return {name: value[None] for name, value in grads.items()}

    def whole(x: Arrays, u: Arrays) -> Arrays:
        grads = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)({n: v[None] for n, v in x.items()})
        return {name: value[0] for name, value in grads.items()}

    return wrong_gradient(t, whole)


def export(t: Jax) -> str | None:
    """As jax.export writes it."""
    written = jax.export.export(jax.jit(jax.grad(t.total)))(t.x)
    return wrong_gradient(t, lambda x, u: written.call(x))


def hessian(t: Jax) -> str | None:
    """Forward over reverse, like jax.hessian, times u."""
    return wrong_second(t, lambda x, u: jax.jvp(jax.grad(t.total), (x,), (u,))[1])


def grad_of_grad(t: Jax) -> str | None:
    return wrong_second(t, lambda x, u: derivatives.hvp(t.outputs, x, t.do, u))


def single(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def without_running(problem: Problem, function: Callable[..., object]) -> None:
    """Trace the second derivatives of a kernel in single precision."""
    t = Jax(problem, "", function)
    t.x, t.u, t.do, t.rest = (jax.tree.map(single, tree) for tree in (t.x, t.u, t.do, t.rest))
    jax.make_jaxpr(lambda x, u: derivatives.hvp(t.outputs, x, t.do, u))(t.x, t.u)


SECOND_WITHOUT_RUNNING = "grad of grad"
TRANSFORMS: dict[str, Callable[[Jax], str | None]] = {
    "jvp": jvp,
    "jacfwd": jacfwd,
    "grad": grad,
    "jacrev": jacrev,
    "vmap(grad)": vmap_grad,
    "grad(checkpoint)": checkpoint,
    "grad in shard_map": shard_map,
    "export(grad)": export,
    "hessian": hessian,
    "grad of grad": grad_of_grad,
}
"""By column of the table."""
