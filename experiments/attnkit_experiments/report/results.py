"""Read a study's directory: cells, statistics over seeds, paired differences."""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from attnkit_experiments.engine.arrays import Arrays, conform_arrays
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.outcomes import read_outcomes
from attnkit_experiments.report.claims import Claims, read_claims
from attnkit_experiments.report.samples import Tested, differences
from attnkit_experiments.report.statistics import Difference, Spread
from attnkit_experiments.study.recipe import Domain
from attnkit_experiments.study.stored import MAPS_FILE, read_analysis, read_result, read_trained


@dataclass(frozen=True)
class Line:
    """One variant with the results of its seeds."""

    variant: dict[str, Any]
    results: dict[int, dict[str, Any]]  # by seed, finished and not diverged
    diverged: dict[int, str]
    folders: dict[int, Path]

    @property
    def name(self) -> str:
        return str(self.variant["name"])

    @property
    def label(self) -> str:
        return str(self.variant["label"])

    @property
    def first(self) -> dict[str, Any]:
        return next(iter(self.results.values()))

    @property
    def first_cell(self) -> Path:
        """The folder of the first seed that has finished."""
        return self.folders[next(iter(self.results))]

    def has(self, key: str) -> bool:
        """Whether every seed has this number."""
        return bool(self.results) and all(key in result for result in self.results.values())

    def over_seeds(self, key: str) -> Spread:
        return Spread.of([result[key] for result in self.results.values()])

    def step_ms(self) -> float:
        """Median over seeds of the median step: a busy machine slows single runs."""
        return statistics.median(result["step_ms"] for result in self.results.values())

    def scores(self, key: str) -> list[tuple[float, float]]:
        """(seconds of training, a number of the evaluation), means over seeds; seconds are steps × the median step.

        Errors: UserError where seeds were not evaluated after the same steps.
        """
        seeds, expected = [], None
        for seed, result in self.results.items():
            path = self.folders[seed] / "metrics.jsonl"
            rows = [row for row in read_metrics(path) if key in row.get("evaluation", ())]
            steps = [row["step"] for row in rows]
            if steps != (expected := steps if expected is None else expected):
                raise UserError(f"{path}: has {key} after the steps {steps}, another seed after {expected}")
            seeds.append([(row["step"] * result["step_ms"] / 1000, row["evaluation"][key]) for row in rows])
        return [
            (statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each))
            for each in zip(*seeds, strict=True)
        ]

    def core_hours(self) -> float:
        """Training hours times GPUs, or threads of a CPU (big_vision counts TPU cores this way).

        Steps × the median step, mean over seeds, so that a pause does not count.
        """
        return self.over_seeds("core_hours").mean

    def layers(self, key: str, *, initial: bool = False) -> list[Spread] | None:
        """A row statistic per layer over seeds; None where it is not defined."""
        rows = [result["initial_layers" if initial else "layers"] for result in self.results.values()]
        if any(layer[key] is None for layers in rows for layer in layers):
            return None
        return [Spread.of([layers[i][key] for layers in rows]) for i in range(len(rows[0]))]

    def losses(self) -> list[list[float]]:
        """Training loss per step, a list per seed."""
        return [self._of_steps(seed, "loss") for seed in self.results]

    def loss_curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Steps, the training loss around them as means over about 30 stretches and the seeds, and its standard
        deviation over seeds, None for one.
        """
        steps, means = stretches(np.array(self.losses()), 30)
        return steps, means.mean(0), means.std(0, ddof=1) if len(means) > 1 else None

    def norm_curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and the norm of the gradient around them as means over about 60 stretches, of the first seed, or of
        one that diverged.
        """
        return stretches(np.array(self._of_steps(next(iter(self.results or self.diverged)), "grad_norm")), 60)

    def _of_steps(self, seed: int, key: str) -> list[float]:
        return [row[key] for row in read_metrics(self.folders[seed] / "metrics.jsonl") if key in row]

    def residual_curves(self) -> list[dict[str, list[float]]]:
        """Residuals of the first seed's iterations by stage: median and largest after each step, and the median before
        training; none for other models.
        """
        return [
            after | {"initial": before["median"]}
            for after, before in zip(
                self.first.get("residuals", ()), self.first.get("initial_residuals", ()), strict=True
            )
        ]

    def shares(self, kind: str) -> dict[float, float]:
        """The share that the largest p % hold, of slots or of weights of attention: means over layers, first seed."""
        found = concentration(self.first_cell)
        return {float(key.rpartition("_")[2]): value for key, value in found.items() if key.startswith(f"{kind}_top_")}


