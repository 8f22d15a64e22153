"""Means over seeds, paired differences with their intervals over seeds and test samples, the difference that they would
find, and Holm's correction for many of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

from attnkit_experiments.study.recipe import Measure

LEVEL, POWER = 0.05, 0.8
WORDS = ("better", "worse", "higher", "lower", "undecided", "one seed")
"""What a difference is called, in the order of a sentence; higher or lower where neither need be better."""


@dataclass(frozen=True)
class Spread:
    """A number over seeds; `sd` is the sample standard deviation, None for one seed."""

    mean: float
    sd: float | None
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def text(self, digits: int = 1, factor: float = 1) -> str:
        if self.sd is None:
            return f"{factor * self.mean:.{digits}f}"
        return f"{factor * self.mean:.{digits}f} ± {factor * self.sd:.{digits}f}"


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences (same seed, same batches), or of other numbers, with Student's interval; one has
    none.

    Everything here is of one comparison alone: `holm` corrects the p-values of several.
    """

    mean: float
    sd: float | None
    n: int

    @staticmethod
    def of(gaps: Sequence[float]) -> Difference:
        spread = Spread.of(gaps)
        return Difference(spread.mean, spread.sd, spread.n)

    @property
    def error(self) -> float:
        """The standard error of the mean; inf for one seed."""
        return math.inf if self.sd is None else self.sd / math.sqrt(self.n)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval."""
        return None if self.sd is None else float(stdtrit(self.n - 1, 1 - LEVEL / 2)) * self.error

    @property
    def seen(self) -> float | None:
        """The true difference that is found with 80 % power: with so many seeds that spread so, the interval of four
        studies in five excludes 0 (3.3 standard deviations for three seeds). By the noncentral t distribution.
        """
        if self.sd is None:
            return None
        return float(nctdtrinc(self.n - 1, 1 - POWER, stdtrit(self.n - 1, 1 - LEVEL / 2))) * self.error

    def below(self, bound: float) -> float:
        """Two-sided p-value with which the mean is below a bound: under 0.05 where the 95 % interval is."""
        if self.error == 0:
            return float(self.mean >= bound)
        if self.sd is None:
            return 1.0
        return min(1.0, 2 * float(stdtr(self.n - 1, (self.mean - bound) / self.error)))

    def above(self, bound: float) -> float:
        return Difference(-self.mean, self.sd, self.n).below(-bound)

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference."""
        return min(self.below(0), self.above(0))

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def word(self, measure: Measure) -> str:
        """One of `WORDS`, by this comparison alone."""
        if self.half_width is None:
            return "one seed"
        if not self.decided:
            return "undecided"
        if not measure.better:
            return "higher" if self.mean > 0 else "lower"
        return "better" if (self.mean > 0) == (measure.better == "more") else "worse"

    def shown(self, measure: Measure) -> str:
        """Mean and interval in the measure's unit."""
        mean = f"{round(measure.factor * self.mean, measure.digits) + 0.0:+.{measure.digits}f}"
        return mean if self.half_width is None else f"{mean} ± {measure.factor * self.half_width:.{measure.digits}f}"

    def text(self, measure: Measure) -> str:
        """The same; a difference whose interval contains zero is called undecided."""
        if self.half_width is None:
            return f"{self.shown(measure)} (one seed)"
        return self.shown(measure) + ("" if self.decided else " (undecided)")

    def would_see(self, measure: Measure) -> str:
        """What these seeds would have found, in the measure's unit."""
        return "" if self.seen is None else f"would see {measure.factor * self.seen:.{measure.digits}f}"


DRAWS = 2000
"""Test sets that are drawn: the ends of an interval are then the 50th from either side."""


def scores_of_drawn_sets(
    outcomes: Sequence[np.ndarray], score: Callable[[np.ndarray, int], np.ndarray], draws: int = DRAWS
) -> np.ndarray:
    """Scores (draws, cells) of cells on test sets that are drawn with replacement, the same for all cells.

    outcomes: (n, columns) of each cell, of which a set sums the rows of its samples; score: sums (cells, columns) and
    the number of samples to scores. Equal sizes have equal draws.
    """
    samples = len(outcomes[0])
    table, rng = np.stack(outcomes, 1).reshape(samples, -1), np.random.default_rng(0)
    scores = np.empty((draws, len(outcomes)))
    for each in scores:
        times = np.bincount(rng.integers(samples, size=samples), minlength=samples)
        each[:] = score((times @ table).reshape(len(outcomes), -1), samples)
    return scores


def interval_with_samples(gaps: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a mean difference over seeds and test samples, by a bootstrap of both levels.

    gaps: (draws, seeds), the differences of each seed on test sets that are drawn with replacement. All seeds and
    both variants have the same test set in a draw, since a hard sample is hard for all of them. Seeds are drawn from
    Student's t around the mean of a draw, by its spread over seeds, and not with replacement: of three that gives the
    interval from the least to the largest, which covers the truth three times in four. Where all test sets are alike
    this is Student's interval over seeds, and where all seeds are alike the bootstrap of samples.
    """
    draws, seeds = gaps.shape
    t = stdtrit(seeds - 1, (np.random.default_rng(1).permutation(draws) + 0.5) / draws)
    centres = gaps.mean(1) + t * gaps.std(1, ddof=1) / math.sqrt(seeds)
    low, high = np.quantile(centres, [LEVEL / 2, 1 - LEVEL / 2], method="hazen")  # whose places are those of t above
    return float(low), float(high)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p-values such that those below 0.05 hold one wrong or more in 5 % of cases at most.

    The k-th smallest of m counts m - k + 1 times, and no less than a smaller one. Equal values are one comparison that
    was made twice, and count once.
    """
    family = sorted({_same(p) for p in values})
    corrected, least = {}, 0.0
    for place, p in enumerate(family):
        least = max(least, min(1.0, (len(family) - place) * p))
        corrected[p] = least
    return [corrected[_same(p)] for p in values]


def _same(p: float) -> float:
    """Without the digits in which a - b and b - a differ."""
    return float(f"{p:.9g}")
