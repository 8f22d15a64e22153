"""`classify DIR IMAGE...`: the top classes of images by an exported model, and maps of its attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from attnkit_experiments.commands.export import Exported, load
from attnkit_experiments.data.images.decoding.views import CentralCrop, rgb, square, viewed
from attnkit_experiments.data.unpacking import Unreadable, printable, read_file
from attnkit_experiments.engine.environment import choose_device
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import written_aside
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.terms import LIMITS
from attnkit_experiments.images.model import ViT
from attnkit_experiments.soft.inspection import attention_inputs
from attnkit_experiments.soft.model import SoftVisionTransformer

FITS: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "shorter side": square,
    "central crop": lambda image, side: CentralCrop(side)(image),
}
"""How test images were resized: in memory, or lazily."""

PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
}

COLUMNS = 7
"""Layers per row beside an image."""


@dataclass(frozen=True)
class LayerMap:
    """The attention of one layer on each image: raw weights (images, side, side)."""

    name: str
    weights: Tensor


def classify(folder: Path, images: tuple[Path, ...], *, top: int, maps: Path | None, device: str) -> None:
    """Print the `top` classes of every image with their probabilities, and draw attention maps to the file `maps`.

    Only classes judged in training are listed; probabilities are over all classes.
    """
    if top < 1:
        raise UserError(f"classify: --top must be at least 1, got {top}")
    exported, on = load(folder), choose_device(device)
    if "classes" not in exported.about:
        raise UserError(f"classify {folder}: a model of kind {exported.about['kind']!r} reads no images")
    model = exported.model.to(on)
    pixels = np.stack([read_image(path, exported.about["input"]) for path in images])
    inputs = normalised(pixels, exported.about["input"]).to(on)
    probabilities = predict(exported, inputs)
    best = []
    for path, classes in zip(images, ranked(exported, probabilities, top), strict=True):
        say(str(path))
        for name, probability in classes:
            say(f"  {100 * probability:5.1f} %  {name}")
        best.append(f"{classes[0][0]}, {100 * classes[0][1]:.0f} %")
    if maps is not None:
        draw_maps(maps, pixels, best, attention_maps(model, inputs))
        say(f"attention maps: {maps}")


def read_image(path: Path, spec: dict[str, Any]) -> np.ndarray:
    """The pixels (size, size, channels) uint8 of an image file, resized like test images."""
    encoded = read_file(path)
    try:
        fitted = viewed(str(path), encoded, lambda image: FITS[spec["fit"]](rgb(image), spec["size"]), LIMITS)
    except Unreadable as error:
        raise UserError(f"{path}: cannot be read as an image ({printable(error.reason)})") from None
    if spec["channels"] == 1:
        return np.asarray(fitted.convert("L"))[..., None]
    return np.asarray(fitted)


def normalised(pixels: np.ndarray, spec: dict[str, Any]) -> Tensor:
    """(N, H, W, C) uint8 to the model's input, (N, C, H, W)."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(spec["divide"]).sub(spec["subtract"])


@torch.no_grad()
def predict(exported: Exported, inputs: Tensor) -> Tensor:
    """Probabilities (N, classes): softmax, or each class by itself for a model of the sigmoid loss."""
    return PROBABILITIES[exported.about["loss"]](exported.model(inputs).float()).cpu()


def ranked(exported: Exported, probabilities: Tensor, top: int) -> list[list[tuple[str, float]]]:
    """For every image (class, probability) of the `top` judged classes, the most likely first."""
    classes, judged = exported.about["classes"], exported.about["judged"]
    among = list(range(len(classes))) if judged is None else judged
    values, places = probabilities[:, among].topk(min(top, len(among)))
    return [
        [(classes[among[place]], value) for value, place in zip(row.tolist(), at.tolist(), strict=True)]
        for row, at in zip(values, places, strict=True)
    ]


def attention_maps(model: nn.Module, inputs: Tensor) -> list[LayerMap]:
    """Mean over heads of the weights on each patch: those of the class token, or the mean over queries without one."""
    if isinstance(model, ViT):
        _, records = model.inspect(inputs)
        side = model.config.image // model.config.patch
        return [layer_map(f"layer {n}", record.weights, side) for n, record in enumerate(records, 1)]
    assert isinstance(model, SoftVisionTransformer)
    if model.config.method == "linformer":
        raise UserError("classify --maps: linformer mixes tokens before it weighs them; it has no weight for each")
    maps = []
    for stage, layers in enumerate(attention_inputs(model, inputs), 1):
        for block, (layer, x, grid) in enumerate(layers, 1):
            if not hasattr(layer, "weights"):
                say(f"stage {stage}: its attention shows no weights and is not drawn")
                continue
            with torch.no_grad():
                weights = layer.weights(x, grid, grid)  # type: ignore[operator]
                maps.append(layer_map(f"stage {stage}, {block}", weights, grid))
    return maps


def layer_map(name: str, weights: Tensor, side: int) -> LayerMap:
    """From weights (B, heads, n, n); of n = side² + 1 tokens the first is a class token."""
    mean = weights.float().mean(1)
    has_class_token = mean.shape[-1] > side * side
    row = mean[:, 0, 1:] if has_class_token else mean.mean(1)
    return LayerMap(name, row.unflatten(-1, (side, side)).cpu())


def draw_maps(path: Path, pixels: np.ndarray, titles: Sequence[str], maps: Sequence[LayerMap]) -> None:
    """Each image (N, H, W, C) with its title and the same image overlaid with each layer's weights; every map has its
    own scale, bright is high. One PNG.
    """
    import matplotlib as mpl  # not needed for prediction
    from matplotlib import pyplot as plt

    from attnkit_conformance.report.pages.figures import STYLE
    from attnkit_experiments.report.plots import picture

    lines = math.ceil(len(maps) / COLUMNS)
    columns = min(len(maps), COLUMNS) + 1
    side = pixels.shape[1]
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        rows = lines * len(pixels)
        figure, grid = plt.subplots(
            rows, columns, figsize=(1.7 * columns, 1.95 * rows), squeeze=False, layout="constrained"
        )
        for axes in grid.flat:
            axes.set_axis_off()
        for number, (image, title) in enumerate(zip(pixels, titles, strict=True)):
            first = number * lines
            picture(grid[first, 0], image.squeeze(), cmap="gray", vmin=0, vmax=255)
            grid[first, 0].set_title(title, fontsize=8.5, loc="center")
            grey = image.mean(-1)
            for index, layer in enumerate(maps):
                axes = grid[first + index // COLUMNS, 1 + index % COLUMNS]
                weights = layer.weights[number].numpy()
                picture(axes, grey, cmap="gray", vmin=0, vmax=255)
                edges = (-0.5, side - 0.5, side - 0.5, -0.5)
                picture(axes, weights, cmap="magma", alpha=0.65, extent=edges, vmin=min(weights.min(), 0))
                axes.set_title(layer.name, fontsize=8.5, loc="center")
        with written_aside(path) as aside:
            figure.savefig(aside, format="png", dpi=150)
        plt.close(figure)
