"""report.html, results.csv and summary.md from what a study left behind, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnkit_experiments.engine.files import write_text
from attnkit_experiments.report.page import render
from attnkit_experiments.report.results import Line, StudyResults, as_csv, read_study
from attnkit_experiments.study.recipe import Measure, Recipe


def write_report(folder: Path, recipe: Recipe, *, show_images: bool = True) -> Path:
    """Write the three files into `folder`; returns the page. UserError if there is nothing to report."""
    study = read_study(folder)
    records = [record(study, line, recipe.domain.measure) for line in study.lines if line.results]
    write_text(folder / "results.csv", as_csv(records))
    write_text(folder / "summary.md", as_markdown(study, recipe))
    write_text(folder / "report.html", render(study, recipe, show_images=show_images))
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
        "core_hours": study.core_hours(line),
        "fewshot_accuracy": line.over_seeds("fewshot_accuracy").mean if "fewshot_accuracy" in line.first else None,
        "step_ms": line.step_ms(),
        "seconds_mean": line.over_seeds("seconds").mean,
        "diverged": len(line.diverged),
        "load": study.load(),
        **{key: environment[key] for key in ("commit", "torch", "device", "threads", "processes")},
        "data_checksum": about["data"]["checksum"],
    }


def as_markdown(study: StudyResults, recipe: Recipe) -> str:
    """The headline table for a README or an issue, with its label on top."""
    about, measure = study.about, recipe.domain.measure
    data, settings = about["data"], about["study"]
    text = [
        f"# {recipe.id} · {study.label}" + (" · SMOKE, NOT A RESULT" if study.smoke else ""),
        "",
        f"{recipe.title}. {about['label']}.",
        f"{data['name']}, {data['text']}, {settings['steps']} steps; {about['environment']['device']}, "
        f"{about['environment']['threads']} threads. {study.load_text()}",
        "",
        f"| variant ({study.preset}) | seeds | {measure.head} | difference to baseline (95 %) | ms per step |",
        "|---|---|---|---|---|",
    ]
    for line in study.lines:
        if not line.results:
            text.append(f"| {line.label} | 0 | diverged | | |")
            continue
        difference = study.difference(line, measure.key)
        gap = difference.text(measure) if difference else ""
        scores = line.over_seeds(measure.key)
        value = scores.text(measure.digits, measure.factor)
        if (ema := f"{measure.key}_ema") in line.first:
            value += f" (moving average of weights {line.over_seeds(ema).text(measure.digits, measure.factor)})"
        text.append(f"| {line.label} | {scores.n} | {value} | {gap} | {line.step_ms():.0f} |")
    return "\n".join(text) + "\n"
