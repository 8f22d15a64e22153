"""A study as a queue: every process that works on it claims the next cell without a result, until all have one.

Leases are in OUT/leases: that of a cell while it is trained, and "run" while `run` is there, which must be alone when
it reads or deletes what is in OUT.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnkit_experiments.commands.cells import run_cell
from attnkit_experiments.commands.opening import Opened
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.leases import Lease, claim, held
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.world import World

LEASES = "leases"
POLL_SECONDS = 5.0
"""The time between two looks at cells that others train."""


def train_cells(study: Opened, world: World) -> list[dict[str, Any]]:
    """Train every cell without a result that nobody else trains, and wait for the others; returns all results.

    Under torchrun the main process claims a cell for all of them; the results are complete only there.
    """
    waiting, announced = list(enumerate(study.cells, 1)), False
    results: dict[str, dict[str, Any]] = {}
    while waiting:
        busy = []
        for number, cell in waiting:
            lease = None
            if world.main:
                lease = claim(study.out / LEASES, cell.name)
            if not world.broadcast(lease is not None):
                busy.append((number, cell))
                continue
            try:
                label = f"[{number}/{len(study.cells)}] {cell.name}"
                results[cell.name] = run_cell(study, cell, world, label=label, check=lease.check if lease else None)
            finally:
                if lease:
                    lease.release()
        if busy and not announced:
            announced = True
            if world.main:
                say(f"waiting for what others train: {', '.join(cell.name for _, cell in busy)}")
        waiting = busy
        if busy:
            time.sleep(POLL_SECONDS)  # a signal to stop ends it
    return [results[cell.name] for cell in study.cells]


@contextmanager
def alone_in(out: Path, world: World) -> Iterator[None]:
    """A context in which no other `run` starts in OUT; UserError if somebody works there."""
    lease: list[Lease] = []

    def take() -> None:
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out}: is a file")
        mine = claim(out / LEASES, "run")
        if mine:
            lease.append(mine)
        others = {name: who for name, who in held(out / LEASES).items() if not mine or name != "run"}
        if others:
            if mine:
                mine.release()
            name, who = next(iter(others.items()))
            at = "runs there" if name == "run" else f"trains {name} there"
            raise UserError(f"--out {out}: {who} {at}; python -m experiments work {out} joins it")

    world.agreed(take)
    try:
        yield
    finally:
        for mine in lease:
            mine.release()
        if world.main and not (out / "study.json").exists():  # nothing was started
            with suppress(OSError):
                (out / LEASES).rmdir()
                out.rmdir()
