"""Summaries of verdicts: the worst of many, and counts by status, by op and adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attnkit_conformance.core import CaseResult

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


def grouped(results: list[CaseResult]) -> dict[str, dict[str, list[CaseResult]]]:
    """{op: {adapter: verdicts}}, in order of arrival."""
    adapters = dict.fromkeys(result.adapter for result in results)
    groups: dict[str, dict[str, list[CaseResult]]] = {}
    for result in results:
        groups.setdefault(result.op, {adapter: [] for adapter in adapters})[result.adapter].append(result)
    return groups
