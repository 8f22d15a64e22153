"""The end of a run before its last case: its time is up, or SIGINT (Ctrl-C) or SIGTERM comes. What was judged stays."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType

from attnkit_conformance.core import CaseResult

TEXTS = {signal.SIGINT: "interrupted", signal.SIGTERM: "SIGTERM"}


def until(verdicts: Generator[CaseResult, None, None], seconds: float | None, ended: list[str]) -> Iterator[CaseResult]:
    """The verdicts that arrive within a time, all without one, and before a signal: what came first goes to `ended`.

    A signal raises only while a verdict is waited for; one that comes while the last is shown is met after it.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    waiting = False

    def stop(number: int, frame: object) -> None:
        nonlocal waiting
        ended.append(TEXTS[signal.Signals(number)])
        interrupts, waiting = waiting, False
        if interrupts:
            raise KeyboardInterrupt

    with handling(stop), contextlib.closing(verdicts):
        try:
            while not ended:
                waiting = True
                verdict = next(verdicts, None)
                waiting = False
                if verdict is None:
                    return
                yield verdict
                if time.monotonic() > end:
                    ended.append(f"--seconds {seconds:g}")
        except KeyboardInterrupt:
            if not ended:  # not by a signal
                ended.append(TEXTS[signal.SIGINT])


@contextlib.contextmanager
def handling(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`stop` takes the signals meanwhile; only the main thread of a process can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in TEXTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status(ended: list[str]) -> int:
    """The exit status of a run that a signal ended, as of a process that one kills; else 0."""
    return next((128 + number for number, text in TEXTS.items() if text in ended), 0)
