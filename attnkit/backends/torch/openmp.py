"""The threads of torch's operations, for the CPU library to compute with them."""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch

FORKED = 0x40
"""Of the flags of a process: it was forked and has called no exec (PF_FORKNOEXEC of Linux)."""


@cache
def entry() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP runtime that torch computes with; None where there is none, or where
    it must not be called.

    GNU's libgomp has it, and the runtimes of LLVM and Intel for its sake. In a forked process libgomp waits for threads
    of its parent forever, as operations of torch do there.
    """
    if sys.platform != "linux" or not torch.backends.openmp.is_available() or _is_forked():
        return None
    try:  # looked for in what that library is linked with, in the order in which its own calls are resolved
        handle = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(handle.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _is_forked() -> bool:
    try:
        status = Path("/proc/self/stat").read_text()
    except OSError:
        return True
    return bool(int(status.rpartition(")")[2].split()[6]) & FORKED)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=entry.cache_clear)
