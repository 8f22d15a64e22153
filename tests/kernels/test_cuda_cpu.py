"""The CUDA kernels executed on the CPU: judged by the kit, which finds planted bugs, and what the kit does not ask."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnkit import pointwise_attention, pointwise_attention_vjp
from attnkit.backends.cupy import launch, pointwise
from attnkit_conformance import core
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault, Machine
from attnkit_conformance.judge import judge
from attnkit_conformance.model.case import Case
from tests.library.arrays import assert_agrees

from .emulated import assert_found, draw
from .selection import FEW, first_now, later, of_numbers

DTYPES = {
    "pointwise_attention": ("float64", "float32", "bfloat16", "float16"),
    "reluformer_attention": ("bfloat16", "float16"),
    "sigmoid_attention": ("float32",),
    "rela_attention": ("float16",),
}
"""What is judged of each op here: the kernels are the same, and the full profile by hand has all dtypes of all."""


@pytest.mark.parametrize(("op", "expression"), [*((op, FEW) for op in DTYPES), *(later(op, None) for op in DTYPES)])
def test_conforms(op: str, expression: str | None, kernels: CudaOnCpu) -> None:
    results = list(judge([kernels], "quick", expression, DTYPES[op], ops=(op,)))
    assert {result.dtype for result in results} == {*DTYPES[op]}
    judged = of_numbers(results)
    assert [f"{result.id}\n{result.message}" for result in judged if result.status != "pass"] == []
    assert len(judged) > len(results) // 3


TELLING = (
    "64x64-d64", "100x257", "257x100-causal", "63x100-upper-left", "window", "transposed", "strided-causal",
    "broadcast", "broadcast-mask", "bias-per-key", "dropout-gqa", "dropout-mask", "everything",
)  # fmt: skip
"""Scenes with copies of 16 bytes, with many tiles, and with the options that the quick profile lacks."""


@pytest.mark.emulated
@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("float32",)], ids=["halves", "float32"])
def test_conforms_beyond_the_quick_profile(dtypes: tuple[str, ...], kernels: CudaOnCpu) -> None:
    chosen = {}
    for case in core.cases("pointwise_attention", "scenes", dtypes):
        scene = case.id.split("/")[2].split(".")[0]
        if scene in TELLING:
            chosen[scene, case.dtype] = case
    assert {scene for scene, _ in chosen} == {*TELLING}
    for case in chosen.values():
        result = core.check(kernels, case)
        assert result.status == "pass", f"{result.id}\n{result.message}"


# ---------------------------------------------------------------------------------------------- planted bugs

BARRIER = "    __syncthreads();\n"
SWEEP = "    wait_for_copies<STAGES - 1>();\n    __syncthreads();\n    use(x0, stage);\n    __syncthreads();\n"
SUM = "sum += a[row][w] * b[column][w];"
SUM_IN_HALF = "{ T x; from_float(x, sum + a[row][w] * b[column][w]); sum = to_float(x); }"
PLANTED: dict[str, tuple[str, str, str, str, set[str]]] = {
    "no barrier before a tile is used": ("pointwise.cuh", SWEEP, SWEEP.replace(BARRIER, "", 1), "cross", {"exception"}),
    "no barrier after a tile was used": (
        "pointwise.cuh", SWEEP, SWEEP[: -len(BARRIER)], "positive-values", {"exception"},
    ),
    "no barrier before results are stored": (
        "pointwise.cuh", "  __syncthreads();  // `queries`, where the sweep was empty\n", "", "causal-padded",
        {"exception"},
    ),
    "no wait for copies": (
        "pointwise.cuh", SWEEP, SWEEP.partition("\n")[2], "257x100-causal", {"exception", "nonfinite"},
    ),
    "an unmasked last tile": (
        "pairs.cuh", "&& j0 + columns <= smaller(keys, i0 + a.right + 1)", "", "257x100-causal", {"bound"},
    ),
    "sums in half precision": (
        "intrinsics_on_host.h", SUM, SUM_IN_HALF, "2x4096-tail", {"bound"},
    ),
    "padding that is not cleared": (
        "pointwise.cuh", "if (seen(row)) continue;", "continue;", "mask", {"nonfinite"},
    ),
    "an upper bound of the window too many": (
        "pairs.cuh", "smaller(keys, i + a.right + 1)", "smaller(keys, i + a.right + 2)", "63x63-causal", {"bound"},
    ),
    "dropout of the transposed pair": (
        "pairs.cuh", "philox_word(j, i, head", "philox_word(i, j, head", "dropout", {"bound"},
    ),
    "a write behind a local array": (
        "tensor_tiles.cuh", "for (int n = 0; n < 4; n++) of_x[n]", "for (int n = 0; n <= 4; n++) of_x[n]", "cross",
        {"exception"},
    ),
    "rows of float16 that are not rescaled": (
        "tensor_tiles.cuh", "if constexpr (same<T, half>) rescale(sums, x);", "", "huge", {"bound", "nonfinite"},
    ),
}  # fmt: skip
"""By name: file, text and what takes its place, the scene of a sample and the checks one of which has to fail."""


class Forward(CudaOnCpu):
    """Without gradients, whose kernels would have to be compiled as well."""

    def vjp(self, *arguments: Any) -> dict[str, np.ndarray]:
        raise Unsupported("gradients are left out")


def case_of(scene: str) -> Case:
    """The sample of a scene, in float16 if there is one."""
    ops, dtypes = ("pointwise_attention", "sigmoid_attention"), ("float16", "bfloat16")
    found = [case for op in ops for dtype in dtypes for case in core.cases(op, "scenes", (dtype,))]
    return next(case for case in found if case.id.split("/")[2].split(".")[0] == scene)


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    file, before, after, scene, checks = PLANTED[name]
    assert_found(Forward("planted", {file: (before, after)}), case_of(scene), checks)


IN_GRADIENTS: dict[str, tuple[str, str, str, set[str]]] = {
    "queries of padding that are loaded": (
        "return larger(query.lo, j0) < smaller(query.hi, j0 + ROWS);", "return i0 + c < a.queries;", "query-mask",
        {"nonfinite"},
    ),
    "all heads of a group but the first left out": (
        "head < (at.head + 1) * a.groups", "head < at.head * a.groups + 1", "gqa", {"bound"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", first_now(IN_GRADIENTS))
@pytest.mark.emulated
def test_a_planted_bug_in_the_gradients_is_found(name: str) -> None:
    before, after, scene, checks = IN_GRADIENTS[name]
    failed = core.check(CudaOnCpu("planted", {"pointwise_gradients.cuh": (before, after)}), case_of(scene))
    assert failed.checks & checks, f"{failed.id}: {failed.message}"
    assert not any(text.startswith("o:") for _, text in failed.failures)


# ---------------------------------------------------------------------------------------------- the shim


OWN_ROWS = "[&](int r) { return i0 + r < this->a.queries; }"
KERNEL_FAULTS = {
    "reads behind an array": ("pointwise.cuh", OWN_ROWS, "[](int) { return true; }", "bytes behind an input"),
    "writes behind an array": (
        "tensor_tiles.cuh", "      if (first + row >= rows) continue;\n", "", "bytes behind an output",
    ),
    "some threads miss a barrier": (
        "pointwise.cuh", "    use(x0, stage);\n", "    use(x0, stage);\n    if (threadIdx.x < 64) __syncthreads();\n",
        "block 0, thread .*barrier of line .* while thread .* is at the barrier of line",
    ),
    "some threads end before a barrier": (
        "pointwise.cuh", "    use(x0, stage);\n", "    use(x0, stage);\n    if (threadIdx.x == 70) return;\n",
        "thread 70|no thread can go on",
    ),
    "half a warp multiplies": (
        "tensor_tiles.cuh", "      load_matrices(of_a,", "      if (lane < 16) load_matrices(of_a,",
        "ldmatrix of line .* while thread .* of its warp is in ldmatrix of line",
    ),
    "a copy that is not aligned": (
        "tensor_tiles.cuh", "from.row % 16 == 0 &&", "", "asynchronous copy of 16 bytes, not aligned",
    ),
    "too much shared memory": (
        "pointwise.cuh", "const QueryBlock<Tiles, PAIRS, 1> block(a, part.at);",
        "const QueryBlock<Tiles, PAIRS, 1, Shared<Tiles, 2>> block(a, part.at);",
        "which belongs to no array",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", first_now(KERNEL_FAULTS))
def test_what_a_kernel_must_not_do_ends_its_launch(name: str) -> None:
    file, before, after, message = KERNEL_FAULTS[name]
    wrong = Forward("planted", {file: (before, after)})
    q, k, v = (draw(n, 1, 65, 20, dtype="float16")[..., :16] for n in range(3))
    with pytest.raises(KernelFault, match=message):
        wrong.call("pointwise_attention", {"q": q, "k": k, "v": v}, {})


def test_an_edit_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pairs\.cuh: nothing to edit"):
        CudaOnCpu("planted", {"pairs.cuh": ("no such text", "")})


def test_arguments_that_are_laid_out_differently_are_refused(
    kernels: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pointwise(launch.Pointwise):
        _fields_ = (("more", launch.View),)

    monkeypatch.setattr(pointwise.Call, "structure", Pointwise)
    x = draw(0, 4, 8)
    with pytest.raises(KernelFault, match=r"arguments of \d+ bytes; expected"):
        kernels.call("pointwise_attention", {"q": x, "k": x, "v": x}, {})


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(("dtype", "d"), [("float16", 129), ("float32", 256), ("float64", 200)])
def test_wide_heads(dtype: str, d: int, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 1, 33, d, dtype=dtype) for n, name in enumerate("qkv")}
    do = draw(4, 1, 33, d, dtype=dtype)
    wide = [x.astype(np.float64) for x in (*arrays.values(), do)]
    assert_agrees(kernels.call("pointwise_attention", arrays, {})["o"], pointwise_attention(*wide[:3]))
    expected = pointwise_attention_vjp(*wide)
    for name, grad in kernels.vjp("pointwise_attention", arrays, {}, {"o": do}).items():
        assert_agrees(grad, expected[name])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_strides_give_the_same_bits(dtype: str, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 2, 3, 20, 16, dtype=dtype) for n, name in enumerate("qkv")}
    options = {"causal": True}
    expected = kernels.call("pointwise_attention", arrays, options)["o"]

    def inside(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)

    def columns(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)

    def backwards(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]

    layouts: list[Callable[[np.ndarray], np.ndarray]] = [inside, columns, backwards]
    for layout in layouts:
        moved = {name: layout(x) for name, x in arrays.items()}
        assert np.array_equal(kernels.call("pointwise_attention", moved, options)["o"], expected)


def test_numbers_of_numpy_are_numbers(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 5, 8) for n, name in enumerate("qkv")}
    options = {"key_lengths": np.int64(3), "length": np.float32(4.0), "dropout": (0.5, np.int64(7))}
    plain = {"key_lengths": 3, "length": 4.0, "dropout": (0.5, 7)}
    results = [kernels.call("pointwise_attention", arrays, given)["o"] for given in (options, plain)]
    assert np.array_equal(*results)
    assert_agrees(results[0], pointwise_attention(*(x.astype(np.float64) for x in arrays.values()), **plain))


def test_a_seed_may_be_an_array(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 5, 8) for n, name in enumerate("qkv")}
    results = [kernels.call("pointwise_attention", arrays, {"dropout": (0.5, seed)})["o"] for seed in (7, np.array(7))]
    assert np.array_equal(*results)


def test_a_launch_is_what_cuda_needs(kernels: CudaOnCpu) -> None:
    class Noted(Machine):
        def run(self, given: launch.Launch) -> None:
            noted.append(given)

    noted: list[launch.Launch] = []
    x = draw(0, 2, 3, 100, 64, dtype="float16")
    pointwise.forward(Noted(kernels.library, True, False), x, x, x, causal=True, activation="gelu")
    rows, forward = noted
    assert rows.name == "attnkit::pointwise_rows<float, 128>"
    tiles = "attnkit::TensorTiles<attnkit::half, 64, 64, 64, 2>"
    assert forward.name == f"attnkit::pointwise_forward<{tiles}, attnkit::Gelu, false>"
    assert (forward.blocks, forward.threads, forward.shared_bytes) == (2 * 3 * 2, 128, 5 * 64 * 64 * 2 + 64 * 16)
