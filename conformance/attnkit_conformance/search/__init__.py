"""A search for inputs on which an implementation is wrong, in addition to the fixed samples.

Recipes are drawn by number: any op, combination of options, sizes, dtype, memory layouts and number of threads. Each
case is judged on a few of the adapters, with a bound that is cheap where results are right. What fails is shrunk as a
recipe and kept as one, and its smallest program is shown; `run --samples FILE` judges it again.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import Keep, declared
from attnkit_conformance.model.case import NoDraw
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.search import recipe as recipes
from attnkit_conformance.search import screen, smallest
from attnkit_conformance.search.recipe import Recipe, drawn, of_op, shrunk
from attnkit_conformance.search.screen import Truth
from attnkit_conformance.search.shrink import size

SEVERAL = 3  # adapters that answer a case
SHRINKING = 20.0  # seconds to shrink one failing case, beyond the time of the search
TWICE = 2  # a result that depends on what was in memory before fails now and then
WRITTEN = 400  # entries of all arrays that a program writes out
VALUES = {"bound", "nonfinite"}  # checks of which memory that nobody wrote fails one or the other
UNFINISHED = "unfinished-{}.json"  # by its seed, the recipe that is being judged: left behind by a process that dies
Way = tuple[str, str, frozenset[str]]


@dataclass(frozen=True)
class Finding:
    """A failing case after shrinking, and the file of its recipe."""

    result: CaseResult
    path: Path


@dataclass
class Search:
    """The state of a search. `examples` counts the judged cases by op, `verdicts` what adapters answered; `silent`
    counts without information: draws whose numbers rounding decides, meaningless bounds, results beyond the range of
    their dtype.
    """

    adapters: Sequence[Adapter]
    seconds: float
    seed: int
    folder: Path
    dtypes: tuple[str, ...]
    keep: Keep
    clock: Callable[[], float] = time.monotonic
    examples: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    verdicts: int = 0
    findings: list[Finding] = field(default_factory=list)
    worst: dict[tuple[str, str, str], CaseResult] = field(default_factory=dict)  # of cases that pass or are unsupported
    known: set[Way] = field(default_factory=set)
    end: float = 0.0

    def run(self, tell: Callable[[Search, str], None]) -> None:
        """Case after case until time is up; `tell` is called before each."""
        if not any(self.covers(adapter, op, dtype) for adapter in self.adapters for op in OPDB for dtype in op.dtypes):
            raise ValueError("nothing selected: no op of any adapter matches")
        self.end, n = self.clock() + self.seconds, 0
        while self.clock() < self.end:
            recipe = drawn(self.seed, n)
            tell(self, recipe.op)
            self.look(recipe, n)
            n += 1
        self.unfinished.unlink(missing_ok=True)

    @property
    def unfinished(self) -> Path:
        """The file of the recipe that is being judged."""
        return self.folder / UNFINISHED.format(self.seed)

    def covers(self, adapter: Adapter, op: Op, dtype: str) -> bool:
        """Whether an adapter is judged on an op in a dtype."""
        known = dtype in self.dtypes and dtype in adapter.dtypes and core.covers(adapter, op.name)
        return known and self.keep(f"{adapter.name}::{op.name}/{dtype}/search")

    def look(self, recipe: Recipe, n: int) -> None:
        """Case n, on some of the adapters; for those that declare what they serve, one within that."""
        op = BY_NAME[recipe.op]
        free = [adapter for adapter in self.adapters if not declared.declares(adapter, op.name)]
        self.judge(recipe, [adapter for adapter in free if self.covers(adapter, op, recipe.dtype)], n)
        for adapter in self.adapters:
            if adapter not in free:
                rng = random.Random(f"{self.seed}/{n}/{adapter.name}")
                own = of_op(op, declared.grammar(adapter, op), rng, declared.sizes(adapter, op))
                self.judge(own, [adapter] if self.covers(adapter, op, own.dtype) else [], n)

    def judge(self, recipe: Recipe, adapters: Sequence[Adapter], n: int) -> None:
        """A case, on adapters in random order until several have answered."""
        if not adapters:
            return
        self.note(recipe)
        with np.errstate(all="ignore"):
            try:
                truth = Truth(recipe.case())
            except NoDraw:
                self.silent[recipe.op] += 1
                return
            except Exception as error:
                self.found(recipe, None, n, of_reference(recipe, error))
                return
            self.examples[recipe.op] += 1
            answers = 0
            for adapter in random.Random(f"{self.seed}/{n}").sample(adapters, len(adapters)):
                with several_threads(adapter, recipe.threads):
                    result = screen.check(adapter, truth.case, truth)
                self.silent[recipe.op] += result is None
                if result is not None and result.status == "fail":
                    self.found(recipe, adapter, n, result)
                elif result is not None:
                    self.remember(result)
                answers += result is None or result.status != "unsupported"
                if answers == SEVERAL:
                    break
            self.verdicts += answers

    def note(self, recipe: Recipe) -> None:
        """Leave the recipe in a file, for whoever finds that the process has died of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.unfinished.write_text(recipe.text)

    def remember(self, result: CaseResult) -> None:
        """Keep the worst verdict on each adapter, op and dtype."""
        place = (result.adapter, result.op, result.dtype)
        before = self.worst.get(place)
        if before is None or (result.status, -result.ratio) < (before.status, -before.ratio):
            self.worst[place] = result

    def found(self, recipe: Recipe, adapter: Adapter | None, n: int, result: CaseResult) -> None:
        """Shrink and save a failing case, and ignore similar ones from now on."""
        way = way_of(result)
        if way in self.known:
            return
        self.known.add(way)
        end = self.clock() + SHRINKING
        small = shrunk(recipe, lambda candidate: self.clock() < end and fails(candidate, adapter, way))
        again = result_of(small, adapter)
        result = again if again is not None and again.status == "fail" else result
        program = "" if adapter is None else program_of(small, adapter, result)
        path = self.folder / f"{recipe.op}-{result.adapter}-{result.id.rpartition('-')[2]}.json"
        told = {"adapter": result.adapter, "seed": self.seed, "case": n, "message": result.message}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**small.record, "found": told}, indent=1) + "\n")
        self.findings.append(Finding(replace(result, program=program), path))

    def results(self) -> list[CaseResult]:
        """Findings, and the worst verdict on every adapter, op and dtype without one."""
        return [*(finding.result for finding in self.findings), *self.worst.values()]


