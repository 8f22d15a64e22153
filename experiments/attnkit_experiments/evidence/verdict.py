"""Verdicts from means over seeds and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from attnkit_experiments.report.statistics import LEVEL, Difference


class Verdict(StrEnum):
    SUPPORTED = "supported at this size"
    CONTRADICTED = "contradicted at this size"
    UNDECIDED = "undecided"
    NO_FLOOR = "no floor yet"
    BLIND = "this study does not see attention"
    ABSENT = "not run here"
    SHOWN = "for the eye alone"


WORDS = {Verdict.SUPPORTED: "supported", Verdict.CONTRADICTED: "contradicted"}
"""What is said of a part that is decided."""


@dataclass(frozen=True)
class Finding:
    """What one test on one run came to; `n` counts seeds, or what else was measured.

    `verdict` is that of the finding's own interval, with the p-value `p`: None for what is counted or exact, where no
    correction is needed. `corrected` is the verdict after Holm's correction, `beside` what stands beside it and decides
    nothing, `would_see` what an undecided difference would have to be. `of_equality`: it is supported where two
    variants are equal.
    """

    text: str
    verdict: Verdict
    n: int = 0
    run: str = ""
    p: float | None = None
    corrected: Verdict | None = None
    would_see: str = ""
    beside: str = ""
    estimate: Difference | None = None
    key: str = ""
    of_equality: bool = False

    @property
    def final(self) -> Verdict:
        return self.corrected or self.verdict

    @property
    def line(self) -> str:
        """The text with its word, which says whether it is corrected."""
        word = WORDS.get(self.verdict, "")
        if word and self.final is not self.verdict:
            word += ", uncorrected"
        elif not word and self.would_see:
            word = f"undecided: {self.would_see}"
        decided = f", {word}" if word and self.p is not None else ""
        return f"{self.text}{decided}{f'; beside it {self.beside}' if self.beside else ''}"


def judged(estimate: Difference, low: float, high: float) -> tuple[Verdict, float]:
    """Whether a number lies between two bounds, and the p-value: decided if its whole 95 % interval is on one side of
    each.

    One seed has no interval and decides nothing.
    """
    within = max(estimate.above(low), estimate.below(high))
    outside = min(estimate.below(low), estimate.above(high))
    if within < LEVEL:
        return Verdict.SUPPORTED, within
    return Verdict.CONTRADICTED if outside < LEVEL else Verdict.UNDECIDED, min(within, outside)


def exactly(inside: Sequence[bool]) -> Verdict:
    """The verdict on numbers that are counted or exact: all or none of them as claimed, or undecided."""
    if all(inside):
        return Verdict.SUPPORTED
    return Verdict.UNDECIDED if any(inside) else Verdict.CONTRADICTED


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim of several parts that decide: one that is contradicted contradicts it, and all must be
    supported.
    """
    if not verdicts:
        return Verdict.SHOWN
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return Verdict.CONTRADICTED if Verdict.CONTRADICTED in verdicts else Verdict.UNDECIDED
