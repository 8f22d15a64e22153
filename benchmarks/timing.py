"""Interleaved timing: alternatives take turns in one process, so that a slow moment of the machine hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Timing(NamedTuple):
    """Seconds per call of one alternative over the rounds."""

    median: float
    lowest: float
    highest: float


def interleave(
    calls: Mapping[str, Callable[[], Any]], *, rounds: int, repeats: int, wait: Callable[[], Any] = lambda: None
) -> dict[str, Timing]:
    """Time every call `rounds` times, in turns, each time over `repeats` calls.

    `wait` is called before the clock is read, for devices that run behind the program.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            wait()
            seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: Timing(statistics.median(x), min(x), max(x)) for name, x in seconds.items()}
