"""An adapter in a separate process, for process-wide modes and for code that may crash.

Arrays are sent over a pipe as the memory that they lie in, so that they have their layout there as well. A worker that
dies raises `WorkerDied`, which says how, instead of hanging, and the next call starts a fresh one.
"""

from __future__ import annotations

import builtins
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import IO

import numpy as np

from attnkit_conformance.adapter import DERIVATIVES, IllFormed, Unsupported, cut
from attnkit_conformance.adapters.wire import Question, Traits, pack, read, unpack
from attnkit_conformance.model.types import Arrays, Params, Plain

PATIENCE = 600.0  # seconds for one call, compilation included
FAREWELL = 60.0  # seconds for a worker to exit after its pipe is closed
SOON = 2.0  # the same for a strange one
HANG, CRASH = 4, 1  # how much worse it is to wait for a call until patience ends than for a process to start again
TAIL = 8  # lines of what a worker wrote before it died
HANGS = "no answer within"
LARGEST = 2**30  # bytes of an answer: what begins with a text in place of a length says more
SECONDS = struct.Struct("@ll")  # and microseconds, as the system has them
READING = 1.0  # seconds for the last lines to arrive: processes of its own may keep the pipe
LONGEST = 400  # characters of them

Fault = tuple[str, str]  # name of the check, message


class WorkerDied(RuntimeError):
    """The worker process ended or stopped answering during a call."""


class NoAnswer(Exception):
    """What a worker sent is no answer."""


class NotLoaded(RuntimeError):
    """There is no adapter at the path that a worker is to load."""


