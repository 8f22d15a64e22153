"""The library of this machine's level, loaded on first use, or the reason why there is none."""

import ctypes
import os
import warnings
from functools import cache
from typing import NamedTuple

from attnkit._core.typing import AnyFunction
from attnkit.backends.native import NativeStatus, build

LISTENED = ("PyGILState_Ensure", "PyGILState_Release", "PyOS_InterruptOccurred", "PyErr_SetInterrupt")
"""By these a long call from the main thread learns of Ctrl-C."""


UNWANTED = f"{build.FORCED}={build.NONE}"
"""The reason of who asked for no library."""


class Library(NamedTuple):
    """The functions that calls need."""

    run: AnyFunction
    check: AnyFunction
    message: AnyFunction
    activation: AnyFunction
    jax: object  # the handler of XLA's custom calls


class Misfit(LookupError):
    """A library is there, and not to be trusted."""


def _level() -> str:
    """The level that ATTNKIT_CPU_LEVEL names, or the highest of those that are there and that this machine has."""
    forced = os.environ.get(build.FORCED)
    if forced == build.NONE:
        raise LookupError(UNWANTED)
    if not build.library(build.DETECTOR).exists():
        told = build.LIBRARIES / build.REASON
        reason = told.read_text() if told.exists() else "it was not compiled"
        raise LookupError(f"{reason}; {build.REBUILD}")
    _refuse_misfit(build.DETECTOR)
    known, machine = build.levels(), build.machine_level()
    if forced not in (None, build.ALL):
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


def _refuse_misfit(name: str) -> None:
    reason = build.misfit(name)
    if reason is not None:
        raise Misfit(reason)


@cache
def warn_of(reason: str) -> None:
    """Warn once that the library is not loaded."""
    text = f"attnkit: its compiled kernels for CPUs are not loaded, and calls take more time: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def warn_of_absence() -> None:
    """Do so where a call is served without it, unless nobody wants it."""
    reason = load()[1].reason
    if load()[0] is None and reason not in (None, UNWANTED):
        warn_of(str(reason))


# torch.compile runs it while it traces
warn_of_absence._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def load() -> tuple[Library | None, NativeStatus]:
    """The library and its level, or None and the reason.

    One that is there and is not what was compiled from these sources is not loaded, with a RuntimeWarning: its plans
    may mean something else, and a file that was cut short ends the process.
    """
    try:
        level = _level()
        _refuse_misfit(level)
        handle = ctypes.CDLL(str(build.library(level)))
    except (LookupError, OSError) as error:
        if isinstance(error, Misfit | OSError):
            warn_of(str(error))
        return None, NativeStatus(None, str(error))
    handle.attnkit_message.restype = ctypes.c_char_p
    of_run = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)
    handle.attnkit_run.argtypes = of_run
    handle.attnkit_check.argtypes = (ctypes.c_void_p,)
    handle.attnkit_activation.argtypes = (ctypes.c_char_p,)
    handle.attnkit_listen.argtypes = (ctypes.c_void_p,) * len(LISTENED)
    handle.attnkit_listen(*(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in LISTENED))
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
