"""The CUDA kernels of linear attention: judged on the CPU, with planted bugs found, and compiled for two GPUs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit import linear_attention, linear_attention_vjp
from attnkit.backends.cupy import linear
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.adapters.cuda_cpu.machine import KernelFault
from attnkit_conformance.judge import judge
from attnkit_conformance.model.case import Case, numpy_dtype
from tests.library.arrays import assert_agrees

from .emulated import assert_found, draw
from .selection import first_now, later

OP = "linear_attention"
TELLING = (
    "64x64-d64", "1x257", "63x63-causal", "100x64-upper-left", "63x100-upper-left", "key-mask", "query-mask",
    "strided-causal", "broadcast", "mqa-causal", "empty-queries", "empty-keys", "everything",
)  # fmt: skip
"""Scenes with several segments, and with the options that the quick profile lacks."""


def scenes(dtype: str, chosen: tuple[str, ...]) -> dict[str, Case]:
    """The first sample of each scene."""
    found: dict[str, Case] = {}
    for case in core.cases(OP, "scenes", (dtype,)):
        scene = case.id.split("/")[2].split(".")[0]
        if scene in chosen:
            found.setdefault(scene, case)
    return found


def test_conforms(kernels: CudaOnCpu) -> None:
    results = list(judge([kernels], "quick", None, ("float64", "float32", "bfloat16", "float16"), ops=(OP,)))
    refused = {result.reason for result in results if result.status == "unsupported"}
    assert refused <= {"a mask of pairs is served by the generic implementation", "has no step of its own"}
    wrong = [f"{result.id}\n{result.message}" for result in results if result.status not in ("pass", "unsupported")]
    assert wrong == []
    assert {result.dtype for result in results if result.status == "pass"} == {*kernels.dtypes}


HALVES = ("1x257", "63x100-upper-left", "mqa-causal", "everything")


@pytest.mark.emulated
@pytest.mark.parametrize(("dtype", "wanted"), [("bfloat16", HALVES), ("float32", TELLING)], ids=["halves", "float32"])
def test_conforms_beyond_the_quick_profile(dtype: str, wanted: tuple[str, ...], kernels: CudaOnCpu) -> None:
    chosen = scenes(dtype, wanted)
    assert {*chosen} == {*wanted}
    for case in chosen.values():
        result = core.check(kernels, case)
        assert result.status == "pass", f"{result.id}\n{result.message}"


# ---------------------------------------------------------------------------------------------- planted bugs

LOADED = "    __syncthreads();\n    Tiles::multiply(x"
PLANTED: dict[str, tuple[str, str, str, str, set[str]]] = {
    "no barrier before pairs are multiplied": (
        "linear.cuh", LOADED, LOADED.partition("\n")[2], "strided-causal", {"exception"},
    ),
    "no barrier after pairs were multiplied": (
        "linear.cuh", "[](int) { return C(1); });\n    __syncthreads();\n", "[](int) { return C(1); });\n",
        "strided-causal", {"exception"},
    ),
    "no barrier before 1/den is used": (
        "linear_kernels.cuh", "inverse : C(0);\n  }\n  __syncthreads();\n", "inverse : C(0);\n  }\n", "cross",
        {"exception", "nonfinite"},
    ),
    "an unmasked last tile": ("linear.cuh", "j >= first && j < stop", "j >= first", "cross", {"exception"}),
    "padding that is not masked": (
        "linear.cuh", "*(const long long*)stops.at < stop", "false", "causal-padded", {"bound", "nonfinite"},
    ),
    "pairs of the future": (
        "linear.cuh", "s0 + column > p0 + row", "s0 + column > p0 + row + 1", "63x63-causal", {"bound"},
    ),
    "a state that is not carried": (
        "linear_kernels.cuh", "total += own;", "total = own;", "1x257", {"bound"},
    ),
    "a state of queries that is carried the wrong way": (
        "linear_kernels.cuh", "QUERIES ? segments - 1 - step : step", "step", "strided-causal", {"bound"},
    ),
    "z left out": (
        "linear.cuh", "f0 + n < a.width ? state.vector[f0 + n] : C(0)", "C(0)", "1x257", {"bound"},
    ),
    "the denominator's gradient left out": (
        "linear_kernels.cuh", "-dot * inverse * inverse", "C(0)", "cross", {"bound"},
    ),
    "all heads of a group but the first left out": (
        "linear_kernels.cuh", "head < (at.head + 1) * l.groups; head++) {\n    add_tokens",
        "head < at.head * l.groups + 1; head++) {\n    add_tokens", "mqa-causal", {"bound"},
    ),
}  # fmt: skip
"""By name: file, text and what takes its place, the scene of a sample and the checks one of which has to fail."""


@pytest.mark.parametrize("name", first_now(PLANTED))
@pytest.mark.emulated
def test_a_planted_bug_is_found(name: str) -> None:
    file, before, after, scene, checks = PLANTED[name]
    wrong = CudaOnCpu("planted", {file: (before, after)})
    assert_found(wrong, scenes("float32", (scene,))[scene], checks)


@pytest.mark.emulated
def test_a_missing_barrier_between_the_heads_of_a_group_is_found() -> None:
    """It matters where heads have padding of their own: their factors of the same keys differ."""
    barrier = "  __syncthreads();  // what was there before is not needed any more\n"
    wrong = CudaOnCpu("planted", {"linear.cuh": (barrier, "")})
    q, k = draw(0, 1, 2, 9, 6), draw(1, 1, 1, 40, 6)
    arrays = {"q": q, "k": k, "v": k, "key_lengths": np.array([[40, 20]])}
    with pytest.raises(KernelFault, match="depends on the order of threads"):
        wrong.vjp(OP, arrays, {"enable_gqa": True}, {"o": q})


# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(
    ("dtype", "d", "e"), [("float32", 129, 256), ("float64", 140, 70)], ids=["wider-values", "wider-keys"]
)
def test_wide_heads(dtype: str, d: int, e: int, kernels: CudaOnCpu) -> None:
    arrays = {
        "q": draw(0, 1, 40, d, dtype=dtype),
        "k": draw(1, 1, 40, d, dtype=dtype),
        "v": draw(2, 1, 40, e, dtype=dtype),
    }
    do, options = draw(3, 1, 40, e, dtype=dtype), {"causal": True}
    wide = [x.astype(np.float64) for x in (*arrays.values(), do)]
    assert_agrees(kernels.call(OP, arrays, options)["o"], linear_attention(*wide[:3], **options))
    expected = linear_attention_vjp(*wide, **options)
    for name, grad in kernels.vjp(OP, arrays, options, {"o": do}).items():
        assert_agrees(grad, expected[name])


def test_masks_of_query_heads_and_states_of_their_groups(kernels: CudaOnCpu) -> None:
    """Every head of a group has padding of its own, and the state comes in and its gradient goes out."""
    q, k, v = draw(0, 2, 4, 150, 6), draw(1, 2, 2, 150, 6), draw(2, 2, 2, 150, 5)
    do = draw(3, 2, 4, 150, 5)
    state = {"initial_S": draw(4, 2, 2, 6, 5) ** 2, "initial_z": draw(5, 2, 2, 6) ** 2}
    lengths, live = np.array([[150, 3, 70, 64], [1, 0, 149, 65]]), draw(6, 2, 4, 150) > -1
    options = {"causal": True, "enable_gqa": True, "scale": 0.5}
    arrays = {"q": q, "k": k, "v": v, "key_lengths": lengths, "query_mask": live, **state}
    wide = [x.astype(np.float64) for x in (q, k, v, do)]
    masks = {"key_lengths": lengths, "query_mask": live}
    initial = (state["initial_S"].astype(np.float64), state["initial_z"].astype(np.float64))
    assert_agrees(
        kernels.call(OP, arrays, options)["o"],
        linear_attention(*wide[:3], initial_state=initial, **options, **masks),
    )
    expected = linear_attention_vjp(*wide, initial_state=initial, **options, **masks)
    found = kernels.vjp(OP, arrays, options, {"o": do})
    for name in "qkv":
        assert_agrees(found[name], expected[name])
    for name, exact in zip(("initial_S", "initial_z"), expected["initial_state"], strict=True):
        assert_agrees(found[name], exact)


def test_states_of_leading_axes_that_cannot_be_joined(kernels: CudaOnCpu) -> None:
    arrays = {"q": draw(0, 3, 2, 4, 5, 8), "k": draw(1, 2, 4, 6, 8), "v": draw(2, 3, 1, 4, 6, 5)}
    found = kernels.call(OP, arrays, {"return_state": True})
    wide = [x.astype(np.float64) for x in arrays.values()]
    o, (S, z) = linear_attention(*wide, return_state=True)
    for name, expected in (("o", o), ("S", S), ("z", z)):
        assert_agrees(found[name], expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_strides_give_the_same_bits(dtype: str, kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 2, 3, 20, 16, dtype=dtype) for n, name in enumerate("qkv")}
    expected = kernels.call(OP, arrays, {"causal": True})["o"]
    for axes in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        back = np.argsort(axes)
        moved = {name: np.ascontiguousarray(x.transpose(axes)).transpose(back) for name, x in arrays.items()}
        assert np.array_equal(kernels.call(OP, moved, {"causal": True})["o"], expected)


def test_features_of_float16_may_leave_its_range(kernels: CudaOnCpu) -> None:
    arrays = {name: draw(n, 1, 70, 8, dtype="float16") * np.float16(4000) for n, name in enumerate("qk")}
    arrays["v"] = draw(2, 1, 70, 8, dtype="float16")
    o = kernels.call(OP, arrays, {"causal": True})["o"]
    assert_agrees(o, linear_attention(*(x.astype(np.float64) for x in arrays.values()), causal=True))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mask": np.ones((3, 3), bool)}, "a mask of pairs"),
        ({"feature_map": np.tanh}, "a feature map of your own"),
        ({"v": np.zeros((1, 3, 0), np.float32)}, "tokens without features"),
        ({"q": np.zeros((1, 3, 300), np.float32)}, "head sizes beyond"),
    ],
)
def test_what_is_not_served(changed: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {name: np.zeros((1, 3, 4), np.float32) for name in "qkv"}
    assert reason in str(linear.unsupported_options(**{**given, **changed}))
    assert linear.unsupported_options(**given) is None


# ---------------------------------------------------------------------------------------------- compiled for GPUs


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "packed"),
    [
        ("float32", 64, 80, ()),
        later("float16", 128, 90, ()),
        later("float64", 64, 90, ()),
        later("float32", 64, 90, ("edges_q", "edges_k")),
        later("bfloat16", 128, 80, ("edges_q", "edges_k")),
    ],
)
def test_no_spills_and_enough_memory(
    dtype: str, d: int, capability: int, packed: tuple[str, ...], tmp_path: Path
) -> None:
    from .test_cuda_compile import MEMORY, Noting, compiled

    options: dict[str, Any] = {"causal": True, **dict.fromkeys(packed, np.array([0, 120, 300]))}
    device, x = Noting(), np.zeros((2, 300, d), numpy_dtype(dtype))
    linear.forward(device, x, x, x, **options)
    linear.backward(device, x, x, x, x, **options)
    launches = {launch.name: launch for launch in device.launches}
    assert {launch.template[-1] for launch in launches.values()} >= ({"true"} if packed else {"attnkit::EluPlusOne"})
    of_queries = {name: launch for name, launch in launches.items() if launch.template[2:3] == ("true",)}
    rest = {name: launch for name, launch in launches.items() if name not in of_queries}
    for wanted in (of_queries, rest):
        for name, kernel in compiled(wanted, capability, tmp_path).items():
            assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
            assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
    kernels = {launch.kernel for launch in launches.values()}
    gradients = {f"linear_gradient_of_{name}" for name in ("queries", "keys", "values")}
    assert kernels == {"linear_sums", "linear_running", "linear_forward", "linear_rows", *gradients}
