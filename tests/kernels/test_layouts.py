"""Outputs and gradients of Triton kernels are laid out like their arguments, in memory and where there is none."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import attnkit

pytest.importorskip("triton", reason="triton is not installed")

# What imports triton stands behind the skip.
from attnkit.backends.torch.layout import in_layout_of, strides_like
from attnkit.backends.torch.triton import launch
from benchmarks.stubbed import stubbed

from .opchecks import Recorder

SHAPE = (2, 3, 5, 8)
FIELDS = ("total", "entropy")


def turned(*order: int) -> Callable[[], list[Tensor]]:
    """Three arrays whose axes are in this order in memory."""
    sizes = [SHAPE[n] for n in order]
    back = [order.index(n) for n in range(4)]
    return lambda: [torch.zeros(sizes).permute(back) for _ in range(3)]


LAYOUTS: dict[str, tuple[Callable[[], list[Tensor]], bool]] = {
    "contiguous": (turned(0, 1, 2, 3), True),
    "heads inside tokens": (turned(0, 2, 1, 3), True),
    "tokens first": (turned(2, 0, 1, 3), True),
    "features outside": (turned(0, 1, 3, 2), True),
    "five axes": (lambda: [torch.zeros(3, 2, 5, 2, 8).permute(1, 0, 3, 2, 4) for _ in range(3)], True),
    "stepped": (lambda: [x.transpose(1, 2) for x in torch.zeros(2, 5, 3, 3, 8).unbind(2)], False),
    "expanded": (lambda: [torch.zeros(2, 1, 5, 8).expand(SHAPE) for _ in range(3)], False),
}
CALLS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda *x: attnkit.pointwise_attention(*x, impl="triton"),
    "gaussian": lambda *x: attnkit.gaussian_attention(*x, impl="triton"),
    "softmax": lambda *x: attnkit.softmax_attention(*x, return_lse=True, impl="triton"),
    "entmax": lambda *x: attnkit.entmax_attention(*x, impl="triton"),
    "linear": lambda *x: attnkit.linear_attention(*x, return_state=True, impl="triton"),
    "statistics": lambda *x: attnkit.attention_with_statistics(
        attnkit.softmax_attention, *x, fields=FIELDS, impl="triton"
    ),
}


@pytest.fixture
def nothing_runs() -> Iterator[None]:
    with stubbed(), mock.patch.object(launch, "run", return_value=None):
        yield


def row_major(x: Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape, device="meta").stride()


def first(answer: Any) -> Tensor:
    found: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_laid_out_like_their_arguments(name: str, layout: str, nothing_runs: None) -> None:
    make, dense = LAYOUTS[layout]
    inputs = [x.requires_grad_() for x in make()]
    for _ in range(3):  # planned, and from what was recorded
        o = first(CALLS[name](*inputs))
        results = [o, *torch.autograd.grad(o, inputs, torch.zeros(o.shape))]
        for x, result in zip((inputs[0], *inputs), results, strict=True):
            assert result.stride() == (torch.empty_like(x).stride() if dense else row_major(x))
    with Recorder() as recorder:
        first(CALLS[name](*inputs)).sum().backward()
    assert len(recorder.calls) == 2
    for op, arguments in recorder.calls:
        mode = FakeTensorMode()
        given = tree_map_only(Tensor, lambda x, mode=mode: mode.from_tensor(x.detach()), arguments)
        with mode:
            fakes = op(*given)
        assert [x.stride() for x in fakes] == [x.stride() for x in op(*arguments)]


def test_packed_results_are_laid_out_like_tokens(nothing_runs: None) -> None:
    edges = torch.tensor([0, 2, 5], dtype=torch.int32)
    inputs = [torch.zeros(5, 3, 8).requires_grad_() for _ in range(3)]
    for op in (attnkit.pointwise_attention_packed, attnkit.softmax_attention_packed, attnkit.linear_attention_packed):
        for _ in range(3):
            o = op(*inputs, edges, edges, impl="triton")  # type: ignore[operator]
            assert all(x.is_contiguous() for x in (o, *torch.autograd.grad(o, inputs, torch.zeros(o.shape))))


def test_joining_heads_is_a_view(nothing_runs: None) -> None:
    q, k, v = (
        x[..., :8].transpose(1, 2) for x in (torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 4))
    )
    o = attnkit.pointwise_attention(q, k, v, impl="triton")
    assert o.transpose(1, 2).view(2, 5, 12).data_ptr() == o.data_ptr()


def test_the_layout_of_an_argument_with_another_width() -> None:
    x = torch.zeros(2, 5, 3, 8).transpose(1, 2)
    assert strides_like(x, (2, 3, 5, 4)) == torch.zeros(2, 5, 3, 4).transpose(1, 2).stride()
    assert strides_like(x[..., :6], (2, 3, 5, 4)) == torch.zeros(2, 3, 5, 4).stride()
    result = torch.randn(2, 3, 5, 4)
    assert torch.equal(in_layout_of(x, result), result)
