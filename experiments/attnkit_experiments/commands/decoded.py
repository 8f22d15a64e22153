"""`cache RECIPE`: the images of a study decoded once, before it is run."""

from __future__ import annotations

import dataclasses

from attnkit_experiments.commands.opening import Request, choose
from attnkit_experiments.data.images.lazy import load_lazily
from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.images.settings import ImageSettings, lazy_request
from attnkit_experiments.recipes import RECIPES


def make(request: Request) -> str:
    """Decode what is not there, and make again what is damaged; returns what there is now.

    Errors: UserError for a study that keeps no decoded images, and as `load_lazily`.
    """
    if request.recipe not in RECIPES:
        raise unknown("recipe that trains", request.recipe, RECIPES)
    _, study = choose(request)
    if not isinstance(study, ImageSettings) or not (study.lazy and study.decoded_side):
        raise UserError(f"cache {request.recipe}: this study decodes for every step; --set lazy=true decoded_side=256")
    assert request.cache
    asked = dataclasses.replace(lazy_request(study), check=True)
    data = load_lazily(request.data, asked, cache=request.cache, workers=request.workers, terms=request.terms())
    assert data.caches
    return " and ".join(f"{cache.about['images']:,} images in {cache.folder}" for cache in data.caches)
