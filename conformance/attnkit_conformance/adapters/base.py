"""Shared by attnkit's adapters: attnkit's public functions behind the `Adapter` interface."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import TypeVar

import attnkit
from attnkit.backends.native import lower
from attnkit_conformance.adapter import Unsupported, refusing
from attnkit_conformance.adapters.bases.numpy import NumpyAdapter
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.types import Arrays, Keyword, Params, Results
from attnkit_conformance.opdb import BY_NAME

VJP = "_vjp"
THREADS = "OMP_NUM_THREADS"


def kernels(library: str, gradients: bool = False) -> dict[str, tuple[str, ...]]:
    """{op: names of attnkit's kernels for it, or for its explicit gradients} for a library."""
    module = f"attnkit.backends.{library}"
    tables = importlib.import_module(module).KERNELS if importlib.util.find_spec(module) else {}
    rows_by_op = {op: rows for op, rows in tables.items() if op.endswith(VJP) is gradients}
    return {op.removesuffix(VJP): tuple(kernel.name for kernel in rows) for op, rows in rows_by_op.items()}


def implementations(library: str, gradients: bool = False) -> dict[str, tuple[str, ...] | None]:
    """{implementation: ops that support it, None for all}: the generic body, then the kernels."""
    ops_of: dict[str, tuple[str, ...] | None] = {"generic": None}
    for op, names in kernels(library, gradients).items():
        ops_of |= {name: (*(ops_of.get(name) or ()), op) for name in names}
    return ops_of


@contextmanager
def threads_of_environment(number: int) -> Iterator[None]:
    """For a while as many threads as if the process had started with OMP_NUM_THREADS, where a library has no number of
    its own."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(number)
    lower.threads_of_environment.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(THREADS)
        os.environ |= {} if before is None else {THREADS: before}
        lower.threads_of_environment.cache_clear()


def is_by_name(refusal: str, op: str, impl: str) -> bool:
    """Whether a refusal names what refuses and what to use instead (E3)."""
    return any(name in refusal for name in (impl, op.partition("_")[0], "attnkit::")) and "generic" in refusal


@contextmanager
def refusing_by_name(op: str, impl: str) -> Iterator[None]:
    """The same for refusals by name only: others are a library's own."""
    try:
        yield
    except NotImplementedError as refusal:
        if not is_by_name(str(refusal), op, impl):
            raise
        raise Unsupported(str(refusal)) from refusal


class AttnkitAdapter(NumpyAdapter):
    """attnkit with one `impl`, gradients by the explicit `<op>_vjp` functions."""

    errors = True
    surroundings = ""
    declines: tuple[str, ...] = ()  # every policy is promised

    def __init__(
        self,
        name: str,
        dtypes: tuple[str, ...],
        impl: str = "auto",
        description: str = "",
        ops: tuple[str, ...] | None = None,
    ) -> None:
        self.name, self.dtypes, self.impl, self.description, self.ops = name, dtypes, impl, description, ops

    def answer(self, op: str, arrays: Arrays, params: Params) -> Results:
        """Outputs of an op under this adapter's `impl`, as its library traces them."""
        row = BY_NAME[op]
        impl = {"impl": self.impl} if dispatches(row) else {}
        return row.binding.forward(attnkit, row, arrays, {**impl, **params})

    def forward(self, op: str, arrays: Arrays, params: Params) -> Results:
        """The same as this adapter runs it."""
        return self.answer(op, arrays, params)

    def call(self, op: str, arrays: Arrays, params: Params) -> Results:
        """Outputs; attnkit's NotImplementedError becomes Unsupported."""
        with refusing():
            return self.forward(op, arrays, params)

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        """Explicit gradients; attnkit's NotImplementedError becomes Unsupported."""
        row = BY_NAME[op]
        impl = {"impl": self.impl} if dispatches(row) else {}
        with refusing():
            return row.binding.vjp(attnkit, row, arrays, {**impl, **params}, cotangents)

    def with_threads(self, number: int) -> AbstractContextManager[None]:
        """Calls with so many threads."""
        return threads_of_environment(number)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """The reason that attnkit.explain gives against this adapter's `impl`."""
        row = BY_NAME[op]
        if self.impl in ("auto", "generic"):
            return None
        return explain(row, arrays, params)[self.impl]


A = TypeVar("A", bound=AttnkitAdapter)


def in_surroundings(make: Callable[[str, tuple[str, ...] | None], A], library: str) -> list[A]:
    """An adapter per implementation of a library, judged in surroundings too, and one for `auto` that is judged in them
    alone. `make(impl, ops)` makes one.
    """
    adapters = [make(impl, ops) for impl, ops in {**implementations(library), "auto": None}.items()]
    for adapter in adapters:
        adapter.surroundings = "alone" if adapter.impl == "auto" else "also"
    return adapters


def dispatches(row: Op) -> bool:
    """Whether attnkit's function takes `impl`."""
    return "impl" in inspect.signature(attrgetter(row.name)(attnkit)).parameters


class Explained(Exception):
    """The answer of attnkit.explain."""

    def __init__(self, reasons: dict[str, str | None]) -> None:
        self.reasons = reasons


def explain(row: Op, arrays: Arrays, params: Params) -> dict[str, str | None]:
    """attnkit.explain for a case, with the arguments that the op's binding passes."""

    def explain_call(*arguments: Keyword, **options: Keyword) -> None:
        raise Explained(attnkit.explain(getattr(attnkit, row.name), *arguments, **options))

    try:
        row.binding.forward(SimpleNamespace(**{row.name: explain_call}), row, arrays, params)
    except Explained as answer:
        return answer.reasons
    raise RuntimeError(f"the binding of {row.name} does not call it")
