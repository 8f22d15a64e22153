"""The figures of studies on sequences: accuracy beside chance, learning curves, rows of attention weights."""

from __future__ import annotations

import math

from attnkit_conformance.report.pages import Markup, table
from attnkit_experiments.report import plots
from attnkit_experiments.report.html import column_head
from attnkit_experiments.report.results import Line, StudyResults
from attnkit_experiments.study.recipe import Section

SIGMAS = 2  # standard errors of the test split by which a score must exceed chance


def sections(study: StudyResults, show_samples: bool) -> list[Section]:
    """In page order; without any of the data."""
    parts = [
        Section("Accuracy beside chance", chance_text(study), chance_table(study)),
        Section("Learning curves", CURVES, plots.in_card(plots.learning_curves(study))),
    ]
    rows = [line for line in plots.trained(study) if line.first["layers"]]
    if rows:
        parts.append(Section("Rows of the attention matrix", rows_text(study, rows), rows_table(rows)))
    return parts


CURVES = "Cross-entropy of the training batches, averaged over short stretches of steps and over seeds."


def chance_text(study: StudyResults) -> str:
    return (
        f"Chance is the accuracy of always answering train's commonest class on the {tests(study):,} test samples. "
        f"A method is called near chance if its mean is less than {SIGMAS} standard errors of such a test split above "
        "it: it has learned nothing that this study can show."
    )


def tests(study: StudyResults) -> int:
    return int(study.about["data"]["test"])


def near_chance(accuracy: float, majority: float, samples: int) -> bool:
    """accuracy < majority + SIGMAS·√(majority·(1 - majority) / samples)."""
    return accuracy < majority + SIGMAS * math.sqrt(majority * (1 - majority) / samples)


def chance_table(study: StudyResults) -> Markup:
    rows = []
    for line in plots.trained(study):
        accuracy, majority = line.over_seeds("accuracy"), line.first["majority"]
        valid = line.over_seeds("valid_accuracy").text(1, 100) if "valid_accuracy" in line.first else "no valid split"
        rows.append(
            (
                line.label,
                accuracy.text(1, 100),
                valid,
                f"{100 * majority:.1f}",
                f"{100 * (accuracy.mean - majority):+.1f}",
                "near chance" if near_chance(accuracy.mean, majority, tests(study)) else "",
            )
        )
    test, above = column_head("test, %", study.preset), column_head("test above", "chance")
    return table(("method", test, "valid, %", "chance, %", above, ""), rows)


def rows_text(study: StudyResults, lines: list[Line]) -> str:
    without = [line.label for line in plots.trained(study) if line not in lines]
    text = (
        "After training, in brackets before it: means over heads and over the rows of tokens of the first test "
        "sequences, first seed, layer by layer. Entropy is that of normalised weights, in nats."
    )
    if without:
        text += f" Without such rows or without statistics of them: {', '.join(without)}."
    return text


def rows_table(lines: list[Line]) -> Markup:
    columns = (("total", 3, 1), ("entropy", 2, 1), ("nonzero", 1, 100), ("dead", 1, 100))
    rows = [(line.label, *(_cells(line, key, digits, factor) for key, digits, factor in columns)) for line in lines]
    return table(("method", "row sum", "entropy", "non-zero weights, %", "rows with no weight, %"), rows)


def _cells(line: Line, key: str, digits: int, factor: float) -> str:
    def text_of(value: float | None) -> str:
        return "not defined" if value is None else f"{factor * value:.{digits}f}"

    pairs = zip(line.first["layers"], line.first["initial_layers"], strict=True)
    both = ((text_of(after[key]), text_of(before[key])) for after, before in pairs)
    return " · ".join(after if after == before == text_of(None) else f"{after} ({before})" for after, before in both)
