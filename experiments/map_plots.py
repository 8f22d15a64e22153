"""Attention maps over images, as one PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from experiments.files import written_aside
from experiments.plots import STYLE, picture
from experiments.predict import LayerMap

COLUMNS = 7
"""Layers beside an image; more go on in the next row."""


def draw_maps(path: Path, pixels: np.ndarray, titles: Sequence[str], maps: Sequence[LayerMap]) -> None:
    """Each image (N, H, W, C) with its title, beside it the same under each layer's weights; every map has its own
    scale, bright is much.
    """
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
        for number, (shown, title) in enumerate(zip(pixels, titles, strict=True)):
            first = number * lines
            picture(grid[first, 0], shown.squeeze(), cmap="gray", vmin=0, vmax=255)
            grid[first, 0].set_title(title, fontsize=8.5, loc="center")
            grey = shown.mean(-1)
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
