"""The report of a study: a self-contained HTML page, CSVs, and a summary that ends with the page in words.

A repository keeps the summary and the CSVs: the site draws the figures again from these (`evidence.figures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnkit_conformance.report.pages import Markup, render, table
from attnkit_experiments.engine.files import write_text
from attnkit_experiments.engine.progress import many
from attnkit_experiments.report import comparison, plots, summary, tables
from attnkit_experiments.report.claims import SLOPE_TOLERANCE, Claims, hold
from attnkit_experiments.report.findings import conclusions, limits
from attnkit_experiments.report.html import column_head, library_text, render_page
from attnkit_experiments.report.merging import BETWEEN
from attnkit_experiments.report.results import Line, StudyResults, as_csv
from attnkit_experiments.study.recipe import Measure, Recipe

SPEED: dict[str, tuple[str, float, int]] = {
    "tflops_per_s": ("TFLOP/s", 1, 3),
    "mfu": ("MFU, %", 100, 1),
    "input_share": (column_head("waiting for", "input, %"), 100, 1),
    "peak_bytes": (column_head("peak", "memory, GB"), 1e-9, 2),
}
"""Of what a training has of `engine.speed`, the head of its column, a factor, and digits."""


def write_tables(study: StudyResults, recipe: Recipe, folder: Path, *, show_images: bool = True) -> None:
    """Write what a report has as CSV, but for the numbers of figures."""
    shown = {"samples": "shown" if show_images else "hidden"}
    records = [record(study, line, recipe.domain.measure) | shown for line in study.lines if line.results]
    write_text(folder / "results.csv", as_csv(records))
    write_text(folder / "cells.csv", as_csv(tables.cells(study)))
    write_text(folder / "curves.csv", as_csv(tables.curves(study)))
    (folder / "differences.csv").unlink(missing_ok=True)
    if study.tested:
        write_text(folder / "differences.csv", as_csv(tables.differences(study)))
    if study.claims:
        write_text(folder / "exact.csv", as_csv(tables.exact(study.claims)))


def write_page(study: StudyResults, recipe: Recipe, folder: Path, too_small: str, *, show_images: bool = True) -> Path:
    """Write the page, its summary and the numbers of its figures; returns the page. `too_small`: why the study decides
    nothing, "" if it may.
    """
    page = page_of(study, recipe, too_small, show_images=show_images)
    text = summary.as_markdown(study, recipe, too_small, page)
    for name, (description, table_of) in tables.FIGURES.items():
        (folder / f"{name}.csv").unlink(missing_ok=True)
        if f"*Figure: {description}" in text:
            write_text(folder / f"{name}.csv", as_csv(table_of(study.inspected())))
    write_text(folder / "summary.md", text)
    write_text(folder / "report.html", page)
    return folder / "report.html"


def record(study: StudyResults, line: Line, measure: Measure) -> dict[str, Any]:
    """One variant as a flat record; it carries its preset."""
    about, environment = study.about, study.about["environment"]
    scores = line.over_seeds(measure.key)
    difference = study.difference(line, measure.key)
    return {
        "recipe": about["recipe"],
        "preset": study.preset,
        "changed": " ".join(about["settings"]),
        "is_result": not study.smoke,
        "variant": line.name,
        "seeds": " ".join(map(str, line.results)),
        "n": scores.n,
        f"{measure.key}_mean": scores.mean,
        f"{measure.key}_sd": scores.sd,
        **({f"{ema}_mean": line.over_seeds(ema).mean} if (ema := f"{measure.key}_ema") in line.first else {}),
        "difference_mean": difference.mean if difference else None,
        "difference_95": difference.half_width if difference else None,
        **{f"{key}_mean": line.over_seeds(key).mean for key in ("test_loss", "valid_loss") if key in line.first},
        "training_loss_mean": line.over_seeds("last_loss").mean,
        "parameters": line.first["parameters"],
        "tokens": line.first.get("tokens"),
        "flops_per_sample": line.first.get("flops_per_sample"),
        "training_flops": line.first.get("training_flops"),
        "core_hours": line.core_hours(),
        "fewshot_accuracy": line.over_seeds("fewshot_accuracy").mean if line.has("fewshot_accuracy") else None,
        "step_ms": line.step_ms(),
        "seconds_mean": line.over_seeds("seconds").mean,
        **{key: line.over_seeds(key).mean for key in SPEED if line.has(key)},
        "diverged": len(line.diverged),
        "load": study.load(),
        **{key: environment[key] for key in ("commit", "torch", "device", "cores", "threads", "processes")},
        "native": environment.get("native"),  # older studies do not say
        "data_checksum": about["data"]["checksum"],
        **({"evaluated_by": BETWEEN.join(map(str, commits))} if (commits := _evaluated_by(study, line)) else {}),
    }


def page_of(study: StudyResults, recipe: Recipe, too_small: str, *, show_images: bool = True) -> str:
    """The whole page of a study of `recipe`; without `show_images` nothing of the data set is in it."""
    about = study.about
    inspected = study.inspected() if study.uninspected else study
    shown = recipe.domain.sections(inspected, show_images) if plots.trained(inspected) else []
    return render_page(
        "study.html",
        recipe,
        about,
        _device_text(about),
        _facts(study),
        study=study,
        conclusions=conclusions(study, recipe, too_small),
        runs=many(sum(len(line.results) for line in study.lines), "run"),
        uninspected={name: summary.uninspected_text(reason) for name, reason in study.uninspected.items()},
        comparison=comparison.part_of_page(study, recipe),
        sections=shown,
        claims=_claims(study.claims) if study.claims else "",
        limits=limits(study, recipe, too_small, show_images=show_images),
        deviations=about["deviations"],
        speed=_speed(study),
        settings=", ".join(f"{key}={_plain(value)}" for key, value in about["study"].items() if key != "seeds"),
    )


def _claims(claims: Claims) -> Markup:
    alphas = sorted({row["alpha"] for row in claims["weights"]})
    slope_of = {(row["activation"], row["alpha"]): row["slope"] for row in claims["weights"]}
    activations = list(dict.fromkeys(row["activation"] for row in claims["weights"]))
    slopes = table(
        ("h", *(f"α = {alpha:g}: slope" for alpha in alphas)),
        [(name, *(f"{round(slope_of[name, alpha], 4) + 0.0:+.4f}" for alpha in alphas)) for name in activations],
    )
    variance = table(
        ("n", *(str(row["n"]) for row in claims["variance"])),
        [
            ("n/2", *(f"{row['expected']:.0f}" for row in claims["variance"])),
            ("relu, no scale", *(f"{row['relu']:.2f}" for row in claims["variance"])),
            ("ratio to n/2", *(f"{row['relu'] / row['expected']:.4f}" for row in claims["variance"])),
            ("reluformer", *(f"{row['reluformer']:.4f}" for row in claims["variance"])),
        ],
    )
    text = render(
        Path(__file__).with_name("claims.html"),
        claims=claims,
        tolerance=f"{100 * SLOPE_TOLERANCE:g}",
        hold=hold(claims),
        figure=plots.in_card(plots.claim_plots(claims)),
        worst=max(abs(row["slope"] + row["alpha"]) for row in claims["weights"]),
        slopes=slopes,
        variance=variance,
    )
    return Markup(text)


def _speed(study: StudyResults) -> Markup:
    """How fast the trainings were, nothing where their results do not say."""
    trained = plots.trained(study)
    keys = [key for key in SPEED if any(line.has(key) for line in trained)]
    compiled = any(line.has("compiled") for line in trained)
    if not keys and not compiled:
        return Markup()
    rows = []
    for line in trained:
        cells = [
            line.over_seeds(key).text(digits, factor) if line.has(key) else "–"
            for key, (_, factor, digits) in ((key, SPEED[key]) for key in keys)
        ]
        counts = {(each["blocks"], each["graphs"]) for each in map(_compiled, line.results.values()) if each}
        if compiled:
            cells.append(", ".join(f"{blocks} in {graphs}" for blocks, graphs in sorted(counts)) or "none")
        rows.append((line.label, *cells))
    head = ["variant", *(SPEED[key][0] for key in keys)]
    if compiled:
        head.append(column_head("blocks compiled", "in graphs"))
    return table(head, rows)


def _compiled(result: Mapping[str, Any]) -> Mapping[str, int] | None:
    return result.get("compiled")


def _device_text(about: Mapping[str, Any]) -> str:
    environment = about["environment"]
    return (
        f"{environment['device']} ({about['device']}), {many(environment['threads'], 'thread')} of "
        f"{many(environment['cores'], 'core')}, {many(environment['processes'], 'process')}"
    )


def _facts(study: StudyResults) -> dict[str, str]:
    data = study.about["data"]
    return {
        "data": f"{data['name']}, {data['text']}",
        "data checksum": f"sha256 {data['checksum']}",
        **_evaluation(study),
        "seeds": ", ".join(map(str, study.about["study"]["seeds"])),
        **_implementations(study),
    }


def _evaluation(study: StudyResults) -> dict[str, str]:
    """What evaluated which cells anew, where that was not their training."""
    texts = []
    for by in study.evaluations:
        to = ((_plain(study.about["study"][key]), key, _plain(x)) for key, x in by["training"].items())
        changed = ", ".join(f"{key}={now} for {before}" for now, key, before in to)
        part = "" if by["cells"] == study.about["cells"] else f" for {', '.join(by['cells'])}"
        texts.append(
            f"made anew{part} with {changed}, by commit {by['commit'] or 'unknown'}, {by['device']}, "
            f"torch {by['torch']}{library_text(by)}, from the weights of the training, which gave its own numbers again"
        )
    return {"evaluation": "; ".join(texts)} if texts else {}


def _evaluated_by(study: StudyResults, line: Line) -> list[str | None]:
    """The commits that evaluated cells of a variant anew."""
    cells = {folder.name for folder in line.folders.values()}
    return list(dict.fromkeys(by["commit"] for by in study.evaluations if cells & {*by["cells"]}))


def _implementations(study: StudyResults) -> dict[str, str]:
    """Which implementation of each op ran, at the first step of the cells that say so."""
    ran: dict[str, set[str]] = {}
    for line in study.lines:
        for result in line.results.values():
            for op, names in result.get("implementations", {}).items():
                ran.setdefault(op, set()).update(names)
    text = ", ".join(f"{op} by {' and '.join(sorted(names))}" for op, names in sorted(ran.items()))
    return {"implementations": text} if ran else {}


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
