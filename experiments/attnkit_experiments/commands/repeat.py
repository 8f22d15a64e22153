"""`repeat REPORT`: a cell of a published report trained again from scratch, and every number of the two compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit_experiments.commands.cells import run_cell
from attnkit_experiments.commands.opening import Opened, Request, open_study, prepare
from attnkit_experiments.commands.queue import alone_in
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.files import write_text
from attnkit_experiments.engine.preemption import listening
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.speed import RATES
from attnkit_experiments.engine.train import reproducible
from attnkit_experiments.engine.world import ALONE, World
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report.results import as_csv, read_csv
from attnkit_experiments.report.statistics import Spread
from attnkit_experiments.report.tables import concentration, numbers
from attnkit_experiments.study.recipe import Measure

TIMES = {
    "seconds", "step_ms", "steady_seconds", "core_hours", "load", "decode_seconds", "sentences_per_second",
    "full_training_rate", "full_prediction_rate", "full_memory", *RATES,
}  # fmt: skip
"""Columns that differ from run to run on the same machine."""
SHOWN = 10


@dataclass(frozen=True)
class Published:
    """A report and one of its cells, as their CSVs have them."""

    report: str
    study: Mapping[str, str]
    cells: Sequence[Mapping[str, str]]
    cell: Mapping[str, str]

    @property
    def name(self) -> str:
        return name_of(self.cell)

    def request(self, data: str | None, **where: Any) -> Request:
        """What trains this cell alone; `where` are the fields of `Request` that the report leaves open."""
        recipe = RECIPES[self.study["recipe"]]
        return Request(
            recipe.id,
            self.study["preset"],
            data=data if data is not None else recipe.domain.source(),
            settings=tuple(self.study["changed"].split()),
            seeds=(int(self.cell["seed"]),),
            threads=int(self.study["threads"]),
            **where,
        )


@dataclass(frozen=True)
class Comparison:
    """The numbers of a cell as published and as trained again, as texts, which hold every bit."""

    published: Published
    again: Mapping[str, str]
    measure: Measure
    environment: Mapping[str, Any]  # of the second training

    @property
    def compared(self) -> list[str]:
        return [key for key in self.again if key in self.published.cell]

    @property
    def differing(self) -> list[str]:
        return [key for key in self.compared if self.published.cell[key] != self.again[key]]

    def spread(self) -> Spread:
        """The headline of the report's seeds of this variant."""
        variant, key = self.published.cell["variant"], self.measure.key
        return Spread.of(
            [float(cell[key]) for cell in self.published.cells if cell["variant"] == variant and cell[key]]
        )

    @property
    def within(self) -> bool | None:
        """Whether the headline is equal, or within two standard deviations of the seeds; None if one seed cannot say.

        A cell that diverged has no headline: that it diverged again is what is compared.
        """
        old, new = (cell.get(self.measure.key, "") for cell in (self.published.cell, self.again))
        if old == new or not (old and new):
            return old == new
        sd = self.spread().sd
        return None if sd is None else abs(float(new) - float(old)) <= 2 * sd

    def text(self) -> str:
        name, count = f"{self.published.report}: {self.published.name}", len(self.compared)
        if not self.differing:
            return f"{name}: all {count} numbers are equal, bit for bit; times are not compared"
        places = place(self.published.study), place(self.environment)
        where = "; both" if places[0] == places[1] else f"; published from {places[0]}, repeated"
        lines = [
            f"{name}: {count - len(self.differing)} of {count} numbers are equal, bit for bit{where} on {places[1]}"
        ]
        lines += [
            f"    {key}: {self.published.cell[key]} published, {self.again[key]}" for key in self.differing[:SHOWN]
        ]
        if len(self.differing) > SHOWN:
            lines.append(f"    and {len(self.differing) - SHOWN} more")
        verdict = {True: "within", False: "not within", None: "one seed has no"}[self.within]
        spread = self.spread().text(self.measure.digits, self.measure.factor)
        return "\n".join([*lines, f"    {self.measure.name}: {verdict} two standard deviations of the seeds, {spread}"])

    def record(self) -> dict[str, str]:
        """A line of the table of repeated cells."""
        old, new = (cell.get(self.measure.key, "") for cell in (self.published.cell, self.again))
        return {
            "report": self.published.report, "cell": self.published.name, "measure": self.measure.key,
            "published": old, "repeated": new, "equal": str(len(self.compared) - len(self.differing)),
            "numbers": str(len(self.compared)), "published_on": place(self.published.study),
            "repeated_on": place(self.environment),
        }  # fmt: skip


def place(environment: Mapping[str, Any]) -> str:
    """Processor, torch, and the level of attnkit's library for CPUs."""
    level = environment.get("native") or "not recorded"
    return f"{environment['device']}, torch {environment['torch']}, CPU library {level}"


def name_of(cell: Mapping[str, str]) -> str:
    return f"{cell['variant']}-seed{cell['seed']}"


def published(report: Path, name: str) -> Published:
    """A cell of a report by name, "" for its first; UserError if there is none."""
    study, cells = read_csv(report / "results.csv"), read_csv(report / "cells.csv")
    if not study or not cells:
        raise UserError(f"{report}: holds no report of trained cells, which are results.csv and cells.csv")
    if study[0]["recipe"] not in RECIPES:
        raise unknown("recipe", study[0]["recipe"], RECIPES)
    named = {name_of(cell): cell for cell in cells}
    if name and name not in named:
        raise unknown(f"cell of {report}", name, named)
    return Published(report.name, study[0], cells, named[name] if name else cells[0])


def repeat(report: Path, name: str, data: str | None, where: Mapping[str, Any]) -> Comparison:
    """Train a cell of a report anew in `where["out"]`, or continue there; UserError if the data or the number of steps
    are others than the report's.
    """
    public = published(report, name)
    request = public.request(data, **where, resume=(where["out"] / "study.json").exists())
    with listening() as stop, alone_in(request.out, ALONE):
        study = open_study(request, ALONE, prepare(request))
        require_same_data(public, study)
        cell = next((cell for cell in study.cells if cell.name == public.name), None)
        if cell is None:
            raise unknown(f"cell of {study.recipe.id}", public.name, [cell.name for cell in study.cells])
        if str(cell.train.steps) != public.cell["steps"]:
            steps = f"{public.cell['steps']} steps were published, {cell.train.steps} are its settings now"
            raise UserError(f"{public.report}: the preset has changed since: {steps}")
        study = dataclasses.replace(study, keep_going=True)
        with reproducible(study.threads, study.deterministic):
            result = run_cell(study, cell, World(stop=stop), label=cell.name)
    every = {"diverged": int("diverged" in result)} | numbers(result) | concentration(study.folder(cell))
    again = {key: "" if value is None else str(value) for key, value in every.items() if key not in TIMES}
    return Comparison(public, again, study.recipe.domain.measure, study.about["environment"])


def require_same_data(public: Published, study: Opened) -> None:
    old, new = public.study["data_checksum"], study.about["data"]["checksum"]
    if old != new:
        raise UserError(f"{public.report}: was trained on data with checksum {old}; --data has {new}")


def add_record(path: Path, comparison: Comparison) -> None:
    """Write a comparison into a CSV of them, in the place of an earlier one of its report."""
    line = comparison.record()
    kept = [row for row in read_csv(path) if row["report"] != line["report"]]
    write_text(path, as_csv(sorted([*kept, line], key=lambda row: row["report"])))
    say(f"written: {path}")
