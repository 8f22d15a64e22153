"""A run spread over processes: each takes some families of adapters and one op at a time, and sends verdicts at once.

Compiling for JAX takes most of a run and holds one core; here every core compiles. The families that do not compile are
judged together, so that the reference answers each case once for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import judge, matcher
from attnkit_conformance.opdb import OPDB

PATIENCE = 5.0  # seconds between looks at whether a silent process still lives
SLOW = ("jax_x64", "jax")  # families that compile: their jobs start first

Find = Callable[[list[str]], list[Adapter]]
Job = tuple[tuple[str, ...], str]  # families of adapters, op


def jobs(names: Sequence[str]) -> list[Job]:
    """Every family with every op: the slow families one by one and first, then the others together."""
    slow = [(name,) for name in SLOW if name in names]
    others = tuple(name for name in names if name not in SLOW)
    return [(group, op.name) for group in (*slow, others) if group for op in OPDB]


def work(
    find: Find, waiting: Any, verdicts: Any, profile: str, expression: str | None, dtypes: tuple[str, ...]
) -> None:
    """The loop of one process: jobs until there are none or nobody waits, the adapters of a family made once."""
    made: dict[str, list[Adapter]] = {}
    parent = multiprocessing.parent_process()
    try:
        while (job := waiting.get()) is not None:
            names, op = job
            for name in names:
                made[name] = made.get(name) or find([name])
            chosen = [adapter for name in names for adapter in made[name]]
            for result in judge(chosen, profile, expression, dtypes, ops=(op,)):
                if parent is not None and not parent.is_alive():
                    verdicts.cancel_join_thread()
                    return
                verdicts.put(result)
        verdicts.put(None)
    except Exception as error:
        verdicts.put(error)
    finally:
        for adapter in (adapter for adapters in made.values() for adapter in adapters):
            if hasattr(adapter, "close"):
                adapter.close()


def judge_in_processes(
    find: Find,
    names: Sequence[str],
    profile: str,
    expression: str | None,
    dtypes: tuple[str, ...],
    workers: int | None = None,
) -> Iterator[CaseResult]:
    """Every verdict of the adapters that `find` gives for `names`, in the order in which they come."""
    matcher(expression)  # refuses what it cannot read, before any process starts
    context = multiprocessing.get_context("spawn")
    waiting, verdicts = context.Queue(), context.Queue()
    count = workers or os.cpu_count() or 1
    for job in (*jobs(names), *[None] * count):
        waiting.put(job)
    arguments = (find, waiting, verdicts, profile, expression, dtypes)
    running = [context.Process(target=work, args=arguments) for _ in range(count)]
    for process in running:
        process.start()
    try:
        yield from collected(verdicts, running)
    finally:
        for process in running:
            process.join(PATIENCE)
            if process.exitcode is None:
                process.terminate()
                process.join()


def collected(verdicts: Any, running: Sequence[Any]) -> Iterator[CaseResult]:
    """What the processes send, until each has sent its last; RuntimeError for one that ended without a word."""
    working = len(running)
    while working:
        try:
            item = verdicts.get(timeout=PATIENCE)
        except queue.Empty:
            dead = [process.exitcode for process in running if process.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"a process ended with exit code {dead[0]}") from None
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            working -= 1
        else:
            yield item
