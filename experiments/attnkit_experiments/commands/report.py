"""`report DIR …`: the results of a study or a measurement as report.html, summary.md and CSVs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnkit_experiments.commands.cells import inspect_again
from attnkit_experiments.commands.opening import open_study, request_of, require_known, started
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.files import write_text
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.train import reproducible
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.evidence.runs import read_run
from attnkit_experiments.evidence.size import too_small
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report import measurement_page, study_page, summary
from attnkit_experiments.report.merging import read_studies
from attnkit_experiments.report.results import read_study
from attnkit_experiments.study.stored import read_asked


def write_report(folder: Path, *more: Path, show_images: bool = True, **where: Any) -> Path:
    """Write the files into `folder`; returns the page. UserError if there is nothing to report.

    Of a committed report, which has CSVs and no run, the summary is made anew from these and returned. Cells whose
    inspection failed are inspected first; `where` are the fields of `Request` that this needs: data, device, cache.
    What may be left out of the data is what the run allowed.
    """
    if not more and not (folder / "study.json").exists() and (folder / "cells.csv").exists():
        run = read_run(folder)
        write_text(folder / "summary.md", summary.renew(folder, RECIPES[run.recipe], too_small(run)))
        return folder / "summary.md"
    recipe = read_asked(folder)["recipe"]
    for other in more:
        if (theirs := read_asked(other)["recipe"]) != recipe:
            raise UserError(f"{folder} and {other} hold different studies: recipe {recipe!r} and {theirs!r}")
    if recipe in MEASUREMENTS:
        if more:
            raise UserError(f"{recipe} is measured, not trained: report expected one folder, got {1 + len(more)}")
        return measurement_page.write_report(folder, MEASUREMENTS[recipe])
    if recipe not in RECIPES:
        raise unknown(f"recipe of {folder}", recipe, RECIPES)
    for one in (folder, *more):
        require_known(one)
        repair(one, **where)
    study = read_studies((folder, *more), RECIPES[recipe])
    study_page.write_tables(study, RECIPES[recipe], folder, show_images=show_images)
    return study_page.write_page(study, RECIPES[recipe], folder, too_small(read_run(folder)), show_images=show_images)


def repair(folder: Path, **where: Any) -> None:
    """Inspect the trained cells whose inspection failed; what cannot be inspected is said, and stays as it is."""
    uninspected = read_study(folder, RECIPES[read_asked(folder)["recipe"]].domain).uninspected
    if not uninspected:
        return
    try:
        study = open_study(request_of(folder, **where), ALONE, started(folder))
        with reproducible(study.threads, study.deterministic):
            for cell in study.cells:
                if cell.name in uninspected:
                    result = inspect_again(study, cell)
                    say(f"{cell.name}: {result.get('uninspected', 'inspected')}")
    except UserError as error:
        say(f"not inspected: {', '.join(uninspected)}: {error}")
