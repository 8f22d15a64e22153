"""The figures of language models: bits per byte against α and seconds, and statistics with exact values."""

from __future__ import annotations

import math

from attnkit_conformance.report.pages import Markup, table
from attnkit_experiments.images.page import rows_table
from attnkit_experiments.language import exact
from attnkit_experiments.report import plots
from attnkit_experiments.report.results import StudyResults
from attnkit_experiments.study.recipe import Section


def sections(study: StudyResults, show_samples: bool) -> list[Section]:
    """In page order; without any of the text."""
    parts = []
    names = plots.points(study)
    figures = [figure for name in names if (figure := plots.against_alpha(study, name, BITS))]
    if figures:
        parts.append(Section("Bits per byte against α", ALPHA, Markup().join(map(plots.in_card, figures))))
    task = study.about["study"]["task"]
    counted = recall_text(study) if task == "recall" else COUNTED[task]
    bits = f"Bits per {unit_of(study)}"
    parts.append(Section(f"{bits} and compute", f"{counted} {HOURS}", quality_table(study)))
    if figure := plots.against_seconds(study, BITS):
        parts.append(Section(f"{bits} against time", seconds_text(study), plots.in_card(figure)))
    if any(line.first["exact"] for line in plots.trained(study)):
        parts.append(Section("Before training: measured and exact", exact_text(study), exact_table(study)))
    parts.append(Section("Learning curves", CURVES, plots.in_card(plots.learning_curves(study))))
    rows = ROWS if task == "masked" else f"{ROWS} Row i sees the {unit_of(study)}s up to i."
    parts.append(Section("Rows of the attention matrix after training", rows, rows_table(study)))
    return parts


BITS = plots.Axis("bits_per_byte", "bits per byte of the test part", share=False)
ALPHA = "Less is better. Dots are single seeds; the dashed line is softmax."
HOURS = "Core hours are those of training, steps × the median step."
COUNTED = {
    "next": "Quarters are the first and the last of the windows' bytes: what more text before a byte is worth.",
    "copying": "Of the second w of windows 0w0w alone. Guessing has 3.32 bits per byte and an accuracy of 10 %.",
    "masked": "Of the 15 % of bytes that are predicted, the same in every variant.",
}
CURVES = "Cross-entropy in nats of the training windows, averaged over short stretches of steps and over seeds."
ROWS = "Means over valid rows, heads and test windows; weightless rows on the right."


def unit_of(study: StudyResults) -> str:
    """What a loss is of: a byte, or one of recall's tokens, which are none."""
    return "token" if study.about["study"]["task"] == "recall" else "byte"


def recall_text(study: StudyResults) -> str:
    """What counts, and what guessing reaches."""
    pairs, values = study.about["study"]["pairs"], study.about["study"]["vocabulary"] // 2
    of_all, of_window = (f"{100 / n:.2g} % and has {math.log2(n):.2f} bits" for n in (values, pairs))
    return (
        f"At the queries alone, {pairs} of a window, one for each of its keys. A guess among all {values:,} values is "
        f"right in {of_all}, one among the {pairs} values of the window in {of_window}."
    )


def seconds_text(study: StudyResults) -> str:
    return f"Less is better. Every evaluation, means over seeds; a pause does not count. {study.load_text()}"


def quality_table(study: StudyResults) -> Markup:
    rows = [
        (
            line.label,
            f"{line.first['tokens']:,}",
            line.over_seeds("bits_per_byte").text(3),
            line.over_seeds("accuracy").text(1, 100),
            *(line.over_seeds(key).text(3) if line.has(key) else "–" for key in ("first_quarter", "last_quarter")),
            f"{line.first['training_flops']:.3g}" if line.has("training_flops") else "not counted",
            f"{line.core_hours():.3g}",
        )
        for line in plots.trained(study)
    ]
    head = (
        "variant", "length", f"bits per {unit_of(study)}", "accuracy, %", "first quarter", "last quarter",
        "training FLOPs", "core hours",
    )  # fmt: skip
    return table(head, rows)


def exact_text(study: StudyResults) -> Markup:
    rows = [row for line in plots.trained(study) for row in line.first["exact"]]
    good = sum(exact.holds(row) for row in rows)
    return Markup(
        f"Normal q and k of {exact.HEAD_DIM} features through qk-layernorm, every query sees all L keys. Row sum: "
        "L<sup>1-α</sup> E h; variance of the output for values of variance 1: L<sup>1-2α</sup> E h². Both moments are "
        f"integrals. {good} of {len(rows)} rows lie within {exact.ERRORS:g} standard errors."
    )


def exact_table(study: StudyResults) -> Markup:
    rows, keys = [], set()
    for line in plots.trained(study):
        series = line.variant["series"], line.variant["alpha"]
        for row in line.first["exact"]:
            if (*series, row["length"]) in keys:
                continue
            keys.add((*series, row["length"]))
            rows.append(
                (
                    f"{series[0]}, α = {series[1]:g}",
                    f"{row['length']:,}",
                    f"{row['row_sum']:.4g}",
                    f"{row['row_sum_exact']:.4g}",
                    f"{row['variance']:.4g}",
                    f"{row['variance_exact']:.4g}",
                    "" if exact.holds(row) else "differs",
                )
            )
    return table(("variant", "L", "row sum", "exact", "output variance", "exact", ""), rows)