def concentration(folder: Path) -> dict[str, float]:
    """Means over layers of the share that the largest p % hold, of slots and of weights of attention, of a translation
    model.
    """
    if not (folder / "analysis.json").exists():
        return {}
    analysis = read_analysis(folder)
    attention = [layer["concentration"] for name, layer in analysis["layers"].items() if name not in analysis["slots"]]
    flat: dict[str, float] = {}
    for kind, layers in (("slots", list(analysis["slots"].values())), ("attention", [x for x in attention if x])):
        flat |= {f"{kind}_top_{p}": statistics.fmean(each[p] for each in layers) for p in (layers[0] if layers else ())}
    return flat


def stretches(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values (..., steps) averaged over about `count` stretches of steps: the middles of those, and the means."""
    stretch = max(values.shape[-1] // count, 1)
    usable = values.shape[-1] // stretch * stretch
    means = values[..., :usable].reshape(*values.shape[:-1], -1, stretch).mean(-1)
    return (np.arange(means.shape[-1]) + 0.5) * stretch, means


@dataclass(frozen=True)
class StudyResults:
    """The contents of the report."""

    about: dict[str, Any]
    lines: tuple[Line, ...]  # variants with at least one finished cell
    claims: Claims | None
    missing: tuple[str, ...]
    machines: int = 1  # of different kinds, on which the cells were trained

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """What evaluated which `cells` anew: study.json has one, folders that are read as one have several."""
        by = self.about.get("evaluated", [])
        return by if isinstance(by, list) else [by | {"cells": self.about["cells"]}]

    @property
    def preset(self) -> str:
        return str(self.about["preset"])

    @property
    def label(self) -> str:
        """The label of every number: the preset, and its changes."""
        return label(self.about)

    @property
    def smoke(self) -> bool:
        return self.preset == "smoke"

    @property
    def uninspected(self) -> dict[str, str]:
        """Trained cells whose inspection failed, and why."""
        return {
            line.folders[seed].name: result["uninspected"]
            for line in self.lines
            for seed, result in line.results.items()
            if "uninspected" in result
        }

    def inspected(self) -> StudyResults:
        """The study without these cells, for the figures of what inspection measures."""
        lines = (
            dataclasses.replace(line, results={s: r for s, r in line.results.items() if "uninspected" not in r})
            for line in self.lines
        )
        return dataclasses.replace(self, lines=tuple(line for line in lines if line.results or line.diverged))

    def load(self) -> float:
        """The machine's load average while the cells were trained, median over them."""
        return statistics.median(result["load"] for line in self.lines for result in line.results.values())

    def load_text(self) -> str:
        """A note on how reliable the times are."""
        if self.machines > 1:
            return f"Trained on {self.machines} different machines, so the times are not comparable."
        cores = self.about["environment"]["cores"]
        text = f"Load average {self.load():.1f} on {cores} cores"
        if is_busy(self.load(), cores):
            return f"{text}: the machine had other work, so the times are not comparable."
        return f"{text}."

    def by_name(self, name: str) -> Line | None:
        return next((line for line in self.lines if line.name == name), None)

    def difference(self, line: Line, key: str) -> Difference | None:
        """`line` minus its baseline in `key` of their results, over the seeds that both have."""
        baseline = self.by_name(line.variant["baseline"])
        if baseline is None:
            return None
        shared = [seed for seed in line.results if seed in baseline.results]
        if not shared:
            return None
        return Difference.of([line.results[seed][key] - baseline.results[seed][key] for seed in shared])

    @cached_property
    def tested(self) -> dict[str, dict[str, Tested]]:
        """Intervals of differences to the baseline over seeds and test samples, by score and variant."""
        kept = {
            (line.name, seed): read_outcomes(line.folders[seed], result)
            for line in self.lines
            for seed, result in line.results.items()
        }
        return differences(kept, {line.name: line.variant["baseline"] for line in self.lines})

    def step_ratio(self, line: Line) -> float | None:
        baseline = self.by_name(line.variant["baseline"])
        return line.step_ms() / baseline.step_ms() if baseline else None


def is_busy(load: float, cores: int) -> bool:
    """Whether a load average means that trainings had to wait for other work."""
    return load > cores + 0.5


def label(about: Mapping[str, Any]) -> str:
    """The preset of a study.json, and its changes."""
    settings = " ".join(about["settings"])
    return f"preset {about['preset']}" + (f", changed: {settings}" if settings else "")


def command(about: Mapping[str, Any]) -> str:
    """The command that trains or measures what a study.json describes; DATA and DIR are places of the reader's."""
    words = [f"python -m experiments run {about['recipe']} --preset {about['preset']}"]
    words += [f"--set {word}" for word in about["settings"]]
    if "data" in about:
        words.append(f"--data DATA --seeds {' '.join(map(str, about['study']['seeds']))}")
    if about["device"] == "cpu":
        words.append(f"--threads {about['environment']['threads']}")
    return " ".join([*words, "--out DIR"])


def read_maps(lines: Sequence[Line], kinds: Mapping[str, str]) -> list[Arrays]:
    """The arrays that the inspections of the lines' first cells have left for figures, of `kinds` as `conform_arrays`
    takes them, in which a capital stands for the same length in all cells; UserError if there are none.
    """
    stored: list[Arrays] = []
    shared: dict[str, int] = {}
    for line in lines:
        path, lengths = line.first_cell / MAPS_FILE, dict(shared)
        try:
            maps = load_file(path)
            conform_arrays(maps, kinds, lengths)
            if not all(lengths.values()):
                raise ValueError("an array without entries")
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as arrays ({error})") from None
        shared = {word: length for word, length in lengths.items() if word.isupper()}
        stored.append(maps)
    return stored


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV, with a column for every key."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The records of a CSV, none where there is no such file."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def read_study(folder: Path, domain: Domain | None = None) -> StudyResults:
    """The study in `folder`, whose results have the numbers of `domain`; UserError if there is none or no cell has
    finished.
    """
    about = read_trained(folder)
    cores = about["environment"]["processes"] * (about["environment"]["threads"] if about["device"] == "cpu" else 1)
    missing, lines = [], []
    for variant in about["variants"]:
        results: dict[int, dict[str, Any]] = {}
        diverged: dict[int, str] = {}
        folders: dict[int, Path] = {}
        for seed in about["study"]["seeds"]:
            path = folder / "cells" / f"{variant['name']}-seed{seed}" / "result.json"
            if not path.exists():
                missing.append(path.parent.name)
                continue
            result = read_result(path.parent, domain)
            folders[seed] = path.parent
            if "diverged" in result:
                diverged[seed] = result["diverged"]
            else:
                result["core_hours"] = cores * result["steady_seconds"] / 3600
                results[seed] = result
        if folders:
            _require_alike(folders, results)
            lines.append(Line(variant, results, diverged, folders))
    if not any(line.results for line in lines):
        raise UserError(f"{folder}: no cell has finished yet; python -m experiments run ... --resume continues it")
    claims = folder / "claims.json"
    return StudyResults(about, tuple(lines), read_claims(claims) if claims.exists() else None, tuple(missing))


def _require_alike(folders: Mapping[int, Path], results: Mapping[int, Mapping[str, Any]]) -> None:
    """UserError for lists, such as one of layers, that are not as long in every cell of a variant."""
    expected: dict[str, int] = {}
    for seed, result in results.items():
        found = {name: len(value) for name, value in result.items() if isinstance(value, list)}
        for name in expected.keys() & found.keys():
            if found[name] != expected[name]:
                raise UserError(
                    f"{folders[seed] / 'result.json'}: {name} has {found[name]} entries, that of another seed "
                    f"{expected[name]}"
                )
        expected |= found
