"""The numbers of cells.csv that claims are about: names, units, digits."""

from __future__ import annotations

import math

from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report.decision import TEST_LOSS, VALID_LOSS, deciding
from attnkit_experiments.study.recipe import Measure


def share(key: str, name: str) -> Measure:
    return Measure(key, name, factor=100, unit="%")


MEASURES = {
    measure.key: measure
    for measure in (
        share("accuracy", "accuracy"),
        TEST_LOSS,
        VALID_LOSS,
        share("zeros", "weights that are 0"),
        Measure("variance_ratio", "variance ratio", digits=3),
        *(recipe.about for recipe in RECIPES.values() if recipe.about),
        share("attention_top_0.5", "share of the top 0.5 % of weights"),
        Measure("learned", "learned value", digits=2),
        Measure("row_sum_errors", "row sum, standard errors off", digits=1),
        Measure("variance_errors", "variance, standard errors off", digits=1),
        Measure("residuals_median", "residual, worst stage", digits=4),
        Measure("step_ms", "time of a step", unit="ms", digits=0),
        Measure("sentences_per_second", "sentences per second"),
        Measure("full_parameters", "parameters", factor=1e-6, unit="M", digits=2),
        Measure("full_multiply_adds_without_inverse", "multiply-adds", factor=1e-9, unit="G", digits=2),
        Measure("full_memory", "memory of training", factor=1e-9, unit="GB", digits=2),
        Measure("full_training_rate", "speed of training", unit="images/s"),
        Measure("full_prediction_rate", "speed of prediction", unit="images/s"),
    )
}


TIMES = ("step_ms", "sentences_per_second", "full_training_rate", "full_prediction_rate")
"""Those that a busy machine falsifies."""
UNTRAINED = (*TIMES, "full_parameters", "full_multiply_adds_without_inverse", "full_memory")
"""Those that models have at any state of training."""
LOSSES = (TEST_LOSS.key, VALID_LOSS.key, "bits_per_byte")


def headline(recipe: str) -> Measure:
    """The metric of a recipe's task."""
    return RECIPES[recipe].domain.measure


def measure_of(recipe: str, key: str = "") -> Measure:
    """A number of a recipe's cells; without a key the one that decides, of which less is better."""
    metric = headline(recipe)
    if not key:
        return deciding(metric)
    return metric if key == metric.key else MEASURES[key]


def in_nats(measure: Measure) -> float:
    """What turns a loss into nats."""
    return math.log(2) if measure.key == "bits_per_byte" else 1.0
