"""The CUDA kernels of softmax, sparsemax and entmax attention: judged on the CPU, planted bugs found, compiled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit import entmax_attention, entmax_attention_vjp, softmax_attention, softmax_attention_vjp
from attnkit.backends.cupy import rows
from attnkit.backends.cupy.launch import Launch
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.judge import judge
from attnkit_conformance.model.case import Case, numpy_dtype
from attnkit_conformance.model.tolerance import growth_of_exponent
from tests.library.arrays import assert_agrees

from .emulated import assert_found, draw
from .selection import FEW, first_now, later

DTYPES = {
    "softmax_attention": ("float32", "float16"),
    "sparsemax_attention": ("float64",),
    "entmax_attention": ("bfloat16",),
}
"""What is judged of each op here: the full profile by hand has all dtypes of all."""


@pytest.mark.parametrize(("op", "expression"), [*((op, FEW) for op in DTYPES), *(later(op, None) for op in DTYPES)])
def test_conforms(op: str, expression: str | None, kernels: CudaOnCpu) -> None:
    results = list(judge([kernels], "quick", expression, DTYPES[op], ops=(op,)))
    assert {result.dtype for result in results} == {*DTYPES[op]}
    bad = [result for result in results if result.status not in ("pass", "unsupported")]
    assert [f"{result.id}\n{result.message}" for result in bad] == []


TELLING = {
    ("softmax_attention", "bfloat16"): ("257x100-causal", "dropout-mask", "huge", "64x64-d64"),
    ("entmax_attention", "float32"): ("1x257", "bias-inf", "dropout-mask", "ties"),
}
"""Scenes of which the quick profile has none: rows that are not resident, many tiles, options of pairs."""


@pytest.mark.parametrize(("op", "dtype"), [("softmax_attention", "bfloat16"), later("entmax_attention", "float32")])
def test_conforms_beyond_the_quick_profile(op: str, dtype: str, kernels: CudaOnCpu) -> None:
    for scene in TELLING[op, dtype]:
        result = core.check(kernels, case_of(op, dtype, scene))
        assert result.status == "pass", f"{result.id}\n{result.message}"


# ---------------------------------------------------------------------------------------------- planted bugs

PLANTED: dict[str, tuple[str, str, str, str, str, str, set[str]]] = {
    "a threshold that stops early": (
        "rows.cuh", "if (count >= a.steps) break;", "if (count >= 2) break;", "sparsemax_attention", "float64",
        "cross", {"bound"},
    ),
    "an unmasked last tile": (
        "pairs.cuh", "&& j0 + columns <= smaller(keys, i0 + a.right + 1)", "", "softmax_attention", "bfloat16",
        "cross", {"bound", "nonfinite"},
    ),
    "sums that are not shrunk": (
        "rows.cuh", "OwnRows<Tiles>::scale(sums, r, shrink);", "", "softmax_attention", "bfloat16", "cross", {"bound"},
    ),
    "lanes that do not join their maxima": (
        "rows.cuh", "higher.reduce([](C x, C y) { return greater(x, y); });", "", "softmax_attention", "bfloat16",
        "cross", {"bound", "nonfinite"},
    ),
    "a mean that is left out": (
        "rows_gradients.cuh", "u[n] *= dp[n] - delta.of_score(n);", "u[n] *= dp[n];", "softmax_attention", "float32",
        "cross", {"bound"},
    ),
    "a cotangent of lse that is left out": (
        "rows_gradients.cuh", "if (a.dlse.at && ", "if (false && ", "softmax_attention", "float32", "causal-padded",
        {"bound"},
    ),
    "dropout of invisible pairs": (
        "rows.cuh", "const bool seen = pairs.visible(queries[r], i0 + r, j0 + c);", "const bool seen = true;",
        "softmax_attention", "float32", "dropout-mask", {"exception"},
    ),
}  # fmt: skip
"""By name: file, text and what takes its place, op, dtype, scene, and the checks one of which has to fail."""


def case_of(op: str, dtype: str, scene: str) -> Case:
    """The first sample of a scene that is served."""
    served = (
        case
        for case in core.cases(op, "scenes", (dtype,))
        if not rows.unsupported_options(**case.arrays, **case.params)
    )
    return next(case for case in served if case.id.split("/")[2].split(".")[0] == scene)


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    file, before, after, op, dtype, scene, checks = PLANTED[name]
    assert_found(CudaOnCpu("planted", {file: (before, after)}), case_of(op, dtype, scene), checks)


def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other warps that need more steps than those of the first."""
    monkeypatch.setattr(rows, "RESIDENT", 0)
    reset = "  if (threadIdx.x == 0) *word = 0;\n  __syncthreads();\n"
    wrong = CudaOnCpu("planted", {"rows_of_tiles.cuh": (reset, reset.partition("\n")[0] + "\n")})
    assert_found(wrong, case_of("sparsemax_attention", "float32", "cross"), {"exception", "bound"})


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
@pytest.mark.parametrize("keys", [200, 300], ids=["resident", "by passes"])
def test_thresholds_are_exact(alpha: float, keys: int, kernels: CudaOnCpu) -> None:
    """Rows of v that are the unit matrix give the weights: they sum to 1 whatever the spread of the scores."""
    q, k = np.linspace(0.01, 60, 9, dtype=np.float32)[:, None], draw(1, keys, 1)
    v = np.eye(keys, 200, dtype=np.float32)
    v[:, 0] = 1
    got = kernels.call("entmax_attention", {"q": q, "k": k, "v": v}, {"alpha": alpha, "scale": 1.0})["o"]
    exact = entmax_attention(*(x.astype(np.float64) for x in (q, k, v)), alpha=alpha, scale=1.0)
    assert_agrees(got[:, 0], np.ones(9))
    assert_agrees(got, exact, growth=growth_of_exponent(np.max(np.abs(q @ k.T))))


