"""Leases: who works on what in a folder that processes of several machines share.

A lease on NAME is a file NAME.N, created exclusively, whose holder touches it every now and then. It ends when it is
removed, when its process is gone from this machine, or when it was not touched for its patience, by the clock of the
file system or, which nobody can set back, by that of whoever has looked at it all the time. Whoever finds the last one
ended creates NAME.N+1, which only one can, so nothing has to be taken away from a holder that was merely asleep: it
notices that there is a later lease.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.schema import conform

PATIENCE = 300.0
"""Seconds without a sign of life after which a lease from another machine has ended."""


class Lease:
    """A lease that this process holds, renewed by a thread until `release`."""

    def __init__(self, folder: Path, name: str, number: int, patience: float) -> None:
        self.folder, self.name, self.number = folder, name, number
        self.path = folder / f"{name}.{number}"
        self._patience = patience
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._done.wait(self._patience / 10):
            try:
                os.utime(self.path)
            except OSError:  # the file system may be away for a while; what is lost is found by `check`
                continue

    def check(self) -> None:
        """UserError if the lease has ended, because this process was asleep for longer than its patience."""
        numbers = _numbers(self.folder, self.name)
        if not numbers or numbers[-1] != self.number:
            raise UserError(f"{self.path}: this process was silent for too long, and another one has taken over")

    def release(self) -> None:
        """End it, and remove what ended before it: the oldest first, so that the last one is always this."""
        self._done.set()
        self._thread.join()
        for number in _numbers(self.folder, self.name):
            if number <= self.number:
                (self.folder / f"{self.name}.{number}").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(folder: Path, name: str, patience: float = PATIENCE) -> Lease | None:
    """A lease on `name`, or None if somebody holds one."""
    folder.mkdir(parents=True, exist_ok=True)
    last = (_numbers(folder, name) or [0])[-1]
    if _holder(folder, name, last):
        return None
    number = last + 1  # of the lease that was looked at: if there is a later one by now, this exists
    try:
        with (folder / f"{name}.{number}").open("x", encoding="utf-8") as file:
            own = {"host": socket.gethostname(), "process": os.getpid(), "born": _born(os.getpid())}
            json.dump(own | {"patience": patience}, file)
    except FileExistsError:
        return None
    return Lease(folder, name, number, patience)


def holder(folder: Path, name: str) -> str:
    """Who holds a lease on `name`: machine and process; "" for nobody."""
    return _holder(folder, name, (_numbers(folder, name) or [0])[-1])


def _holder(folder: Path, name: str, number: int) -> str:
    path = folder / f"{name}.{number}"
    try:
        touched = path.stat().st_mtime
        silent = max(_now(folder) - touched, _watched(path, touched))
        about = _read(path)
    except FileNotFoundError:
        return ""
    if silent > about["patience"] or (
        about["host"] == socket.gethostname() and _born(about["process"]) != about["born"]
    ):
        return ""
    return f"process {about['process']} on {about['host']}"


def held(folder: Path) -> dict[str, str]:
    """All names with a lease, and who holds them."""
    names = {path.name.rpartition(".")[0] for path in folder.glob("*.*")} if folder.is_dir() else set()
    return {name: who for name in sorted(names) if name and (who := holder(folder, name))}


def _numbers(folder: Path, name: str) -> list[int]:
    ends = (path.name.removeprefix(f"{name}.") for path in folder.glob("*.*") if path.name.startswith(f"{name}."))
    return sorted(int(end) for end in ends if end.isdecimal())


class About(TypedDict):
    """What a lease says."""

    host: str
    process: int
    born: str
    patience: float


def _read(path: Path) -> dict[str, Any]:
    """What a lease says; one that is being written says nothing yet."""
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        conform(about, About)
    except (ValueError, RecursionError):
        return {"host": "an unknown machine", "process": 0, "born": "", "patience": PATIENCE}
    return about


def _watched(path: Path, touched: float) -> float:
    """The seconds for which this process has seen a lease untouched."""
    before, since = _seen.get(path, (None, 0.0))
    if before != touched:
        since = time.monotonic()
        _seen[path] = touched, since
    return time.monotonic() - since


_seen: dict[Path, tuple[float, float]] = {}


def _now(folder: Path) -> float:
    """The time of the file system, which machines agree on."""
    clock = folder / f".clock-{socket.gethostname()}-{os.getpid()}"
    clock.touch()
    try:
        return clock.stat().st_mtime
    finally:
        clock.unlink(missing_ok=True)


def _born(process: int) -> str:
    """When a process of this machine was started, where the system tells; "" if there is none of that number."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if facts[0] in "ZX" else facts[19]
    except OSError:
        pass
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"
