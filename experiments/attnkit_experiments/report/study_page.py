"""The report of a study: a self-contained HTML page, CSVs, and a summary that ends with the page in words.

A repository keeps the summary and the CSVs: the site draws the figures again from these (`evidence.figures`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnkit_conformance.report.pages import Markup, render, table
from attnkit_experiments.engine.files import write_text
from attnkit_experiments.engine.progress import many
from attnkit_experiments.report import plots, samples, tables, words
from attnkit_experiments.report.claims import SLOPE_TOLERANCE, Claims, hold
from attnkit_experiments.report.html import changes_text, column_head, render_page
from attnkit_experiments.report.merging import read_studies
from attnkit_experiments.report.results import Line, StudyResults, as_csv, command
from attnkit_experiments.report.statistics import DRAWS, Spread
from attnkit_experiments.study.recipe import Measure, Published, Recipe

FULL = ("paper", "i1k", "fairseq", "wmt14")
"""Presets at the scale of a paper."""

SPEED: dict[str, tuple[str, float, int]] = {
    "tflops_per_s": ("TFLOP/s", 1, 3),
    "mfu": ("MFU, %", 100, 1),
    "input_share": (column_head("waiting for", "input, %"), 100, 1),
    "peak_bytes": (column_head("peak", "memory, GB"), 1e-9, 2),
}
"""Of what a training has of `engine.speed`, the head of its column, a factor, and digits."""


def write_report(folders: Sequence[Path], recipe: Recipe, *, show_images: bool = True) -> Path:
    """Write the files into the first folder; returns the page. UserError if there is nothing to report."""
    study, folder = read_studies(folders, recipe), folders[0]
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
    page = page_of(study, recipe, show_images=show_images)
    in_words = words.as_markdown(page)
    for name, (description, table_of) in tables.FIGURES.items():
        (folder / f"{name}.csv").unlink(missing_ok=True)
        if f"*Figure: {description}" in in_words:
            write_text(folder / f"{name}.csv", as_csv(table_of(study.inspected())))
    write_text(folder / "summary.md", f"{as_markdown(study, recipe)}\n{in_words}")
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
    }


def as_markdown(study: StudyResults, recipe: Recipe) -> str:
    """The headline table for a README or an issue, with its label above."""
    about, measure, own = study.about, recipe.domain.measure, recipe.about
    data, settings = about["data"], about["study"]
    heads = ["seeds", *([own.head] if own else []), measure.head, "difference to baseline (95 %)", "ms per step"]
    text = [
        f"# {recipe.id} · {study.label}" + (" · SMOKE, NOT A RESULT" if study.smoke else ""),
        "",
        *([f"**{changed}**", ""] if (changed := changes_text(about["environment"])) else []),
        " ".join((f"{recipe.title}.", f"{about['label']}.", *conclusions(study, recipe))),
        f"{data['name']}, {data['text']}, {settings['steps']:,} steps; {about['environment']['device']}, "
        f"{many(about['environment']['threads'], 'thread')}. {study.load_text()}",
        f"`{command(about)}`",
        "",
        f"| variant ({study.preset}) | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
    ]
    for line in tables.with_numbers(study).lines if own else study.lines:
        if not line.results:
            text.append(f"| {line.label} | 0 | diverged |" + " |" * (len(heads) - 2))
            continue
        difference = study.difference(line, measure.key)
        gap = difference.text(measure) if difference else ""
        if tested := study.tested.get(measure.key, {}).get(line.name):
            gap += f"; {tested.text(measure)}"
        scores = line.over_seeds(measure.key)
        value = scores.text(measure.digits, measure.factor)
        if (ema := f"{measure.key}_ema") in line.first:
            value += f" (moving average of weights {line.over_seeds(ema).text(measure.digits, measure.factor)})"
        if own:
            value = f"{_own(line, own)} | {value}"
        text.append(f"| {line.label} | {scores.n} | {value} | {gap} | {line.step_ms():.0f} |")
    text += ["", *([] if study.smoke else [f"{sentence}." for sentence in _sampled(study, measure)])]
    text += ["", *(f"{name}: {uninspected_text(reason)}" for name, reason in study.uninspected.items())]
    return "\n".join(text).rstrip() + "\n"


def page_of(study: StudyResults, recipe: Recipe, *, show_images: bool = True) -> str:
    """The whole page of a study of `recipe`; without `show_images` nothing of the data set is in it."""
    about, measure = study.about, recipe.domain.measure
    columns = [column for column in recipe.published if _concerns(column, study)]
    inspected = study.inspected() if study.uninspected else study
    shown = recipe.domain.sections(inspected, show_images) if plots.trained(inspected) else []
    return render_page(
        "study.html",
        recipe,
        about,
        _device_text(about),
        _facts(study),
        study=study,
        conclusions=conclusions(study, recipe),
        runs=many(sum(len(line.results) for line in study.lines), "run"),
        uninspected={name: uninspected_text(reason) for name, reason in study.uninspected.items()},
        headline=_headline_table(study, measure, recipe.about),
        sampled=_sampled(study, measure),
        published=_published(study, columns) if columns else "",
        sections=shown,
        claims=_claims(study.claims) if study.claims else "",
        limits=_limits(study, measure, show_images=show_images),
        deviations=about["deviations"],
        speed=_speed(study),
        settings=", ".join(f"{key}={_plain(value)}" for key, value in about["study"].items() if key != "seeds"),
    )


def conclusions(study: StudyResults, recipe: Recipe) -> list[str]:
    """Sentences on the number that the recipe is about and on its domain's; or one that the study is too small."""
    if too_small := recipe.too_small(study.preset, study.about["settings"]):
        return [f"Too small to say anything: {too_small}."]
    own = compared(tables.with_numbers(study.inspected()), recipe.about) if recipe.about else []
    return own + compared(study, recipe.domain.measure)


