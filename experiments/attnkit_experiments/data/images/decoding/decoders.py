"""Processes that decode images: jobs in, arrays out, in any number.

A process runs this file as a program: it reads pickled jobs from standard input, answers on standard output and ends
with its input, so it never outlives its parent. Processes are started afresh, not forked, because a process with
threads or a GPU must not be forked.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attnkit_experiments.data.images.decoding.places import Unreadable

ROOT = Path(__file__).parents[4]
Jobs = queue.SimpleQueue[tuple[Future[Any], Any] | None]


class Decoders:
    """`count` processes that call functions of `decoding.views`; with none, this process calls them directly.

    The processes end when this object is no longer used.
    """

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"workers must be at least 0, got {count}")
        self.count = count
        self._jobs: Jobs = queue.SimpleQueue()
        threads = [threading.Thread(target=_serve, args=(self._jobs,), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end, self._jobs, threads)

    def submit(self, function: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> Future[Any]:
        """A future of `function(items)`; `result()` raises its Unreadable."""
        future: Future[Any] = Future()
        if self.count:
            self._jobs.put((future, (function, items)))
            return future
        try:
            future.set_result(function(items))
        except Unreadable as error:
            future.set_exception(error)
        return future


def _end(jobs: Jobs, threads: Sequence[threading.Thread]) -> None:
    while not jobs.empty():
        jobs.get()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join()


def _serve(jobs: Jobs) -> None:
    """Start a process and send it jobs until None; a dead process fails every job."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "attnkit_experiments.data.images.decoding.decoders"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin
    assert process.stdout
    while (item := jobs.get()) is not None:
        future, job = item
        try:
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
            value, error = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            value, error = None, RuntimeError(f"a decoding process ended with status {process.wait()}")
        except Exception as unexpected:  # must reach whoever waits for the future
            value, error = None, unexpected
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # it had died, and later jobs have failed
        process.stdin.close()
    process.wait()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends this process
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            function, items = pickle.load(source)
        except EOFError:
            return
        value: Any = None
        error: Exception | None = None
        try:
            value = function(items)
        except Unreadable as unreadable:
            error = unreadable
        except Exception:
            error = RuntimeError(f"in a decoding process:\n{traceback.format_exc()}")
        try:
            pickle.dump((value, error), answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent is gone


if __name__ == "__main__":
    main()
