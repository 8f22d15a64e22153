"""torch's transformations of an op on a `Problem`: each reports what is wrong with its result, or nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit_conformance.adapters.base import dispatches
from attnkit_conformance.adapters.derivatives import torch as derivatives
from attnkit_conformance.adapters.derivatives.torch import product
from attnkit_conformance.golden.derivatives import Problem
from attnkit_conformance.model.types import Keywords
from attnkit_conformance.studies.transforms.problem import missed, missed_tangents

Tensors = dict[str, torch.Tensor]
Function = Callable[..., object]


class Torch:
    """A problem as tensors, and the op as a function of its differentiable arguments under one `impl`."""

    name = "torch"

    def __init__(self, problem: Problem, impl: str, function: Function | None = None) -> None:
        self.problem, self.op, self.case = problem, problem.op, problem.case
        self.module: object = attnkit if function is None else SimpleNamespace(**{self.op.name: function})
        self.options = {"impl": impl} if function is None and dispatches(self.op) else {}
        self.x, self.u = tensors(problem.inputs), tensors(problem.direction)
        self.do, self.samples = tensors(problem.case.cotangents), tensors(problem.samples)
        self.rest = tensors({n: x for n, x in problem.case.arrays.items() if n not in self.x})

    def outputs(self, x: Mapping[str, torch.Tensor]) -> Tensors:
        """Those with a gradient."""
        answer = self.op.binding.forward(self.module, self.op, {**self.rest, **x}, {**self.options, **self.case.params})
        return {name: y for name, y in answer.items() if name not in self.op.not_differentiable}

    def along(self, step: torch.Tensor) -> Tensors:
        """The outputs at a step along the direction."""
        return self.outputs({name: x + step * self.u[name] for name, x in self.x.items()})

    def total(self, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The function that is differentiated."""
        return product(self.outputs(x), self.do)

    def leaves(self) -> Tensors:
        """Its inputs, with gradients to be noted."""
        return {name: x.clone().requires_grad_() for name, x in self.x.items()}

    def elsewhere(self) -> Tensors:
        """Other inputs of the same shapes."""
        return {name: x + self.u[name] for name, x in self.x.items()}


