"""The tests that decide claims: each looks at one run and returns what it found, nothing if the run lacks its numbers.

Variants are named with at most one *, which stands for the same text in all names of a check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeGuard

from attnkit_experiments.engine.progress import many
from attnkit_experiments.evidence.estimates import Ends, Estimate
from attnkit_experiments.evidence.measures import TIMES, UNTRAINED, headline, measure_of
from attnkit_experiments.evidence.runs import Record, Run
from attnkit_experiments.evidence.verdict import Finding, Verdict, exactly, judged
from attnkit_experiments.report.claims import SLOPE_TOLERANCE, slope
from attnkit_experiments.report.statistics import Difference
from attnkit_experiments.study.recipe import Measure


class Check(Protocol):
    def on(self, run: Run) -> list[Finding]: ...

    @property
    def variants(self) -> tuple[str, ...]:
        """The patterns of variants that it names."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of cells.csv, or of results.csv for what is measured without training; "" for the loss that
        decides.
        """


@dataclass(frozen=True)
class Compare:
    """The paired differences of a variant and another, or with `relative` their ratios less 1, between two bounds.

    Without a `key` it is the loss that decides, and the task's metric stands beside it. `beyond` are two more variants,
    whose difference is subtracted.
    """

    variant: str
    other: str
    key: str = ""
    low: float = -math.inf
    high: float = math.inf
    relative: bool = False
    beyond: tuple[str, str] | None = None

    @property
    def variants(self) -> tuple[str, ...]:
        return self.variant, self.other, *(self.beyond or ())

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def on(self, run: Run) -> list[Finding]:
        measure, found = measure_of(run.recipe, self.key), []
        for _, star in run.matching(self.variant):
            names = [name.replace("*", star) for name in self.variants]
            if set(names) <= {*run.variants}:
                found += self._finding(run, names, measure)
        return found

    def _finding(self, run: Run, names: Sequence[str], measure: Measure) -> list[Finding]:
        gaps, metric = self._gaps(run, names, measure), headline(run.recipe)
        labels = [run.label(name) for name in names]
        text = f"{_without_point(run, names)} beside {labels[1]}"
        if self.beyond:
            text += f", less the same of {labels[2]} beside {labels[3]}"
        if not gaps:
            lost = [
                f"{label} diverged in {run.diverged(name)[0]} of {run.diverged(name)[1]}"
                for name, label in zip(names, labels, strict=True)
                if run.diverged(name)[0]
            ]
            return [Finding(f"{text}: {', '.join(lost)}", Verdict.UNDECIDED, 0, run.report(names[0]))] if lost else []
        shown = Measure(measure.key, measure.name, 1.0, 2) if self.relative else measure
        estimate = Estimate.of(gaps, self._ends(run, names, measure.key, gaps))
        found = _estimated(text, estimate, self, shown, run.report(names[0]))
        if measure.key in TIMES and run.busy:
            return [replace(found, text=f"{found.text}, on a busy machine", verdict=Verdict.UNDECIDED, p=None)]
        found = replace(found, of_equality=of_equality(self))
        beside = self._gaps(run, names, metric) if not self.key and measure != metric else []
        unit = f" {metric.unit}" if metric.unit else ""
        return [replace(found, beside=f"{metric.name} {Difference.of(beside).shown(metric)}{unit}" if beside else "")]

    def _ends(self, run: Run, names: Sequence[str], key: str, gaps: Sequence[float]) -> Ends | None:
        return None if self.relative or self.beyond else run.ends(names[0], names[1], key, gaps)

    def _gaps(self, run: Run, names: Sequence[str], measure: Measure) -> list[float]:
        numbers = [run.numbers(name, measure.key) for name in names]
        return [
            self._gap([each[seed] for each in numbers]) for seed in numbers[0] if all(seed in each for each in numbers)
        ]

    def _gap(self, numbers: Sequence[float]) -> float:
        if self.relative:
            return numbers[0] / numbers[1] - 1
        return numbers[0] - numbers[1] - (numbers[2] - numbers[3] if self.beyond else 0)


@dataclass(frozen=True)
class Level:
    """A number of a variant between two bounds."""

    variant: str
    key: str = ""
    low: float = -math.inf
    high: float = math.inf
    relative = False

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.variant,)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def on(self, run: Run) -> list[Finding]:
        measure, found = measure_of(run.recipe, self.key), []
        for name, _ in run.matching(self.variant):
            numbers = list(run.numbers(name, measure.key).values())
            if numbers:
                found.append(_estimated(run.label(name), Estimate.of(numbers), self, measure, run.report(name)))
        return found


@dataclass(frozen=True)
class Everywhere:
    """A number between two bounds in every cell of the variants: for what is counted, or holds exactly."""

    variant: str
    key: str
    low: float = -math.inf
    high: float = math.inf

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.variant,)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def on(self, run: Run) -> list[Finding]:
        measure = measure_of(run.recipe, self.key)
        named = [name for name, _ in run.matching(self.variant)]
        numbers = [number for name in named for number in run.numbers(name, measure.key).values()]
        if not numbers:
            return []
        verdict = exactly([self.low < number < self.high for number in numbers])
        least, most = (f"{measure.factor * x:.{measure.digits}f}" for x in (min(numbers), max(numbers)))
        span = least if least == most else f"{least} to {most}"
        text = f"{measure.name} {span} {measure.unit}".rstrip() + f" in {len(numbers)} cells"
        return [Finding(text, verdict, len(numbers), run.name)]


@dataclass(frozen=True)
class Diverges:
    """Every cell of a variant diverges; one seed decides nothing, nor do some that did not: a count has no p-value."""

    variant: str

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.variant,)

    @property
    def keys(self) -> tuple[str, ...]:
        return ()

    def on(self, run: Run) -> list[Finding]:
        found = []
        for name, _ in run.matching(self.variant):
            lost, of = run.diverged(name)
            verdict = Verdict.SUPPORTED if lost == of > 1 else Verdict.UNDECIDED
            seen = (
                f"{lost} of {many(of, 'training')} diverged"
                if lost
                else f"divergence not seen in {many(of, 'training')}"
            )
            found.append(Finding(f"{run.label(name)}: {seen}", verdict, of, run.name))
        return found


@dataclass(frozen=True)
class Exact:
    """One of the exact statements that a study measures (`report.claims`)."""

    statement: str
    variants: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def on(self, run: Run) -> list[Finding]:
        rows = [row for row in run.exact if row["statement"] == self.statement]
        if not rows:
            return []
        errors = [abs(float(row["measured"]) - float(row["expected"])) for row in rows]
        worst = rows[errors.index(max(errors))]
        measured, expected = (float(worst[key]) for key in ("measured", "expected"))
        text = f"{len(rows)} slopes, furthest off that of {worst['of']}: {measured:.3f} for {expected:g}"
        verdict = exactly([error <= SLOPE_TOLERANCE for error in errors])
        return [Finding(text, verdict, len(rows), run.name)]


@dataclass(frozen=True)
class Growth:
    """The exponent with which a column grows with another, over the rows that have `where`."""

    where: Mapping[str, str]
    key: str
    over: str
    name: str
    low: float = -math.inf
    high: float = math.inf
    variants: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.where, self.key, self.over)

    def on(self, run: Run) -> list[Finding]:
        rows = [row for row in _rows(run, self.where) if row[self.key]]
        if len(rows) < 2:
            return []
        x, y = ([float(row[key]) for row in rows] for key in (self.over, self.key))
        fitted = slope(x, y)
        verdict = exactly([self.low < fitted < self.high])
        span = f"n = {x[0]:,.0f} to {x[-1]:,.0f}"
        text = f"{', '.join(self.where.values())}: {self.name} grow as n^{round(fitted, 2) + 0.0:.2f}, {span}"
        return [Finding(text, verdict, len(rows), run.name)]


@dataclass(frozen=True)
class Rows:
    """`number` of every row that has `where` between two bounds; a row without it is outside."""

    what: str
    number: Callable[[Record], float | None]
    low: float = -math.inf
    high: float = math.inf
    where: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    def on(self, run: Run) -> list[Finding]:
        numbers = [self.number(row) for row in _rows(run, self.where)]
        if not numbers:
            return []
        inside = [number is not None and self.low < number < self.high for number in numbers]
        text = f"{self.what}: {sum(inside)} of {len(inside)} rows"
        return [Finding(text, exactly(inside), len(inside), run.name)]


def _without_point(run: Run, names: Sequence[str]) -> str:
    """The label of the first, without the point that the second has too."""
    point, other = (run.first(name)["point"] for name in names[:2])
    return run.label(names[0]).removesuffix(f", {point}" if point == other else "")


def _rows(run: Run, where: Mapping[str, str]) -> list[Record]:
    return [row for row in run.results if all(row.get(key) == value for key, value in where.items())]


def _estimated(text: str, estimate: Estimate, bounds: Compare | Level, measure: Measure, run: str) -> Finding:
    """A number with its interval, and what would have been seen."""
    verdict, p = judged(estimate, bounds.low, bounds.high)
    shift, sign = (1, "×") if bounds.relative else (0, "")
    form = f"{'+' if isinstance(bounds, Compare) and not bounds.relative else ''}.{measure.digits}f"
    mean = f"{sign}{round(measure.factor * (estimate.mean + shift), measure.digits) + 0.0:{form}}"
    unit = f" {measure.unit}" if measure.unit else ""
    if estimate.half_width is None:
        return Finding(f"{text}: {measure.name} {mean}{unit}, one seed", verdict, estimate.n, run)
    width = f"{measure.factor * estimate.half_width:.{measure.digits}f}"
    samples = f" ({estimate.samples(measure)} with test samples)" if estimate.ends else ""
    return Finding(
        f"{text}: {measure.name} {mean} ± {width}{unit}{samples}, n = {estimate.n}",
        verdict,
        estimate.n,
        run,
        p,
        would_see=f"{estimate.would_see(measure)}{unit}" if isinstance(bounds, Compare) else "",
        estimate=estimate,
        measure=Measure(measure.key, measure.name, 100.0, 1, "%") if bounds.relative else measure,
    )


def of_training(check: Check) -> bool:
    """Whether a longer training could turn it."""
    return isinstance(check, Diverges) or (isinstance(check, Compare | Level) and check.key not in UNTRAINED)


def of_equality(check: Check) -> TypeGuard[Compare]:
    """Whether it holds where two variants are equal: then a study that does not see attention supports it too."""
    return isinstance(check, Compare) and check.key in QUALITY and check.low < 0 < check.high


def no_worse(check: Compare) -> Compare:
    """A check of equality without its bound on what is better."""
    return replace(check, high=math.inf) if check.key else replace(check, low=-math.inf)


QUALITY = ("", "accuracy", "bleu")
NATS = 0.05
"""Our margin of the loss where a paper says "matches" or "comparable" without one. In our trainings 2 points of small
photographs, or 1 BLEU of captions, go with about so much."""


def better(variant: str, other: str) -> Compare:
    """Less of the loss that decides."""
    return Compare(variant, other, high=0.0)


def worse(variant: str, other: str) -> Compare:
    return Compare(variant, other, low=0.0)


def as_good(variant: str, other: str, margin: float = NATS) -> Compare:
    """No more of the loss than by a margin."""
    return Compare(variant, other, high=margin)


def alike(variant: str, other: str, margin: float = NATS) -> Compare:
    return Compare(variant, other, low=-margin, high=margin)


def higher(variant: str, other: str, key: str, *, relative: bool = False) -> Compare:
    return Compare(variant, other, key, low=0.0, relative=relative)


def lower(variant: str, other: str, key: str, *, relative: bool = False) -> Compare:
    return Compare(variant, other, key, high=0.0, relative=relative)


def not_below(variant: str, other: str, margin: float, key: str) -> Compare:
    return Compare(variant, other, key, low=-margin)
