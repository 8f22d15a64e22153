"""`report DIR`: the results of a study or a measurement as report.html, results.csv and summary.md."""

from __future__ import annotations

from pathlib import Path

from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report import measurement_page, study_page
from attnkit_experiments.report.results import read_about


def write_report(folder: Path, *, show_images: bool = True) -> Path:
    """Write the three files into `folder`; returns the page. UserError if there is nothing to report."""
    recipe = read_about(folder)["recipe"]
    if recipe in MEASUREMENTS:
        return measurement_page.write_report(folder, MEASUREMENTS[recipe])
    return study_page.write_report(folder, RECIPES[recipe], show_images=show_images)
