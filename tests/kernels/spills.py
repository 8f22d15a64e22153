"""What Triton kernels need of GPUs that are not here: no spilled registers with the Triton for which their tiles were
chosen, enough memory, tensor cores."""

from collections.abc import Mapping

import pytest
import triton

from attnkit.backends.torch.triton.launch import Launch
from benchmarks.sass import report
from benchmarks.sass.compiling import Compiled, compiled, tool

if not tool("cuobjdump").exists():
    pytest.skip("triton came without cuobjdump", allow_module_level=True)
SMALL, AMPLE = 99 * 1024, 227 * 1024
MEMORY = {80: SMALL, 90: AMPLE, 100: AMPLE, 120: SMALL}  # for one program; 8.0 has more, but its tiles serve 8.6 too
TUNED = triton.__version__ == report.committed()["triton"]
BYTES = 0 if TUNED else 304  # more: with Triton 3.6 seven calls take 8 to 304, most of linear attention on 8.0


def assert_no_spills(name: str, kernel: Compiled, allowed: int = 0) -> None:
    assert kernel.stack <= allowed + BYTES, f"{name} spills {kernel.stack} bytes"


def assert_memory(name: str, kernel: Compiled, capability: int) -> None:
    assert kernel.shared <= MEMORY[capability], f"{name} needs {kernel.shared} bytes of shared memory"


def assert_tensor_cores(name: str, kernel: Compiled) -> None:
    assert kernel.tensor_core_instructions() >= 2, f"{name} multiplies without tensor cores"


def gated(
    launches: Mapping[str, Launch], capability: int, allowed: Mapping[str, int] | None = None
) -> dict[str, Compiled]:
    """Launches, compiled: they spill at most the bytes that are allowed, and have enough memory."""
    found = {name: compiled(launch, capability) for name, launch in launches.items()}
    for name, kernel in found.items():
        assert_no_spills(name, kernel, (allowed or {}).get(name, 0))
        assert_memory(name, kernel, capability)
    return found
