"""Derivatives that torch computes around a call and that kernels do not support.

`torch.func.grad`, `vjp`, `jvp`, `jacrev`, `jacfwd` and `hessian` refuse custom ops with autograd rules, and forward
mode gives them no tangent. Only `vmap` has a rule.
"""

from typing import Any

from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

DERIVATIVES = "derivatives by torch.func or in forward mode are served by the generic implementation"
MAPS = "torch.func.vmap is served by the generic implementation"


def differentiates() -> bool:
    """Whether the current call is inside a derivative of torch.func or a level of dual numbers."""
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack()
    return stack is not None and any(level.key() != TransformType.Vmap for level in stack)


def maps() -> bool:
    """Whether the current call is inside vmap."""
    stack = get_interpreter_stack()
    return stack is not None and any(level.key() == TransformType.Vmap for level in stack)


# torch.compile evaluates this while it traces, when the levels exist; torch.compiler.assume_constant_result would do
# the same but import the compiler
differentiates._dynamo_marked_constant = True  # type: ignore[attr-defined]
maps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported(*arrays: Any, **options: Any) -> str | None:
    """Why no kernel supports the current call."""
    return DERIVATIVES if differentiates() else None
