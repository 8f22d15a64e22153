"""A difference with both of its intervals: over seeds, and over seeds and test samples where those were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from attnkit_experiments.report.statistics import LEVEL, Difference
from attnkit_experiments.study.recipe import Measure

Ends = tuple[float, float]


@dataclass(frozen=True)
class Estimate(Difference):
    """`ends` are those of the 95 % interval over seeds and test samples, None where samples were not kept.

    What is said of it holds by both intervals: p-values are those of the wider one, on the side of a bound, and so is
    what would be seen.
    """

    ends: Ends | None = None

    @staticmethod
    def of(gaps: Sequence[float], ends: Ends | None = None) -> Estimate:
        seeds = Difference.of(gaps)
        return Estimate(seeds.mean, seeds.sd, seeds.n, ends)

    def _wide(self, reach: float) -> Difference:
        """The same mean with a Student's interval that reaches so far to either side."""
        sd = max(reach, 0.0) * math.sqrt(self.n) / float(stdtrit(self.n - 1, 1 - LEVEL / 2))
        return Difference(self.mean, sd, self.n)

    def below(self, bound: float) -> float:
        of_seeds = super().below(bound)
        return max(of_seeds, self._wide(self.ends[1] - self.mean).below(bound)) if self.ends else of_seeds

    def above(self, bound: float) -> float:
        of_seeds = super().above(bound)
        return max(of_seeds, self._wide(self.mean - self.ends[0]).above(bound)) if self.ends else of_seeds

    @property
    def decided(self) -> bool:
        """Whether both intervals exclude zero."""
        return self.half_width is not None and self.p < LEVEL

    @property
    def seen(self) -> float | None:
        of_seeds = super().seen
        if of_seeds is None or not self.ends:
            return of_seeds
        widest = self._wide(max(self.mean - self.ends[0], self.ends[1] - self.mean))
        return max(of_seeds, widest.seen or 0.0)

    def seeds(self, measure: Measure, sign: str = "+") -> str:
        """The interval over seeds in the measure's unit, "" of one seed."""
        half = self.half_width
        return "" if half is None else _between(self.mean - half, self.mean + half, measure, sign)

    def samples(self, measure: Measure) -> str:
        """The interval over seeds and test samples in the measure's unit, "" where there is none."""
        return _between(*self.ends, measure) if self.ends else ""


def _between(low: float, high: float, measure: Measure, sign: str = "+") -> str:
    low, high = (round(measure.factor * x, measure.digits) + 0.0 for x in (low, high))
    return f"{low:{sign}.{measure.digits}f} to {high:{sign}.{measure.digits}f}"
