"""Measurements of a trained language model: rows of its attention, and statistics with exact values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import torch

from attnkit_experiments.images.inspection import row_means
from attnkit_experiments.language import exact, layers
from attnkit_experiments.language.model import LanguageModel
from attnkit_experiments.language.task import LanguageTask
from attnkit_experiments.study.recipe import Cell
from attnkit_experiments.study.stored import Count, Layers, RowMeans

INSPECTED_TOKENS = 1 << 13


class AtStart(TypedDict):
    """`exact.at_start`."""

    length: Count
    row_sum: float
    row_sum_exact: float
    row_sum_errors: float
    variance: float
    variance_exact: float
    variance_errors: float


class Inspected(Layers):
    """What the inspection of a cell leaves in its result."""

    exact: list[AtStart]


def inspect(task: LanguageTask, initial: LanguageTask, cell: Cell, folder: Path) -> dict[str, Any]:
    """Rows of attention before and after training on the same test windows, and the statistics that are exact."""
    tokens = task.tested_sample(0, max(INSPECTED_TOKENS // task.length, 1)).tokens
    signed = cell.variant.signed
    return {
        "layers": layer_statistics(task.model, tokens, signed=signed),
        "initial_layers": layer_statistics(initial.model, tokens, signed=signed),
        "exact": exact_statistics(cell),
    }


def layer_statistics(model: LanguageModel, tokens: torch.Tensor, *, signed: bool) -> list[RowMeans]:
    """Per layer the means over rows that `row_means` takes; [] where attnkit has no statistics of the op."""
    if not layers.has_statistics(model.config.op, model.config.options):
        return []
    model.eval()
    fields = ("total", "nonzero", "visible", *(() if signed else ("entropy",)))
    return [row_means(rows) for rows in model.statistics(tokens, fields)]


def exact_statistics(cell: Cell) -> list[dict[str, Any]]:
    """`exact.at_start` at the study's lengths; [] for softmax, and for activations without a moment there."""
    options = cell.variant.options
    if options.get("activation") not in exact.ACTIVATIONS:
        return []
    lengths = cell.settings["exact_at"]
    return [exact.at_start(options["activation"], options["alpha"], at, seed=cell.seed) for at in lengths]
