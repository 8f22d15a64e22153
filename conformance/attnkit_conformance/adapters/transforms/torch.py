"""torch's transformations of an op on a `Problem`: each reports what is wrong with its result, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

import attnkit
from attnkit_conformance.adapters.base import dispatches
from attnkit_conformance.adapters.transforms.problem import Problem, missed, missed_second, missed_tangents

Tensors = dict[str, torch.Tensor]
Function = Callable[[Tensors], Tensors]


class Torch:
    """A problem as tensors, and the op as a function of its differentiable arguments under one `impl`."""

    name = "torch"

    def __init__(self, problem: Problem, impl: Any, function: Callable[..., Any] | None = None) -> None:
        self.problem, self.op, self.case = problem, problem.op, problem.case
        self.module: Any = attnkit if function is None else SimpleNamespace(**{self.op.name: function})
        self.options = {"impl": impl} if function is None and dispatches(self.op) else {}
        self.x, self.u = tensors(problem.inputs), tensors(problem.direction)
        self.do = tensors(problem.case.cotangents)
        self.rest = tensors({n: x for n, x in problem.case.arrays.items() if n not in self.x})

    def outputs(self, x: Tensors) -> Tensors:
        """Those with a gradient."""
        answer = self.op.binding.forward(self.module, self.op, {**self.rest, **x}, {**self.options, **self.case.params})
        return {name: answer[name] for name in self.do}

    def entries(self, x: Tensors) -> torch.Tensor:
        outputs = self.outputs(x)
        return torch.stack([outputs[name].reshape(-1)[index] for name, index in self.problem.entries])

    def total(self, x: Tensors) -> torch.Tensor:
        """The function that is differentiated."""
        return sum_of_products(self.outputs(x), self.do)


def tensors(arrays: Mapping[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}


def sum_of_products(a: Tensors, b: Tensors) -> torch.Tensor:
    products = [torch.sum(a[name] * b[name]) for name in b]
    return torch.stack(products).sum()


def arrays(x: Tensors) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in x.items()}


def wrong_tangents(t: Torch, tangents: Tensors) -> str | None:
    entries = [tangents[name].detach().reshape(-1)[index].numpy() for name, index in t.problem.entries]
    return missed_tangents(entries, t.problem)


def jvp(t: Torch) -> str | None:
    return wrong_tangents(t, torch.func.jvp(t.outputs, (t.x,), (t.u,))[1])


def dual_numbers(t: Torch) -> str | None:
    with forward_ad.dual_level():
        outputs = t.outputs({name: forward_ad.make_dual(x, t.u[name]) for name, x in t.x.items()})
        tangents = {name: forward_ad.unpack_dual(x).tangent for name, x in outputs.items()}
    lost = [name for name, tangent in tangents.items() if tangent is None]
    return f"no tangent of {', '.join(lost)}" if lost else wrong_tangents(t, tangents)


def jacfwd(t: Torch) -> str | None:
    def along(step: torch.Tensor) -> torch.Tensor:
        return t.entries({name: x + step * t.u[name] for name, x in t.x.items()})

    return missed_tangents(torch.func.jacfwd(along)(torch.zeros((), dtype=torch.float64)).detach(), t.problem)


def vjp(t: Torch) -> str | None:
    return missed("the gradient", arrays(torch.func.vjp(t.outputs, t.x)[1](t.do)[0]), t.problem.gradient)


def grad(t: Torch) -> str | None:
    return missed("the gradient", arrays(torch.func.grad(t.total)(t.x)), t.problem.gradient)


def jacrev(t: Torch) -> str | None:
    got = arrays(torch.func.jacrev(t.entries)(t.x))
    rows = ((missed("the row", {name: x[n] for name, x in got.items()}, row)) for n, row in enumerate(t.problem.rows))
    return next((text for text in rows if text), None)


def vmap_grad(t: Torch) -> str | None:
    step = 0.01
    both = {name: torch.stack([x, x + step * t.u[name]]) for name, x in t.x.items()}
    got = arrays(torch.func.vmap(torch.func.grad(t.total))(both))
    golden = (t.problem.gradient, t.problem.moved(step).gradient)
    texts = (missed("the gradient", {name: x[n] for name, x in got.items()}, golden[n]) for n in range(2))
    return next((text for text in texts if text), None)


def backward_twice(t: Torch) -> str | None:
    """torch.autograd.grad with create_graph, and again of its result."""
    leaves = {name: x.clone().requires_grad_() for name, x in t.x.items()}
    first = torch.autograd.grad(t.total(leaves), list(leaves.values()), create_graph=True, allow_unused=True)
    grads = {name: g for name, g in zip(leaves, first, strict=True) if g is not None and g.requires_grad}
    second: Any = [None] * len(leaves)
    if grads:
        along = sum_of_products(grads, {name: t.u[name] for name in grads})
        second = torch.autograd.grad(along, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), second, strict=True)
    return missed_second(
        arrays({name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}), t.problem.second
    )


def hessian(t: Torch) -> str | None:
    """Forward over reverse, like torch.func.hessian, times u."""
    return missed_second(arrays(torch.func.jvp(torch.func.grad(t.total), (t.x,), (t.u,))[1]), t.problem.second)


def grad_of_grad(t: Torch) -> str | None:
    def along(x: Tensors) -> torch.Tensor:
        return sum_of_products(torch.func.grad(t.total)(x), t.u)

    return missed_second(arrays(torch.func.grad(along)(t.x)), t.problem.second)


def empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32 if x.is_floating_point() else x.dtype, device="meta")


def without_running(problem: Problem, function: Callable[..., Any]) -> None:
    """Differentiate a kernel twice on float32 tensors without data."""
    t = Torch(problem, "", function)
    t.x, t.do, t.rest = ({name: empty(x) for name, x in tensors.items()} for tensors in (t.x, t.do, t.rest))
    leaves = {name: x.requires_grad_() for name, x in t.x.items()}
    first = torch.autograd.grad(t.total(leaves), list(leaves.values()), create_graph=True, allow_unused=True)
    torch.autograd.grad([g.sum() for g in first if g is not None], list(leaves.values()), allow_unused=True)


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
}
"""By column of the table."""
