"""What a report has as CSV beside the means of results.csv: every cell, thinned curves, the exact statements."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.report.claims import slope
from attnkit_experiments.report.results import StudyResults
from attnkit_experiments.study.stored import read_analysis

CURVE_LINES = 300
"""About so many lines of curves.csv, of all cells together."""


def cells(study: StudyResults) -> list[dict[str, Any]]:
    """A record for every trained cell: what it is, and every number of its result."""
    return [
        {"variant": line.name}
        | {key: line.variant[key] for key in ("label", "series", "point", "alpha", "baseline")}
        | {"seed": seed, "diverged": int(seed in line.diverged)}
        | numbers(line.results.get(seed, {}))
        | concentration(folder)
        for line in study.lines
        for seed, folder in line.folders.items()
    ]


def with_numbers(study: StudyResults) -> StudyResults:
    """The study, whose results have the numbers of cells.csv too."""
    lines = (
        replace(line, results={s: r | numbers(r) | concentration(line.folders[s]) for s, r in line.results.items()})
        for line in study.lines
    )
    return replace(study, lines=tuple(lines))


def numbers(result: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a result: single ones as they are, lists in short.

    Rows of layers become their mean over layers, None where a layer has none; learned scales mean, lowest and highest;
    residuals those of the last step in the worst stage; exact statistics the largest error over lengths.
    """
    flat: dict[str, float | None] = {}
    for key, value in result.items():
        if key == "seed":
            continue
        if value is None or isinstance(value, int | float):
            flat[key] = value
        elif isinstance(value, dict):
            flat |= {f"{key}_{name}": each for name, each in value.items() if isinstance(each, int | float)}
        elif key in ("layers", "initial_layers") and value:
            names = (name for name in value[0] if name != "name")
            flat |= {f"{_before(key)}{name}": _mean(row[name] for row in value) for name in names}
        elif key == "learned" and value:
            every = [number for layer in value for number in layer]
            flat |= {"learned": _mean(every), "learned_lowest": min(every), "learned_highest": max(every)}
        elif key in ("residuals", "initial_residuals") and value:
            flat |= {f"{key}_{name}": max(stage[name][-1] for stage in value) for name in ("median", "largest")}
        elif key == "exact" and value:
            flat |= {name: max(abs(row[name]) for row in value) for name in ("row_sum_errors", "variance_errors")}
    return flat


def concentration(folder: Path) -> dict[str, float | None]:
    """Means over layers of the share that the largest p % hold, of slots and of weights of attention, of a translation
    model.
    """
    if not (folder / "analysis.json").exists():
        return {}
    analysis = read_analysis(folder)
    attention = [layer["concentration"] for name, layer in analysis["layers"].items() if name not in analysis["slots"]]
    flat: dict[str, float | None] = {}
    for kind, layers in (("slots", list(analysis["slots"].values())), ("attention", [x for x in attention if x])):
        flat |= {f"{kind}_top_{p}": _mean(layer[p] for layer in layers) for p in (layers[0] if layers else ())}
    return flat


def curves(study: StudyResults) -> list[dict[str, Any]]:
    """Loss and gradient norm as means over stretches of steps, each at its last step, and evaluations between them."""
    places = [(line.name, seed, folder) for line in study.lines for seed, folder in line.folders.items()]
    each = max(CURVE_LINES // len(places), 8)
    return [
        {"variant": name, "seed": seed} | {key: f"{value:.6g}" for key, value in row.items() if value is not None}
        for name, seed, folder in places
        for row in thinned(read_metrics(folder / "metrics.jsonl"), each)
    ]


def thinned(rows: Sequence[Mapping[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """At most `count` records, of evaluation at most half of them; the last of training and of evaluation are there."""
    evaluations = _parts([row for row in rows if "evaluation" in row], count // 2)
    for part in _parts([row for row in rows if "loss" in row], count - len(evaluations)):
        means = {key: _mean(row[key] for row in part) for key in ("loss", "grad_norm")}
        yield {"step": part[-1]["step"]} | means
    for part in evaluations:
        yield {"step": part[-1]["step"]} | numbers(part[-1]["evaluation"])


def _parts(rows: Sequence[Any], count: int) -> list[Sequence[Any]]:
    stretch = -(-len(rows) // count)
    return [rows[max(end - stretch, 0) : end] for end in range(len(rows), 0, -stretch)][::-1] if rows else []


def exact(claims: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The exact statements (`report.claims`) as slopes against the length: measured and expected."""
    flat = slope([row["n"] for row in claims["variance"]], [row["reluformer"] for row in claims["variance"]])
    slopes = [
        *(("weights", f"{row['activation']}, α = {row['alpha']:g}", row["slope"], -row["alpha"])
          for row in claims["weights"]),
        ("variance", "relu", claims["variance_slope"], 1.0),
        ("variance", "reluformer", flat, 0.0),
    ]  # fmt: skip
    return [dict(zip(("statement", "of", "measured", "expected"), each, strict=True)) for each in slopes]


def _before(key: str) -> str:
    return "initial_" if key.startswith("initial_") else ""


def _mean(values: Iterable[float | None]) -> float | None:
    given = list(values)
    found = [value for value in given if value is not None]
    return statistics.fmean(found) if found and len(found) == len(given) else None
