"""One folder per paper, one file per figure or table; this is the list of them."""

from __future__ import annotations

from attnkit_experiments.recipes import linear, newer, relu_vit, reluformer, soft
from attnkit_experiments.study.measurement import Measurement
from attnkit_experiments.study.recipe import Recipe

FILES = (*relu_vit.FILES, *reluformer.FILES, *soft.FILES, *linear.FILES, *newer.FILES)
RECIPES: dict[str, Recipe] = {file.RECIPE.id: file.RECIPE for file in FILES if hasattr(file, "RECIPE")}
MEASUREMENTS: dict[str, Measurement] = {
    file.MEASUREMENT.id: file.MEASUREMENT for file in FILES if hasattr(file, "MEASUREMENT")
}
