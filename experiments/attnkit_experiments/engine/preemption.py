"""Stopping at SIGTERM or SIGUSR1, by which schedulers and spot machines announce that a process will be killed.

While steps are trained a signal waits for the end of one, in all processes, and for a checkpoint; at any other time the
process ends at once, for whatever it leaves is whole. Both end with SAVED, after which a job should be queued again. If
that has not come to pass within the grace, because a step is longer or another process does not answer, the process
ends with UNSAVED: what is resumed is the checkpoint before. A second signal ends the process at once.

A thread hears the signals, since the main one may be in a call of a library that waits for other processes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.progress import say

SAVED, UNSAVED = 75, 76
"""Exit statuses of a process that was told to stop: 75 is EX_TEMPFAIL of sysexits.h, "try again"."""
GRACE = 25.0
"""Seconds to the end of a process that was told to stop; torchrun and SLURM kill after 30."""
ECHO = 1.0
"""Seconds in which signals are one: a scheduler tells all processes, and torchrun passes on what it is told."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(BaseException):
    """The process was told to stop; the text is one line. Like KeyboardInterrupt, no Exception, so that nothing takes
    it for a failure.
    """


class Stop:
    """Whether this process was told to stop, and what that needs."""

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self.told = threading.Event()
        self.signal = ""
        self.unsaved = False
        """Whether steps were trained that no checkpoint has."""
        self._waits = False
        self._raised = False
        self._announced = 0.0

    @contextmanager
    def after_a_step(self) -> Iterator[None]:
        """A context in which a signal waits until `told` is looked at, at the end of the context at the latest."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = self.unsaved = False
        self.heed()

    def heed(self) -> None:
        """Preempted, once, if the process was told to stop and nothing is to be waited for."""
        if self.told.is_set() and not self._waits and not self._raised:
            self._raised = True  # else an echo would end what this one cleans up
            raise Preempted(f"stopped by {self.signal}; --resume continues at the last checkpoint")

    def announce(self, step: float, save: float) -> None:
        """Say how long a stop takes, unless it was said of about as long a one: the longest step and a save, in
        seconds.
        """
        need = step + save
        if need < 1.5 * self._announced:
            return
        self._announced = need
        text = (
            f"a stop by SIGTERM or SIGUSR1 needs {need:.1f} s: {step:.1f} to the end of a step or an evaluation, "
            f"{save:.1f} for a checkpoint"
        )
        say(f"{text}; that is more than --grace {self.grace:g}" if need > self.grace else text)

    def hear(self, number: int) -> None:
        self.signal = self.signal or signal.Signals(number).name
        self.told.set()

    def handle(self, number: int, frame: object) -> None:
        self.hear(number)
        self.heed()


@contextmanager
def listening(grace: float = GRACE) -> Iterator[Stop]:
    """A context in which SIGTERM and SIGUSR1 stop this process as the module says; only the main thread can have it,
    and in another one the two keep their meaning.
    """
    if not grace > 0:
        raise UserError(f"--grace {grace:g}: expected seconds above 0")
    stop = Stop(grace)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    thread = threading.Thread(target=_hear, args=(heard, stop), daemon=True)
    thread.start()
    before = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(told)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        os.close(told)
        thread.join()


def _hear(heard: int, stop: Stop) -> None:
    """Read the numbers of signals as they come, until the pipe is closed; end the process if it does not by itself."""
    since = None
    while True:
        left = None if since is None else max(since + stop.grace - time.monotonic(), 0)
        ready, _, _ = select.select([heard], [], [], left)
        if not ready:
            _end(UNSAVED if stop.unsaved else SAVED, f"not stopped within --grace {stop.grace:g} after {stop.signal}")
        numbers = os.read(heard, 1)
        if not numbers:
            os.close(heard)
            return
        if numbers[0] not in SIGNALS:
            continue
        if since is None:
            since = time.monotonic()
            stop.hear(numbers[0])
        elif time.monotonic() > since + ECHO:
            _end(128 + numbers[0], f"ended by a second {signal.Signals(numbers[0]).name}")


def _end(status: int, reason: str) -> None:
    """End the process, whatever its threads are doing."""
    lost = "; steps after the last checkpoint are lost" if status != SAVED else ""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{reason}{lost}; --resume continues\n".encode())
    os._exit(status)
