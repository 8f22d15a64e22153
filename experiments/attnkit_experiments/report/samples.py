"""Differences to the baseline over seeds and test samples, of cells whose outcomes were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnkit_experiments.engine.outcomes import Outcomes, columns, score
from attnkit_experiments.report.statistics import interval_with_samples, scores_of_drawn_sets
from attnkit_experiments.study.recipe import Measure

Cell = tuple[str, int]
"""A variant and a seed."""
Drawn = dict[Cell, tuple[np.ndarray, int]]
"""The scores of a cell on the drawn test sets, and of how many samples these are."""
ABSENT = "test sample: not in the interval"


@dataclass(frozen=True)
class Tested:
    """The 95 % interval of a difference to the baseline, over `seeds` and `samples` of the test set."""

    low: float
    high: float
    seeds: int
    samples: int

    def text(self, measure: Measure) -> str:
        """The interval in the measure's unit."""
        low, high = (
            f"{round(measure.factor * x, measure.digits) + 0.0:+.{measure.digits}f}" for x in (self.low, self.high)
        )
        return f"{low} to {high} with the test sample"


def differences(kept: Mapping[Cell, Outcomes], baselines: Mapping[str, str]) -> dict[str, dict[str, Tested]]:
    """The intervals of differences to the baseline, by score and variant.

    A variant lacks one where fewer than two seeds are both its own and its baseline's, or an outcome of these was not
    kept. `kept` has every cell that was trained to its end.
    """
    names = dict.fromkeys(name for outcomes in kept.values() for name in outcomes)
    return {name: found for name in names if (found := _of_score(kept, baselines, name))}


def _of_score(kept: Mapping[Cell, Outcomes], baselines: Mapping[str, str], name: str) -> dict[str, Tested]:
    outcomes = {cell: x[name] for cell, x in kept.items() if name in x}
    compared = {}
    for variant, baseline in baselines.items():
        seeds = [seed for each, seed in kept if each == variant and (baseline, seed) in kept]
        if len(seeds) > 1 and all((each, seed) in outcomes for each in (variant, baseline) for seed in seeds):
            compared[variant] = seeds
    drawn, found = _drawn(outcomes) if compared else {}, {}
    for variant, seeds in compared.items():
        (ours, samples), (theirs, others) = (_together(drawn, each, seeds) for each in (variant, baselines[variant]))
        if samples == others:
            found[variant] = Tested(*interval_with_samples(ours - theirs), len(seeds), samples)
    return found


def _drawn(outcomes: Mapping[Cell, np.ndarray]) -> Drawn:
    """The same test sets for all cells with equally many samples."""
    found: Drawn = {}
    for shape in dict.fromkeys(x.shape for x in outcomes.values()):
        alike = [cell for cell, x in outcomes.items() if x.shape == shape]
        scores = scores_of_drawn_sets([columns(outcomes[cell]) for cell in alike], score)
        found |= {cell: (scores[:, place], shape[0]) for place, cell in enumerate(alike)}
    return found


def _together(drawn: Drawn, variant: str, seeds: Sequence[int]) -> tuple[np.ndarray, int]:
    return np.stack([drawn[variant, seed][0] for seed in seeds], 1), drawn[variant, seeds[0]][1]
