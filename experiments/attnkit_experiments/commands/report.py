"""`report DIR`: what a study or a measurement left behind as report.html, results.csv and summary.md."""

from __future__ import annotations

from pathlib import Path

from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report import measurement, write
from attnkit_experiments.report.results import read_about


def write_report(folder: Path, *, show_images: bool = True) -> Path:
    """Write the three files into `folder`; returns the page. UserError if there is nothing to report."""
    recipe = read_about(folder)["recipe"]
    if recipe in MEASUREMENTS:
        return measurement.write_report(folder, MEASUREMENTS[recipe])
    return write.write_report(folder, RECIPES[recipe], show_images=show_images)
