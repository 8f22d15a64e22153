"""The library of this machine's level, loaded on first use, or the reason why there is none."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from attnkit.backends.native import NativeStatus, abi, build


class Library(NamedTuple):
    """The functions that calls need."""

    run: Callable[..., Any]
    check: Callable[..., Any]
    message: Callable[..., Any]
    activation: Callable[..., Any]
    jax: Any  # the handler of XLA's custom calls


def _level() -> str:
    """The level that ATTNKIT_CPU_LEVEL names, or the highest of those that are there and that this machine has."""
    forced = os.environ.get("ATTNKIT_CPU_LEVEL")
    if forced == "none":
        raise LookupError("ATTNKIT_CPU_LEVEL=none")
    if not build.library(build.DETECTOR).exists():
        told = build.LIBRARIES / build.REASON
        reason = told.read_text() if told.exists() else "it was not compiled"
        raise LookupError(f"{reason}; {build.REBUILD}")
    known, machine = build.levels(), build.machine_level()
    if forced is not None:
        if forced not in known:
            raise LookupError(f"ATTNKIT_CPU_LEVEL={forced} is none of {', '.join(known)}")
        if known[forced][0] > machine:
            raise LookupError(f"ATTNKIT_CPU_LEVEL={forced} has instructions that this machine lacks")
        if not build.library(forced).exists():
            raise LookupError(f"ATTNKIT_CPU_LEVEL={forced} was not compiled; {build.REBUILD}")
        return forced
    there = [name for name, (number, _) in known.items() if number <= machine and build.library(name).exists()]
    if not there:
        raise LookupError(f"no level of this machine was compiled; {build.REBUILD}")
    return max(there, key=lambda name: known[name][0])


@cache
def load() -> tuple[Library | None, NativeStatus]:
    try:
        level = _level()
        handle = ctypes.CDLL(str(build.library(level)))
    except (LookupError, OSError) as error:
        return None, NativeStatus(None, str(error))
    if build.sources_of(handle) != build.fingerprint():
        return None, NativeStatus(None, f"it was compiled from other C++ sources than those there; {build.REBUILD}")
    if handle.attnkit_plan_size() != ctypes.sizeof(abi.Plan):
        sizes = f"{handle.attnkit_plan_size()} bytes there, {ctypes.sizeof(abi.Plan)} here"
        return None, NativeStatus(None, f"its plans have another size: {sizes}")
    handle.attnkit_message.restype = ctypes.c_char_p
    handle.attnkit_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    handle.attnkit_check.argtypes = (ctypes.c_void_p,)
    handle.attnkit_activation.argtypes = (ctypes.c_char_p,)
    functions = Library(
        handle.attnkit_run,
        handle.attnkit_check,
        handle.attnkit_message,
        handle.attnkit_activation,
        handle.attnkit_jax,
    )
    return functions, NativeStatus(level, None)


def library() -> Library:
    """The library; ImportError where there is none."""
    functions, status = load()
    if functions is None:
        raise ImportError(f"the CPU library of attnkit is not loaded: {status.reason}")
    return functions
