"""The CUDA kernels compile for GPUs that are not here: no spilled registers, enough memory, tensor cores used.

NVRTC compiles exactly what a launch names; cuobjdump, which comes with triton, looks at the machine code.
"""

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from attnkit.backends.cupy import pointwise, rows
from attnkit.backends.cupy.launch import Launch, Tiles
from attnkit.kernels.cuda import SOURCES

from .launches import MEMORY, OF_STATISTICS, of_linear, of_newton, of_packed, of_pointwise, of_rows, of_statistics
from .selection import later

cupy = pytest.importorskip("cupy", reason="cupy, through which NVRTC is called, is not installed")
nvrtc = cupy.cuda.nvrtc
try:
    nvrtc.getVersion()
except Exception as missing:
    pytest.skip(f"NVRTC is not installed (nvidia-cuda-nvrtc): {missing}", allow_module_level=True)

TRITON = importlib.util.find_spec("triton")
CUOBJDUMP = Path(str(TRITON and TRITON.origin)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
if not CUOBJDUMP.exists():
    pytest.skip("cuobjdump, which comes with triton, is not here", allow_module_level=True)

FORWARD, QUERIES, KEYS = "pointwise_forward", "pointwise_gradient_of_queries", "pointwise_gradient_of_keys"
BIAS, ROWS = "pointwise_gradient_of_bias", "pointwise_rows"


class Compiled(NamedTuple):
    """What the machine code of a kernel needs, and its assembly."""

    registers: int
    stack: int
    shared: int
    ptx: str

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


def compiled(wanted: dict[str, Launch], capability: int, folder: Path) -> dict[str, Compiled]:
    """Launches, compiled instead of run, by the names of their kernels."""
    (source,) = {launch.source for launch in wanted.values()}
    program = nvrtc.createProgram(f'#include "{source}"\n', "kernels.cu", [], [])
    for name in wanted:
        nvrtc.addNameExpression(program, name)
    try:
        nvrtc.compileProgram(program, [f"-arch=sm_{capability}", "--std=c++17", f"-I{SOURCES}"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert not nvrtc.getProgramLog(program).strip("\0\n "), nvrtc.getProgramLog(program)
    cubin = folder / "kernels.cubin"
    cubin.write_bytes(nvrtc.getCUBIN(program) + b"\0")
    told = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    bodies = nvrtc.getPTX(program).decode().split(".entry ")
    found = {}
    for name, launch in wanted.items():
        symbol = nvrtc.getLoweredName(program, name)
        usage = re.search(rf"Function {re.escape(symbol)}:\s+REG:(\d+) STACK:(\d+)", told)
        assert usage, told
        ptx = next(body for body in bodies if body.startswith(f"{symbol}("))
        found[launch.kernel] = Compiled(int(usage[1]), int(usage[2]), launch.shared_bytes, ptx)
    return found


def gated(wanted: dict[str, Launch], capability: int, folder: Path) -> dict[str, Compiled]:
    """No spilled registers, enough memory. What is launched twice, of other types, is compiled apart."""
    once: dict[str, Launch] = {}
    again: dict[str, Launch] = {}
    for name, launch in wanted.items():
        (again if launch.kernel in {other.kernel for other in once.values()} else once)[name] = launch
    found = {}
    for group in filter(None, (once, again)):
        for name, kernel in compiled(group, capability, folder).items():
            assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
            assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
            found[name] = kernel
    return found


PAIRS: dict[str, Any] = {"mask": np.ones((128, 128), bool), "dropout": (0.1, 5)}
BIASED = {**PAIRS, "bias": np.zeros((128, 128), np.float32)}
WIDE = {
    "mask": np.ones((128, 1024), bool), "bias": np.zeros((128, 1024), np.float32), "dropout": (0.1, 5), "causal": True,
}  # fmt: skip
GAUSSIAN = {**pointwise.GAUSSIAN, "causal": True}
EDGES = dict.fromkeys(("edges_q", "edges_k"), np.array([0, 120, 300]))
SIGMOID = {"activation": "sigmoid", "shift": "-log_length"}
OF_DISTANCES = [FORWARD, QUERIES, KEYS]
OF_LINEAR = [
    "linear_sums", "linear_running", "linear_forward", "linear_rows", "linear_gradient_of_queries",
    "linear_gradient_of_keys", "linear_gradient_of_values",
]  # fmt: skip
OF_NEWTON = ["newton_iterations", "newton_implicit_gradient", "newton_unrolled_gradient"]
OF_ROWS = [f"rows_gradient_of_{name}" for name in ("queries", "keys", "bias")]
STATISTICS = [
    ("sigmoid", "bfloat16", 128, 90),
    ("sigmoid", "float32", 64, 80),
    ("gaussian", "float16", 64, 90),
    ("gaussian", "float32", 256, 80),
    ("softmax", "float16", 64, 80),
    ("softmax", "bfloat16", 128, 90),
    ("softmax", "float64", 128, 80),
    ("entmax", "float16", 128, 80),
    ("sparsemax", "bfloat16", 64, 90),
    ("sparsemax", "float32", 256, 80),
]
THRESHOLDS = ["rows_threshold", *OF_ROWS[:2]]
SMALL = [  # whose best tiles need more than 99 KiB of shared memory, or on 8.0 163
    (of_pointwise, ("bfloat16", 256), {}, 86, OF_DISTANCES),
    (of_pointwise, ("float32", 128), BIASED, 120, [ROWS, *OF_DISTANCES, BIAS]),
    (of_pointwise, ("float64", 64), GAUSSIAN, 89, OF_DISTANCES),
    (of_pointwise, ("float64", 256), {}, 120, OF_DISTANCES),
    (of_pointwise, ("float16", 256), GAUSSIAN, 120, OF_DISTANCES),
    (of_rows, ("float32", 128, 256), {"alpha": 1.25}, 86, THRESHOLDS),
    (of_rows, ("float64", 128, 256), {"alpha": 2.0}, 80, THRESHOLDS),
    (of_rows, ("float64", 256, 256), {"alpha": 2.0}, 120, THRESHOLDS),
    (of_linear, ("float32", 256, "attnkit::EluPlusOne"), {}, 120, OF_LINEAR),
    (of_linear, ("float64", 128, "attnkit::EluPlusOne"), {}, 86, OF_LINEAR),
    (of_statistics, ("float32", 256, "softmax"), {}, 120, OF_STATISTICS["softmax"][1]),
]
FIRST = [
    (of_rows, ("bfloat16", 128, 256), {"alpha": 1.5, "causal": True}, 90, ["rows_threshold", *OF_ROWS[:2]]),
    (of_newton, ("float32",), {}, 80, OF_NEWTON),
]
LATER = [
    (of_pointwise, ("float16", 64), GAUSSIAN, 80, OF_DISTANCES),
    (of_statistics, ("float16", 64, "sigmoid"), PAIRS, 80, OF_STATISTICS["sigmoid"][1]),
    (of_linear, ("float32", 64, "attnkit::EluPlusOne"), {}, 80, OF_LINEAR),
    (of_pointwise, ("float32", 64), {**GAUSSIAN, **BIASED}, 90, [*OF_DISTANCES, BIAS]),
    (of_pointwise, ("float16", 128), GAUSSIAN, 80, OF_DISTANCES),
    (of_pointwise, ("float32", 256), GAUSSIAN, 80, OF_DISTANCES),
    (of_pointwise, ("float64", 128), GAUSSIAN, 90, OF_DISTANCES),
    (of_rows, ("float16", 64, 1024), {"alpha": 1.0, **WIDE}, 80, ["rows_softmax", *OF_ROWS]),
    (of_statistics, ("float16", 64, "sigmoid"), {}, 80, OF_STATISTICS["sigmoid"][1]),
    *(
        (of_statistics, (dtype, d, op), pairs, capability, OF_STATISTICS[op][1])
        for op, dtype, d, capability in STATISTICS
        for pairs in ({}, PAIRS)
    ),
    (of_linear, ("float16", 128, "attnkit::EluPlusOne"), {}, 90, OF_LINEAR),
    (of_linear, ("float64", 64, "attnkit::EluPlusOne"), {}, 90, OF_LINEAR),
    (of_linear, ("float32", 64, "true"), EDGES, 90, OF_LINEAR),
    (of_linear, ("bfloat16", 128, "true"), EDGES, 80, OF_LINEAR),
    (of_newton, ("float64",), {}, 90, OF_NEWTON),
    (of_packed, (pointwise, "bfloat16", 64), SIGMOID, 90, [ROWS, *OF_DISTANCES]),
    (of_packed, (pointwise, "float32", 64), SIGMOID, 80, [ROWS, *OF_DISTANCES]),
    (of_packed, (rows, "float16", 64), {"alpha": 1.0}, 80, ["rows_softmax", *OF_ROWS[:2]]),
    (of_packed, (rows, "bfloat16", 128), {"alpha": 1.0}, 90, ["rows_softmax", *OF_ROWS[:2]]),
    *SMALL,
]


@pytest.mark.parametrize(
    ("launches", "sizes", "options", "capability", "kernels"), [*FIRST, *(later(*row) for row in LATER)]
)
def test_no_spills_and_enough_memory(
    launches: Callable[..., dict[str, Launch]], sizes: tuple[Any, ...], options: dict[str, Any], capability: int,
    kernels: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    wanted = launches(*sizes, **options, capability=capability)
    found = gated(wanted, capability, tmp_path)
    assert [*dict.fromkeys(launch.kernel for launch in wanted.values())] == kernels
    if launches is of_rows and sizes[0] in ("float16", "bfloat16"):
        for name, kernel in found.items():
            assert kernel.count("mma.sync.aligned.m16n8k16") >= 32, f"{name} does not use tensor cores"


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "activation"),
    [
        later("float16", 64, 80, "sigmoid"),
        later("bfloat16", 128, 80, "relu"),
        ("bfloat16", 64, 90, "relu"),
        later("float16", 128, 90, "relu"),
        later("float32", 64, 80, "sigmoid"),
        later("float64", 128, 90, "relu"),
    ],
)
def test_pointwise_attention_uses_tensor_cores(
    dtype: str, d: int, capability: int, activation: str, tmp_path: Path
) -> None:
    found = gated(
        of_pointwise(dtype, d, activation=activation, causal=True, capability=capability), capability, tmp_path
    )
    assert {*found} == {FORWARD, QUERIES, KEYS, ROWS}
    del found[ROWS]
    for name, kernel in found.items():
        assert kernel.count("cp.async.c") >= 2, f"{name} does not copy asynchronously"
        if dtype in ("float16", "bfloat16"):
            assert name != FORWARD or kernel.registers <= 168, "three blocks do not fit beside one another"
            kind = "f16" if dtype == "float16" else "bf16"
            products = kernel.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32")
            assert products >= 64, f"{name} has {products} products by tensor cores"
            assert kernel.count("ldmatrix") >= 16, f"{name} does not load fragments"


@pytest.mark.emulated
def test_the_widest_heads_fit(tmp_path: Path) -> None:
    found = compiled(of_pointwise("bfloat16", 256, capability=80), 80, tmp_path)
    assert {name: kernel.stack for name, kernel in found.items()} == {FORWARD: 0, QUERIES: 0, KEYS: 0}
    assert max(kernel.shared for kernel in found.values()) <= MEMORY[80]


@pytest.mark.emulated
def test_every_option_compiles(tmp_path: Path) -> None:
    options = {"mask": np.ones((128, 128), bool), "bias": np.zeros((128, 128), np.float32), "dropout": (0.1, 5)}
    options |= {"dropout_mask": np.ones((128, 128)), "window": (7, 3), "shift": "-log_length"}
    found = compiled(of_pointwise("float16", 64, activation="silu", **options), 80, tmp_path)
    assert {*found} == {FORWARD, QUERIES, KEYS, BIAS, ROWS}
    assert {name: kernel.stack for name, kernel in found.items()} == dict.fromkeys(found, 0)


def test_the_gate_sees_a_tile_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Tiles("PlainTiles", "double", 64, 64, 128, 1)
    monkeypatch.setattr(pointwise, "fitting", lambda *sizes: large)
    wanted = of_pointwise("float64", 128)
    found = compiled({name: launch for name, launch in wanted.items() if launch.kernel == QUERIES}, 80, tmp_path)
    assert found[QUERIES].stack > 0
    assert found[QUERIES].shared > MEMORY[80]


def test_only_one_header_holds_ptx() -> None:
    assert {path.name for path in SOURCES.glob("*.cuh") if "asm" in path.read_text()} == {"intrinsics.cuh"}
