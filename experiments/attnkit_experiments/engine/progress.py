"""Progress: a bar on a terminal, otherwise a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

PLAIN_SECONDS = 10.0

console = Console(highlight=False, soft_wrap=True)


class Meter(Protocol):
    def __call__(self, done: int, note: str = "") -> None: ...


@contextmanager
def meter(label: str, total: int) -> Iterator[Meter]:
    """Yield ``update(done, note)``. On a terminal a bar is redrawn; otherwise a line comes every ten seconds."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=total, note="")
            yield lambda done, note="": bar.update(task, completed=done, note=note)
        return
    last = time.monotonic()

    def line(done: int, note: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(f"{label}: {done}/{total} {note}".rstrip(), flush=True)

    yield line


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Iterate over `items` with a meter."""
    with meter(label, len(items)) as update:
        for index, item in enumerate(items):
            yield item
            update(index + 1)


def many(n: int | str, noun: str) -> str:
    """A count with its noun: 1 thread, 2 threads, 2 processes; of several machines that differ, "1 / 4" threads."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{n if isinstance(n, str) else f'{n:,}'} {noun}{'' if n == 1 else ending}"


def say(text: str) -> None:
    """Print one line above any bar."""
    console.print(text, markup=False)
