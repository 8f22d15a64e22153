"""Packed sequences in one launch of the CUDA kernels: judged on the CPU, planted bugs found, compiled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnkit
from attnkit.backends.cupy import packed, pointwise, rows
from attnkit.kernels import predicted
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.judge import judge
from attnkit_conformance.model.case import numpy_dtype
from tests.library.arrays import assert_agrees

from .emulated import assert_found, draw
from .selection import first_now, later

POINTWISE, SOFTMAX = "pointwise_attention_packed", "softmax_attention_packed"


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (SOFTMAX, "float32"),
        later(SOFTMAX, "bfloat16"),
        later(POINTWISE, "float16"),
        later(POINTWISE, "float32"),
        later(POINTWISE, "float64"),
    ],
)
def test_conforms(op: str, dtype: str, kernels: CudaOnCpu) -> None:
    results = list(judge([kernels], "quick", "not property", (dtype,), ops=(op,)))
    assert len(results) > 5
    assert [f"{result.id}\n{result.message}" for result in results if result.status != "pass"] == []


# ---------------------------------------------------------------------------------------------- several blocks

EDGES = (0, 5, 5, 38, 60), (0, 9, 20, 41, 41)
"""More keys than queries, none of either, more queries than keys in several blocks, no keys."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "softplus": (POINTWISE, {"activation": "softplus", "causal": True, "window": (20, None), "length": "all"}),
    "silu": (POINTWISE, {"activation": "silu", "length": draw(9, 60) ** 2 + 1, "shift": "-log_length"}),
    "visible": (POINTWISE, {"activation": "relu", "alpha": 0.5, "window": (9, 3)}),
    "softmax": (SOFTMAX, {"causal": "upper_left", "window": (4, 2)}),
}


def agree(kernels: CudaOnCpu, name: str) -> None:
    """Results are those of the generic body, whichever kind boundaries are."""
    op, options = CALLS[name]
    q, k, v, do = (draw(n, *shape) for n, shape in enumerate(((60, 4, 8), (41, 2, 8), (41, 2, 5), (60, 4, 5))))
    arrays = {"q": q, "k": k, "v": v}
    edges = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), EDGES, strict=True))
    if options.get("causal"):
        edges = {name: np.array(x, np.int32) for name, x in edges.items()}
    options = {**options, **edges, "enable_gqa": True}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected = getattr(attnkit, op)(*wide, impl="generic", **options)
    assert_agrees(kernels.call(op, arrays, options)["o"], expected)
    grads = getattr(attnkit, f"{op}_vjp")(*wide, do=do.astype(np.float64), impl="generic", **options)
    for argument, grad in kernels.vjp(op, arrays, options, {"o": do}).items():
        assert_agrees(grad, grads[argument])


@pytest.mark.parametrize("name", first_now(CALLS))
def test_sequences_of_several_blocks(name: str, kernels: CudaOnCpu) -> None:
    agree(kernels, name)


# ---------------------------------------------------------------------------------------------- planted bugs

PLANTED: dict[str, tuple[str, str, str]] = {
    "bounds that count from the first tokens": ("pairs.cuh", "shift = keys - queries;", "shift = 0;"),
    "a search that ends too early": ("packed.cuh", "while (high - low > 1)", "while (high - low > 2)"),
    "keys of the first sequence": ("pairs.cuh", "move(*x, first_key)", "move(*x, 0)"),
    "blocks without one more for a sequence": (
        "packed.cuh", "(int)(edges[sequence] / size) + sequence", "(int)(edges[sequence] / size)",
    ),
    "a sequence that ends where it begins": (
        "pairs.cuh", "queries = (int)(edges_q[sequence + 1] - first_query);", "queries = 1;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", first_now(PLANTED))
def test_a_planted_bug_is_found(name: str) -> None:
    file, before, after = PLANTED[name]
    wrong = CudaOnCpu("planted", {file: (before, after)})
    with pytest.raises((AssertionError, RuntimeError)):
        agree(wrong, "softplus")


def test_numbers_of_rows_that_are_not_moved_are_found() -> None:
    text = "for (View* x : of_queries) move(*x, edges_q[sequence]);"
    case = next(iter(core.cases(SOFTMAX, "quick", ("float32",))))
    assert_found(CudaOnCpu("planted", {"rows.cuh": (text, "")}), case, {"bound", "nonfinite", "exception"})


# ---------------------------------------------------------------------------------------------- dispatch


def test_what_is_refused_and_taken() -> None:
    wide, edges = np.zeros((5, 2, 300), np.float32), (0, 2, 5)
    assert "head sizes beyond 256" in str(packed.unsupported_options(wide, wide, wide, edges, edges))
    side = int((predicted.KEPT / 4) ** 0.5)
    q = np.empty((2 * side + 2, 1, 1), np.float32)
    halves, boundaries = (0, side, 2 * side + 2), np.array([0, side, 2 * side + 2])
    assert not packed.keeps(q, q, q, (0, 1, 2), (0, 1, 2))
    assert packed.keeps(q, q, q, halves, halves)
    assert not packed.keeps(q, q, q, (0, side, 2 * side), (0, side, 2 * side))
    assert packed.keeps(q, q, q, boundaries, boundaries)


# ---------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize(
    ("kind", "dtype", "d", "capability"),
    [
        (pointwise, "bfloat16", 64, 90),
        later(rows, "float16", 64, 80),
        later(rows, "bfloat16", 128, 90),
        later(pointwise, "float32", 64, 80),
    ],
)
def test_no_spills_and_enough_memory(kind: Any, dtype: str, d: int, capability: int, tmp_path: Path) -> None:
    from .test_cuda_compile import MEMORY, Noting, compiled

    edges = np.array([0, 60, 128])
    own = {"alpha": 1.0} if kind is rows else {"activation": "sigmoid", "shift": "-log_length"}
    options = {**own, "edges_q": edges, "edges_k": edges, "causal": True, "window": (50, None)}
    device, x = Noting(), np.zeros((2, 128, d), numpy_dtype(dtype))
    kind.forward(device, x, x, x, **options)
    kind.backward(device, x, x, x, x, **options)
    found = compiled({launch.name: launch for launch in device.launches}, capability, tmp_path)
    assert len(found) == (3 if kind is rows else 4)
    for name, kernel in found.items():
        assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
        assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
