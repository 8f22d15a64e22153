"""A report that was committed, read from its CSVs as the study that its figures show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.report.claims import read_claims
from attnkit_experiments.report.merging import BETWEEN, MACHINE
from attnkit_experiments.report.results import Line, StudyResults, read_csv
from attnkit_experiments.report.samples import Tested
from attnkit_experiments.report.statistics import Spread
from attnkit_experiments.report.tables import FIGURES

Record = Mapping[str, str]
SAID = ("variant", "label", "series", "point", "alpha", "baseline", "seed", "diverged", "uninspected")
"""Columns of cells.csv that are no numbers of a result."""
FILES = ("curves", *FIGURES)


@dataclass(frozen=True)
class CommittedLine(Line):
    """A variant whose curves are those of the CSVs, in the order of `FILES`."""

    curves: Sequence[Record] = ()
    averaged: Sequence[Record] = ()
    gradients: Sequence[Record] = ()
    by_layer: Sequence[Record] = ()
    iterations: Sequence[Record] = ()

    def loss_curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        steps, means = (np.array([float(row[key]) for row in self.averaged]) for key in ("step", "mean"))
        spreads = [float(row["sd"]) for row in self.averaged if row["sd"]]
        return steps, means, np.array(spreads) if spreads else None

    def norm_curve(self) -> tuple[np.ndarray, np.ndarray]:
        steps, norms = (np.array([float(row[key]) for row in self.gradients]) for key in ("step", "norm"))
        return steps, norms

    def scores(self, key: str) -> list[tuple[float, float]]:
        seeds = [
            [
                (int(row["step"]) * result["step_ms"] / 1000, float(row[key]))
                for row in self.curves
                if row["seed"] == str(seed) and row[key]
            ]
            for seed, result in self.results.items()
        ]
        return [(fmean(x for x, _ in each), fmean(y for _, y in each)) for each in zip(*seeds, strict=True)]

    def layers(self, key: str, *, initial: bool = False) -> list[Spread] | None:
        begin = "initial_" * initial + key
        found = [(row[f"{begin}_mean"], row.get(f"{begin}_sd")) for row in self.by_layer]
        return [Spread(float(mean), float(sd) if sd else None, len(self.results)) for mean, sd in found] or None

    def residual_curves(self) -> list[dict[str, list[float]]]:
        stages = dict.fromkeys(row["stage"] for row in self.iterations)
        return [
            {
                key: [float(row[key]) for row in self.iterations if row["stage"] == stage]
                for key in ("median", "largest", "initial")
            }
            for stage in stages
        ]

    def shares(self, kind: str) -> dict[float, float]:
        begin = f"{kind}_top_"
        return {float(key.removeprefix(begin)): x for key, x in self.first.items() if key.startswith(begin)}


@dataclass(frozen=True)
class CommittedStudy(StudyResults):
    """A study whose intervals over test samples are those of differences.csv."""

    differences: Sequence[Record] = ()

    @cached_property
    def tested(self) -> dict[str, dict[str, Tested]]:
        found: dict[str, dict[str, Tested]] = {}
        for row in self.differences:
            interval = Tested(float(row["low_95"]), float(row["high_95"]), int(row["seeds"]), int(row["samples"]))
            found.setdefault(row["score"], {})[row["variant"]] = interval
        return found


def read_committed(folder: Path) -> CommittedStudy:
    """The study of a committed report; UserError if there are no cells."""
    head, cells = read_csv(folder / "results.csv")[0], read_csv(folder / "cells.csv")
    if not cells:
        raise UserError(f"{folder}: has no cells.csv, from which figures are drawn")
    files = {name: read_csv(folder / f"{name}.csv") for name in FILES}
    lines = []
    for name in dict.fromkeys(cell["variant"] for cell in cells):
        own = [cell for cell in cells if cell["variant"] == name]
        variant: dict[str, Any] = {key: own[0][key] for key in ("label", "series", "point", "baseline")} | {
            "name": name
        }
        variant["alpha"] = float(own[0]["alpha"]) if own[0]["alpha"] else None
        lines.append(
            CommittedLine(
                variant,
                {int(cell["seed"]): _numbers(cell) for cell in own if cell["diverged"] == "0"},
                {int(cell["seed"]): "diverged" for cell in own if cell["diverged"] != "0"},
                {int(cell["seed"]): folder for cell in own},
                *([row for row in rows if row["variant"] == name] for rows in files.values()),
            )
        )
    claims = folder / "claims.json"
    measured = read_claims(claims) if claims.exists() else None
    machines = max(len(head.get(key, "").split(BETWEEN)) for key in MACHINE)
    return CommittedStudy(
        _about(head), tuple(lines), measured, (), machines, differences=read_csv(folder / "differences.csv")
    )


def _numbers(cell: Record) -> dict[str, Any]:
    found: dict[str, Any] = {key: float(value) for key, value in cell.items() if key not in SAID and value}
    return found | ({"uninspected": ""} if cell.get("uninspected") == "1" else {})


def _about(head: Record) -> dict[str, Any]:
    """What results.csv has of study.json, and whether samples of the data are on the page."""
    about: dict[str, Any] = {key: head[key] for key in ("recipe", "preset")}
    cores = head["cores"]
    environment = {"commit": head["commit"], "cores": int(cores) if cores.isdigit() else cores}
    return about | {
        "settings": head["changed"].split(),
        "samples": head.get("samples", "shown"),
        "environment": environment,
    }
