"""Summaries of verdicts: the worst of many, and counts by status, by op and adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.model import grades

SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def worst(results: Iterable[CaseResult]) -> float | None:
    """The largest error relative to its bound, None if nothing was measured."""
    return max((result.ratio for result in results if result.measured), default=None)


def percent(ratio: float | None) -> str:
    """A ratio to its bound, as text."""
    return "·" if ratio is None else "∞" if ratio > 1e4 else f"{100 * ratio:.0f}%"


def counts(results: Iterable[CaseResult]) -> Counter[str]:
    """The number of verdicts by status."""
    return Counter(result.status for result in results)


def grade_counts(results: Iterable[CaseResult]) -> dict[str, int]:
    """The number of failures by grade, from the worst to the mildest; expected ones are not counted."""
    count = Counter(result.grade for result in results if result.status == "fail")
    return {grade: count[grade] for grade in grades.GRADES if count[grade]}


def told_by_grade(results: Iterable[CaseResult]) -> str:
    """The same as text: "2 wrong, 1 policy"."""
    return ", ".join(f"{count} {grade}" for grade, count in grade_counts(results).items())


def told(result: CaseResult) -> str:
    """The grade of a failure, of an inaccurate one how far it is off, and the policy on which one hangs."""
    if result.policy:
        without = f"{result.rest} without it" if result.rest else "right without it"
        return f"{result.grade}: {result.policy}, {without}"
    wrong = [measured for measured in result.measured if measured.failures]
    if result.grade != grades.INACCURATE or not wrong:
        return result.grade
    ratio, relative = max(m.ratio for m in wrong), max(m.relative for m in wrong)
    return f"{result.grade}: up to {ratio:.3g} bounds, {relative:.2g} of the largest number"


def deciding(results: Iterable[CaseResult], adapters: Iterable[Adapter], threshold: str | None) -> list[CaseResult]:
    """The failures that decide the exit status: of this grade or a worse one. By default those that are refused or
    worse, and of an adapter that says what it declines, if that is nothing, all: the rest it promises.
    """
    promising = {adapter.name for adapter in adapters if getattr(adapter, "declines", None) is not None}

    def decides(result: CaseResult) -> bool:
        own = grades.POLICY if result.adapter in promising else grades.REFUSED
        return result.status == "fail" and grades.reaches(result.grade, threshold or own)

    return [result for result in results if decides(result)]


def grouped(results: list[CaseResult]) -> dict[str, dict[str, list[CaseResult]]]:
    """{op: {adapter: verdicts}}, in order of arrival."""
    adapters = dict.fromkeys(result.adapter for result in results)
    groups: dict[str, dict[str, list[CaseResult]]] = {}
    for result in results:
        groups.setdefault(result.op, {adapter: [] for adapter in adapters})[result.adapter].append(result)
    return groups
