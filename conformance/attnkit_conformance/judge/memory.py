"""What libraries keep of every call, compiled functions above all: it would fill the memory of a machine, and before
that the system's table of a process' pieces of memory, of which every compiled function has some."""

import gc
import os
import sys
from pathlib import Path

LARGE = 3 << 30
"""Bytes of memory from which a process forgets; if that does not help, it ends after its job."""
MANY = 40_000
"""Pieces of memory from which it does: Linux gives a process 65,530, and LLVM ends one that gets no more."""


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def pieces() -> int:
    """Pieces of memory of this process; 0 where the system has no /proc."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def is_full() -> bool:
    """Whether a process should forget."""
    return resident() > LARGE or pieces() > MANY


def forget_compiled() -> None:
    """Free what JAX and torch have traced and compiled: what comes next seldom asks for it again."""
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    gc.collect()
