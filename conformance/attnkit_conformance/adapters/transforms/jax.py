"""JAX's transformations of an op on a `Problem`, in float64: each reports what is wrong with its result, or nothing.

A transformation is one jitted program, in which an op sees the tracers of that transformation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attnkit
from attnkit_conformance.adapters.base import dispatches
from attnkit_conformance.adapters.jax import light
from attnkit_conformance.adapters.transforms.problem import Problem, missed, missed_second, missed_tangents

Arrays = dict[str, jax.Array]


class Jax:
    """A problem as JAX arrays, and the op as a function of its differentiable arguments under one `impl`."""

    name = "jax"

    def __init__(self, problem: Problem, impl: Any, function: Callable[..., Any] | None = None) -> None:
        self.problem, self.op, self.case = problem, problem.op, problem.case
        self.module: Any = attnkit if function is None else SimpleNamespace(**{self.op.name: function})
        self.options = {"impl": impl} if function is None and dispatches(self.op) else {}
        self.x, self.u = arrays(problem.inputs), arrays(problem.direction)
        self.do = arrays(problem.case.cotangents)
        self.rest = arrays({n: x for n, x in problem.case.arrays.items() if n not in self.x})

    def outputs(self, x: Arrays) -> Arrays:
        """Those with a gradient."""
        answer = self.op.binding.forward(self.module, self.op, {**self.rest, **x}, {**self.options, **self.case.params})
        return {name: answer[name] for name in self.do}

    def entries(self, x: Arrays) -> jax.Array:
        outputs = self.outputs(x)
        return jnp.stack([outputs[name].reshape(-1)[index] for name, index in self.problem.entries])

    def total(self, x: Arrays) -> jax.Array:
        """The function that is differentiated."""
        return sum_of_products(self.outputs(x), self.do)

    def run(self, function: Callable[[Arrays, Arrays], Any]) -> Any:
        """Run `function(x, u)` as a jitted program; the results are NumPy arrays."""
        compiled = jax.jit(function, compiler_options=options())
        return jax.tree.map(np.asarray, compiled(self.x, self.u))


def options() -> dict[str, Any]:
    """Options that reduce XLA's compile time, without its older fusion emitters: together with less optimisation they
    lose half of the digits of jacfwd of an unrolled inverse (jaxlib 0.10.2, float64)."""
    return {name: value for name, value in light().items() if name != "xla_cpu_use_fusion_emitters"}


def arrays(values: Any) -> Arrays:
    return {name: jnp.asarray(x) for name, x in values.items()}


def sum_of_products(a: Arrays, b: Arrays) -> jax.Array:
    return sum((jnp.sum(a[name] * b[name]) for name in b), jnp.zeros(()))


def jvp(t: Jax) -> str | None:
    return missed_tangents(t.run(lambda x, u: jax.jvp(t.entries, (x,), (u,))[1]), t.problem)


def jacfwd(t: Jax) -> str | None:
    def along(x: Arrays, u: Arrays) -> Any:
        return jax.jacfwd(lambda step: t.entries({name: x[name] + step * u[name] for name in x}))(0.0)

    return missed_tangents(t.run(along), t.problem)


def grad(t: Jax) -> str | None:
    return missed("the gradient", t.run(lambda x, u: jax.grad(t.total)(x)), t.problem.gradient)


def jacrev(t: Jax) -> str | None:
    got = t.run(lambda x, u: jax.jacrev(t.entries)(x))
    texts = (missed("the row", {name: x[n] for name, x in got.items()}, row) for n, row in enumerate(t.problem.rows))
    return next((text for text in texts if text), None)


def vmap_grad(t: Jax) -> str | None:
    step = 0.01

    def both(x: Arrays, u: Arrays) -> Any:
        return jax.vmap(jax.grad(t.total))({name: jnp.stack([x[name], x[name] + step * u[name]]) for name in x})

    got, golden = t.run(both), (t.problem.gradient, t.problem.moved(step).gradient)
    texts = (missed("the gradient", {name: x[n] for name, x in got.items()}, golden[n]) for n in range(2))
    return next((text for text in texts if text), None)


def checkpoint(t: Jax) -> str | None:
    return missed("the gradient", t.run(lambda x, u: jax.grad(jax.checkpoint(t.total))(x)), t.problem.gradient)


def hessian(t: Jax) -> str | None:
    """Forward over reverse, like jax.hessian, times u."""
    return missed_second(t.run(lambda x, u: jax.jvp(jax.grad(t.total), (x,), (u,))[1]), t.problem.second)


def twice(t: Jax, x: Arrays, u: Arrays) -> Arrays:
    """The gradient of <grad, u>."""
    grads: Arrays = jax.grad(lambda x: sum_of_products(jax.grad(t.total)(x), u))(x)
    return grads


def grad_of_grad(t: Jax) -> str | None:
    return missed_second(t.run(lambda x, u: twice(t, x, u)), t.problem.second)


def single(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def without_running(problem: Problem, function: Callable[..., Any]) -> None:
    """Trace the second derivatives of a kernel in single precision."""
    t = Jax(problem, "", function)
    t.x, t.u, t.do, t.rest = (jax.tree.map(single, tree) for tree in (t.x, t.u, t.do, t.rest))
    jax.make_jaxpr(lambda x, u: twice(t, x, u))(t.x, t.u)


SECOND_WITHOUT_RUNNING = "grad of grad"
TRANSFORMS: dict[str, Callable[[Jax], str | None]] = {
    "jvp": jvp,
    "jacfwd": jacfwd,
    "grad": grad,
    "jacrev": jacrev,
    "vmap(grad)": vmap_grad,
    "grad(checkpoint)": checkpoint,
    "hessian": hessian,
    "grad of grad": grad_of_grad,
}
"""By column of the table."""