def end(pipe: Connection, process: subprocess.Popen[bytes], farewell: float) -> None:
    """End a worker and wait for it: closing the pipe stops it, and one that does not react in time is killed."""
    pipe.close()
    try:
        process.wait(farewell)
    except subprocess.TimeoutExpired:
        kill(process)
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and what it has started if it is the first of a session."""
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


class Worker:
    """A process that loads `target` = "package.module:ATTRIBUTE", with extra environment variables, and answers
    questions. It ends with `close()`, or when this object is no longer used. Functions named in `calls` are watched.

    It is in a session of its own, so that Ctrl-C and signals to a group of processes are not for it: the end of the
    pipe is. One that is `strange` ends without a long farewell, and what it writes to its output and errors is not
    shown but kept: its last lines are told when it dies.
    """

    def __init__(
        self, name: str, target: str, environment: Mapping[str, str], patience: float, calls: tuple[str, ...] = (),
        strange: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.target, self.patience = name, target, patience
        self.environment, self.calls, self.strange = dict(environment), calls, strange
        self.faults: list[Fault] = []  # what the worker noticed beside its answers, until somebody takes it
        self.deaths = 0
        self.traits = self.start()

    def start(self) -> Traits:
        """Start the process and wait for what the adapter says of itself."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self.environment}
        command = [sys.executable, "-m", "attnkit_conformance.adapters.serving", str(theirs.fileno()), self.target]
        output, errors = (subprocess.PIPE, subprocess.STDOUT) if self.strange else (None, None)
        self.process = subprocess.Popen(
            [*command, *self.calls],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        theirs.close()
        # an answer that stops in the middle is waited for no longer than one that does not come
        whole, part = divmod(self.patience, 1.0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, SECONDS.pack(int(whole), int(1e6 * part)))
        self.pipe = Connection(ours.detach())
        self.close = weakref.finalize(self, end, self.pipe, self.process, SOON if self.strange else FAREWELL)
        self.written: deque[str] = deque(maxlen=TAIL)
        self.reader = threading.Thread(target=drain, args=(self.process.stdout, self.written), daemon=True)
        self.reader.start()
        traits: Traits = self.receive("loading")
        return traits

    def receive(self, doing: str, calls: int = 1) -> Plain:
        """The worker's next answer; an exception in the worker is raised here."""
        try:
            if not self.pipe.poll(calls * self.patience):
                raise self.death(HANG, f"{HANGS} {calls * self.patience:g} s while {doing}")
            message = self.pipe.recv_bytes(LARGEST)
        except BlockingIOError:
            text = f"{HANGS} {self.patience:g} s: it stopped in the middle of one while {doing}"
            raise self.death(HANG, text) from None
        except (EOFError, ConnectionError):
            self.close()
            text = f"the worker {how(self.process.returncode)} while {doing}{self.last_words()}"
            raise self.death(CRASH, text) from None
        except OSError as error:  # the end of the pipe in the middle of an answer, or a length that is none
            text = f"the worker sent what is no answer while {doing} ({error})"
            raise self.death(CRASH, text, last_words=True) from None
        try:
            return self.told(message)
        except NoAnswer as error:
            raise self.death(CRASH, f"the worker sent what is no answer while {doing} ({error})") from None

    def death(self, weight: int, text: str, last_words: bool = False) -> WorkerDied:
        """The end of the process, which may have ended by itself, as an exception that tells of it."""
        kill(self.process)
        self.close()
        self.deaths += weight
        return WorkerDied(f"{self.name}: {text}{self.last_words() if last_words else ''}")

    def told(self, message: bytes) -> Plain:
        """The answer in a message; what the worker raised is raised here."""
        try:
            kind, value, faults = read(message)
            self.faults += [(str(check), cut(str(text))) for check, text in faults]
        except Exception as error:  # it may send anything
            raise NoAnswer(f"{type(error).__name__}: {cut(str(error))}") from None
        if kind == "unloaded":
            self.close()
            raise NotLoaded(value)
        if kind == "unsupported":
            raise Unsupported(value)
        if kind == "ill-formed":
            raise IllFormed(value)
        if kind == "error":
            raise exception_of(*value)
        return value

    def last_words(self) -> str:
        """The last lines that the worker wrote, which has ended."""
        self.reader.join(READING)
        text = "\n".join(self.written).strip()[-LONGEST:]
        return f"; it had written: {text}" if text else ""

    def ask(self, question: Question, calls: int = 1) -> Plain:
        """An answer, of a fresh process if the last one is gone; for so many `calls` there is as much patience."""
        if self.process.poll() is not None:
            self.close()
            self.start()
        if self.pipe.poll(0):
            text = f"the worker sent something unasked before running {question.method} of {question.op}"
            raise self.death(CRASH, text, last_words=True)
        with suppress(ConnectionError):  # the worker has died: `receive` reports how
            self.pipe.send(question)
        return self.receive(f"running {question.method} of {question.op}", calls)


def exception_of(name: str, text: str) -> Exception:
    """The exception of this type, if it is one of Python's that has a text."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(text)
    return RuntimeError(f"{name}: {text}")


def how(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def drain(output: IO[bytes] | None, lines: deque[str]) -> None:
    """Read what a process writes, if it is not shown, so that it can go on, and keep the last lines."""
    if output is None:
        return
    with output:
        for line in iter(lambda: output.readline(LONGEST), b""):
            lines.append(line.decode(errors="replace").rstrip())


class WorkerAdapter:
    """The adapter `target` = "package.module:ATTRIBUTE" in a process with extra environment variables. The process
    ends with `close()`, or when this object is no longer used.
    """

    def __init__(
        self, name: str, target: str, environment: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> None:
        self.take(name, Worker(name, target, environment or {}, patience))

    def take(self, name: str, worker: Worker) -> None:
        """Be the adapter of a worker, by this name."""
        self.name, self.worker = name, worker
        traits = {name: value for name, (_, value) in worker.traits.items()}
        self.dtypes: tuple[str, ...] = tuple(traits["dtypes"])
        self.errors: bool = traits.get("errors", False)
        self.description: str = traits.get("description", "")
        self.ops: tuple[str, ...] | None = traits.get("ops")
        self.without: tuple[str, ...] = tuple(traits.get("without", ()))
        self.serves: Mapping[str, Mapping[str, Plain]] | None = traits.get("serves")
        self.compiles: bool = traits.get("compiles", False)
        self.copied: tuple[str, ...] = tuple(traits.get("copied", ()))
        self.declines: tuple[str, ...] | None = traits.get("declines")
        self.emulates: bool = traits.get("emulates", False)
        self.unsupported = self.declared if "unsupported" in traits else None
        for kind in (kind for kind in DERIVATIVES if kind in traits):
            setattr(self, kind, partial(self.computed, kind))

    def question(self, method: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Question:
        """A question for the worker."""
        return Question(method, op, pack(arrays), dict(params), tuple(map(pack, others)))

    def ask(self, method: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Plain:
        """One call in the worker."""
        return self.worker.ask(self.question(method, op, arrays, params, *others))

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Arrays stay NumPy's on this side; the worker converts them."""
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        """The worker has already converted them to NumPy."""
        return x

    def computed(self, method: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> dict[str, np.ndarray]:
        """What a method of the worker's adapter returns."""
        return unpack(self.ask(method, op, arrays, params, *others))

    def call(self, op: str, arrays: Arrays, params: Params) -> dict[str, np.ndarray]:
        """Outputs, computed in the worker."""
        return self.computed("call", op, arrays, params)

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> dict[str, np.ndarray]:
        """Gradients, computed in the worker."""
        return self.computed("vjp", op, arrays, params, cotangents)

    def declared(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """The declaration of the worker's adapter."""
        reason: str | None = self.ask("unsupported", op, arrays, params)
        return reason

    def close(self) -> None:
        """End the process."""
        self.worker.close()

    def faults(self) -> list[Fault]:
        """What the worker noticed since this was last asked, beside its answers."""
        faults = list(dict.fromkeys(self.worker.faults))
        self.worker.faults.clear()
        return faults
