"""Disagreements of peers with the definitions: expected failures by reason, each with a smallest input that shows it.

A `Disagreement` is one sentence about a difference, shared by all peers that differ in this way. For every library
among them the smallest failing case is shrunk and written as a snippet that needs only that library and NumPy.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import draw_case, golden
from attnkit_conformance.judge import invariances, pattern_of, properties, read_xfails
from attnkit_conformance.model.case import DTYPES, INTEGER, Case, Sample
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.traits import traits
from attnkit_conformance.scenes.attention import scene_case
from attnkit_conformance.search.shrink import Fails, fewer_leading, shrink, size
from attnkit_conformance.search.snippet import shows_gradients, snippet

PLAIN_SIGHT = 1e-2  # a relative error this large is preserved while a case is shrunk
SINGLES = ("float64", "float32")
CANDIDATES = 3  # verdicts that are tried for an example
DTYPE = "dtype"  # the check of what outputs are
STEEPER = 10.0  # a gradient is shown instead of an output if its error is so many times as large


@dataclass(frozen=True)
class Sight:
    """A disagreement in one case: a wrong output, one of another dtype, or an exception."""

    check: str
    output: str = ""
    relative: float = 0.0  # error over the largest golden magnitude
    exception: str = ""
    beyond: bool = False  # also at entries with visible keys


@dataclass(frozen=True)
class Example:
    """A smallest failing case of one adapter, and the program that shows it."""

    adapter: str
    case: Case
    sight: Sight
    program: str
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Disagreement:
    """Verdicts that fail for one reason, and an example per library."""

    reason: str
    results: tuple[CaseResult, ...]
    examples: tuple[Example, ...]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.adapter for result in self.results))

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.op for result in self.results))


def collect(results: Iterable[CaseResult], adapters: Sequence[Any]) -> list[Disagreement]:
    """Disagreements, those of most peers first; unexpected failures are grouped by their first check."""
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.status in ("xfail", "fail"):
            expected = result.status == "xfail"
            groups.setdefault(result.reason if expected else f"not explained yet: {result.message}", []).append(result)
    by_name = {adapter.name: adapter for adapter in adapters}
    disagreements = [Disagreement(reason, tuple(own), tuple(examples(own, by_name))) for reason, own in groups.items()]
    return sorted(disagreements, key=lambda one: (-len({library(name) for name in one.adapters}), -len(one.adapters)))


def library(adapter: str) -> str:
    return adapter.partition("-")[0]


def examples(results: Sequence[CaseResult], adapters: dict[str, object]) -> Iterator[Example]:
    """One per library."""
    for name in dict.fromkeys(library(result.adapter) for result in results):
        one = example([result for result in results if library(result.adapter) == name], adapters)
        if one is not None:
            yield one


def example(results: Sequence[CaseResult], adapters: dict[str, Any]) -> Example | None:
    """The smallest case of the simplest verdict that can be shown, shrunk."""
    for result, case in sorted(start_cases(results), key=lambda pair: simplicity(*pair))[:CANDIDATES]:
        adapter = adapters[result.adapter]
        case = core.without_outputs(adapter, case)
        starts = [case] if "/property." in case.id else purer(case)
        failing = [(start, sight) for start in starts if (sight := largest_error(adapter, start)) is not None]
        if failing:
            start, sight = min(failing, key=lambda pair: len(traits(pair[0])))
            small = shrink(start, same(adapter, start, sight))
            smaller = largest_error(adapter, small)
            if smaller is not None and (smaller.check, smaller.output) == (sight.check, sight.output):
                sight = smaller  # its own error, which may be less
            program, environment = snippet(adapter, small, sight.output, sight.exception, sight.check == DTYPE)
            return Example(adapter.name, small, sight, program, environment)
    return None


def purer(case: Case) -> Iterator[Case]:
    """The case, its batch items, and both without NaN and infinities, with fewer reasons to fail."""
    arrays = {n: np.where(np.isfinite(x), x, 1.0) if x.dtype.kind == "f" else x for n, x in case.arrays.items()}
    for n, whole in enumerate((replace(case, arrays=arrays), case)):
        for i, one in enumerate((*fewer_leading(whole), whole)):
            yield replace(one, id=f"{case.id}~{n}.{i}")


def start_cases(results: Sequence[CaseResult]) -> Iterator[tuple[CaseResult, Case]]:
    """The cases of the verdicts, or if all are properties those that the full profile expects to fail for the same
    reason; and the case on visible NaN."""
    for op in dict.fromkeys(result.op for result in results):
        by_id = {result.id: result for result in results if result.op == op}
        dtypes = tuple(dict.fromkeys(result.dtype for result in by_id.values()))
        samples = tuple(core.samples(op, "full", dtypes))
        own = [(by_id[sample.id], draw_case(sample)) for sample in samples if sample.id in by_id]
        yield from own or ((result, case) for result in by_id.values() for case in alike(result, samples))
        for identity, result in by_id.items():
            if "/property.visible_nan" in identity:
                yield result, property_case(result)


def alike(result: CaseResult, samples: Sequence[Sample]) -> list[Case]:
    """The cases in the dtype of a verdict that its adapter is expected to fail for the reason of the verdict."""
    patterns = [pattern_of(entry) for entry, reason in read_xfails(result.adapter).items() if reason == result.reason]
    own = [sample for sample in samples if sample.id.split("/")[1] == result.dtype]
    return [draw_case(s) for s in own if any(fnmatch.fnmatchcase(s.id, pattern) for pattern in patterns)]


def property_case(result: CaseResult) -> Case:
    """The case in which a visible key holds NaN."""
    op = BY_NAME[result.op]
    labels = dict(properties.subjects(op, "full"))
    label = result.id.partition("property.visible_nan")[2]
    few = invariances.OF_FEW in result.message
    scene = invariances.FEW if few else invariances.LAST_CAUSAL
    case = scene_case(op, scene, labels[label], label.strip("."), result.dtype)
    return replace(invariances.with_a_nan(case, 0) if few else invariances.with_a_nan(case), id=result.id)


def simplicity(result: CaseResult, case: Case) -> tuple[object, ...]:
    """The best cases have a single reason: few traits, outputs before gradients, wide dtypes, small."""
    forward = any(m.failures and not m.output.startswith("d") for m in result.measured)
    return len(traits(case)), not forward, case.dtype not in SINGLES, DTYPES.index(case.dtype), size(case)


def largest_error(adapter: Adapter, case: Case) -> Sight | None:
    """The largest error, outputs before gradients, or else another dtype; None if none can be shown."""
    result = core.check(adapter, case)
    wrong = [m for m in result.measured if m.failures and m.dtype != INTEGER]
    if any(m.output.startswith("d") for m in wrong) and not shows_gradients(adapter, case):
        wrong = [m for m in wrong if not m.output.startswith("d")]
    if wrong:
        worst = max(wrong, key=lambda m: m.relative / (STEEPER if m.output.startswith("d") else 1.0))
        return Sight(worst.failures[0][0], worst.output, worst.relative, beyond=beyond(adapter, case, worst.output))
    for check, text in result.failures:
        if check == "exception":
            return Sight(check, exception=text.partition(":")[0])
    return next((Sight(check, text.partition(" ")[0]) for check, text in result.failures if check == DTYPE), None)


def beyond(adapter: Adapter, case: Case, output: str) -> bool:
    """Whether an output is wrong at entries that have visible keys."""
    truth = golden(case)
    if output not in truth.zero_outputs:
        return False
    limit, got = truth.outputs[output], core.outputs(adapter, case)[output]
    live = ~np.broadcast_to(truth.zero_outputs[output], got.shape)
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(got.astype(np.float64) - limit.golden) <= limit.allowed)
    return bool(np.any(off & live & np.isfinite(limit.golden)))


def same(adapter: Adapter, first: Case, sight: Sight) -> Fails:
    """Whether a case shows the same as `first`: the same check on the same output, as large, for no new reason."""
    allowed = traits(first)

    def fails(case: Case) -> bool:
        try:
            if not traits(case) <= allowed:
                return False
            golden(case)
        except Exception:  # the reference refuses it: an invalid case
            return False
        result = core.check(adapter, case)
        if sight.check == DTYPE:
            return any(c == DTYPE and text.startswith(f"{sight.output} ") for c, text in result.failures)
        if sight.exception:
            return any(c == "exception" and text.startswith(sight.exception) for c, text in result.failures)
        off = any(
            m.output == sight.output
            and sight.check in {check for check, _ in m.failures}
            and not m.relative < min(PLAIN_SIGHT, sight.relative)  # NaN counts as large
            for m in result.measured
        )
        return off and (not sight.beyond or beyond(adapter, case, sight.output))

    return fails
