"""Packed sequences in one launch of the Triton kernels: judged by the kit in the interpreter, and compiled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import attnkit
from attnkit_conformance import core
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.judge import judge

pytest.importorskip("triton", reason="triton is not installed")

from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import linear_launch
from attnkit.backends.torch.triton import rows as triton_rows
from benchmarks.sass.compiling import compiled, device_of

from .interpreted import MODE
from .selection import first_now, later
from .spills import assert_no_spills
from .test_triton_compile import MEMORY

DTYPES = {
    "softmax_attention_packed": "float32",
    "pointwise_attention_packed": "float16",
    "linear_attention_packed": "float32",
}
PLANTED = """
import triton
import triton.language as tl

from attnkit.kernels.triton import linear_tokens, tiles
from attnkit_conformance.adapters.triton_interpreted import Interpreted


@triton.jit
def first_alone(edges, sequences, block, size):
    return block * 0, tiles.first_block(edges, block * 0, size)


@triton.jit
def one_token_less(edges, sequence):
    first = tl.load(edges + sequence).to(tl.int64)
    return first, tl.maximum((tl.load(edges + sequence + 1) - first).to(tl.int32) - 1, 0)


class Wrong(Interpreted):
    def __init__(self):
        super().__init__()
        NAME = WRONG
"""


@pytest.mark.emulated
@pytest.mark.parametrize("op", DTYPES)
def test_conforms(op: str, interpreted: WorkerAdapter) -> None:
    results = list(judge([interpreted], "quick", None, (DTYPES[op],), ops=(op,)))
    assert {result.dtype for result in results if result.status == "pass"} == {DTYPES[op]}
    assert [f"{result.id}\n{result.message}" for result in results if result.status != "pass"] == []


@pytest.mark.parametrize(
    ("op", "name", "wrong"),
    [
        later("pointwise_attention_packed", "tiles.own_sequence", "first_alone"),
        ("pointwise_attention_packed", "tiles.own_tokens", "one_token_less"),
        later("linear_attention_packed", "linear_tokens.own_sequence", "first_alone"),
    ],
)
@pytest.mark.emulated
def test_a_planted_bug_is_found(
    op: str, name: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"planted_{wrong}.py").write_text(PLANTED.replace("NAME", name).replace("WRONG", wrong))
    monkeypatch.syspath_prepend(tmp_path)
    adapter = WorkerAdapter("planted", f"planted_{wrong}:Wrong", MODE)
    result = core.check(adapter, next(iter(core.cases(op, "quick", ("float32",)))))
    adapter.close()
    assert result.checks & {"bound", "nonfinite"}, result.message


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
    call, exact = (linear_launch.Call(q, q, q, s) for s in (setting, setting._replace(exact=True)))
    return call.forward(q, None) + exact.backward(q, {"q": q, "k": q, "v": q}, None, None)


# Bytes: two numbers from before the loop, which a chunk of 16 tokens reads once, in 1,300 instructions.
ALLOWED = {"outputs": 8}


@pytest.mark.parametrize("launches", first_now([of_pointwise, of_rows, of_linear]))
def test_sequences_compile_without_spills(launches: Callable[[], list[triton_launch.Launch]]) -> None:
    with device_of(90):
        by_name = {launch.kernel.fn.__name__: launch for launch in launches()}
    for name, launch in by_name.items():
        kernel = compiled(launch, 90)
        assert_no_spills(name, kernel, ALLOWED.get(name, 0))
        assert kernel.shared <= MEMORY[90], f"{name} needs {kernel.shared} bytes of shared memory"


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
