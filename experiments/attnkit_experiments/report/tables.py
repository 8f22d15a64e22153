"""What a report has as CSV beside the means of results.csv: cells, curves, the exact statements, numbers of figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.report.claims import slope
from attnkit_experiments.report.results import StudyResults, concentration

CURVE_LINES = 300
"""About so many lines of curves.csv, of all cells together."""


def cells(study: StudyResults) -> list[dict[str, Any]]:
    """A record for every trained cell: what it is, and every number of its result."""
    missing = study.uninspected
    return [
        {"variant": line.name}
        | {key: line.variant[key] for key in ("label", "series", "point", "alpha", "baseline")}
        | {"seed": seed, "diverged": int(seed in line.diverged)}
        | ({"uninspected": int(folder.name in missing)} if missing else {})
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


def losses(study: StudyResults) -> list[dict[str, Any]]:
    """The learning curves that a page draws: means of the training loss around steps, and their sd over seeds."""
    return [
        {"variant": line.name, "step": f"{step:g}", "mean": f"{mean:.6g}", "sd": "" if sd is None else f"{sd[n]:.6g}"}
        for line in study.lines
        if line.results
        for x, means, sd in [line.loss_curve()]
        for n, (step, mean) in enumerate(zip(x, means, strict=True))
    ]


def norms(study: StudyResults) -> list[dict[str, Any]]:
    """The norms of gradients that a page of translations draws."""
    return [
        {"variant": line.name, "step": f"{step:g}", "norm": f"{norm:.6g}"}
        for line in study.lines
        for step, norm in zip(*line.norm_curve(), strict=True)
    ]


def layers(study: StudyResults) -> list[dict[str, Any]]:
    """Entropy of rows over log n in each layer, after training and before it, over seeds, where rows have one."""
    return [
        {"variant": line.name, "layer": number + 1}
        | {"entropy_share_mean": f"{after.mean:.6g}", "entropy_share_sd": "" if after.sd is None else f"{after.sd:.6g}"}
        | {"initial_entropy_share_mean": f"{before.mean:.6g}"}
        for line in study.lines
        if line.results
        for number, (after, before) in enumerate(
            zip(line.layers("entropy_share") or (), line.layers("entropy_share", initial=True) or (), strict=False)
        )
    ]


def residuals(study: StudyResults) -> list[dict[str, Any]]:
    """Residuals of the inverse's iterations, first seed: after each step in each stage."""
    return [
        {"variant": line.name, "stage": stage + 1, "step": step} | {key: f"{trace[key][step]:.6g}" for key in trace}
        for line in study.lines
        if line.results
        for stage, trace in enumerate(line.residual_curves())
        for step in range(len(trace["median"]))
    ]


def differences(study: StudyResults) -> list[dict[str, Any]]:
    """Differences to the baseline that have an interval over seeds and test samples, beside Student's over seeds."""
    return [
        {"variant": line.name, "baseline": line.variant["baseline"], "score": name}
        | {"difference": gap.mean, "student_95": gap.half_width}
        | {"low_95": tested.low, "high_95": tested.high, "seeds": tested.seeds, "samples": tested.samples}
        for name, found in study.tested.items()
        for line in study.lines
        if (tested := found.get(line.name)) and (gap := study.difference(line, name))
    ]


FIGURES = {
    "losses": ("training loss against step", losses),
    "norms": ("norm of the gradient", norms),
    "layers": ("entropy of the attention weights per layer", layers),
    "residuals": ("residual of Newton's iteration", residuals),
}
"""The numbers of figures that no other table has: the file by how the description of its figure begins."""


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
