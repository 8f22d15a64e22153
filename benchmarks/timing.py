"""Interleaved timing: alternatives take turns in one process, so that slow moments affect all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

Call = Callable[[], Any]
Context = Callable[[], AbstractContextManager[Any]]


class Timing(NamedTuple):
    """Seconds per call of one alternative over the rounds; `lower` and `upper` are quartiles."""

    median: float
    lowest: float
    highest: float
    lower: float
    upper: float


class Ratio(NamedTuple):
    """How many times faster than the baseline: median and quartiles of the ratios of single rounds."""

    median: float
    lower: float
    upper: float


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def summary(seconds: Sequence[float]) -> Timing:
    """Of one alternative's rounds."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds), *quartiles(seconds))


def ratio(baseline: Sequence[float], seconds: Sequence[float]) -> Ratio:
    """Above 1: faster than the baseline in the same rounds."""
    rounds = [b / s for b, s in zip(baseline, seconds, strict=True)]
    return Ratio(statistics.median(rounds), *quartiles(rounds))


def seconds_per_call(call: Call, repeats: int, wait: Call, context: Context = nullcontext) -> float:
    """Over `repeats` calls in a row. `wait` lets a device catch up that runs behind the program."""
    with context():
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        return (time.perf_counter() - start) / repeats


def repeats_for(call: Call, at_least: float, wait: Call, context: Context = nullcontext) -> int:
    """The number of consecutive calls, a power of 2, that take `at_least` seconds."""
    repeats = 1
    while seconds_per_call(call, repeats, wait, context) * repeats < at_least:
        repeats *= 2
    return repeats


def rounds_of(
    calls: Mapping[str, Call],
    rounds: int,
    repeats: Mapping[str, int],
    wait: Call,
    contexts: Mapping[str, Context] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call in every round. In each round another alternative is the first."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            context = (contexts or {}).get(name, nullcontext)
            seconds[name].append(seconds_per_call(calls[name], repeats[name], wait, context))
    return seconds


def interleave(calls: Mapping[str, Call], *, rounds: int, repeats: int, wait: Call = lambda: None) -> dict[str, Timing]:
    """Time every call `rounds` times, in turns, each time over `repeats` calls."""
    for call in calls.values():
        call()
    seconds = rounds_of(calls, rounds, dict.fromkeys(calls, repeats), wait)
    return {name: summary(x) for name, x in seconds.items()}
