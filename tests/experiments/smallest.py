"""Every recipe in its smallest form: a step of every cell, an inspection and a report."""

import torch

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.opening import choose
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.engine.train import Run
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report.results import read_study
from attnkit_experiments.study.recipe import Source, expand

from .translation_cases import TINY

IMAGES = ("steps=1", "train_images=24", "test_images=12", "batch=4")
SMALLEST = {
    "images": (*IMAGES, "model=d32"),
    "soft images": (*IMAGES, "full_scale=false"),
    "translation": (*TINY, "steps=1"),
    "language": ("steps=1", "tested=2", "model=d32"),
    "sequences": ("steps=1", "train_samples=8", "valid_samples=4", "test_samples=4"),
}


def first_run(recipe, data, out, *settings, world=ALONE):
    """The training of the first cell of a study on the CPU, before its first step."""
    chosen, study = choose(runner.Request(recipe, "cpu", data, out, settings))
    held, cpu = chosen.domain.load(Source(data, study, out)), torch.device("cpu")
    cell = expand(chosen, study, held)[0]
    return Run(lambda: chosen.domain.task(cell, held, cpu), cell.train, cpu, world)


def run(name, data, out, *settings, preset="smoke"):
    """One step of every cell, an inspection and a report."""
    small = SMALLEST[RECIPES[name].domain.name] if name in RECIPES else ()
    seeds = (0,) if name in RECIPES else None
    request = runner.Request(name, preset, data, out, (*small, *settings), seeds, "cpu", 1, keep_going=True)
    write_report(runner.run(request))
    if name in RECIPES:
        assert not read_study(out).uninspected
