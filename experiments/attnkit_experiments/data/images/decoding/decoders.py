"""Processes that decode images: jobs in, arrays out, in any number.

A process runs this file as a program: it reads pickled jobs from standard input, answers on standard output and ends
with its input, so it never outlives its parent. Pixels come in memory that both have: a file without a name, which is
gone with the last of them, however that ends. Processes are started afresh, not forked, because a process with threads
or a GPU must not be forked.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attnkit_experiments.data.unpacking import Unreadable

ROOT = Path(__file__).parents[4]
Jobs = queue.SimpleQueue[tuple[Future[Any], Any, np.ndarray | None] | None]


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

    def submit(
        self, function: Callable[[Sequence[Any]], Any], items: Sequence[Any], into: np.ndarray | None = None
    ) -> Future[Any]:
        """A future of `function(items)`, or of None once that array is written `into` one; `result()` raises its
        Unreadable.
        """
        future: Future[Any] = Future()
        if self.count:
            self._jobs.put((future, (function, items), into))
            return future
        try:
            value = function(items)
            if into is not None:
                into[...], value = value, None
            future.set_result(value)
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
    pixels = _nameless_file()
    process = subprocess.Popen(
        [sys.executable, "-m", "attnkit_experiments.data.images.decoding.decoders", str(pixels.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=(pixels.fileno(),),
    )
    assert process.stdin
    assert process.stdout
    while (item := jobs.get()) is not None:
        future, job, into = item
        try:
            process.stdin.write(pickle.dumps((*job, into is not None)))
            process.stdin.flush()
            value, error = pickle.load(process.stdout)
            if into is not None and error is None:
                pixels.seek(0)
                if value != into.shape or pixels.readinto(into) != into.nbytes:  # type: ignore[attr-defined]
                    raise ValueError(f"images of {into.shape} were expected, {value} came")
                value = None
        except (OSError, EOFError, pickle.UnpicklingError):
            value, error = None, RuntimeError(f"a decoding process ended with status {process.wait()}")
        except Exception as unexpected:  # must reach whoever waits for the future
            value, error = None, unexpected
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    pixels.close()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # it had died, and later jobs have failed
        process.stdin.close()
    process.wait()


def _nameless_file() -> BinaryIO:
    """A file without a name, in memory where the system has such files."""
    if sys.platform == "linux":
        return open(os.memfd_create("pixels"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def main(pixels: int) -> None:
    """Answer jobs; arrays go into the file `pixels`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the parent, whose end ends this process
        signal.signal(number, signal.SIG_IGN)
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            function, items, shared = pickle.load(source)
        except EOFError:
            return
        value: Any = None
        error: Exception | None = None
        try:
            value = function(items)
            if shared:
                os.pwrite(pixels, np.ascontiguousarray(value).data, 0)
                value = value.shape
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
    main(int(sys.argv[1]))
