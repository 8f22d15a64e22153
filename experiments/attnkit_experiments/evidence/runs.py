"""Committed reports, read from their CSVs alone."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnkit_experiments.evidence.estimates import Ends
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.results import is_busy, read_csv
from attnkit_experiments.report.statistics import Spread

Record = Mapping[str, str]

SAME_MODELS = {
    "001-fig1": "001-fig3",
    "001-fig2": "001-fig1",
    "001-fig3": "001-fig1",
    "001-layernorm": "001-table2",
    "001-temperature": "001-table1",
}
"""Recipes by the one that trains some of their cells too: a run takes those that it lacks from there."""

FLOORS = {
    "000-causal": "005-causal",
    "000-fig4": "000-fig3",
    "000-learned": "000-fig3",
    "001-layernorm": "001-table4",
    "001-table2": "001-table4",
    "001-table3": "001-table4",
    "001-table5": "001-table4",
    "002-kernel": "002-table1",
    "002-sampling": "002-table1",
    "002-table4": "002-table1",
    "002-table6": "003-sequences",
}
"""Recipes by the one whose floors are theirs: without attention, or without scores, they train the same model."""

CHOICES = ("activations", "alphas", "kinds", "memories", "methods", "sizes", "softmax")
"""Settings that choose variants and change none of them."""

FLOOR = "zeros"
"""The series whose attention returns zeros: what a model of the study reaches without any."""
WITHOUT_SCORES = (FLOOR, "average")
"""Series that are no variant to choose: they tell how much of a task is done without comparing queries and keys."""


@dataclass(frozen=True)
class Run:
    """A report: `results` are the records of results.csv, `cells`, `curves`, `exact` and `differences` those of the
    other files.

    Cells that another report has, of the same study or with the same models, have its name as "report".
    """

    name: str
    results: Sequence[Record]
    cells: Sequence[Record] = ()
    curves: Sequence[Record] = ()
    exact: Sequence[Record] = ()
    differences: Sequence[Record] = ()

    @property
    def recipe(self) -> str:
        return self.results[0]["recipe"]

    @property
    def preset(self) -> str:
        return self.results[0]["preset"]

    @property
    def changed(self) -> dict[str, str]:
        """The settings that its preset has otherwise."""
        return dict(word.split("=", 1) for word in self.results[0]["changed"].split())

    def setting(self, key: str) -> str:
        """A setting of its study: as it was changed, or as the preset has it."""
        recipe = RECIPES.get(self.recipe) or MEASUREMENTS[self.recipe]
        return self.changed.get(key, str(getattr(recipe.presets[self.preset].study, key, "")))

    @property
    def task(self) -> str:
        """The task of a study on sequences, "" for others, which have one."""
        return self.setting("task") if self.recipe in ("002-table6", "003-sequences") else ""

    @property
    def link(self) -> str:
        """Links to its page and to those that its other cells are from, as the pages of the results have them."""
        steps = f"{int(self.changed['steps']):,} steps" if "steps" in self.changed else ""
        named = ", ".join(filter(None, (self.recipe, self.task, f"preset {self.preset}", steps)))
        others: dict[str, list[Record]] = {}
        for cell in self.cells:
            if "report" in cell:
                others.setdefault(cell["report"], []).append(cell)
        links = [f"[{named}](../reports/{self.name}/summary.md)"]
        links += [f"{self._what(cells)} from [{name}](../reports/{name}/summary.md)" for name, cells in others.items()]
        return "; ".join(links)

    def _what(self, cells: Sequence[Record]) -> str:
        """What cells of another report add: seeds of variants that this one has, or variants."""
        own = {cell["variant"] for cell in self.cells if "report" not in cell}
        seeds = dict.fromkeys(cell["seed"] for cell in cells if cell["variant"] in own)
        added = dict.fromkeys(cell["point"] or cell["label"] for cell in cells if cell["variant"] not in own)
        return " and ".join([f"seeds {', '.join(seeds)}"] * bool(seeds) + list(added))

    @property
    def busy(self) -> bool:
        """Whether the machine had other work while its cells were trained, so that times are not comparable."""
        cores, loads = self.results[0].get("cores"), [float(cell["load"]) for cell in self.cells if cell.get("load")]
        return bool(cores and loads) and is_busy(statistics.median(loads), int(cores or 0))

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(cell["variant"] for cell in self.cells))

    def first(self, variant: str) -> Record:
        """The first cell of a variant, for what all of them have in common."""
        return next(cell for cell in self.cells if cell["variant"] == variant)

    def report(self, variant: str) -> str:
        """The report that the cells of a variant are from."""
        return self.first(variant).get("report", self.name)

    def label(self, variant: str) -> str:
        return self.first(variant)["label"]

    def numbers(self, variant: str, key: str) -> dict[int, float]:
        """A number of the variant's cells by seed, of those that have it."""
        return {
            int(cell["seed"]): float(cell[key]) for cell in self.cells if cell["variant"] == variant and cell.get(key)
        }

    def spread(self, variant: str, key: str) -> Spread | None:
        numbers = self.numbers(variant, key)
        return Spread.of(list(numbers.values())) if numbers else None

    def ends(self, variant: str, other: str, key: str, gaps: Sequence[float]) -> Ends | None:
        """The interval over seeds and test samples of a variant less another, whose paired differences are `gaps`.

        None where it is not of these: the samples of seeds that another report adds were not drawn with them.
        """
        for row in self.differences:
            pair, ends = (row["variant"], row["baseline"]), (float(row["low_95"]), float(row["high_95"]))
            sign = {(variant, other): 1, (other, variant): -1}.get(pair)
            if sign is None or (row["score"], int(row["seeds"])) != (key, len(gaps)):
                continue
            if math.isclose(sign * float(row["difference"]), statistics.fmean(gaps), rel_tol=1e-6, abs_tol=1e-9):
                return ends if sign == 1 else (-ends[1], -ends[0])
        return None

    def diverged(self, variant: str) -> tuple[int, int]:
        """How many of the variant's cells diverged, of how many."""
        outcomes = [int(cell["diverged"]) for cell in self.cells if cell["variant"] == variant]
        return sum(outcomes), len(outcomes)

    def matching(self, pattern: str) -> list[tuple[str, str]]:
        """The variants that a pattern with at most one * names, each with what the * stands for."""
        return matching(pattern, self.variants)


