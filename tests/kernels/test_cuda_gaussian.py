"""Gaussian attention by the CUDA kernels of point-wise attention: judged on the CPU, planted bugs found, compiled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit import gaussian_attention, gaussian_attention_vjp
from attnkit.backends.cupy import pointwise
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.judge import judge
from attnkit_conformance.model.case import Case
from tests.library.arrays import assert_agrees

from .emulated import assert_found, draw
from .selection import FEW, first_now, later, of_numbers

OP = "gaussian_attention"
HALVES = ("bfloat16", "float16")
NOW = f"({FEW}) or offset-mask"


@pytest.mark.parametrize(
    ("dtypes", "expression"),
    [(("float32", "float16"), NOW), later((*HALVES, "float32", "float64"), None)],
    ids=["few", "quick"],
)
def test_conforms(dtypes: tuple[str, ...], expression: str | None, kernels: CudaOnCpu) -> None:
    results = list(judge([kernels], "quick", expression, dtypes, ops=(OP,)))
    judged = of_numbers(results)
    assert {result.dtype for result in judged} == {*dtypes}
    assert [f"{result.id}\n{result.message}" for result in judged if result.status != "pass"] == []
    assert len(judged) > len(results) // 3


TELLING = (
    "64x64-d64", "100x257", "257x100-causal", "window", "transposed", "strided-causal", "broadcast", "broadcast-mask",
    "dropout-gqa", "everything", "offset-causal", "offset-padded", "offset-self",
)  # fmt: skip
"""Scenes with many tiles, with common offsets and padding, and with the options that the quick profile lacks."""


def case_of(scene: str, dtypes: tuple[str, ...]) -> Case:
    """The sample of a scene; most have one in one of the half types."""
    found = (case for dtype in dtypes for case in core.cases(OP, "scenes", (dtype,)))
    return next(case for case in found if case.id.split("/")[2].split(".")[0] == scene)


@pytest.mark.emulated
@pytest.mark.parametrize("dtypes", [HALVES, ("float32",), ("float64",)], ids=["halves", "float32", "float64"])
def test_conforms_beyond_the_quick_profile(dtypes: tuple[str, ...], kernels: CudaOnCpu) -> None:
    for scene in TELLING:
        result = core.check(kernels, case_of(scene, dtypes))
        assert result.status == "pass", f"{result.id}\n{result.message}"


# ---------------------------------------------------------------------------------------------- planted bugs

SQUARES = "x[n] -= difference * difference;"
EXPANDED = """{ const C a = own[row * TILE_PITCH + w], b = passing[column * TILE_PITCH + w];
        x[n] += 2 * a * b - a * a - b * b; }"""
LEFT_OUT = " - own[(y + r * HIGH) * TILE_PITCH + column];"
PLANTED: dict[str, tuple[str, str, str, str, tuple[str, ...], set[str]]] = {
    "squares that are expanded without a centre": (
        "distance_tiles.cuh", SQUARES, EXPANDED, "offset-mask", ("float32",), {"bound"},
    ),
    "a gradient of products": ("distance_tiles.cuh", LEFT_OUT, ";", "cross", ("float32",), {"bound"}),
    "weights of 0 times padding": (
        "distance_tiles.cuh", "factor == 0 ? C(0) : factor * difference", "factor * difference", "offset-padded",
        ("float32",), {"nonfinite"},
    ),
    "half types that are read beyond a row": (
        "distance_tiles.cuh", "keep(row) && column < width", "keep(row)", "cross", HALVES, {"exception", "bound"},
    ),
    "sums of half types that are stored as float32": (
        "pointwise.cuh", "kind_of<typename Tiles::Input>", "kind_of<typename Tiles::T>", "cross", HALVES,
        {"exception"},
    ),
    "products in the gradient of the bias": (
        "pointwise_gradients.cuh", "Tiles::compare(s, shared.own(0), shared.passing(0, 0));",
        "Tiles::multiply(s, shared.own(0), shared.passing(0, 0));", "bias-per-key", ("float32",), {"bound"},
    ),
}  # fmt: skip
"""By name: file, text and what takes its place, scene, dtypes, and the checks one of which has to fail."""


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    file, before, after, scene, dtypes, checks = PLANTED[name]
    assert_found(CudaOnCpu("planted", {file: (before, after)}), case_of(scene, dtypes), checks)


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(("dtype", "d"), [later("float16", 129), ("float32", 256), later("float64", 200)])
def test_wide_heads(dtype: str, d: int, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 1, 33, d, dtype=dtype) for n, name in enumerate("qkv")}
    do, scale = draw(4, 1, 33, d, dtype=dtype), 1 / d
    wide = [x.astype(np.float64) for x in (*arrays.values(), do)]
    found = kernels.call(OP, arrays, {"scale": scale})["o"]
    assert_agrees(found, gaussian_attention(*wide[:3], scale=scale))
    expected = gaussian_attention_vjp(*wide, scale=scale)
    for name, grad in kernels.vjp(OP, arrays, {"scale": scale}, {"o": do}).items():
        assert_agrees(grad, expected[name])


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1024.0), ("float16", 64.0)])
def test_a_common_offset_changes_no_bit(dtype: str, offset: float, kernels: CudaOnCpu) -> None:
    """Numbers that both can hold: multiples of the unit of the offset."""
    q, k = (np.round(draw(n, 1, 40, 8) * 16).astype(dtype) / np.asarray(16, dtype) for n in range(2))
    v, moved = draw(2, 1, 40, 8, dtype=dtype), np.asarray(offset, dtype)
    found = [kernels.call(OP, {"q": q + at, "k": k + at, "v": v}, {})["o"] for at in (0 * moved, moved)]
    assert np.array_equal(*found)


# ---------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "pairs"),
    [
        ("float16", 64, 80, False),
        later("float32", 64, 90, True),
        later("float16", 128, 80, False),
        later("float32", 256, 80, False),
        later("float64", 128, 90, False),
    ],
)
def test_no_spills_and_enough_memory(dtype: str, d: int, capability: int, pairs: bool, tmp_path: Path) -> None:
    from .test_cuda_compile import MEMORY, compiled, launches

    options: dict[str, Any] = {"causal": True}
    if pairs:
        options |= {"mask": np.ones((128, 128), bool), "bias": np.zeros((128, 128), np.float32), "dropout": (0.1, 5)}
    found = compiled(launches(dtype, d, **pointwise.GAUSSIAN, **options), capability, tmp_path)
    gradients = {f"pointwise_gradient_of_{name}" for name in ("queries", "keys", *(("bias",) if pairs else ()))}
    assert {*found} == {"pointwise_forward", *gradients}
    for name, kernel in found.items():
        assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
        assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