def compared(study: StudyResults, measure: Measure) -> list[str]:
    """Which variants are higher or lower than their baseline, a sentence for each baseline; none for a smoke run.

    Those that are undecided with the difference that their seeds would have found.
    """
    lines = [] if study.smoke else plots.trained(study)
    sentences = []
    for name in dict.fromkeys(line.variant["baseline"] for line in lines):
        baseline = study.by_name(name)
        kinds: dict[str, list[str]] = {"higher": [], "lower": [], "undecided": [], "one seed": []}
        for line in (line for line in lines if line.variant["baseline"] == name):
            difference = study.difference(line, measure.key)
            if difference:
                would = f" ({difference.would_see(measure)})" if difference.kind == "undecided" else ""
                kinds[difference.kind].append(line.label + would)
        told = "; ".join(f"{kind} for {' · '.join(labels)}" for kind, labels in kinds.items() if labels)
        if baseline and told:
            scores = f"{baseline.over_seeds(measure.key).text(measure.digits, measure.factor)} {measure.unit}".rstrip()
            name = f"{measure.name[0].upper()}{measure.name[1:]}"
            alone = "" if told.startswith("one seed") else ", uncorrected"
            sentences.append(f"{name} beside {baseline.label} ({scores}){alone}: {told}.")
    return sentences


def uninspected_text(reason: str) -> str:
    return f"trained, but not inspected ({reason}); python -m experiments report with --data inspects it again."


def _headline_table(study: StudyResults, measure: Measure, own: Measure | None) -> Markup:
    rows = []
    has_flops = all("flops_per_sample" in line.first for line in plots.trained(study))
    for line in plots.trained(tables.with_numbers(study) if own else study):
        scores = line.over_seeds(measure.key)
        value = Markup('<span class="{}">{}</span>').format(
            "soft" if study.smoke else "big", scores.text(measure.digits, measure.factor)
        )
        averaged = ""
        if (ema := f"{measure.key}_ema") in line.first:
            averaged = f"averaged {line.over_seeds(ema).text(measure.digits, measure.factor)}"
        ratio, difference = study.step_ratio(line), study.difference(line, measure.key)
        tested = study.tested.get(measure.key, {}).get(line.name)
        step = f"{line.step_ms():.0f}"
        rows.append(
            (
                line.label,
                str(scores.n),
                *([_own(line, own)] if own else []),
                _over(value, averaged),
                _over(difference.text(measure) if difference else "", tested.text(measure) if tested else ""),
                line.over_seeds("last_loss").text(3),
                f"{line.first['parameters']:,}",
                *([f"{line.first['flops_per_sample'] / 1e6:.1f}"] if has_flops else []),
                Markup("{} <small>×{:.2f}</small>").format(step, ratio) if ratio else step,
            )
        )
    head = (
        "variant", "seeds", *([own.head] if own else []), column_head(measure.head, study.preset),
        column_head("difference to", "its baseline"), column_head("training", "loss"), "parameters",
        *([column_head("MFLOPs", "per sample")] if has_flops else []), "ms per step",
    )  # fmt: skip
    return table(head, rows)


