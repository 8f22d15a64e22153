"""torch's derivatives of a function from named tensors to named tensors, at some of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[Tensors], Tensors]


def jvp(function: Function, arrays: Tensors, tangents: Tensors) -> Tensors:
    """The tangents of the outputs, by torch.func.jvp, which lays tangents out like arrays: entries that share a place
    would share their tangent.
    """
    apart = {name: arrays[name].clone() for name in tangents}
    answer: Tensors = torch.func.jvp(function, (apart,), (dict(tangents),))[1]
    return answer


def hvp(function: Function, arrays: Tensors, cotangents: Tensors, tangents: Tensors) -> Tensors:
    """The derivatives of the gradients along the tangents, by torch.autograd.grad of what it returned before."""
    leaves = {name: arrays[name].detach().clone().requires_grad_() for name in tangents}
    first = torch.autograd.grad(
        product(function(leaves), cotangents), list(leaves.values()), create_graph=True, allow_unused=True
    )
    grads = {name: grad for name, grad in zip(leaves, first, strict=True) if grad is not None and grad.requires_grad}
    second: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if grads:
        along = product(grads, {name: tangents[name] for name in grads})
        second = torch.autograd.grad(along, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), second, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}


def vmap_grad(function: Function, arrays: Tensors, cotangents: Tensors, samples: Tensors) -> Tensors:
    """The gradients of every sample, by torch.func.vmap of torch.func.grad."""
    grad = torch.func.grad(lambda sample: product(function(sample), cotangents))
    answer: Tensors = torch.func.vmap(grad)(dict(samples))
    return answer


def product(a: Tensors, b: Tensors) -> torch.Tensor:
    """The sum of all products of entries, by the names of b."""
    return torch.stack([torch.sum(a[name] * b[name]) for name in b]).sum()
