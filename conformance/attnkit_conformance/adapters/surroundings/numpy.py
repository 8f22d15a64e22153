"""Surroundings of NumPy, whose gradients are explicit calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from attnkit_conformance.adapters.surroundings import Function, Surrounding
from attnkit_conformance.adapters.surroundings.together import InThreads
from attnkit_conformance.model.types import Arrays


def within(name: str, text: str, context: Callable[[], AbstractContextManager[object]]) -> Surrounding:
    """A context around every call."""

    def call(function: Function, arrays: Arrays) -> Arrays:
        with context():
            return function(arrays)

    return Surrounding(name, text, call)


def beside_a_thread(name: str, text: str) -> Surrounding:
    """Every call in a thread beside another."""
    run = InThreads()

    def call(function: Function, arrays: Arrays) -> Arrays:
        answer: Arrays = run(lambda: function(arrays))
        return answer

    return Surrounding(name, text, call)


def errors_raised() -> AbstractContextManager[object]:
    """All but underflow, by which the exponential of a small score is 0 (semantics D)."""
    return np.errstate(over="raise", divide="raise", invalid="raise")


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    """What Python runs under -W error, but for products: OpenBLAS's for AVX-512 warn for no reason now and then."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* encountered in matmul", RuntimeWarning)
        yield


SURROUNDINGS = (
    within("errstate", 'numpy.errstate of "raise" for overflow, division by 0 and invalid values', errors_raised),
    within("warnings", "warnings are errors", warnings_as_errors),
    beside_a_thread("threads", "two threads at the same time, each with a call of its own"),
)
