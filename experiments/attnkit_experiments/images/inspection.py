"""The attention of a trained model on a few test images: maps, and row statistics per layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnkit_experiments.data.images import augment
from attnkit_experiments.data.images.dataset import in_turn
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.schema import Filled
from attnkit_experiments.images.model import ViT
from attnkit_experiments.images.task import ImageTask
from attnkit_experiments.study.stored import MAPS_FILE, Layers, RowMeans

MAP_IMAGES = 4
STATISTICS_IMAGES = 64


class Inspected(Layers):
    """What the inspection of a cell leaves in its result."""

    learned: list[Annotated[list[float], Filled()]]


def layer_statistics(model: ViT, images: Tensor, *, signed: bool) -> list[RowMeans]:
    """Per layer the mean over valid rows of entropy (nats), its share of log n, row sum, share of non-zero weights.

    A row is valid if it sees a key and has a weight other than zero; `dead` is the share that has none. Entropy is not
    defined where weights can be negative (`signed`): None.
    """
    fields = ("total", "nonzero", "visible") if signed else ("total", "nonzero", "visible", "entropy")
    _, records = model.inspect(images, fields=fields)
    return [row_means(record.statistics) for record in records]


def row_means(rows: Any) -> RowMeans:
    """The means of one layer's `attnkit.RowStatistics`."""
    alive = rows.nonzero > 0
    row: RowMeans = {
        "total": _mean(rows.total, alive),
        "nonzero": _mean(rows.nonzero / rows.visible, alive),
        "dead": float((~alive).float().mean()),
        "entropy": None,
        "entropy_share": None,
    }
    if rows.entropy is not None:
        row["entropy"] = _mean(rows.entropy, alive)
        row["entropy_share"] = _mean(rows.entropy / rows.visible.clamp(min=2).log(), alive)
    return row


def _mean(values: Tensor, rows: Tensor) -> float:
    return float(values[rows].mean()) if rows.any() else 0.0


def inspect(task: ImageTask, folder: Path, *, signed: bool, initial: ImageTask) -> dict[str, Any]:
    """Row statistics before and after training; `maps.safetensors` holds images and attention of the last layer.

    `received` is the mean weight that a patch receives over heads and queries, `centre` the weights of the query in the
    middle of the image, mean over heads; both (images, layers, L), not normalised.
    """
    order = in_turn(task.test_labels.tolist()).tolist()
    images = augment.normalise(task.pixels.test(order[:STATISTICS_IMAGES]))
    sample = task.pixels.test(order[:MAP_IMAGES])
    _, records = task.model.inspect(augment.normalise(sample))
    side = task.model.config.image // task.model.config.patch
    patches = slice(records[0].weights.shape[-1] - side * side, None)  # a class token comes first
    stacked = torch.stack([record.weights.float().mean(1)[:, patches, patches] for record in records], dim=1)
    middle = (side // 2) * side + side // 2
    tensors = {"images": sample, "received": stacked.mean(2), "centre": stacked[:, :, middle]}
    with written_aside(folder / MAPS_FILE) as aside:
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
            aside,
            metadata={"attnkit": json.dumps({"side": side})},
        )
    return {
        "layers": layer_statistics(task.model, images, signed=signed),
        "initial_layers": layer_statistics(initial.model, images, signed=signed),
    }
