"""The CUDA kernels compile for GPUs that are not here: no spilled registers, enough memory, tensor cores used.

NVRTC compiles exactly what a launch names; cuobjdump, which comes with triton, looks at the machine code.
"""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from attnkit.backends.cupy import pointwise
from attnkit.backends.cupy.launch import Launch, Tiles
from attnkit.kernels.cuda import SOURCES
from attnkit_conformance.model.case import numpy_dtype

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

MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # of a multiprocessor, for one block
FORWARD, QUERIES, KEYS = "pointwise_forward", "pointwise_gradient_of_queries", "pointwise_gradient_of_keys"
BIAS, ROWS = "pointwise_gradient_of_bias", "pointwise_rows"


class Noting:
    """A device on which nothing runs."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def pointer(self, x: np.ndarray) -> int:
        return int(x.ctypes.data)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def word(self, value: int) -> np.ndarray:
        return np.array(value, np.uint64)

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)


class Compiled(NamedTuple):
    """What the machine code of a kernel needs, and its assembly."""

    registers: int
    stack: int
    shared: int
    ptx: str

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


def launches(dtype: str, d: int, **options: Any) -> dict[str, Launch]:
    """The launches of a call and of its gradients by their names in C++."""
    device, x = Noting(), np.zeros((1, 2, 128, d), numpy_dtype(dtype))
    pointwise.forward(device, x, x, x, **options)
    pointwise.backward(device, x, x, x, x, **options)
    return {launch.name: launch for launch in device.launches}


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


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "activation"),
    [
        later("float16", 64, 80, "sigmoid"),
        later("bfloat16", 128, 80, "relu"),
        ("bfloat16", 64, 90, "relu"),
        later("float16", 128, 90, "relu"),
        ("float32", 64, 80, "sigmoid"),
        later("float64", 128, 90, "relu"),
    ],
)
def test_no_spills_enough_memory_and_tensor_cores(
    dtype: str, d: int, capability: int, activation: str, tmp_path: Path
) -> None:
    found = compiled(launches(dtype, d, activation=activation, causal=True), capability, tmp_path)
    assert {*found} == {FORWARD, QUERIES, KEYS, ROWS}
    for name, kernel in found.items():
        assert kernel.stack == 0, f"{name} spills {kernel.stack} bytes"
        assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"
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
    found = compiled(launches("bfloat16", 256), 80, tmp_path)
    assert {name: kernel.stack for name, kernel in found.items()} == {FORWARD: 0, QUERIES: 0, KEYS: 0}
    assert max(kernel.shared for kernel in found.values()) <= MEMORY[80]


@pytest.mark.emulated
def test_every_option_compiles(tmp_path: Path) -> None:
    options = {"mask": np.ones((128, 128), bool), "bias": np.zeros((128, 128), np.float32), "dropout": (0.1, 5)}
    options |= {"dropout_mask": np.ones((128, 128)), "window": (7, 3), "shift": "-log_length"}
    found = compiled(launches("float16", 64, activation="silu", **options), 80, tmp_path)
    assert {*found} == {FORWARD, QUERIES, KEYS, BIAS, ROWS}
    assert {name: kernel.stack for name, kernel in found.items()} == dict.fromkeys(found, 0)


def test_the_gate_sees_a_tile_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Tiles("PlainTiles", "double", 64, 64, 128, 1)
    monkeypatch.setattr(pointwise, "tiles_of", lambda *sizes: large)
    wanted = launches("float64", 128)
    found = compiled({name: launch for name, launch in wanted.items() if launch.kernel == QUERIES}, 80, tmp_path)
    assert found[QUERIES].stack > 0
    assert found[QUERIES].shared > MEMORY[80]


def test_only_one_header_holds_ptx() -> None:
    assert {path.name for path in SOURCES.glob("*.cuh") if "asm" in path.read_text()} == {"intrinsics.cuh"}