def tensors(arrays: Mapping[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}


def arrays(x: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in x.items()}


def wrong_tangents(t: Torch, tangents: Mapping[str, torch.Tensor]) -> str | None:
    return missed_tangents(arrays(tangents), t.problem)


def wrong_gradient(t: Torch, grads: Mapping[str, torch.Tensor]) -> str | None:
    return missed("the gradient", arrays(grads), t.problem.gradient)


def wrong_second(t: Torch, grads: Mapping[str, torch.Tensor]) -> str | None:
    return missed("the second derivative", arrays(grads), t.problem.truth.hvp)


def jvp(t: Torch) -> str | None:
    return wrong_tangents(t, derivatives.jvp(t.outputs, t.x, t.u))


def dual_numbers(t: Torch) -> str | None:
    with forward_ad.dual_level():
        outputs = t.outputs({name: forward_ad.make_dual(x, t.u[name]) for name, x in t.x.items()})
        tangents = {name: forward_ad.unpack_dual(x).tangent for name, x in outputs.items()}
    lost = [name for name, tangent in tangents.items() if tangent is None]
    return f"no tangent of {', '.join(lost)}" if lost else wrong_tangents(t, tangents)


def jacfwd(t: Torch) -> str | None:
    return wrong_tangents(t, torch.func.jacfwd(t.along)(torch.zeros((), dtype=torch.float64)))


def vjp(t: Torch) -> str | None:
    return wrong_gradient(t, torch.func.vjp(t.total, t.x)[1](torch.ones((), dtype=torch.float64))[0])


def grad(t: Torch) -> str | None:
    return wrong_gradient(t, torch.func.grad(t.total)(t.x))


def wrong_rows(wrong: Callable[[Torch, Tensors], str | None], t: Torch, rows: Mapping[str, torch.Tensor]) -> str | None:
    """What is wrong with the derivatives of a function and of its negative."""
    texts = (wrong(t, {name: sign * x[n] for name, x in rows.items()}) for n, sign in enumerate((1, -1)))
    return next((text for text in texts if text), None)


def jacrev(t: Torch) -> str | None:
    """Of the function and of its negative."""
    return wrong_rows(wrong_gradient, t, torch.func.jacrev(lambda x: torch.stack([t.total(x), -t.total(x)]))(t.x))


def vmap_grad(t: Torch) -> str | None:
    return missed(
        "the gradient", arrays(derivatives.vmap_grad(t.outputs, t.x, t.do, t.samples)), t.problem.truth.vmap_grad
    )


def backward_twice(t: Torch) -> str | None:
    """torch.autograd.grad with create_graph, and again of its result."""
    return wrong_second(t, derivatives.hvp(t.outputs, t.x, t.do, t.u))


def hessian(t: Torch) -> str | None:
    """Forward over reverse, like torch.func.hessian, times u."""
    return wrong_second(t, torch.func.jvp(torch.func.grad(t.total), (t.x,), (t.u,))[1])


def grad_of_grad(t: Torch) -> str | None:
    return wrong_second(t, torch.func.grad(lambda x: product(torch.func.grad(t.total)(x), t.u))(t.x))


def gradient_of(total: torch.Tensor, x: Tensors, create_graph: bool = False) -> Tensors:
    """By torch.autograd.grad; 0 for inputs that do not matter."""
    grads = torch.autograd.grad(
        total, [*x.values()], create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(x, grads, strict=True))


def grads_batched(t: Torch) -> str | None:
    """Of cotangents and of their negatives."""
    leaves = t.leaves()
    outputs = {name: y for name, y in t.outputs(leaves).items() if name in t.do}
    cotangents = [torch.stack([t.do[name], -t.do[name]]) for name in outputs]
    rows = torch.autograd.grad(
        [*outputs.values()], [*leaves.values()], cotangents, is_grads_batched=True, allow_unused=True
    )
    pairs = zip(leaves.items(), rows, strict=True)
    whole = {name: x.new_zeros((2, *x.shape)) if row is None else row for (name, x), row in pairs}
    return wrong_rows(wrong_gradient, t, whole)


def vectorized_jacobian(t: Torch, function: Callable[[Tensors], torch.Tensor]) -> Tensors:
    """Of a function of the inputs and of its negative."""

    def both(*x: torch.Tensor) -> torch.Tensor:
        value = function(dict(zip(t.x, x, strict=True)))
        return torch.stack([value, -value])

    rows = torch.autograd.functional.jacobian(both, tuple(t.x.values()), vectorize=True)
    return dict(zip(t.x, rows, strict=True))


def jacobian(t: Torch) -> str | None:
    return wrong_rows(wrong_gradient, t, vectorized_jacobian(t, t.total))


def vectorized_hessian(t: Torch) -> str | None:
    """Times u, as torch.autograd.functional.hessian does it with vectorize=True."""

    def along(x: Tensors) -> torch.Tensor:
        return product(gradient_of(t.total(x), x, create_graph=True), t.u)

    return wrong_rows(wrong_second, t, vectorized_jacobian(t, along))


def jit_trace(t: Torch) -> str | None:
    """The gradient through a module that was traced on other inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and sizes are numbers of a trace
        inputs = tuple(t.elsewhere().values())
        traced = torch.jit.trace(lambda *x: t.total(dict(zip(t.x, x, strict=True))), inputs, check_trace=False)
    leaves = t.leaves()
    return wrong_gradient(t, gradient_of(traced(*leaves.values()), leaves))


def gradient(t: Torch, x: Tensors) -> Tensors:
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    return gradient_of(t.total(leaves), leaves)


def traced_by_make_fx(t: Torch) -> str | None:
    """A program for the gradient that was recorded on other inputs."""
    return wrong_gradient(t, make_fx(lambda x: gradient(t, x))(t.elsewhere())(t.x))


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, function: Function, types: object, args: tuple[object, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, operation: Function, types: object, args: tuple[object, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        return operation(*args, **(kwargs or {}))


def in_mode(mode: Callable[[], AbstractContextManager[object]], t: Torch) -> str | None:
    """The gradient in a mode, which surrounds both passes or the backward pass alone."""
    for around in (mode, contextlib.nullcontext):
        leaves = t.leaves()
        with around():
            total = t.total(leaves)
        with mode():
            grads = gradient_of(total, leaves)
        text = wrong_gradient(t, grads)
        if text:
            return text
    return None


def empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32 if x.is_floating_point() else x.dtype, device="meta")


def without_running(problem: Problem, function: Function) -> None:
    """Differentiate a kernel twice on float32 tensors without data."""
    t = Torch(problem, "", function)
    t.x, t.u, t.do, t.rest = ({name: empty(x) for name, x in held.items()} for held in (t.x, t.u, t.do, t.rest))
    derivatives.hvp(t.outputs, t.x, t.do, t.u)


SECOND_WITHOUT_RUNNING = "backward twice"
TRANSFORMS: dict[str, Callable[[Torch], str | None]] = {
    "func.jvp": jvp,
    "dual numbers": dual_numbers,
    "func.jacfwd": jacfwd,
    "func.grad": grad,
    "func.vjp": vjp,
    "func.jacrev": jacrev,
    "vmap(grad)": vmap_grad,
    "backward twice": backward_twice,
    "func.hessian": hessian,
    "grad of grad": grad_of_grad,
    "is_grads_batched": grads_batched,
    "jacobian(vectorize)": jacobian,
    "hessian(vectorize)": vectorized_hessian,
    "jit.trace": jit_trace,
    "make_fx": traced_by_make_fx,
    "function mode": partial(in_mode, Functions),
    "dispatch mode": partial(in_mode, Operations),
}
"""By column of the table."""
