"""The tables of a study in which its variants are compared, with each other and with the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnkit_conformance.report.pages import Markup, render, table
from attnkit_experiments.report import plots, tables
from attnkit_experiments.report.decision import deciding, in_order
from attnkit_experiments.report.findings import capital, sample_notes
from attnkit_experiments.report.html import column_head, mark
from attnkit_experiments.report.results import Line, StudyResults
from attnkit_experiments.report.statistics import Spread
from attnkit_experiments.study.recipe import Measure, Published, Recipe


def part_of_page(study: StudyResults, recipe: Recipe) -> Markup:
    """The part of a page with the numbers that are compared."""
    first, *beside = in_order(recipe.domain.measure)
    columns = [column for column in recipe.published if _concerns(column, study)]
    text = render(
        Path(__file__).with_name("comparison.html"),
        study=study,
        mark=mark(study.about),
        measured=capital(first.name) + "".join(f", which decides, and beside it {each.name}," for each in beside),
        sampled=sample_notes(study, recipe.domain.measure),
        headline=headline(study, recipe),
        published=_published(study, columns) if columns else "",
    )
    return Markup(text)


def headline(study: StudyResults, recipe: Recipe) -> Markup:
    """Each variant with the measure that decides, the task's metric, and its costs."""
    measures = in_order(recipe.domain.measure)
    has_flops = all("flops_per_sample" in line.first for line in plots.trained(study))
    rows = []
    for line in plots.trained(tables.with_numbers(study) if recipe.about else study):
        ratio, step = study.step_ratio(line), f"{line.step_ms():.0f}"
        rows.append(
            (
                line.label,
                str(line.over_seeds(measures[0].key).n),
                *([own_text(line, recipe.about)] if recipe.about else []),
                *(cell for measure in measures for cell in _cells_of(study, line, measure)),
                line.over_seeds("last_loss").text(3),
                f"{line.first['parameters']:,.0f}",
                *([f"{line.first['flops_per_sample'] / 1e6:.1f}"] if has_flops else []),
                Markup("{} <small>×{:.2f}</small>").format(step, ratio) if ratio else step,
            )
        )
    heads = [
        head
        for measure in measures
        for head in (column_head(measure.head, study.preset), column_head("difference to", "its baseline"))
    ]
    own = [recipe.about.head] if recipe.about else []
    costs = [
        column_head("training", "loss"),
        "parameters",
        *([column_head("MFLOPs", "per sample")] if has_flops else []),
    ]
    return table(("variant", "seeds", *own, *heads, *costs, "ms per step"), rows)


def _cells_of(study: StudyResults, line: Line, measure: Measure) -> Iterator[str]:
    """The cells of a measure: means, and differences to the baseline, with what else is known of them below."""
    scores, difference = line.over_seeds(measure.key), study.difference(line, measure.key)
    look = "soft" if study.smoke else "big" if measure == deciding(measure) else ""
    value = Markup('<span class="{}">{}</span>').format(look, scores.text(measure.digits, measure.factor))
    ema = f"{measure.key}_ema"
    averaged = f"averaged {line.over_seeds(ema).text(measure.digits, measure.factor)}" if ema in line.first else ""
    tested = study.tested.get(measure.key, {}).get(line.name)
    yield _over(value, averaged)
    yield _over(difference.text(measure) if difference else "", tested.text(measure) if tested else "")


def _over(value: str, note: str) -> str:
    """A value with a note below it, if there is one."""
    return Markup("{}<br><small>{}</small>").format(value, note) if note else value


def own_text(line: Line, own: Measure) -> str:
    """The number that the recipe is about."""
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
