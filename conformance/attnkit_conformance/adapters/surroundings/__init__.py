"""Calls as people make them: under a mode of the library, inside its control flow, beside other threads and tasks.

A surrounding runs a call, and a call with its gradients. `Surrounded(adapter, surrounding)` is an adapter itself, so
that whatever judges adapters judges it. A call in a surrounding is right, or refused by an error that names `generic`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from attnkit_conformance.adapter import Adapter, IllFormed, Unsupported, package_of
from attnkit_conformance.model.types import Arrays, Params
from attnkit_conformance.opdb import BY_NAME

Function = Callable[[Arrays], Arrays]
LIBRARIES = {"numpy": "numpy", "torch": "torch", "jaxlib": "jax", "jax": "jax"}
"""The library of an array by the package that its type is in."""


@dataclass(frozen=True)
class Surrounding:
    """What people do around a call, by name.

    `call(function, arrays)` is what the function returns for these arrays. `vjp(function, leaves, rest, cotangents)`
    are the gradients of `function({**leaves, **rest})` by the library's own differentiation; None where the library
    has none, and gradients are a call like any other. `forward_only` is why there are no gradients at all.
    """

    name: str
    text: str
    call: Callable[[Function, Arrays], Arrays]
    vjp: Callable[[Function, Arrays, Arrays, Arrays], Arrays] | None = None
    forward_only: str = ""


class Surrounded:
    """An adapter whose calls are made in a surrounding. Where the library differentiates, gradients are those of what
    `call` returns, or `answer`: the same, neither compiled nor with its refusals under another name.
    """

    def __init__(self, inner: Adapter, surrounding: Surrounding) -> None:
        self.inner, self.surrounding = inner, surrounding
        self.name, self.dtypes = f"{inner.name}@{surrounding.name}", inner.dtypes
        self.description = surrounding.text
        self.ops: tuple[str, ...] | None = getattr(inner, "ops", None)
        self.without: tuple[str, ...] = getattr(inner, "without", ())
        self.declines: tuple[str, ...] | None = getattr(inner, "declines", None)
        self.compiles: bool = getattr(inner, "compiles", False)
        self.copied: tuple[str, ...] = getattr(inner, "copied", ())
        self.array, self.numpy = inner.array, inner.numpy

    def refuse_as_elsewhere(self, op: str, arrays: Arrays, params: Params) -> None:
        """Unsupported if the adapter declares to refuse the call, whatever surrounds it."""
        declares = getattr(self.inner, "unsupported", None)
        if declares and (reason := declares(op, arrays, params)):
            raise Unsupported(reason)

    def outputs(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """The outputs of the call itself."""
        answer: Arrays = getattr(self.inner, "answer", self.inner.call)(op, arrays, params)
        return answer

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """The outputs."""
        self.refuse_as_elsewhere(op, arrays, params)
        with refusing():
            return self.surrounding.call(lambda arrays: self.outputs(op, arrays, params), arrays)

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        """The gradients."""
        if self.surrounding.forward_only:
            raise Unsupported(self.surrounding.forward_only)
        with refusing():
            if self.surrounding.vjp is None:
                return self.surrounding.call(lambda arrays: self.inner.vjp(op, arrays, params, cotangents), arrays)
            leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}
            rest = {name: x for name, x in arrays.items() if name not in leaves}

            def outputs(arrays: Arrays) -> Arrays:
                answer = self.outputs(op, arrays, params)
                return {name: answer[name] for name in cotangents}

            return self.surrounding.vjp(outputs, leaves, rest, cotangents)


@contextmanager
def refusing() -> Iterator[None]:
    """A NotImplementedError that names `generic` becomes Unsupported; others are failures."""
    try:
        yield
    except NotImplementedError as refusal:
        if "generic" not in str(refusal):
            raise
        raise Unsupported(str(refusal)) from refusal


def library_of(adapter: Adapter) -> str:
    """The library of an adapter's arrays, or of its process's; IllFormed for one without surroundings."""
    package = getattr(adapter, "package_of_arrays", None) or package_of(adapter)
    if package not in LIBRARIES:
        known = ", ".join(dict.fromkeys(LIBRARIES.values()))
        raise IllFormed(f"adapter {adapter.name!r}: surroundings are those of {known}; its arrays are of {package}")
    return LIBRARIES[package]


def surroundings_of(library: str) -> dict[str, Surrounding]:
    """The surroundings of a library by name."""
    module = importlib.import_module(f"attnkit_conformance.adapters.surroundings.{library}")
    return {surrounding.name: surrounding for surrounding in module.SURROUNDINGS}


def within(adapter: Adapter, surrounding: Surrounding) -> Adapter:
    """An adapter in a surrounding, which is where its library is: perhaps in a process of its own."""
    apart = getattr(adapter, "within", None)
    return apart(surrounding.name, surrounding.text) if apart else Surrounded(adapter, surrounding)


def surround(adapter: Adapter, name: str) -> Adapter:
    """An adapter in a surrounding by name; ValueError for an unknown one."""
    library = library_of(adapter)
    known = surroundings_of(library)
    if name not in known:
        raise ValueError(
            f"{adapter.name}@{name}: {library} has no such surrounding; expected one of {', '.join(known)}"
        )
    return within(adapter, known[name])
