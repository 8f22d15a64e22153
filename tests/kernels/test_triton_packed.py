"""Packed sequences in one launch of the Triton kernels: compiled, and what errors name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import attnkit

pytest.importorskip("triton", reason="triton is not installed")

from attnkit._core.check import dtype_name
from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import linear_launch
from attnkit.backends.torch.triton import rows as triton_rows
from benchmarks.sass.compiling import device_of

from .selection import first_now
from .spills import gated

# ---------------------------------------------------------------------------------------------- compiled


def operands() -> tuple[torch.Tensor, dict[str, Any]]:
    """Heads first, and the options that say where sequences begin."""
    edges = torch.tensor([0, 100, 1000])
    return torch.empty(8, 1000, 64, dtype=torch.bfloat16), {"edges_q": edges, "edges_k": edges, "causal": True}


def of_pointwise() -> list[triton_launch.Launch]:
    q, options = operands()
    c = triton_launch.call_of(q, q, q, alpha=0.5, shift="-log_length", window=(50, None), **options)
    launches = triton_launch.forward_launches(q, q, q, q, c)
    return launches + triton_launch.backward_launches(q, q, q, q, {"q": q, "k": q, "v": q}, c)


def of_rows() -> list[triton_launch.Launch]:
    q, options = operands()
    call = triton_rows.call_of("softmax_attention", {"q": q, "k": q, "v": q, **options})
    rows = torch.empty(triton_rows.row_numbers(call.a.leading, call.a.queries, 1.0))
    made = [triton_rows.forward_launch(q, q, q, q, rows[0, 0], rows, call)]
    return made + triton_rows.backward_launches(q, q, q, q, rows[0, 0], rows, {"q": q, "k": q, "v": q}, call)


def of_linear() -> list[triton_launch.Launch]:
    q, options = operands()
    setting = linear_launch.setting(q, q, q, **options)
    of_gradients = setting.of_gradients(dtype_name(q))
    call, exact = (linear_launch.Call(q, q, q, s) for s in (setting, of_gradients))
    return call.forward(q, None) + exact.backward(q, {"q": q, "k": q, "v": q}, None, None)


# Bytes: two numbers from before the loop, which a chunk of 16 tokens reads once, in 1,300 instructions.
ALLOWED = {"outputs": 8, "sweep_queries": 120}


@pytest.mark.parametrize("launches", first_now([of_pointwise, of_rows, of_linear]))
def test_sequences_compile_without_spills(launches: Callable[[], list[triton_launch.Launch]]) -> None:
    with device_of(90):
        by_name = {launch.kernel.fn.__name__: launch for launch in launches()}
    gated(by_name, 90, ALLOWED)


# ---------------------------------------------------------------------------------------------- dispatch


@pytest.mark.parametrize("as_array", [False, True])
def test_explain_and_errors_name_the_packed_op(as_array: bool) -> None:
    x, edges = torch.zeros(5, 2, 4), torch.tensor([0, 2, 5]) if as_array else (0, 2, 5)
    call = partial(attnkit.explain, attnkit.linear_attention_packed, x, x, x, edges, edges)
    assert call()["triton"] == "Triton kernels run on CUDA; the tensors are on cpu"
    assert call()["generic"] is None
    told = attnkit.explain(attnkit.softmax_attention_packed_vjp, x, x, x, edges, edges, x)
    assert {"triton", "generic"} <= told.keys()
    with pytest.raises(NotImplementedError, match=r"pointwise_attention_packed: .*run on CUDA"):
        attnkit.pointwise_attention_packed(x, x, x, edges, edges, impl="triton")
