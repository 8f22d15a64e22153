"""An adapter in a separate process, for process-wide modes and for code that may crash.

Arrays are sent over a pipe as the memory that they lie in, so that they have their layout there as well. A worker that
dies raises `WorkerDied` with its exit code instead of hanging, and the next call starts a fresh one.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from attnkit_conformance.adapter import DERIVATIVES, IllFormed, Unsupported, answered
from attnkit_conformance.model.memory import Memory, memory_of

PATIENCE = 600.0  # seconds for one call, compilation included
FAREWELL = 60.0  # seconds for a worker to exit after its pipe is closed
RARELY = 200_000  # objects between collections of garbage

Arrays = Mapping[str, Any]


class WorkerDied(RuntimeError):
    """The worker process ended or stopped answering during a call."""


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, Memory]:
    """The memory of all arrays of a dict, which pickles without ml_dtypes."""
    return {name: memory_of(np.asarray(x)) for name, x in arrays.items()}


def unpacked(arrays: Mapping[str, Memory]) -> dict[str, np.ndarray]:
    """Inverse of `pack`."""
    return {name: x.array() for name, x in arrays.items()}


def load(target: str) -> Any:
    """The object named "package.module:ATTRIBUTE"; a class or function without arguments is called."""
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    return value() if isinstance(value, type) or (callable(value) and not hasattr(value, "call")) else value


def collect_rarely() -> None:
    """Let a process that traces for JAX all the time collect garbage rarely, which takes a seventh of its time."""
    gc.set_threshold(RARELY)


def serve(pipe: Connection, target: str) -> None:
    """The worker's loop: one message (method, op, arrays, params, further arrays) in, one (kind, value) out."""
    collect_rarely()
    try:
        adapter = load(target)
        declares = getattr(adapter, "unsupported", None) is not None
        traits = {"dtypes": adapter.dtypes, "errors": getattr(adapter, "errors", False), "declares": declares}
        traits |= {"description": getattr(adapter, "description", ""), "ops": getattr(adapter, "ops", None)}
        traits |= {"without": getattr(adapter, "without", ()), "serves": getattr(adapter, "serves", None)}
        traits |= {"compiles": getattr(adapter, "compiles", False), "copied": getattr(adapter, "copied", ())}
        traits |= {"declines": getattr(adapter, "declines", None)}
        traits |= {"derivatives": tuple(kind for kind in DERIVATIVES if getattr(adapter, kind, None))}
        pipe.send(("answer", traits))
    except Exception as error:
        pipe.send(("error", (type(error).__name__, f"{target}: {error}")))
        return
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(adapter, *message))


def answer(adapter: Any, method: str, op: str, arrays: Any, params: Any, *others: Any) -> tuple[str, Any]:
    """Run one call in the worker."""
    try:
        inputs, *further = (
            {name: adapter.array(x, held[name].dtype) for name, x in unpacked(held).items()}
            for held in (arrays, *others)
        )
        result = getattr(adapter, method)(op, inputs, params, *further)
        return "answer", result if method == "unsupported" else pack(answered(adapter, method, result))
    except Unsupported as refusal:
        return "unsupported", str(refusal)
    except IllFormed as error:
        return "ill-formed", str(error)
    except Exception as error:
        return "error", (type(error).__name__, str(error))


def end(pipe: Connection, process: subprocess.Popen[bytes]) -> None:
    """End a worker and wait for it: closing the pipe stops it, and one that does not react is killed."""
    pipe.close()
    try:
        process.wait(FAREWELL)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WorkerAdapter:
    """The adapter `target` = "package.module:ATTRIBUTE" in a process with extra environment variables. The process
    ends with `close()`, or when this object is no longer used.
    """

    def __init__(
        self, name: str, target: str, environment: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> None:
        self.name, self.target, self.patience = name, target, patience
        self.environment = dict(environment or {})
        traits = self.start()
        self.dtypes: tuple[str, ...] = tuple(traits["dtypes"])
        self.errors: bool = traits["errors"]
        self.description: str = traits["description"]
        self.ops: tuple[str, ...] | None = traits["ops"]
        self.without: tuple[str, ...] = tuple(traits["without"])
        self.serves: Mapping[str, Mapping[str, Any]] | None = traits["serves"]
        self.compiles: bool = traits["compiles"]
        self.copied: tuple[str, ...] = tuple(traits["copied"])
        self.declines: tuple[str, ...] | None = traits["declines"]
        self.unsupported = self.declared if traits["declares"] else None
        for kind in traits["derivatives"]:
            setattr(self, kind, partial(self.computed, kind))

    def start(self) -> Any:
        """Start the process and wait for its capabilities."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self.environment}
        command = [sys.executable, "-m", "attnkit_conformance.adapters.worker", str(theirs.fileno()), self.target]
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self.pipe = Connection(ours.detach())
        self.close = weakref.finalize(self, end, self.pipe, self.process)
        return self.receive("starting")

    def receive(self, doing: str) -> Any:
        """The worker's next answer; an exception in the worker is raised here."""
        try:
            if not self.pipe.poll(self.patience):
                self.process.kill()
                self.close()
                raise WorkerDied(f"{self.name}: no answer within {self.patience:g} s while {doing}")
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.close()
            code = self.process.returncode
            raise WorkerDied(f"{self.name}: the worker ended with exit code {code} while {doing}") from None
        if kind == "unsupported":
            raise Unsupported(value)
        if kind == "ill-formed":
            raise IllFormed(value)
        if kind == "error":
            exception = getattr(builtins, value[0], RuntimeError)
            raise exception(value[1] if exception is not RuntimeError else ": ".join(value))
        return value

    def ask(self, method: str, op: str, arrays: Any, params: Any, *others: Any) -> Any:
        """One call in the worker, in a fresh process if the last one is gone."""
        if self.process.poll() is not None:
            self.close()
            self.start()
        with suppress(ConnectionError):  # the worker has died: `receive` reports how
            self.pipe.send((method, op, pack(arrays), dict(params), *map(pack, others)))
        return self.receive(f"running {method} of {op}")

    def array(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Arrays stay NumPy's on this side; the worker converts them."""
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        """The worker has already converted them to NumPy."""
        return x

    def computed(self, method: str, op: str, arrays: Arrays, params: Arrays, *others: Arrays) -> dict[str, np.ndarray]:
        """What a method of the worker's adapter returns."""
        return unpacked(self.ask(method, op, arrays, params, *others))

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, np.ndarray]:
        """Outputs, computed in the worker."""
        return self.computed("call", op, arrays, params)

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, np.ndarray]:
        """Gradients, computed in the worker."""
        return self.computed("vjp", op, arrays, params, cotangents)

    def declared(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """The declaration of the worker's adapter."""
        reason: str | None = self.ask("unsupported", op, arrays, params)
        return reason


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
