"""Calls of an adapter in its process, and what they must not change: their arguments and the results of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from attnkit_conformance.adapter import Adapter, arrays_of, as_numpy
from attnkit_conformance.adapters.wire import Packed, Question, unpack
from attnkit_conformance.model.types import Foreign, Results

CACHED = 1024  # bytes below which NumPy keeps freed memory for itself
KEPT = 7  # blocks of each size that it keeps

Fault = tuple[str, str]  # name of the check, message


def convert(adapter: Adapter, arrays: Mapping[str, np.ndarray]) -> Results:
    """Arrays as the adapter takes them."""
    return {name: adapter.array(x, x.dtype.name) for name, x in arrays.items()}


class Call:
    """A call whose arrays are converted once, to be run any number of times."""

    def __init__(self, adapter: Foreign, question: Question, arrays: Packed, others: tuple[Packed, ...]) -> None:
        self.adapter, self.question = adapter, question
        given = unpack(arrays)
        self.sizes = [x.nbytes for x in given.values()]
        self.arrays = convert(adapter, given)
        self.others = [convert(adapter, unpack(each)) for each in others]
        self.before = self.contents()
        if name := question.freed:
            self.arrays[name] = adapter.freed(self.arrays[name])
            self.before.pop(name)

    def contents(self) -> dict[str, bytes]:
        """The bytes of the arguments."""
        return {name: as_numpy(self.adapter, name, x).tobytes() for name, x in self.arrays.items()}

    def run(self) -> tuple[dict[str, np.ndarray], Foreign]:
        """The results as NumPy arrays, and as the adapter returned them."""
        question = self.question
        raw = getattr(self.adapter, question.method)(question.op, self.arrays, question.params, *self.others)
        return arrays_of(self.adapter, question.method, raw), raw

    def changes(self) -> Iterator[Fault]:
        """The arguments that have other contents now."""
        if self.question.freed:
            return
        for name, content in self.contents().items():
            if content != self.before[name]:
                yield "inputs", f"{name} was changed by the call"


class Former:
    """The results of a call before, which no later call may change."""

    def __init__(self, adapter: Adapter, method: str, raw: object, outputs: Mapping[str, np.ndarray]) -> None:
        self.adapter, self.method, self.raw = adapter, method, raw
        self.contents = {name: x.tobytes() for name, x in outputs.items()}

    def changes(self) -> Iterator[Fault]:
        """The results that have other contents now."""
        for name, x in arrays_of(self.adapter, self.method, self.raw).items():
            if x.tobytes() != self.contents[name]:
                yield "outputs", f"{name} of an earlier {self.method} was changed by this call: it is the same memory"


def poison(sizes: list[int]) -> None:
    """Fill the small blocks that NumPy keeps when they are freed: the C library fills all others (MALLOC_PERTURB_)."""
    for size in {size for size in sizes if 0 < size < CACHED}:
        blocks = [np.full(size, 0xFE, np.uint8) for _ in range(KEPT)]
        del blocks