def matching(pattern: str, names: Sequence[str]) -> list[tuple[str, str]]:
    shape = re.compile(re.escape(pattern).replace(r"\*", "(.+)"))
    found = [(name, shape.fullmatch(name)) for name in names]
    return [(name, match[1] if "*" in pattern else "") for name, match in found if match]


def read_run(folder: Path) -> Run:
    """The report in a folder as it is."""
    return Run(folder.name, *(read_csv(folder / f"{name}.csv") for name in FILES))


def read_runs(reports: Path) -> list[Run]:
    """The reports in a folder by name, without smoke runs, studies that lack cells.csv, and those left out."""
    runs = []
    for path in sorted(reports.glob("*/results.csv")):
        run = read_run(path.parent)
        if run.name in LEFT_OUT:
            continue
        if run.results[0]["is_result"] == "True" and (run.cells or run.recipe in MEASUREMENTS):
            runs.append(run)
    whole = united(runs)
    return [with_shared(run, whole) for run in whole]


def united(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of one study as one: the whole one or its part with the baselines, with the cells and curves that
    the others add to it.

    A study is a recipe, a preset, data and settings, but for CHOICES and seeds. Reports without a checksum of their
    data stay alone.
    """
    studies: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        data = run.results[0].get("data_checksum", "")
        study = run.recipe, run.preset, data or run.name, *sorted(f"{k}={v}" for k, v in _settings(run).items())
        studies.setdefault(study, []).append(run)
    return [functools.reduce(_extended, sorted(parts, key=_rank)) for parts in studies.values()]


def _rank(run: Run) -> tuple[bool, bool]:
    """Less for a run that chose no variants, and for one that has what others are compared with."""
    return not run.changed.keys().isdisjoint(CHOICES), not {*_baselines(run).values()} & {*run.variants}


def _extended(run: Run, other: Run) -> Run:
    def added(mine: Sequence[Record], theirs: Sequence[Record]) -> list[Record]:
        have = {(each["variant"], each["seed"]) for each in mine}
        return [each for each in theirs if (each["variant"], each["seed"]) not in have]

    cells = [{**cell, "report": other.name} for cell in added(run.cells, other.cells)]
    differences = [{**row, "report": other.name} for row in other.differences]
    return replace(
        run,
        cells=[*run.cells, *cells],
        curves=[*run.curves, *added(run.curves, other.curves)],
        differences=[*run.differences, *differences],
    )


def with_shared(run: Run, runs: Sequence[Run]) -> Run:
    """The run with the variants that it lacks and a run of the same models has, of the same preset on the same data,
    and with the floors, of the same seeds, of one that has the same without attention. Baselines are those of the
    recipe, where it has them: a training that chose variants took the first for one.
    """
    shared = [
        {"report": other.name, **cell, "baseline": _baselines(run).get(cell["variant"], cell["baseline"])}
        for other in _alike(run, runs, SAME_MODELS)
        for cell in other.cells
        if cell["variant"] not in run.variants
    ]
    there = {*run.variants, *(cell["variant"] for cell in shared)}
    own = [{**cell, "baseline": _baseline(run, cell, there)} for cell in run.cells]
    seeds = {cell["seed"] for cell in own}
    floors = [
        {"report": other.name, **cell, "baseline": ""}
        for other in _alike(run, runs, FLOORS)
        for cell in other.cells
        if cell["series"] in WITHOUT_SCORES and cell["variant"] not in run.variants and cell["seed"] in seeds
    ]
    return replace(run, cells=[*shared, *own, *floors])


def _baseline(run: Run, cell: Record, there: Container[str]) -> str:
    """That of the recipe if it is there, or the cell has none, else the cell's."""
    named = _baselines(run).get(cell["variant"], "")
    return named if named in there or not cell["baseline"] else cell["baseline"]


def _alike(run: Run, runs: Sequence[Run], recipes: Mapping[str, str]) -> list[Run]:
    """The runs of the recipe that `recipes` has for this one, with the same preset, data and settings."""
    same = ("preset", "data_checksum")
    return [
        other
        for other in runs
        if other.recipe == recipes.get(run.recipe)
        and all(other.results[0].get(key) == run.results[0].get(key) for key in same)
        and _settings(other) == _settings(run)
    ]


def _baselines(run: Run) -> dict[str, str]:
    """The baselines of the recipe's own variants by name: in the report of another recipe they may be others."""
    recipe = RECIPES.get(run.recipe)
    if recipe is None:  # a measurement
        return {}
    return {each.name: each.baseline for each in recipe.variants(recipe.presets[run.preset].study)}


def _settings(run: Run) -> dict[str, str]:
    """The changes of its settings, but for those that choose variants."""
    return {key: value for key, value in run.changed.items() if key not in CHOICES}


FILES = ("results", "cells", "curves", "exact", "differences")
LEFT_OUT = ("000-fig2-activations-cpu",)
"""Reports of one seed and 300 steps, whose cells were read from their page: too little to be evidence."""
