"""Verdicts from means over seeds and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from attnkit_experiments.report.results import Difference


class Verdict(StrEnum):
    SUPPORTED = "supported at this size"
    CONTRADICTED = "contradicted at this size"
    UNDECIDED = "not decided"
    ABSENT = "not run here"
    SHOWN = "for the eye alone"


@dataclass(frozen=True)
class Finding:
    """What one test on one run came to; `n` counts seeds, or what else was measured."""

    text: str
    verdict: Verdict
    n: int = 0
    run: str = ""


def judged(estimate: Difference, low: float, high: float) -> Verdict:
    """Whether a number lies between two bounds: decided if its whole 95 % interval is on one side of each.

    One seed has no interval and decides nothing.
    """
    if estimate.half_width is None:
        return Verdict.UNDECIDED
    least, most = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    if low < least and most < high:
        return Verdict.SUPPORTED
    return Verdict.CONTRADICTED if most < low or high < least else Verdict.UNDECIDED


def exactly(inside: Sequence[bool]) -> Verdict:
    """The verdict on numbers that are counted or exact: all or none of them as claimed, or not decided."""
    if all(inside):
        return Verdict.SUPPORTED
    return Verdict.UNDECIDED if any(inside) else Verdict.CONTRADICTED


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim of several parts: one that is contradicted contradicts it, and all must be supported."""
    if not verdicts:
        return Verdict.SHOWN
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return Verdict.CONTRADICTED if Verdict.CONTRADICTED in verdicts else Verdict.UNDECIDED
