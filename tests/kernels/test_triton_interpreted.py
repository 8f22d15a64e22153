"""The Triton kernels in Triton's interpreter, in a process of its own, judged by the kit, which finds planted bugs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnkit_conformance import core
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.judge import judge

from .interpreted import MODE, TARGET
from .selection import FEW, later, of_numbers

pytest.importorskip("triton", reason="triton is not installed")

DTYPES = {
    "pointwise_attention": ("float32", "float16"),
    "reluformer_attention": ("bfloat16", "float16"),
    "sigmoid_attention": ("float32", "bfloat16"),
    "gaussian_attention": ("float32", "bfloat16", "float16"),
    "rela_attention": ("float32",),
}
"""What is judged of each op here, properties of the first alone: the kernels are the same, and the full profile by hand
has all dtypes and all properties of all."""
OPS = tuple(DTYPES)
OF_ROWS = ("softmax_attention", "sparsemax_attention", "entmax_attention")

PLANTED = """
import triton
import triton.language as tl

from attnkit.kernels.triton import distances, pointwise, rows, rows_gradients, rows_statistics, statistics, tiles
from attnkit_conformance.adapters.triton_interpreted import Interpreted


@triton.jit
def every_pair(mask, lo, hi, item, head, i0, i, j0, j):
    return (i0 + i >= 0) & (j0 + j >= 0)


@triton.jit
def whole_blocks(i0, queries, keys, left, right, ROWS: tl.constexpr, KEYS: tl.constexpr):
    first, whole, end, stop = tiles.key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    return first, whole, end, stop // KEYS * KEYS


@triton.jit
def one_key_more(key_lengths, keys, item, head):
    return tiles.valid_keys(key_lengths, keys, item, head) + 1


@triton.jit
def nowhere(total, count):
    return total * 0.0


@triton.jit
def products_alone(sums, own, dtype):
    return tiles.whole_sum((sums[0], sums[1]), own, dtype)


@triton.jit
def near_alone(tile, rest, others, PRECISION: tl.constexpr):
    return tl.dot(tile, tl.trans(others), input_precision=PRECISION)


@triton.jit
def near_tokens(tile, exact, item, head, first, rows, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    return tile


@triton.jit
def no_logarithm(x):
    return x * 0.0


@triton.jit
def output_alone(du, dstats, drows, w, share, j):
    return du


@triton.jit
def not_divided(stats, at, i, queries):
    top, tau, step, inverse = rows.load_stats(stats, at, i, queries)
    return top, tau, step, inverse * 0.0 + 1.0


class Wrong(Interpreted):
    def __init__(self):
        super().__init__()
        NAME
        NAME = WRONG
"""


@pytest.mark.parametrize(
    ("op", "expression"),
    [
        ("pointwise_attention", FEW),
        ("gaussian_attention", FEW),
        ("rela_attention", "/cross"),
        *(later(op, None if op == "pointwise_attention" else "not property") for op in OPS),
    ],
)
def test_conforms(op: str, expression: str | None, interpreted: WorkerAdapter) -> None:
    results = list(judge([interpreted], "quick", expression, DTYPES[op], ops=(op,)))
    assert {result.dtype for result in results} == {*DTYPES[op]}
    assert [f"{result.id}\n{result.message}" for result in of_numbers(results) if result.status != "pass"] == []


@pytest.mark.emulated
def test_statistics_conform(interpreted: WorkerAdapter) -> None:
    results = list(judge([interpreted], "quick", "not property", ("float32",), ops=("attention_with_statistics",)))
    passed = " ".join(result.id.split("/", 2)[2] for result in results if result.status == "pass")
    ops = {*OPS, *OF_ROWS} - {"rela_attention"}  # whose statistics have no kernel
    assert [op for op in ops if op not in passed] == []
    assert [f"{result.id}\n{result.message}" for result in results if result.status == "fail"] == []
    assert all("served by the generic" in result.reason for result in results if result.status == "unsupported")


@pytest.mark.parametrize(
    ("op", "name", "wrong", "dtype", "scene", "checks"),
    [
        ("pointwise", "pointwise.visible_pairs", "every_pair", "float32", "causal-padded", {"bound", "nonfinite"}),
        later("pointwise", "pointwise.key_blocks", "whole_blocks", "float32", "cross", {"bound"}),
        later(
            "pointwise", "pointwise.valid_keys", "one_key_more", "float32", "causal-padded",
            {"bound", "nonfinite", "null_rows"},
        ),
        later("gaussian", "pointwise.whole_sum", "products_alone", "float32", "cross", {"bound"}),
        later("gaussian", "distances.mean_of", "nowhere", "float32", "offset", {"bound"}),
        later("gaussian", "distances.visible_pairs", "every_pair", "float32", "causal-padded", {"nonfinite"}),
        later("gaussian", "pointwise.products_of", "near_alone", "bfloat16", "width=17x5,heads=grouped", {"bound"}),
        later("gaussian", "pointwise.whole_tokens", "near_tokens", "float16", "causal-padded", {"bound"}),
        later("statistics", "statistics.logarithm", "no_logarithm", "float32", "cross", {"bound"}),
        later("statistics", "pointwise.with_statistics", "output_alone", "float32", "cross", {"bound"}),
        later("softmax", "rows_statistics.load_stats", "not_divided", "float32", "cross", {"bound"}),
        later("softmax", "rows_gradients.with_statistics", "output_alone", "float32", "cross", {"bound"}),
    ],
)  # fmt: skip
@pytest.mark.emulated
def test_a_planted_bug_is_found(
    op: str, name: str, wrong: str, dtype: str, scene: str, checks: set[str], tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    code = PLANTED.replace("NAME", name).replace("WRONG", wrong)
    (tmp_path / f"planted_{wrong}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    adapter = WorkerAdapter("planted", f"planted_{wrong}:Wrong", MODE)
    named, judged = f"{op}_attention", (*OPS, "softmax_attention")
    if op in ("statistics", "softmax"):
        named, judged = "attention_with_statistics", OPS if op == "statistics" else OF_ROWS
    served = (case for case in core.cases(named, "quick", (dtype,)) if case.params.get("op", OPS[0]) in judged)
    case = next(case for case in served if scene in case.tags or scene in case.id)
    result = core.check(adapter, case)
    adapter.close()
    assert result.checks & checks, result.message


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("pointwise_attention", "float16"), ("gaussian_attention", "float32"), ("gaussian_attention", "bfloat16")],
)
def test_gradients_that_are_added_in_any_order_conform(op: str, dtype: str) -> None:
    adapter = WorkerAdapter("triton_interpreted-atomic", TARGET.replace(":Interpreted", ":Atomic"), MODE)
    found = [core.check(adapter, case) for case in core.cases(op, "quick", (dtype,))]
    adapter.close()
    assert found
    assert [f"{result.id}\n{result.message}" for result in of_numbers(found) if result.status != "pass"] == []


@pytest.mark.emulated
@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("in_interpreter*.py")), ids=lambda path: path.stem)
def test_what_the_kit_does_not_ask(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, env={**os.environ, **MODE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dispatch_never_picks_the_interpreter() -> None:
    import torch

    import attnkit

    x = torch.zeros(2, 3, 4)
    told = attnkit.explain(attnkit.pointwise_attention, x, x, x)["triton"]
    assert told == "Triton kernels run on CUDA; the tensors are on cpu"
    with pytest.raises(NotImplementedError, match="run on CUDA"):
        attnkit.pointwise_attention(x, x, x, impl="triton")
