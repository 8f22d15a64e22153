"""torch's autocast does not round what attnkit computes, whether it is on around the call or around `backward()`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnkit

from .gradient_cases import CASES, Case
from .test_gradchecks import SERVED

IMPLEMENTATIONS = [*[(case, "generic") for case in CASES], *SERVED]


def on(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def single(x: Any) -> Any:
    """float32, in which autocast rounds, for float64, in which it does not."""
    x = torch.as_tensor(x)
    return x.float() if x.dtype == torch.float64 else x


def gradients(call: Callable[..., Any], leaves: list[torch.Tensor], around: bool, behind: bool, order: int = 1) -> Any:
    """Of the cosines of the outputs, with autocast around the call or behind it; and those of their sines."""
    with on(around):
        out = call(*leaves)
    with on(behind):
        for function in (torch.cos, torch.sin)[:order]:
            total = sum(function(x.float()).sum() for x in out if x is not None)
            out = torch.autograd.grad(total, leaves, create_graph=order > 1, allow_unused=True)
    return out


def same(found: Any, expected: Any) -> bool:
    return all(y is None if x is None else torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(("case", "impl"), IMPLEMENTATIONS, ids=lambda x: x if isinstance(x, str) else x.id)
def test_gradients_are_the_same_bits_wherever_autocast_is_on(case: Case, impl: str) -> None:
    call = case.function(single, impl)
    leaves = [single(case.arrays[name]).requires_grad_() for name in case.leaves]
    expected = gradients(call, leaves, False, False)
    assert same(gradients(call, leaves, False, True), expected)
    assert same(gradients(call, leaves, True, True), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.op != "attention_regulariser"], ids=lambda x: x.id)
def test_second_derivatives_are_the_same_bits_inside_autocast(case: Case) -> None:
    call = case.function(single)
    leaves = [single(case.arrays[name]).requires_grad_() for name in case.leaves]
    assert same(gradients(call, leaves, False, True, order=2), gradients(call, leaves, False, False, order=2))


def qkv() -> list[torch.Tensor]:
    return [single(x) for x in np.random.default_rng(0).standard_normal((3, 2, 6, 4))]


@pytest.mark.parametrize("impl", ["generic", "native"])
def test_a_remembered_call_is_not_rounded(impl: str) -> None:
    leaves = [x.requires_grad_() for x in qkv()]

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor]:
        return (attnkit.softmax_attention(*leaves, impl=impl),)

    for _ in range(2):
        assert same(gradients(call, leaves, False, True), gradients(call, leaves, False, False))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_derivatives_of_torch_func_are_not_rounded(depth: int) -> None:
    """Each level has a graph of its own, and those of the outer ones hold the gradients of the inner ones."""
    q, k, v = qkv()

    def function(q: torch.Tensor) -> torch.Tensor:
        return attnkit.nystrom_attention(q, k, v, num_landmarks=3)

    for _ in range(depth):
        function = torch.func.grad(lambda q, inner=function: inner(q).sin().sum())
    expected = function(q)
    with on(True):
        assert torch.equal(function(q), expected)


def test_gradients_of_a_compiled_call_inside_autocast_are_not_rounded() -> None:
    """torch.compile takes the autocast around a program for its gradients too."""

    def call(*leaves: torch.Tensor) -> Any:
        return attnkit.softmax_attention(*leaves, return_lse=True, impl="generic")

    leaves = [x.requires_grad_() for x in qkv()]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert same(gradients(compiled, leaves, True, True), gradients(call, leaves, False, False))


def test_autocast_of_other_nodes_stays_as_it_is() -> None:
    """Hooks end at the arguments: a product of the model before them is rounded by whoever calls backward() as ever."""
    x, w = qkv()[0].requires_grad_(), qkv()[1]
    asked = []
    q = x @ w.mT @ w
    q.register_hook(lambda grad: asked.append(torch.is_autocast_enabled("cpu")))
    out = attnkit.softmax_attention(q, q, q, impl="generic")
    with on(True):
        (out * w).sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert asked == [True]
    node = q.grad_fn
    while node.name() != "BmmBackward0":
        node = node.next_functions[0][0]
    assert not node.metadata


def test_a_graph_is_freed_with_its_output() -> None:
    """Hooks do not keep the nodes that they stand on."""
    freed = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.note = Note()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    class Note:
        def __del__(self) -> None:
            freed.append(True)

    leaves = [x.requires_grad_() for x in qkv()]
    out = attnkit.softmax_attention(Noted.apply(leaves[0]), *leaves[1:], impl="generic")
    with on(True):
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    del out, grads
    assert freed == [True]


def test_meta_tensors_have_gradients_inside_autocast() -> None:
    q = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    with on(True):
        (grad,) = torch.autograd.grad(attnkit.softmax_attention(q, q, q).sum(), q, create_graph=True)
    assert grad.shape == q.shape
