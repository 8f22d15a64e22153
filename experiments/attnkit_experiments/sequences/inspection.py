"""The attention of a trained sequence classifier: rows of its weights, layer by layer."""

from __future__ import annotations

from pathlib import Path

import torch

from attnkit.nn import LayerAnalysis, capture
from attnkit_experiments.sequences.model import SequenceClassifier
from attnkit_experiments.sequences.task import SequenceTask
from attnkit_experiments.study.recipe import Cell
from attnkit_experiments.study.stored import Layers, RowMeans

INSPECTED, AT_ONCE = 32, 8  # sequences whose rows of attention are measured


def inspect(task: SequenceTask, initial: SequenceTask, cell: Cell, folder: Path) -> Layers:
    """Rows of attention before and after training, on the same test sequences."""
    # hooks need a model that is not compiled
    plain = SequenceClassifier(cell.settings["model"]).to(task.device)
    plain.load_state_dict(task.model.state_dict())
    return {"layers": layer_statistics(plain, task), "initial_layers": layer_statistics(initial.model, task)}


@torch.no_grad()
def layer_statistics(model: SequenceClassifier, task: SequenceTask) -> list[RowMeans]:
    """Per attention layer means over the rows of tokens of the first test sequences, in the order of the model.

    `total` is the row sum, `entropy` in nats of normalised weights (None where it is not defined), `nonzero` the share
    of keys with a weight, `dead` the share of rows without any. [] for methods without weights of single keys, or whose
    weights attnkit has no statistics of.
    """
    model.eval()
    rows = task.data.test.rows[:INSPECTED]
    with capture(model, percents=()) as record:
        for start in range(0, len(rows), AT_ONCE):
            here = rows[start : start + AT_ONCE]
            model(task.padded(here, task.width_of(here)))
    return [_layer(layer) for layer in record.layers if layer.rows > layer.null]


def _layer(layer: LayerAnalysis) -> RowMeans:
    return {
        "name": layer.name,
        "total": layer.means["total"],
        "entropy": layer.means.get("entropy"),
        "nonzero": 1 - layer.zeros,
        "dead": layer.dead / (layer.rows - layer.null),
    }
