"""Is every op right under every transformation of its library, or refused by name (semantics E)?

A cell is an op, an implementation, a number of tokens and a transformation. On every problem of the op it must be right
or refused by a NotImplementedError that names the implementation, or the op, and `generic`; anything else is a failure.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnkit_conformance.adapters.base import explain, is_by_name, kernels
from attnkit_conformance.families.linear.row import STEP
from attnkit_conformance.golden.derivatives import Problem
from attnkit_conformance.judge.derivatives import of_everyone, problem_of
from attnkit_conformance.model.binding import STATISTICS
from attnkit_conformance.model.op import QKV, Op
from attnkit_conformance.model.types import Foreign
from attnkit_conformance.studies.transforms.problem import differentiable, long_problem

LIBRARIES = ("torch", "jax")
LENGTHS = (512, 1024, 1536, 2048)  # where auto may choose another implementation than for a few tokens
MORE_KEYS = 16  # than those of problems of everyone
ROWS = ("a", "b", "c")  # groups of ops whose cost grows with pairs or tokens
RIGHT, REFUSED, EITHER, ELSEWHERE = "right", "refused", "right or refused", "needs a GPU"


@dataclass(frozen=True)
class Row:
    """An op under an implementation; for auto with many tokens their number and its choice there."""

    library: str
    op: str
    impl: str
    tokens: int | None = None
    takes: str | None = None

    @property
    def label(self) -> str:
        return self.impl if self.tokens is None else f"{self.impl}, many tokens"


@dataclass(frozen=True)
class Verdict:
    """The result of a cell; `text` says what is wrong or why it was refused."""

    row: Row
    transform: str
    word: str
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.word not in (RIGHT, REFUSED, EITHER, ELSEWHERE)


def runner(library: str) -> tuple[Foreign, Mapping[str, Callable[[Foreign], str | None]]]:
    """The class that runs a library's transformations, and the transformations by name."""
    module = importlib.import_module(f"attnkit_conformance.studies.transforms.{library}")
    return getattr(module, library.capitalize()), module.TRANSFORMS


@contextlib.contextmanager
def double_precision(library: str) -> Iterator[None]:
    """float64, which JAX needs to have enabled."""
    if library != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield


def rows(library: str) -> Iterator[Row]:
    """Every op under every implementation that the library has; auto only if its choice changes for many tokens."""
    for op in differentiable():
        yield Row(library, op.name, "generic")
        for impl in kernels(library).get(op.name, ()):
            yield Row(library, op.name, impl)
        switch = switching(library, op)
        if switch:
            yield Row(library, op.name, "auto", *switch)


def switching(library: str, op: Op) -> tuple[int, str] | None:
    """The number of tokens from which `auto` chooses a kernel here, and its name; None if it never or always does."""
    if op.name not in kernels(library) or op.group not in ROWS:
        return None
    few = long_problem(op, 1)
    for tokens in LENGTHS:
        axes = {**dict.fromkeys(QKV, -2), "log_forget": -1}
        many = {name: np.repeat(x, tokens, axes[name]) for name, x in few.case.arrays.items() if name in axes}
        choice = first_choice(library, Problem(replace(few.case, arrays={**few.case.arrays, **many})))
        if choice != "generic":
            return tokens, choice
    return None


def first_choice(library: str, problem: Problem) -> str:
    """The choice of `auto`."""
    return next(name for name, reason in reasons(library, problem).items() if reason is None)


def reasons(library: str, problem: Problem) -> dict[str, str | None]:
    """attnkit.explain of a problem."""
    make, _ = runner(library)
    with double_precision(library):
        run = make(problem, "auto")
        return explain(problem.op, {**run.rest, **run.x}, problem.case.params)


def judge(row: Row, most: int | None = None, transforms: tuple[str, ...] | None = None) -> Iterator[Verdict]:
    """The verdicts of a row; `most` bounds the number of problems."""
    _, checks = runner(row.library)
    op = next(op for op in differentiable() if op.name == row.op)
    several = problems(row, op, most)
    for transform in transforms or tuple(checks):
        results = [answer(row, transform, problem) for problem in several]
        answers = [pair for pair in results if pair is not None]
        yield joined(row, transform, answers or refused_elsewhere(row, transform, several[0]))


