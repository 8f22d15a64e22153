"""Committed reports, read from their CSVs alone."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.results import is_busy, read_csv
from attnkit_experiments.report.statistics import Spread

Record = Mapping[str, str]

SAME_MODELS = {"001-fig1": "001-fig3", "001-fig2": "001-fig1", "001-fig3": "001-fig1"}
"""Recipes by the one that trains some of their cells too: a run takes those that it lacks from there."""


@dataclass(frozen=True)
class Run:
    """A report: `results` are the records of results.csv, `cells`, `curves` and `exact` those of the other files.

    Cells that another report has, with the same models, have its name as "report".
    """

    name: str
    results: Sequence[Record]
    cells: Sequence[Record] = ()
    curves: Sequence[Record] = ()
    exact: Sequence[Record] = ()

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
        others: dict[str, list[str]] = {}
        for cell in self.cells:
            if "report" in cell:
                points = others.setdefault(cell["report"], [])
                points += [cell["point"]] if cell["point"] not in points else []
        links = [f"[{named}](../reports/{self.name}/summary.md)"]
        links += [
            f"{' and '.join(points)} from [{report}](../reports/{report}/summary.md)"
            for report, points in others.items()
        ]
        return "; ".join(links)

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


def read_runs(reports: Path) -> list[Run]:
    """The reports in a folder by name, without smoke runs, studies that lack cells.csv, and those left out."""
    runs = []
    for path in sorted(reports.glob("*/results.csv")):
        run = Run(path.parent.name, *(read_csv(path.parent / f"{name}.csv") for name in FILES))
        if run.name in LEFT_OUT:
            continue
        if run.results[0]["is_result"] == "True" and (run.cells or run.recipe in MEASUREMENTS):
            runs.append(run)
    return [with_shared(run, runs) for run in runs]


def with_shared(run: Run, runs: Sequence[Run]) -> Run:
    """The run with the variants that it lacks and a run of the same models has, of the same preset on the same data."""
    same = ("preset", "data_checksum")
    shared = [
        {**cell, "report": other.name}
        for other in runs
        if other.recipe == SAME_MODELS.get(run.recipe)
        and all(other.results[0].get(key) == run.results[0].get(key) for key in same)
        and _changed(other) == _changed(run)
        for cell in other.cells
        if cell["variant"] not in run.variants
    ]
    return replace(run, cells=[*shared, *run.cells])


def _changed(run: Run) -> dict[str, str]:
    """The changes of its settings, but for that of the sizes trained."""
    return {key: value for key, value in run.changed.items() if key != "sizes"}


FILES = ("results", "cells", "curves", "exact")
LEFT_OUT = ("000-fig2-activations-cpu",)
"""Reports of one seed and 300 steps, whose cells were read from their page: too little to be evidence."""
