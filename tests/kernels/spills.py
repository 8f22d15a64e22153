"""How many bytes of registers a Triton kernel may spill: none with the Triton for which its tiles were chosen."""

import triton

from benchmarks.sass import report
from benchmarks.sass.compiling import Compiled

TUNED = triton.__version__ == report.committed()["triton"]
BYTES = 0 if TUNED else 128  # with Triton 3.6 five calls take 8 to 112


def assert_no_spills(name: str, kernel: Compiled, allowed: int = 0) -> None:
    assert kernel.stack <= max(BYTES, allowed), f"{name} spills {kernel.stack} bytes"