def problems(row: Row, op: Op, most: int | None) -> list[Problem]:
    """Those of a row: those of everyone, and for an implementation that supports none of them some without options and
    with more keys, whose values are as wide as the keys and narrower: torch's softmax then has other derivatives.
    """
    if row.tokens:
        return [long_problem(op, row.tokens)]
    few = list(map(problem_of, of_everyone(op)[:most]))
    if row.impl == "generic" or op.group not in ROWS or any(reasons(row.library, x)[row.impl] is None for x in few):
        return few
    return [*few, *(long_problem(op, MORE_KEYS, values, ()) for values in (4, 3))]


def summary(verdicts: list[Verdict]) -> str:
    """The transformations by result."""
    by_word: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_word.setdefault(verdict.word, []).append(verdict.transform)
    return "; ".join(f"{word} {', '.join(names)}" for word, names in by_word.items())


def joined(row: Row, transform: str, answers: list[tuple[str, str]]) -> Verdict:
    """One verdict from those on several problems."""
    for word, text in answers:
        if word not in (RIGHT, REFUSED):
            return Verdict(row, transform, word, text)
    words = {word for word, _ in answers}
    if len(words) > 1:
        return Verdict(row, transform, EITHER)
    return Verdict(row, transform, *answers[0]) if answers else Verdict(row, transform, ELSEWHERE)


def answer(row: Row, transform: str, problem: Problem) -> tuple[str, str] | None:
    """A word and a text; None if the implementation does not support the problem here, transformed or not."""
    make, checks = runner(row.library)
    unsupported_options = None if row.impl in ("auto", "generic") else reasons(row.library, problem)[row.impl]
    with double_precision(row.library):
        try:
            wrong = checks[transform](make(problem, row.impl))
        except NotImplementedError as refusal:
            if unsupported_options and unsupported_options in str(refusal):
                return None
            return as_refusal(row, refusal)
        except Exception as error:  # whatever a library raises is a verdict
            return "error", f"{problem.case.id}: {type(error).__name__}: {error}"
    return (RIGHT, "") if wrong is None else ("wrong", f"{problem.case.id}: {wrong}")


def as_refusal(row: Row, refusal: NotImplementedError) -> tuple[str, str]:
    """Whether a refusal names what refuses and what to use instead."""
    text = str(refusal)
    return (REFUSED if is_by_name(text, row.op, row.takes or row.impl) else "nameless", text)


def state_first(call: Callable[..., object]) -> Callable[..., object]:
    """What serves a step, with the arguments of the public function."""
    return lambda state, *arrays, **options: call(*arrays, state=state, **options)


def with_option(call: Callable[..., object], name: str, at: int) -> Callable[..., object]:
    """A kernel that takes the array at this place as an option, as the public function hands it on."""
    return lambda *arrays, **options: call(*arrays[:at], *arrays[at + 1 :], **{name: arrays[at]}, **options)


def refused_elsewhere(row: Row, transform: str, problem: Problem) -> list[tuple[str, str]]:
    """Whether a kernel of another device refuses second derivatives, checked without running it; None if that does not
    apply, or if it calls another kernel by name, which answers for itself."""
    library = importlib.import_module(f"attnkit_conformance.studies.transforms.{row.library}")
    if transform != library.SECOND_WITHOUT_RUNNING or problem.op.binding is STATISTICS:
        return []
    backend = importlib.import_module(f"attnkit.backends.{row.library}")
    kernel = next(kernel for kernel in backend.KERNELS[row.op] if kernel.name == row.impl)
    function = state_first(kernel.call) if problem.op.binding is STEP else kernel.call
    option = importlib.import_module("attnkit._core.dispatch").OPTION
    if option in problem.op.arguments:
        function = with_option(function, option, problem.op.arguments.index(option))
    try:
        library.without_running(problem, function)
    except NotImplementedError as refusal:
        return [] if "no implementation of impl" in str(refusal) else [as_refusal(row, refusal)]
    return [("wrong", f"{problem.case.id}: second derivatives of {row.impl} are not refused")]
