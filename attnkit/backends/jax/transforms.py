"""Derivatives that a function with explicit gradients (`jax.custom_vjp`) does not support, refused by name.

Forward mode is visible in the arguments of a call, and kernels are skipped. Inside `jax.jit` it is not: a call only
sees the tracer of the program, and jax.jvp of that program ends with JAX's own TypeError. Second derivatives are
visible in the arguments too where nothing is compiled between them, and else detected where the gradients of a kernel
are differentiated.
"""

from collections.abc import Iterator
from functools import wraps
from typing import NoReturn

import jax
from jax.interpreters.ad import JVPTracer

from attnkit._core.typing import AnyFunction, Array

REASON = "forward mode (jax.jvp, jacfwd, hessian) is served by the generic implementation"
SYMBOLIC = "symbolic shapes (jax.export.symbolic_shape) are served by the generic implementation"
TWICE = "second derivatives (jax.grad of jax.grad) are served by the generic implementation"


def levels(x: object) -> Iterator[object]:
    """The tracers around x, those of linearisation and vmap opened."""
    while isinstance(x, jax.core.Tracer):
        yield x
        x = getattr(x, "primal", getattr(x, "val", None))


def forward_mode(x: Array) -> bool:
    """Whether x is traced for forward mode at any level."""
    return any(isinstance(tracer, JVPTracer) for tracer in levels(x))


def differentiated_twice(*arrays: object) -> str | None:
    """Why a kernel whose gradients have none is not called where both derivatives are visible."""
    of_derivatives = ([hasattr(tracer, "primal") for tracer in levels(x)] for x in jax.tree.leaves(arrays))
    return TWICE if any(sum(found) > 1 for found in of_derivatives) else None


def symbolic(x: Array) -> bool:
    """Whether a size of x is a symbol of jax.export, which no plan of a kernel can hold."""
    return isinstance(x, jax.core.Tracer) and not all(type(size) is int for size in x.shape)


def unsupported(*arrays: Array, **options: object) -> str | None:
    """Why no kernel supports the current call."""
    leaves = jax.tree.leaves((arrays, options))
    return REASON if any(map(forward_mode, leaves)) else SYMBOLIC if any(map(symbolic, leaves)) else None


def promoting(function: AnyFunction) -> AnyFunction:
    """`function` under JAX's default rules of promotion, as every op is called, where JAX traces it after the call: the
    gradients of a `jax.custom_vjp`."""

    @wraps(function)
    def by_default(*arguments: Array) -> object:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return by_default


def differentiated_once(name: str, pull: AnyFunction) -> AnyFunction:
    """`pull`, the gradients of the kernel `name`, with an error for second derivatives."""
    once = jax.custom_vjp(pull)

    def refuse(residuals: None, cotangents: object) -> NoReturn:
        raise NotImplementedError(f"{name} has no second derivatives; impl='generic' has")

    once.defvjp(lambda *arguments: (pull(*arguments), None), refuse)
    return once
