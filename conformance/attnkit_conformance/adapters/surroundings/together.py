"""Two calls at the same time: the one that is judged, and the one before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeAlias, TypeVar

from attnkit_conformance.model.types import Arrays

T = TypeVar("T")
Work: TypeAlias = Callable[[], Arrays]
Task: TypeAlias = Callable[[], Coroutine[None, None, Arrays]]
REPEATS = 3  # of the call that is judged


class Beside(Generic[T]):
    """Remembers the last piece of work, beside which the next is done."""

    def __init__(self) -> None:
        self.last: T | None = None

    def with_last(self, work: T, run: Callable[[T, T], Arrays]) -> Arrays:
        """run(work, the work before), which is kept unless it raises."""
        answer = run(work, work if self.last is None else self.last)
        self.last = work
        return answer


class InThreads(Beside[Work]):
    """Work in a thread while another thread does the work before it again and again."""

    def __call__(self, work: Work) -> Arrays:
        return self.with_last(work, both_in_threads)


def both_in_threads(mine: Work, other: Work) -> Arrays:
    """What `mine` returns the last time of several, while another thread repeats `other` until then."""
    start, done = threading.Barrier(2), threading.Event()

    def repeat() -> Arrays:
        start.wait()
        try:
            return [mine() for _ in range(REPEATS)][-1]
        finally:
            done.set()

    def beside() -> None:
        start.wait()
        other()
        while not done.is_set():
            other()

    with ThreadPoolExecutor(2) as pool:
        answer, neighbour = pool.submit(repeat), pool.submit(beside)
    neighbour.result()
    return answer.result()


class InTasks(Beside[Task]):
    """Work in an asyncio task that takes turns with the task before it."""

    def __call__(self, work: Task) -> Arrays:
        return self.with_last(work, both_in_tasks)


def both_in_tasks(mine: Task, other: Task) -> Arrays:
    """What `mine` returns beside `other`."""

    async def both() -> Arrays:
        return (await asyncio.gather(mine(), other()))[0]

    loop = asyncio.new_event_loop()  # asyncio.run writes a task with all of its arrays as text
    try:
        return loop.run_until_complete(both())
    finally:
        loop.close()
