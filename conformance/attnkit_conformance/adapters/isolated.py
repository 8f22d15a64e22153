"""An adapter of somebody else in a process of its own, which is trusted with nothing but inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np

from attnkit_conformance.adapter import DERIVATIVES, Unsupported
from attnkit_conformance.adapters.watch import REFERENCE
from attnkit_conformance.adapters.wire import Again, Question, pack, unpack
from attnkit_conformance.adapters.worker import Worker, WorkerAdapter
from attnkit_conformance.model.types import Arrays, Params, Plain

LIMIT = 60.0  # seconds for a call: compiling a kernel takes some, and a hang must not take an hour
GIVES_UP = 12  # what `Worker.deaths` counts before an adapter is asked no more: twelve crashes, or three hangs
ALIKE = 3  # refused calls of a kind that are remembered
SEVERAL = 5  # so many limits are the most that repeats take: four calls, and what is repeated meanwhile
FEW = 4  # refused calls that are asked again though none of their kind was answered
ENVIRONMENT = {
    "MALLOC_PERTURB_": "1",  # the C library fills new memory with 0xFE: what is not written is wrong
    "ATTNKIT_GOLDENS": "",  # golden values are the judge's
}


class Freed(NamedTuple):
    """An array whose storage the worker is to give back."""

    x: np.ndarray  # any shape, (...)


class Refused(NamedTuple):
    """A call that was refused."""

    dtype: str
    arrays: Mapping[str, np.ndarray]
    params: Params
    reason: str


class Repeated(NamedTuple):
    """What repeats of a call gave: results of the first, of one with other values, and of the farthest from the first
    (none if all were equal), the number of calls, and the number of the first that differed in a bit (or 0)."""

    first: dict[str, np.ndarray]
    other: dict[str, np.ndarray]
    farthest: dict[str, np.ndarray] | None
    calls: int
    differs: int


def process_of(target: str, limit: float = LIMIT, calls: tuple[str, ...] = ()) -> Worker:
    """A process for the adapter `target`, killed after `limit` seconds for a call, which may not call the functions
    named in `calls`, nor the reference.
    """
    return Worker(target, target, ENVIRONMENT, limit, (REFERENCE, *calls), strange=True)


class Isolated(WorkerAdapter):
    """The adapter of such a process. `seed` draws the values of its repeats."""

    def __init__(self, worker: Worker, seed: int = 0) -> None:
        worker.name = str(worker.traits["name"][1])
        self.take(worker.name, worker)
        self.seed, self.surrounding, self.threads = seed, "", 0
        self.refused: dict[str, dict[tuple[str, ...], list[Refused]]] = {}  # by op and kind: dtype and arguments
        self.served: set[tuple[str, ...]] = set()  # the kinds, with their ops, of which a call was answered

    def take(self, name: str, worker: Worker) -> None:
        """Be the adapter of a worker, in everything that adapters may have."""
        super().take(name, worker)
        self.surroundings: str = worker.traits.get("surroundings", (True, ""))[1]
        if "with_threads" in worker.traits:
            self.with_threads = self.several_threads
        if "freed" in worker.traits:
            self.freed = Freed

    @property
    def gave_up(self) -> bool:
        """Whether the process ended too often to be asked again."""
        return self.worker.deaths >= GIVES_UP

    @cached_property
    def package_of_arrays(self) -> str:
        """The package of the worker's arrays."""
        package: str = self.worker.ask(Question("package", "", {}, {}))
        return package

    def within(self, surrounding: str, text: str) -> Isolated:
        """The same adapter in the same process, in a surrounding by its name."""
        inside = copy.copy(self)
        inside.name, inside.description, inside.surrounding = f"{self.name}@{surrounding}", text, surrounding
        inside.surroundings, inside.serves, inside.unsupported, inside.errors = "", None, None, False
        for name in (*DERIVATIVES, "with_threads", "freed"):
            vars(inside).pop(name, None)
        return inside

    @contextmanager
    def several_threads(self, number: int) -> Iterator[None]:
        """Calls with so many threads in the worker."""
        self.threads = number
        try:
            yield
        finally:
            self.threads = 0

    def question(self, method: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Question:
        """A question, with what surrounds the call."""
        freed = next((name for name, x in arrays.items() if isinstance(x, Freed)), "")
        arrays = {name: x.x if isinstance(x, Freed) else x for name, x in arrays.items()}
        question = super().question(method, op, arrays, params, *others)
        return question._replace(surrounding=self.surrounding, threads=self.threads, freed=freed)

    def ask(self, method: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Plain:
        """One call in the worker, of which is remembered whether it was refused."""
        if method != "call" or self.surrounding or any(isinstance(x, Freed) for x in arrays.values()):
            return super().ask(method, op, arrays, params, *others)
        kind = (dtype_of(arrays), *arrays, *params)
        try:
            answer = super().ask(method, op, arrays, params, *others)
        except Unsupported as refusal:
            calls = self.refused.setdefault(op, {}).setdefault(kind, [])
            if len(calls) < ALIKE:
                calls.append(Refused(dtype_of(arrays), dict(arrays), dict(params), str(refusal)))
            raise
        self.served.add((op, *kind))
        return answer

    def dubious(self, op: str) -> list[Refused]:
        """Refused calls of an op: first those with the dtype and the arguments of one that was answered, then a few."""
        refused = self.refused.get(op, {})
        served = [call for kind, calls in refused.items() if (op, *kind) in self.served for call in calls]
        others = [calls[0] for kind, calls in refused.items() if (op, *kind) not in self.served]
        return [*served, *others[:FEW]]

    def repeated(
        self, method: str, op: str, arrays: Arrays, params: Params, others: tuple[Arrays, ...],
        with_arrays: Arrays, with_others: tuple[Arrays, ...], most: int, least: int, seconds: float, longest: float,
    ) -> Repeated:  # fmt: skip
        """A call again and again in the worker, between calls `with_arrays` of the same shapes."""
        longest = min(longest, self.worker.patience)
        again = Again(pack(with_arrays), tuple(map(pack, with_others)), most, least, seconds, longest)
        question = self.question(method, op, arrays, params, *others)._replace(again=again)
        told = self.worker.ask(question, SEVERAL)
        results = {name: unpack(packed) for name, packed in told["results"].items()}
        return Repeated(results["first"], results["other"], results.get("farthest"), told["calls"], told["differs"])


def dtype_of(arrays: Arrays) -> str:
    """The dtype of a call: that of its first array of numbers."""
    return str(next((x.dtype.name for x in arrays.values() if x.dtype.kind not in "biu"), ""))
