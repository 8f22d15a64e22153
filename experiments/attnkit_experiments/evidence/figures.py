"""The figures of a committed report, drawn again from its CSVs in the places that its summary has for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnkit_conformance.report.pages.figures import in_page
from attnkit_experiments.images import plots as image_plots
from attnkit_experiments.language.page import BITS
from attnkit_experiments.recipes import MEASUREMENTS
from attnkit_experiments.report import plots
from attnkit_experiments.report.committed import read_committed
from attnkit_experiments.report.results import StudyResults, read_csv
from attnkit_experiments.report.words import FIGURE
from attnkit_experiments.soft import plots as soft_plots
from attnkit_experiments.study.measurement import Measurement
from attnkit_experiments.translation import plots as translation_plots

Drawing = Callable[[StudyResults], list[str]]


def against_alpha(axis: plots.Axis) -> Drawing:
    """A figure of each point that has alphas."""

    def draw(study: StudyResults) -> list[str]:
        return [figure for point in plots.points(study) if (figure := plots.against_alpha(study, point, axis))]

    return draw


def one(draw: Callable[..., str | None], *more: Any) -> Drawing:
    return lambda study: [figure] if (figure := draw(study, *more)) else []


FIGURES: dict[str, Drawing] = {
    f"{plots.ACCURACY.name} against alpha": against_alpha(plots.ACCURACY),
    f"{BITS.name} against alpha": against_alpha(BITS),
    f"{BITS.name} against seconds": one(plots.against_seconds, BITS),
    "test accuracy against floating-point operations": one(plots.against_compute),
    "few-shot accuracy against floating-point operations": one(
        plots.against_compute, "fewshot_accuracy", "few-shot accuracy"
    ),
    "training loss against step": one(plots.learning_curves),
    "norm of the gradient": one(translation_plots.gradient_norms),
    "share of the sum": one(translation_plots.concentration),
    "BLEU and anisotropy": one(translation_plots.against_size),
    "entropy of the attention weights per layer": one(image_plots.entropy_bars),
    "residual of Newton's iteration": one(soft_plots.residuals),
    "mean weight against L": lambda study: [plots.claim_plots(study.claims)] if study.claims else [],
}
"""What draws the figures whose descriptions begin so; attention to samples of the data needs more than CSVs."""


def with_figures(summary: Path) -> str:
    """The summary of a committed report as Markdown in which its figures are <svg> elements, where CSVs have them."""
    text = summary.read_text(encoding="utf-8")
    if not FIGURE.search(text):
        return text
    head = read_csv(summary.parent / "results.csv")[0]
    if head["recipe"] in MEASUREMENTS:
        drawn = of_measurement(MEASUREMENTS[head["recipe"]], summary.parent)
    else:
        drawn = of_study(summary.parent)
    return FIGURE.sub(lambda match: next(drawn(match[1]), None) or match[0], text)


def of_study(folder: Path) -> Callable[[str], Iterator[str]]:
    """The figures of a study by their descriptions; one that has several figures gives them in turn."""
    study = read_committed(folder).inspected()
    started: dict[str, Iterator[str]] = {}

    def draw(description: str) -> Iterator[str]:
        if description not in started:
            kinds = [kind for name, kind in FIGURES.items() if description.startswith(name)]
            started[description] = iter([in_page(figure) for kind in kinds for figure in kind(study)])
        return started[description]

    return draw


def of_measurement(measurement: Measurement, folder: Path) -> Callable[[str], Iterator[str]]:
    """The figures of a measurement, one after the other."""
    rows = [{key: number(value) for key, value in row.items()} for row in read_csv(folder / "results.csv")]
    preset = str(rows[0]["preset"])
    about: Mapping[str, Any] = {"preset": preset, "study": vars(measurement.presets[preset].study)}
    page = "".join(section.body for section in measurement.sections(rows, about))
    drawn = iter(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    return lambda description: drawn


def number(text: str) -> Any:
    """A value of a CSV as what it was in JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None