def test_resident_rows_and_passes_give_the_same(kernels: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"q": draw(0, 70, 16), "k": draw(1, 150, 16), "v": draw(2, 150, 16)}
    results = []
    for keys in (256, 0):
        monkeypatch.setattr(rows, "RESIDENT", keys)
        results.append(kernels.call("entmax_attention", arrays, {"causal": True})["o"])
    assert np.array_equal(*results)


def test_scores_that_overflow_exp(kernels: CudaOnCpu) -> None:
    q, k, v = (draw(n, 70, 8) for n in range(3))
    got = kernels.call("softmax_attention", {"q": q, "k": k, "v": v}, {"scale": 300.0, "return_lse": True})
    o, lse = softmax_attention(*(x.astype(np.float64) for x in (q, k, v)), scale=300.0, return_lse=True)
    assert_agrees(got["o"], o, growth=growth_of_exponent(np.max(np.abs(300 * q @ k.T))))
    assert_agrees(got["lse"], lse)


def test_no_queries_and_no_keys(kernels: CudaOnCpu) -> None:
    q, k, v, do = draw(0, 5, 8), draw(1, 0, 8), draw(2, 0, 8), draw(3, 5, 8)
    found = kernels.call("softmax_attention", {"q": q, "k": k, "v": v}, {"return_lse": True})
    assert np.all(found["o"] == 0)
    assert np.all(found["lse"] == -np.inf)
    grads = kernels.vjp("entmax_attention", {"q": q, "k": k, "v": v}, {}, {"o": do})
    expected = entmax_attention_vjp(q, k, v, do)
    assert {name: x.shape for name, x in grads.items()} == {name: x.shape for name, x in expected.items()}
    assert np.all(grads["q"] == 0)


def test_values_of_no_width_leave_the_gradient_of_lse(kernels: CudaOnCpu) -> None:
    q, k, v, do = draw(0, 5, 8), draw(1, 7, 8), np.zeros((7, 0), np.float32), np.zeros((5, 0), np.float32)
    dlse = draw(4, 5)
    params = {"return_lse": True}
    grads = kernels.vjp("softmax_attention", {"q": q, "k": k, "v": v}, params, {"o": do, "lse": dlse})
    expected = softmax_attention_vjp(q, k, v, do, dlse)
    for name, grad in grads.items():
        assert_agrees(grad, expected[name])


def test_an_array_alpha_is_refused() -> None:
    x = draw(0, 2, 5, 8)
    assert rows.unsupported_options(x, x, x, alpha=np.full((2, 1, 1), 1.5)) == (
        "an array alpha is served by the generic implementation"
    )


# ---------------------------------------------------------------------------------------------- the compiler


def launches(dtype: str, d: int, alpha: float, keys: int, **options: Any) -> dict[str, Launch]:
    """The launches of a call and of its gradients by their names in C++."""
    from .test_cuda_compile import Noting

    device = Noting()
    x, y = (np.zeros((1, 2, tokens, d), numpy_dtype(dtype)) for tokens in (128, keys))
    rows.forward(device, x, y, y, alpha=alpha, **options)
    rows.backward(device, x, y, y, x, alpha=alpha, **options)
    return {launch.name: launch for launch in device.launches}


@pytest.mark.parametrize(
    ("dtype", "d", "alpha", "keys", "capability", "pairs"),
    [
        later("float16", 64, 1.0, 1024, 80, True),
        ("bfloat16", 128, 1.5, 256, 90, False),
    ],
)
def test_no_spills_enough_memory_and_tensor_cores(
    dtype: str, d: int, alpha: float, keys: int, capability: int, pairs: bool, tmp_path: Path
) -> None:
    from .test_cuda_compile import MEMORY, compiled

    options: dict[str, Any] = {"causal": True}
    if pairs:
        options |= {"mask": np.ones((128, keys), bool), "bias": np.zeros((128, keys), np.float32), "dropout": (0.1, 5)}
    found = compiled(launches(dtype, d, alpha, keys, **options), capability, tmp_path)
    forward = "rows_softmax" if alpha == 1.0 else "rows_threshold"
    gradients = {f"rows_gradient_of_{name}" for name in ("queries", "keys", *(("bias",) if pairs else ()))}
    assert {*found} == {forward, *gradients}
    for name, kernel in found.items():
        assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
        assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
        if dtype in ("float16", "bfloat16"):
            assert kernel.count("mma.sync.aligned.m16n8k16") >= 32, f"{name} does not use tensor cores"
