"""Memory of this process, and of one call in a separate process."""

import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MEASURED = sys.platform == "linux"


def resident(field: str) -> float:
    """VmRSS (current) or VmHWM (peak) of this process in MiB. ru_maxrss would count the parent, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def restart_peak() -> None:
    """Reset VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")


def growth(call: Callable[[], Any]) -> float:
    """The peak growth of memory in MiB during a second call; the first does the one-time setup."""
    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    restart_peak()
    before = resident("VmRSS")
    call()
    return max(resident("VmHWM") - before, 0.0)


def in_a_process(function: Callable[..., float], *arguments: Any, preload: tuple[str, ...] = ()) -> float:
    """function(*arguments) in a new process, forked from a server that has imported `preload` and done nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
