"""Verdicts from means over seeds and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from attnkit_experiments.evidence.estimates import Estimate
from attnkit_experiments.report.statistics import LEVEL, Difference
from attnkit_experiments.study.recipe import Measure


class Verdict(StrEnum):
    SUPPORTED = "supported at this size"
    CONTRADICTED = "contradicted at this size"
    MIXED = "mixed"
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

    `verdict` is that of the finding's own intervals, with the p-value `p`: None for what is counted or exact, where no
    correction is needed. `corrected` is the p-value after Holm's correction, None before it and 1 where it is of no
    family. `beside` stands beside it and decides nothing, `would_see` is what an undecided difference would have to be,
    `measure` in what the `estimate` is shown: a ratio as a difference in %. `of_equality`: it is supported where two
    variants are equal.
    """

    text: str
    verdict: Verdict
    n: int = 0
    run: str = ""
    p: float | None = None
    corrected: float | None = None
    would_see: str = ""
    beside: str = ""
    estimate: Estimate | None = None
    measure: Measure | None = None
    of_equality: bool = False

    @property
    def final(self) -> Verdict:
        """The verdict after correction."""
        return self.verdict if self.corrected is None or self.corrected < LEVEL else Verdict.UNDECIDED

    @property
    def word(self) -> str:
        """That of its verdict, which says whether it is corrected."""
        word = WORDS.get(self.verdict, "undecided")
        return word if self.final is self.verdict else f"{word}, uncorrected"

    @property
    def line(self) -> str:
        """The text with its word."""
        word = f"{self.word}: {self.would_see}" if self.word == "undecided" and self.would_see else self.word
        decided = f", {word}" if self.p is not None and word != "undecided" else ""
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
    """The verdict on a claim of several parts that decide: that of all, mixed where some are contradicted."""
    if not verdicts:
        return Verdict.SHOWN
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return Verdict.MIXED if Verdict.CONTRADICTED in verdicts else Verdict.UNDECIDED
