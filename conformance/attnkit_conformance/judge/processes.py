"""A run distributed over processes: each gets some families of adapters and one op at a time, and reports at once.

Compiling for JAX takes most of a run and uses one core; here every core compiles. The families that do not compile are
judged together, so that the reference computes each case once for all of them.

A process that has grown large, and stays so when it has forgotten what was compiled in it (`memory`), ends after its
job, and another takes its place.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.serving import collect_rarely
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import Matcher, judge, matcher, memory, stop
from attnkit_conformance.opdb import OPDB

PATIENCE = 5.0  # seconds that a process may take to end after its last job
SLOW = ("jax_x64", "jax")  # families that compile: their jobs start first

Find = Callable[[list[str]], list[Adapter]]
Job = tuple[tuple[str, ...], str]  # families of adapters, op


def jobs(names: Sequence[str]) -> list[Job]:
    """Every family with every op: the slow families one by one and first, then the others together."""
    slow = [(name,) for name in SLOW if name in names]
    others = tuple(name for name in names if name not in SLOW)
    return [(group, op.name) for group in (*slow, others) if group for op in OPDB]


def work(
    find: Find, waiting: Queue[Job | None], verdicts: Connection, profile: str,
    expression: str | Matcher | None, dtypes: tuple[str, ...],
) -> None:  # fmt: skip
    """The loop of one process: jobs until none are left, it has grown large, or the parent is gone. Adapters serve all
    jobs of their families that come together, and are closed before others are created.
    """
    present: tuple[str, ...] = ()
    members: list[Adapter] = []
    for number in stop.TEXTS:  # they are the parent's, which reports what was judged
        signal.signal(number, signal.SIG_IGN)
    collect_rarely()
    try:
        while (job := waiting.get()) is not None:
            verdicts.send(job)
            names, op = job
            if names != present:
                close_all(members)
                present, members = names, [adapter for name in names for adapter in find([name])]
            for result in judge(members, profile, expression, dtypes, ops=(op,)):
                verdicts.send(result)
            if memory.is_full():
                verdicts.send(Large())
                return
        verdicts.send(None)
    except BrokenPipeError:  # the parent is gone
        pass
    except Exception as error:
        verdicts.send(error)
    finally:
        close_all(members)


class Large:
    """What a process says that ends because it has grown large."""


def close_all(adapters: Iterable[Adapter]) -> None:
    """End the processes of adapters."""
    for adapter in adapters:
        if hasattr(adapter, "close"):
            adapter.close()


def judge_in_processes(
    find: Find,
    names: Sequence[str],
    profile: str,
    expression: str | Matcher | None,
    dtypes: tuple[str, ...],
    workers: int | None = None,
) -> Generator[CaseResult, None, None]:
    """Every verdict of the adapters that `find` gives for `names`, in order of arrival."""
    matcher(expression)  # refuses invalid expressions before any process starts
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    count = workers or os.cpu_count() or 1
    for job in (*jobs(names), *[None] * count):
        waiting.put(job)

    def started() -> Running:
        verdicts, here = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(find, waiting, here, profile, expression, dtypes))
        process.start()
        here.close()  # so that the pipe ends with the process
        return Running(process, verdicts)

    running, patience = [started() for _ in range(count)], 0.0
    try:
        yield from collect(running, started)
        patience = PATIENCE
    finally:
        end = time.monotonic() + patience
        for process in (each.process for each in running):
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


@dataclass
class Running:
    """A process, its job, and its last verdict on that."""

    process: BaseProcess
    verdicts: Connection
    job: Job | None = None
    last: CaseResult | None = None
    done: bool = False

    def verdict(self) -> CaseResult:
        """The failure of a process that died; RuntimeError for one that died before it had a job."""
        end = f"ended with exit code {self.process.exitcode}"
        if self.job is None:
            raise RuntimeError(f"a process {end}")
        names, op = self.job
        after = f" after {self.last.id}" if self.last else ""
        text = f"the process {end} while {', '.join(names)} ran {op}{after}; the rest of these cases was not judged"
        adapter = self.last.adapter if self.last else names[0]
        return CaseResult(f"{op}/float32/process", adapter, op, "float32", "fail", failures=(("process", text),))


def collect(running: list[Running], started: Callable[[], Running]) -> Iterator[CaseResult]:
    """What the processes send until each is done. One that dies is a failure, and another takes its place."""
    while busy := [each for each in running if not each.done]:
        ready = wait([each.verdicts for each in busy])
        for sender in (each for each in busy if each.verdicts in ready):
            try:
                item = sender.verdicts.recv()
            except EOFError:
                sender.process.join()
                sender.done = True
                yield sender.verdict()
                running.append(started())
                continue
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, CaseResult):
                sender.last = item
                yield item
            elif item is None:
                sender.done = True
            elif isinstance(item, Large):
                sender.done = True
                running.append(started())
            else:
                sender.job, sender.last = item, None
