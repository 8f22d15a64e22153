"""A `Case`: one input of one op in one dtype, as passed to adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import ParamSpec

import numpy as np

from attnkit_conformance.model.layout import DENSE, align, laid_out, suits, tie
from attnkit_conformance.model.types import Params

INTEGER = "integer"  # an output of integers of any width
DTYPES = ("float64", "float32", "bfloat16", "float16")
HAS_BFLOAT16 = find_spec("ml_dtypes") is not None  # NumPy itself has none
PROFILES = ("small", "quick", "scenes", "full")
"""Small: the quick one without long and wide calls; scenes: all hand-written ones, without rows of grammars."""
BRIEF = ("small", "quick")


P = ParamSpec("P")


class NoDraw(ValueError):
    """No draw stays away from points where rounding decides."""


def judged_dtypes() -> tuple[str, ...]:
    """The dtypes that are judged by default: all that are available."""
    return tuple(name for name in DTYPES if HAS_BFLOAT16 or name != "bfloat16")


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype called `name`, ml_dtypes' bfloat16 included; "integer", a dtype of outputs, is int64 here."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(np.int64 if name == INTEGER else name)


def finfo(name: str) -> np.finfo[np.floating]:
    """NumPy's `finfo` of a float dtype, or ml_dtypes' of bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.finfo(ml_dtypes.bfloat16)
    return np.finfo(name)


def is_dtype(x: np.ndarray, name: str) -> bool:
    """Whether x has the dtype `name`; any integer dtype is "integer", as libraries' defaults differ."""
    return x.dtype.kind in "iu" if name == INTEGER else x.dtype.name == name


def compute_dtype(name: str) -> str:
    """A7: float64 stays, everything else is computed in float32."""
    return "float64" if name == "float64" else "float32"


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` as float64 after rounding to `dtype`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x, np.float64).astype(numpy_dtype(dtype)).astype(np.float64)


def generator(seed_text: str) -> np.random.Generator:
    """A generator seeded by text, the same on every machine."""
    digest = hashlib.sha256(seed_text.encode()).digest()
    return np.random.default_rng(np.random.SeedSequence(int.from_bytes(digest[:16], "little")))


@dataclass(frozen=True)
class Case:
    """One input with its parameters and cotangents. Float arrays are float64, already rounded to their dtype."""

    id: str
    op: str
    dtype: str
    arrays: Mapping[str, np.ndarray]
    params: Params
    cotangents: Mapping[str, np.ndarray]
    tags: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = field(default_factory=dict)  # only where an array's dtype is not `dtype`
    layouts: Mapping[str, str] = field(default_factory=dict)  # of arrays that are not dense; of cotangents by d<name>

    @cached_property
    def digest(self) -> str:
        """Equal for equal calls, whatever their ids."""
        static = (
            self.op,
            self.dtype,
            sorted(self.params.items()),
            sorted(self.dtypes.items()),
            sorted(self.tags),
            sorted(self.layouts.items()),
        )
        digest = hashlib.sha256(repr(static).encode())
        for arrays in (self.arrays, self.cotangents):
            for name, x in sorted(arrays.items()):
                digest.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
        return digest.hexdigest()

    def dtype_of(self, name: str) -> str:
        """The dtype in which an adapter gets array `name`."""
        x = self.arrays[name]
        return self.dtypes.get(name, self.dtype) if x.dtype.kind == "f" else x.dtype.name

    def typed(self, name: str) -> np.ndarray:
        """Array `name` in its dtype and in its memory layout."""
        x = align(self.arrays[name].astype(numpy_dtype(self.dtype_of(name))))
        return laid_out(x, self.layouts.get(name, DENSE))

    def typed_cotangent(self, name: str, dtype: str) -> np.ndarray:
        """The cotangent of output `name` in the dtype of that output and in its memory layout."""
        x = align(self.cotangents[name].astype(numpy_dtype(dtype)))
        return laid_out(x, self.layouts.get(f"d{name}", DENSE))

    def laid(self, layouts: Mapping[str, str]) -> Case:
        """The case with these layouts, by names of arrays and d<name> of cotangents, as far as they suit what it has;
        values become such that the layouts can hold them.
        """
        arrays = {name: tie(x, layouts.get(name, DENSE)) for name, x in self.arrays.items()}
        cotangents = {name: tie(x, layouts.get(f"d{name}", DENSE)) for name, x in self.cotangents.items()}
        every = {**arrays, **{f"d{name}": x for name, x in cotangents.items()}}
        suited = {name: layout for name, layout in layouts.items() if name in every and suits(every[name], layout)}
        return replace(self, arrays=arrays, cotangents=cotangents, layouts=suited)


@dataclass(frozen=True)
class Sample:
    """A case by its id: nothing is drawn before `draw(halvings, again)`, which halves the numbers that many times, and
    where they are drawn at random draws others `again`.
    """

    id: str
    draw: Callable[..., Case]


def sample(
    op: str, dtype: str, name: str, maker: Callable[P, Case], *arguments: P.args, **keywords: P.kwargs
) -> Sample:
    """The sample `name` of an op in a dtype, drawn by `maker(*arguments)` in one size."""
    return Sample(f"{op}/{dtype}/{name}", lambda halvings, again=0: maker(*arguments, **keywords))


@dataclass(frozen=True)
class ErrorSample:
    """A call that must raise `exception` with a text that names the op and matches `pattern`."""

    name: str
    arrays: Mapping[str, np.ndarray]  # in their dtypes
    params: Params
    exception: type[Exception]
    pattern: str

    def fits(self, dtypes: tuple[str, ...]) -> bool:
        """Whether the sample needs only float dtypes that an adapter has."""
        return all(x.dtype.kind != "f" or x.dtype.name in dtypes for x in self.arrays.values())
