"""`profile RECIPE`: the training cost of a recipe's variant, printed as a table and written as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from attnkit_experiments.commands.cost import measure, show
from attnkit_experiments.commands.opening import Request, choose
from attnkit_experiments.engine.environment import choose_device, describe
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.files import write_json
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.train import reproducible
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.study.recipe import Source, expand

FORMAT = "attnkit-experiments-profile-1"


def profile(request: Request, variant: str, repeats: int, out: Path | None) -> None:
    """Measure one variant of a recipe (the first if none is named), print a table, and write JSON to `out`."""
    if repeats < 1:
        raise UserError(f"profile: --repeats must be at least 1, got {repeats}")
    if request.recipe not in RECIPES:
        raise unknown("recipe that trains", request.recipe, RECIPES)
    recipe, study = choose(request)
    device = choose_device(request.device)
    threads = request.threads or torch.get_num_threads()
    assert request.cache
    data = recipe.domain.load(Source(request.data, study, request.cache, request.terms(), request.workers))
    try:
        first = dataclasses.replace(study, seeds=study.seeds[:1])
        cells = {cell.variant.name: cell for cell in expand(recipe, first, data)}
    except ValueError as error:
        raise UserError(f"{recipe.id}: {error}") from None
    if variant and variant not in cells:
        raise unknown(f"variant of {recipe.id}", variant, cells)
    cell = cells[variant or next(iter(cells))]
    if cell.train.compile:
        raise UserError("profile looks into blocks, which compile=true closes; --set compile=false")
    with reproducible(threads, not request.fast):
        costs = measure(cell, data, recipe.domain.task, device, repeats)
    about = {
        "format": FORMAT,
        "recipe": recipe.id,
        "preset": request.preset,
        "settings": list(request.settings),
        "variant": cell.variant.name,
        "config": cell.config(),
        "repeats": repeats,
        "deterministic": not request.fast,
        "environment": describe(device, threads, not request.fast),
    }
    show(about, costs)
    if out is not None:
        write_json(out, about | costs)
        say(f"written: {out}")
