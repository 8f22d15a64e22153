"""The process of an adapter: it loads it and answers questions, and says what it noticed about an answer.

It has inputs and nothing else: no case, no golden value, no bound.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection

from attnkit_conformance.adapter import DERIVATIVES, Adapter, IllFormed, Unsupported, cut, package_of
from attnkit_conformance.adapters.calls import Call, Fault, Former, convert, poison
from attnkit_conformance.adapters.repetition import repeat_call
from attnkit_conformance.adapters.watch import Watch
from attnkit_conformance.adapters.wire import Question, Traits, pack, plain, unpack
from attnkit_conformance.model.types import Foreign

RARELY = 200_000  # objects between collections of garbage
DATA = (
    "name", "dtypes", "ops", "without", "copied", "serves", "surroundings", "description", "errors", "compiles",
    "emulates", "declines",
)  # fmt: skip
NEEDED = ("array", "numpy", "call", "vjp")
METHODS = (*NEEDED, "unsupported", "with_threads", "freed", *DERIVATIVES)
METHOD = "method"
Answer = tuple[str, object, list[Fault]]  # its kind, what it is, and what was noticed besides
SHOWN = 3  # functions that are named of those that were called


def load(target: str) -> Foreign:
    """The object named "package.module:ATTRIBUTE"; a class or function without arguments is called."""
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    return value() if isinstance(value, type) or (callable(value) and not hasattr(value, "call")) else value


def collect_rarely() -> None:
    """Let a process that traces for JAX all the time collect garbage rarely, which takes a seventh of its time."""
    gc.set_threshold(RARELY)


def traits_of(adapter: Adapter) -> Traits:
    """What an adapter says of itself, by attribute that it has: (True, plain data or METHOD), or (False, its repr)."""
    traits: Traits = {}
    for name in (name for name in DATA if hasattr(adapter, name)):
        try:
            traits[name] = (True, plain(getattr(adapter, name)))
        except TypeError:
            traits[name] = (False, cut(repr(getattr(adapter, name))))
    for name in (name for name in METHODS if hasattr(adapter, name)):
        value = getattr(adapter, name)
        if value is not None or name in NEEDED:
            traits[name] = (True, METHOD) if callable(value) else (False, cut(repr(value)))
    return traits


class Served:
    """An adapter in its process, with what is remembered from one call to the next."""

    def __init__(self, adapter: Foreign, calls: tuple[str, ...]) -> None:
        self.adapter, self.watch = adapter, Watch(calls)
        self.inside: dict[str, Adapter] = {"": adapter}  # the adapter in surroundings, by name
        self.former: list[Former] = []

    def in_surrounding(self, name: str) -> Adapter:
        """The adapter, in a surrounding if one is named."""
        if name not in self.inside:
            from attnkit_conformance.adapters.surroundings import surround

            self.inside[name] = surround(self.adapter, name)
        return self.inside[name]

    def reply(self, question: Question) -> Answer:
        """The kind of an answer, the answer, and what was noticed besides."""
        faults: list[Fault] = []
        try:
            adapter = self.in_surrounding(question.surrounding)
            with self.watch.calls(), ExitStack() as around:
                if question.threads:
                    around.enter_context(self.adapter.with_threads(question.threads))
                kind, value = answer(adapter, question, faults, self.former)
        except Exception as error:
            kind, value = "error", describe_error(error)
        if seen := self.watch.new_calls():
            more = f" and {len(seen) - SHOWN} more" if len(seen) > SHOWN else ""
            faults.append(("calls", f"{question.method} called {', '.join(seen[:SHOWN])}{more}, which it may not"))
        return kind, value, faults


def answer(adapter: Foreign, question: Question, faults: list[Fault], former: list[Former]) -> tuple[str, object]:
    """Run one call, or the repeats of one."""
    try:
        if question.method == "package":
            return "answer", package_of(adapter)
        if question.method == "unsupported":
            arrays = convert(adapter, unpack(question.arrays))
            reason = adapter.unsupported(question.op, arrays, question.params)
            return "answer", reason if reason is None else cut(str(reason))
        if question.again is not None:
            return "answer", repeat_call(adapter, question, faults)
        call = Call(adapter, question, question.arrays, question.others)
        poison(call.sizes)
        outputs, raw = call.run()
        faults += call.changes()
        faults += [fault for result in former for fault in result.changes()]
        former[:] = [Former(adapter, question.method, raw, outputs)]
        return "answer", pack(outputs)
    except Unsupported as refusal:
        return "unsupported", cut(str(refusal))
    except IllFormed as error:
        return "ill-formed", cut(str(error))
    except Exception as error:
        return "error", describe_error(error)


def describe_error(error: BaseException) -> tuple[str, str]:
    """The type and the text of an exception."""
    return type(error).__name__, cut(str(error))


def serve(pipe: Connection, target: str, calls: tuple[str, ...]) -> None:
    """The loop of the process: a question in, an answer out, until the pipe ends."""
    collect_rarely()

    def send(message: Answer) -> None:
        pipe.send_bytes(pickle.dumps(message))

    try:
        adapter = load(target)
        served = Served(adapter, calls)
        send(("answer", traits_of(adapter), []))
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        send(("unloaded", ": ".join(describe_error(error)), []))
        return
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        send(served.reply(question))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], tuple(sys.argv[3:]))
