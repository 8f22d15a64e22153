"""What goes over the pipe between the judge and an adapter's process: questions there, plain data back.

The judge reads nothing but numbers, texts, bytes and containers of them: what a process sends cannot run code here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import numpy as np

from attnkit_conformance.model.memory import Memory, memory_of
from attnkit_conformance.model.types import Params, Plain

PLAIN = (str, int, float, bool, bytes, type(None))
Traits = dict[str, tuple[bool, Plain]]  # of an adapter: whether an attribute is sent, and its value or else its repr
Packed = dict[str, tuple[bytes, int, int, str, tuple[int, ...], tuple[int, ...], bool]]  # the fields of `Memory`


class Question(NamedTuple):
    """One call: a method of an adapter, what it is given, and what surrounds it."""

    method: str
    op: str
    arrays: Packed
    params: Params
    others: tuple[Packed, ...] = ()  # cotangents, tangents, samples
    surrounding: str = ""
    threads: int = 0
    freed: str = ""  # the array whose storage is given back before the call
    again: Again | None = None


class Again(NamedTuple):
    """How often a call is repeated in its process: `most` times, but after the `least` no longer than `seconds` of
    work, and never longer than `longest` seconds. `arrays` and `others` have the same shapes and other values.
    """

    arrays: Packed
    others: tuple[Packed, ...]
    most: int
    least: int
    seconds: float
    longest: float


def pack(arrays: Mapping[str, np.ndarray]) -> Packed:
    """The memory of all arrays of a dict: pickled without ml_dtypes, and plain."""
    packed = {}
    for name, x in arrays.items():
        memory = memory_of(np.asarray(x))
        packed[str(name)] = (memory.content.tobytes(), *memory[1:])
    return packed


def unpack(packed: Packed) -> dict[str, np.ndarray]:
    """Inverse of `pack`."""
    return {name: Memory(np.frombuffer(x[0], np.uint8), *x[1:]).array() for name, x in packed.items()}


def plain(value: object) -> object:
    """A value as plain data, each mapping a dict; TypeError for anything else."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind):
            return kind(plain(item) for item in value)
    if type(value) in PLAIN:
        return value
    raise TypeError(f"{type(value).__name__} is no plain data")


class PlainUnpickler(pickle.Unpickler):
    """Reads plain data alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def read(message: bytes) -> Plain:
    """Plain data from a message; UnpicklingError for anything else."""
    return PlainUnpickler(io.BytesIO(message)).load()
