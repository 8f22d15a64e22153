"""Derivatives that a function with explicit gradients (`jax.custom_vjp`) does not support, refused by name.

Forward mode is visible in the arguments of a call, and kernels are skipped. Inside `jax.jit` it is not: a call only
sees the tracer of the program, and jax.jvp of that program ends with JAX's own TypeError. Second derivatives are
detected where the gradients of a kernel are differentiated.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters.ad import JVPTracer

REASON = "forward mode (jax.jvp, jacfwd, hessian) is served by the generic implementation"


def forward_mode(x: Any) -> bool:
    """Whether x is traced for forward mode at any level."""
    while isinstance(x, jax.core.Tracer):
        if isinstance(x, JVPTracer):
            return True
        x = getattr(x, "primal", getattr(x, "val", None))  # tracers of linearisation and vmap
    return False


def unsupported(*arrays: Any, **options: Any) -> str | None:
    """Why no kernel supports the current call."""
    return REASON if any(map(forward_mode, jax.tree.leaves((arrays, options)))) else None


def differentiated_once(name: str, pull: Callable[..., Any]) -> Callable[..., Any]:
    """`pull`, the gradients of the kernel `name`, with an error for second derivatives."""
    once = jax.custom_vjp(pull)

    def refuse(residuals: None, cotangents: Any) -> Any:
        raise NotImplementedError(f"{name} has no second derivatives; impl='generic' has")

    once.defvjp(lambda *arguments: (pull(*arguments), None), refuse)
    return once
