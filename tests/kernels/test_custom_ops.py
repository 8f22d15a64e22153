"""What torch promises of a custom op, kept by every implementation with explicit gradients: the same bits again and in
deterministic mode, in one compiled graph, in a CUDA graph. Triton kernels need a CUDA device for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnkit

CPU = {
    "blocked": ("pointwise_attention", {"causal": True, "dropout": (0.2, 5)}),
    "blocked softmax": ("softmax_attention", {"key_lengths": torch.tensor([[30], [17]])}),
    "blocked entmax": ("entmax_attention", {"causal": True}),
    "recomputed": ("efficient_attention", {}),
}
CUDA = {
    "triton": ("pointwise_attention", {"causal": True, "dropout": (0.2, 5)}),
    "triton gelu": ("pointwise_attention", {"activation": "gelu", "bias": torch.linspace(-1, 1, 33), "alpha": 0.5}),
    "triton softpick": ("softpick_attention", {"causal": True, "bias": torch.linspace(-1, 1, 33), "eps": 0.1}),
    "triton linear": ("linear_attention", {"causal": True}),
    "triton full": ("linear_attention", {"key_lengths": torch.tensor([[30], [17]])}),
}
CASES = [(impl, "cpu") for impl in CPU] + [(impl, "cuda") for impl in CUDA]
Call = Callable[..., torch.Tensor]


def needs(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def call_of(name: str, device: str) -> Call:
    op, options = {**CPU, **CUDA}[name]
    moved: dict[str, Any] = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    function = getattr(attnkit, op)
    return lambda q, k, v: function(q, k, v, impl=name.split()[0], **moved)


def tensors(device: str, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 33, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]


def pulled(call: Call, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    o = call(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, torch.cos(o.detach()))]


@pytest.mark.parametrize(("name", "device"), CASES, ids=str)
def test_the_same_bits_again_and_in_deterministic_mode(name: str, device: str) -> None:
    needs(device)
    call = call_of(name, device)
    expected = pulled(call, tensors(device))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            found = pulled(call, tensors(device))
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("name", "device"), CASES, ids=str)
def test_one_compiled_graph(name: str, device: str) -> None:
    needs(device)
    torch._dynamo.reset()
    call = call_of(name, device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for one, other in zip(pulled(compiled, tensors(device)), pulled(call, tensors(device)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CUDA)
def test_a_cuda_graph_replays_forward_and_backward(name: str) -> None:
    needs("cuda")
    call, inputs = call_of(name, "cuda"), tensors("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pulled(call, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = pulled(call, inputs)
    others = tensors("cuda", seed=1)
    with torch.no_grad():
        for held, other in zip(inputs, others, strict=True):
            held.copy_(other)
    graph.replay()
    for one, other in zip(found, pulled(call, others), strict=True):
        assert torch.equal(one, other)
