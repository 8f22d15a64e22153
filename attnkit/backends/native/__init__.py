"""The compiled CPU kernels (`attnkit/kernels/cpu`), one library for the arrays of NumPy, torch and JAX."""

from typing import NamedTuple

OLDEST_JAX = (0, 8, 2)
"""The oldest that calls the library: it registers handlers of version 0.2 of XLA's interface of foreign functions."""


class NativeStatus(NamedTuple):
    """The level of the CPU kernels that was loaded, or why none was."""

    level: str | None
    reason: str | None


def native_status() -> NativeStatus:
    """Which level of the compiled CPU kernels serves this process, or the reason why none does.

    A level is one of "x86-64", "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx"; on other machines there is
    one, with their name. The highest that this machine has is taken; the environment variable ATTNKIT_CPU_LEVEL names
    another, or "none". The library is loaded when it is first asked for.

    >>> attnkit.native_status()
    NativeStatus(level='x86-64-v4', reason=None)
    """
    from attnkit.backends.native import load

    return load.load()[1]