def _over(value: str, note: str) -> str:
    """A value with a note below it, if there is one."""
    return Markup("{}<br><small>{}</small>").format(value, note) if note else value


def _sampled(study: StudyResults, measure: Measure) -> list[str]:
    """A sentence on what the intervals say of other test samples, for a study that has intervals."""
    seen = [line for line in study.lines if (gap := study.difference(line, measure.key)) and gap.half_width is not None]
    found = study.tested.get(measure.key, {})
    if not seen:
        return []
    if not found:
        return [samples.ABSENT.capitalize()]
    counts = " or ".join(f"{n:,}" for n in sorted({each.samples for each in found.values()}))
    rest = [line.label for line in seen if line.name not in found]
    text = f"With the test sample: over seeds and {counts} test samples, by {DRAWS:,} test sets drawn with replacement"
    return [text, *([f"{' · '.join(rest)}: {samples.ABSENT}"] if rest else [])]


def _own(line: Line, own: Measure) -> str:
    return line.over_seeds(own.key).text(own.digits, own.factor) if line.has(own.key) else "–"


def _concerns(column: Published, study: StudyResults) -> bool:
    settings = study.about["study"] | {"preset": study.preset}
    return all(settings[key] in values for key, values in column.where.items())


def _published(study: StudyResults, columns: list[Published]) -> Markup:
    """The paper's table beside ours, labelled with the preset."""
    rows = []
    for line in study.lines:
        cells = [line.label]
        for column in columns:
            cells += [_ours(study, line, column), _theirs(line.name, column.values, column)]
        rows.append(cells)
    for name in dict.fromkeys(name for column in columns for name in column.cited):
        cells = [f"{name} (cited)"]
        for column in columns:
            cells += ["", _theirs(name, column.cited, column)]
        rows.append(cells)
    head = ["variant"]
    for column in columns:
        head += [column_head(column.name, study.preset), column_head(column.name, "paper")]
    return table(head, rows)


def _ours(study: StudyResults, line: Line, column: Published) -> str:
    if not line.results:
        return "diverged"
    numbers, factor = _measured(line, column.key), column.factor
    if column.relative_to:
        other = study.by_name(column.relative_to)
        reference = _measured(other, column.key) if other else []
        factor = 1 / statistics.fmean(reference) if reference else math.nan
    if not numbers or math.isnan(factor):
        return "not measured"
    return Spread.of(numbers).text(column.digits, factor)


def _measured(line: Line, key: str) -> list[float]:
    values = [result.get(key) for result in line.results.values()]
    return [value for value in values if value is not None]


def _theirs(name: str, values: Mapping[str, float | None], column: Published) -> str:
    if name not in values:
        return ""
    value = values[name]
    if value is None:
        return "–"
    reference = column.values[column.relative_to] if column.relative_to else 1.0
    assert reference is not None
    return f"{value / reference:.{column.digits}f}"


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


def _limits(study: StudyResults, measure: Measure, *, show_images: bool) -> list[str]:
    if study.smoke:
        limits = ["Anything about quality: the models have barely begun to learn."]
    else:
        undecided = [
            line.label
            for line in plots.trained(study)
            if (difference := study.difference(line, measure.key)) and not difference.decided
        ]
        limits = []
        if study.preset not in FULL:
            limits.append(
                "What the paper shows. Models, data and training are far smaller, and the paper's differences are "
                "between models that are trained to the end."
            )
        limits += [
            "That one variant is better in general: the spread covers seeds (weights, order of samples, dropout or "
            "augmentation), not data sets, sizes or hyperparameters, which were not tuned for any variant.",
        ]
        if undecided:
            limits.insert(
                0,
                f"A difference to the baseline for: {'; '.join(undecided)}: one seed, or an interval that holds zero.",
            )
        if study.preset == "cpu":
            limits.append("Speed: at this size the step time is mostly overhead.")
    if not show_images:
        limits.append("Samples of the data, and attention to them: this page was made with --hide-samples.")
    return limits


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
        "seeds": ", ".join(map(str, study.about["study"]["seeds"])),
        **_implementations(study),
    }


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
