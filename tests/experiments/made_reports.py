"""Reports with made-up numbers: every recipe at its preset for CPUs, in the form in which reports are committed."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnkit_experiments.evidence.measures import MEASURES
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.results import as_csv
from attnkit_experiments.study.overrides import override


def write_cells(reports: Path, recipe: str, cells: Sequence[dict], *, name: str = "", changed: str = "") -> Path:
    """A report of the cells given: each has a variant, a seed and numbers; what is not given is as in most runs."""
    folder = reports / (name or f"{recipe}-cpu")
    folder.mkdir(parents=True)
    about = {"recipe": recipe, "preset": "cpu", "changed": changed, "is_result": True, "cores": 2}
    filled = [
        {"label": cell["variant"], "series": cell["variant"], "point": "", "alpha": "", "baseline": "", "diverged": 0}
        | cell
        for cell in cells
    ]
    (folder / "results.csv").write_text(as_csv([about]))
    (folder / "cells.csv").write_text(as_csv(filled))
    return folder


def cells_of(recipe: str, settings: Iterable[str] = (), seeds: Iterable[int] = (0, 1, 2)) -> list[dict]:
    """Cells of the variants of a recipe, with random numbers for everything that claims are about."""
    rng = random.Random(recipe)
    made, preset = RECIPES[recipe], RECIPES[recipe].presets["cpu"]
    centre = {"accuracy": 0.6, "bleu": 30.0, "bits_per_byte": 2.0}.get(made.domain.measure.key, 1.0)
    cells = []
    for variant in made.variants(override(preset.study, settings)):
        better = rng.gauss(0, 0.02)
        for seed in seeds:
            numbers = {key: rng.uniform(0.4, 0.6) for key in MEASURES}
            numbers[made.domain.measure.key] = numbers["bleu_tokenised"] = centre * (1 + better + rng.gauss(0, 0.005))
            about = {key: getattr(variant, key) for key in ("label", "series", "point", "alpha", "baseline")}
            cells.append({"variant": variant.name} | about | {"seed": seed, "diverged": 0} | numbers)
    return cells


def write_everything(reports: Path) -> Path:
    """A report of every recipe that trains, of the tasks and settings that claims need, and of what is measured."""
    for recipe in RECIPES:
        folder = write_cells(reports, recipe, cells_of(recipe))
        write_curves(folder, cells_of(recipe))
    for recipe in ("002-table6", "003-sequences"):
        for task in ("text", "image"):
            write_cells(reports, recipe, cells_of(recipe), name=f"{recipe}-{task}-cpu", changed=f"task={task}")
    many = ("activations=relu,relu_squared,gelu,softplus,identity",)
    write_cells(reports, "000-fig2", cells_of("000-fig2", many), name="000-fig2-many-cpu", changed=many[0])
    squared = ("activations=relu_squared",)
    for recipe in ("000-fig3", "000-fig4"):
        write_cells(reports, recipe, cells_of(recipe, squared), name=f"{recipe}-squared-cpu", changed=squared[0])
    write_exact(reports / "000-fig2-cpu")
    for recipe, rows in measured().items():
        folder = reports / f"{recipe}-cpu"
        folder.mkdir()
        preset = "cpu" if "cpu" in MEASUREMENTS[recipe].presets else "paper"
        about = {"recipe": recipe, "preset": preset, "changed": "", "is_result": True}
        (folder / "results.csv").write_text(as_csv([about | row for row in rows]))
    return reports


def write_curves(folder: Path, cells: Sequence[dict]) -> None:
    rows = [
        {"variant": cell["variant"], "seed": cell["seed"], "step": step, "loss": 3 - step / 100}
        for cell in cells
        for step in (10, 50, 100)
    ]
    (folder / "curves.csv").write_text(as_csv(rows))


def write_exact(folder: Path, off: float = 0.001) -> None:
    rows = [
        {"statement": statement, "of": of, "measured": expected + off, "expected": expected}
        for statement, of, expected in (("weights", "relu, α = 1", -1.0), ("variance", "relu", 1.0))
    ]
    (folder / "exact.csv").write_text(as_csv(rows))


def measured() -> dict[str, list[dict]]:
    """Rows of what is measured without training."""
    rows: dict[str, list[dict]] = {}
    for recipe, measurement in MEASUREMENTS.items():
        preset = measurement.presets.get("cpu") or measurement.presets["paper"]
        rows[recipe] = [numbers_of(recipe, dict(item)) for item in measurement.items(preset.study)]
    return rows


def numbers_of(recipe: str, row: dict) -> dict:
    if recipe in ("002-fig1b", "003-decoding"):
        quadratic = row["method"] in ("transformer", "softmax", "relu")
        power = {"002-fig1b": 2 if quadratic else 1, "003-decoding": 1 if quadratic else 0}[recipe]
        return row | {"bytes": 1e3 * row["tokens"] ** power, "ms": row["tokens"] ** (power / 2), "note": ""}
    if recipe == "003-memory":
        expected = 256.0 * row["tokens"] * (64 if "sums" in row["method"] else 1)
        sizes = dict.fromkeys(("layer_bytes", "expected_bytes", "bytes"), expected)
        return row | sizes | {"formula": "n·e", "ms": 1.0, "took": "native"}
    if recipe == "003-future":
        mixed = row["method"] in ("linformer", "nystrom", "soft", "sima")
        refused = f"{row['method']}_attention: unexpected argument 'causal'" if mixed else ""
        return row | {"change": 1.0, "causal_change": "" if mixed else 0.0, "refused": refused}
    if recipe == "002-halving":
        return row | {"n": 0 if row["spread"] > 2 else "", "spectral_n": 0}
    return row | {"parameters": 1e6 * row["paper_parameters"] + 1, "without_inverse": 1e9 * (row["paper_flops"] or 0)}
