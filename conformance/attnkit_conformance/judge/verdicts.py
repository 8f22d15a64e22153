"""Summaries of verdicts: the worst of many, and counts by status, by op and adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.core import CaseResult
from attnkit_conformance.model import grades
from attnkit_conformance.scenes.rows import PROBE

ENOUGH = 1 / 3  # of a profile has to be met for a run to say that an adapter passes
LINE = 160  # characters of a message that are shown before the end
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


def share(results: Iterable[CaseResult]) -> float:
    """The share of a profile that an adapter answered, beside what it was found to serve."""
    count = counts(result for result in results if f"/{PROBE}" not in result.id)
    return 1 - count["unsupported"] / max(1, count.total())


def shares(results: Iterable[CaseResult]) -> dict[str, float]:
    """The same by adapter."""
    by_adapter: dict[str, list[CaseResult]] = {}
    for result in results:
        by_adapter.setdefault(result.adapter, []).append(result)
    return {name: share(verdicts) for name, verdicts in by_adapter.items()}


def too_few(results: Sequence[CaseResult]) -> dict[str, float]:
    """The adapters that answered some cases, but so few of what they were asked that nothing is said to pass."""
    measured = {result.adapter for result in results if result.measured}
    return {name: part for name, part in shares(results).items() if name in measured and part < ENOUGH}


def grade_counts(results: Iterable[CaseResult]) -> dict[str, int]:
    """The number of failures by grade, from the worst to the mildest; expected ones are not counted."""
    count = Counter(result.grade for result in results if result.status == "fail")
    return {grade: count[grade] for grade in grades.GRADES if count[grade]}


def told_by_grade(results: Iterable[CaseResult]) -> str:
    """The same as text: "2 wrong, 1 policy"."""
    return ", ".join(f"{count} {grade}" for grade, count in grade_counts(results).items())


def describe_failure(result: CaseResult) -> str:
    """The grade of a failure, of an inaccurate one how far it is off, and the policy on which one hangs."""
    if result.policy:
        without = f"{result.rest} without it" if result.rest else "right without it"
        return f"{result.grade}: {result.policy}, {without}"
    wrong = [measured for measured in result.measured if measured.failures]
    if result.grade != grades.INACCURATE or not wrong:
        return result.grade
    ratio, relative = max(m.ratio for m in wrong), max(m.relative for m in wrong)
    return f"{result.grade}: up to {ratio:.3g} bounds, {relative:.2g} of the largest number"


def in_a_line(result: CaseResult, failed: int, judged: int) -> str:
    """A failure as soon as it is known: how many there are so far, its case, its grade, and how its message begins."""
    begin = result.message.partition("\n")[0][:LINE]
    return (
        f"failed ({failed:,} of {judged:,} so far): {result.adapter}::{result.id} ({describe_failure(result)}): {begin}"
    )


def deciding(results: Iterable[CaseResult], adapters: Iterable[Adapter], threshold: str | None) -> list[CaseResult]:
    """The failures that decide the exit status: of this grade or a worse one. By default those that are refused or
    worse, and of an adapter that says what it declines, if that is nothing, all: the rest it promises.
    """
    promising = {adapter.name for adapter in adapters if getattr(adapter, "declines", None) is not None}

    def decides(result: CaseResult) -> bool:
        own = grades.POLICY if result.adapter in promising else grades.REFUSED
        return result.status == "fail" and grades.reaches(result.grade, threshold or own)

    return [result for result in results if decides(result)]


def group_by_op(results: list[CaseResult]) -> dict[str, dict[str, list[CaseResult]]]:
    """{op: {adapter: verdicts}}, in order of arrival."""
    adapters = dict.fromkeys(result.adapter for result in results)
    groups: dict[str, dict[str, list[CaseResult]]] = {}
    for result in results:
        groups.setdefault(result.op, {adapter: [] for adapter in adapters})[result.adapter].append(result)
    return groups