def way_of(result: CaseResult) -> Way:
    """The kind of a failure: the adapter, the op, and the checks, or the name of an exception; of values whether they
    are outputs or gradients alone.
    """
    failing = {measured.output for measured in result.measured if measured.failures}
    of = "gradients" if failing and all(name.startswith("d") for name in failing) else "outputs"
    kinds = {f"values of {of}" if check in VALUES else check for check in result.checks}
    kinds |= {text.partition(":")[0] for check, text in result.failures if check == "exception"}
    return result.adapter, result.op, frozenset(kinds)


def of_reference(recipe: Recipe, error: Exception) -> CaseResult:
    """The failure of a case for which there is no reference."""
    text = f"{type(error).__name__}: {error}"
    return CaseResult(recipe.id, "reference", recipe.op, recipe.dtype, "fail", failures=(("exception", text),))


def result_of(recipe: Recipe, adapter: Adapter | None) -> CaseResult | None:
    """The verdict on a recipe, of the reference where there is no adapter; None if it tells nothing."""
    try:
        truth = truth_of(recipe.text)
    except NoDraw:
        return None
    except Exception as error:
        return of_reference(recipe, error)
    if adapter is None:
        return None
    with several_threads(adapter, recipe.threads):
        return screen.check(adapter, truth.case, truth)


def several_threads(adapter: Adapter, number: int) -> AbstractContextManager[None]:
    """A context in which an adapter has so many threads, if it takes a number."""
    known = getattr(adapter, "with_threads", None)
    return known(number) if known else nullcontext()


@lru_cache(maxsize=2)
def truth_of(text: str) -> Truth:
    """What is known of the case of a recipe."""
    return Truth(recipes.read(json.loads(text)).case())


def untold(recipe: Recipe, adapter: Adapter) -> CaseResult:
    """The verdict where results tell nothing."""
    return CaseResult(recipe.id, adapter.name, recipe.op, recipe.dtype, "unsupported", reason="tells nothing")


def fails(recipe: Recipe, adapter: Adapter | None, way: Way) -> bool:
    """Whether a recipe fails in a certain way."""
    results = (result_of(recipe, adapter) for _ in range(TWICE))
    return any(result is not None and result.status == "fail" and way_of(result) == way for result in results)


def program_of(recipe: Recipe, adapter: Adapter, result: CaseResult) -> str:
    """The smallest program of a failure, and how many threads there are. Empty where it would be long."""
    text, case = "", recipe.case()
    with several_threads(adapter, recipe.threads), suppress(Exception):  # it refuses, or does otherwise now
        case = smallest.smaller(adapter, result, case)
        text = smallest.program(adapter, case) if size(case) <= WRITTEN else ""
    if not text and size(case) <= WRITTEN:
        typed = {name: case.typed(name) for name in case.arrays}
        text = smallest.runnable(typed, [smallest.written(case), result.message], case.layouts)
    return f"{text}\n# with {recipe.threads} threads" if text and recipe.threads > 1 else text


def replay(adapters: Sequence[Adapter], paths: Sequence[Path], dtypes: tuple[str, ...]) -> list[CaseResult]:
    """Verdicts on kept recipes; ValueError for files that are none."""
    results = []
    for path in paths:
        try:
            recipe = recipes.read(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: no case that a search kept: {error}") from error
        for adapter in adapters:
            if core.covers(adapter, recipe.op) and recipe.dtype in adapter.dtypes and recipe.dtype in dtypes:
                with np.errstate(all="ignore"):
                    result = result_of(recipe, adapter)
                results.append(result or untold(recipe, adapter))
    return results
