"""Whether a mutant is seen.

One process prepares all units and finds out which lines each of them runs. A mutant is a fork of that process, in which
the changed function has other code and the units that run the changed line are judged until one fails.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from attnkit_conformance import golden
from attnkit_conformance.model import store
from attnkit_conformance.studies.mutation import live
from attnkit_conformance.studies.mutation.operators import Mutant, compiled, mutants
from attnkit_conformance.studies.mutation.units import Unit

SECONDS, TIMES = 120.0, 3.0  # a mutant never ends that takes so much longer than what judges it takes without a change
UNPLACED = "no function can take its code"
if TYPE_CHECKING:
    from _typeshed import TraceFunction

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")


class Verdict(NamedTuple):
    """`by` is the first unit that failed, None where all passed."""

    mutant: Mutant
    by: str | None
    seconds: float


# ---------------------------------------------------------------------------------------------- processes


class Fork(Generic[T]):
    """A task in a copy of this process, and what it answers: `died` if nothing."""

    def __init__(self, task: Callable[[], T]) -> None:
        self.answer, there = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._run, args=(task, there))
        self.started = time.perf_counter()
        self.process.start()
        there.close()

    @staticmethod
    def _run(task: Callable[[], T], answer: Connection) -> None:
        os.environ.pop(store.FOLDER, None)  # the reference may be mutated: its answers are those of now
        golden.of_content.cache_clear()
        with np.errstate(all="ignore"):
            answer.send(task())

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def result(self, died: T) -> T:
        try:
            result: T = self.answer.recv()
        except EOFError:
            result = died
        self.end()
        return result

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.answer.close()


Runs = dict[Path, dict[int, list[int]]]
"""By file and line, the units that run it."""


def executed(units: Sequence[Unit], files: Sequence[Path]) -> tuple[Runs, list[float]]:
    """Which lines are run by which units, the fastest first, and the seconds that each unit takes; units that fail
    without any change are left out.

    Modules that units import while they run are imported here: otherwise every fork would read them without its change.
    """
    by_name = {str(file): file for file in files}

    def task() -> tuple[Runs, list[float], list[str]]:
        runs: Runs = {file: {} for file in files}
        seconds = []
        for n, unit in enumerate(units):
            seen, started = set[tuple[str, int]](), time.perf_counter()
            sys.settrace(partial(_trace, by_name, seen))
            failed = unit.fails()
            sys.settrace(None)
            seconds.append(time.perf_counter() - started)
            for name, line in seen if failed is None else ():
                runs[by_name[name]].setdefault(line, []).append(n)
        for of_line in runs.values():
            for covering in of_line.values():
                covering.sort(key=seconds.__getitem__)
        return runs, seconds, live.modules_of(set(files))

    result = Fork[tuple[Runs, list[float], list[str]] | None](task).result(None)
    if result is None:
        raise ValueError("the units cannot be judged without any change")
    runs, seconds, modules = result
    for name in modules:
        importlib.import_module(name)
    return runs, seconds


def _trace(
    names: Collection[str], seen: set[tuple[str, int]], frame: FrameType, event: str, argument: object
) -> TraceFunction | None:
    """Traces the lines of functions in some files."""
    name = frame.f_code.co_filename
    if name not in names:
        return None

    def lines(frame: FrameType, event: str, argument: object) -> TraceFunction:
        seen.add((name, frame.f_lineno))
        return lines

    return lines


def lines_of(file: Path) -> list[int]:
    """The lines of a file at which something begins to run."""
    module = compile(file.read_text(), str(file), "exec", dont_inherit=True)
    return sorted({line for code in live.codes(module) for _, _, line in code.co_lines() if line is not None})


# ---------------------------------------------------------------------------------------------- trials


class Trials:
    """The mutants of some files in lines that some unit runs."""

    def __init__(self, units: Sequence[Unit], files: Sequence[Path]) -> None:
        self.units = units
        runs, self.seconds = executed(units, files)
        self.functions = live.functions_of(set(files))
        live.forget(set(files))
        self.of_mutant: list[tuple[Mutant, list[int]]] = []
        self.unexecuted = 0
        for file in files:
            lines = lines_of(file)
            for mutant in mutants(file):
                at = bisect_right(lines, mutant.line)
                covering = runs[file].get(lines[at - 1]) if at else None
                if covering is None:
                    self.unexecuted += 1
                else:
                    self.of_mutant.append((mutant, covering))

    def drawn(self, count: int, seed: int) -> list[tuple[Mutant, list[int]]]:
        """Some of the mutants, in the order of the files."""
        chosen = random.Random(seed).sample(range(len(self.of_mutant)), min(count, len(self.of_mutant)))
        return [self.of_mutant[n] for n in sorted(chosen)]

    def verdicts(self, count: int, seed: int, workers: int) -> Iterator[Verdict]:
        """The verdicts on some of the mutants, as they arrive."""
        return self.judge(self.drawn(count, seed), workers)

    def judge(self, chosen: Sequence[tuple[Mutant, list[int]]], workers: int) -> Iterator[Verdict]:
        """The verdicts on those that functions can take, as they arrive."""
        waiting, running = list(reversed(chosen)), dict[Connection, tuple[Mutant, Fork[str | None], float]]()
        while waiting or running:
            while waiting and len(running) < workers:
                mutant, covering = waiting.pop()
                fork = Fork(partial(self.killer, mutant, covering))
                running[fork.answer] = mutant, fork, SECONDS + TIMES * sum(self.seconds[n] for n in covering)
            ready = wait(list(running), timeout=1.0)
            late = [
                answer for answer, (_, fork, limit) in running.items() if fork.seconds > limit and answer not in ready
            ]
            for answer in [*(answer for answer in running if answer in ready), *late]:
                mutant, fork, _ = running.pop(answer)
                seconds = fork.seconds
                if answer in late:
                    fork.end()
                    yield Verdict(mutant, "does not end", seconds)
                elif (by := fork.result("the process ended")) != UNPLACED:
                    yield Verdict(mutant, by, seconds)

    def killer(self, mutant: Mutant, covering: Sequence[int]) -> str | None:
        """In a fork: the first unit that fails with the mutant in place, or `UNPLACED`."""
        try:
            live.replace(self.functions[mutant.file], compiled(mutant))
        except ValueError:  # it has other free variables
            return UNPLACED
        failures = (self.units[n].fails() for n in covering)
        return next((failure for failure in failures if failure is not None), None)
