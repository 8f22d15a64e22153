"""Figures of studies of images: entropy by layer, attention maps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from attnkit_conformance.report.pages.figures import INK, STYLE, svg
from attnkit_experiments.engine.arrays import Arrays
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.report.plots import image, picture, pictures, shades, trained
from attnkit_experiments.report.results import Line, StudyResults, read_maps
from attnkit_experiments.study.stored import MAPS_FILE


def entropy_bars(study: StudyResults) -> str | None:
    """Entropy of the normalised weights per layer as a share of log n; ticks show the untrained model."""
    lines = [line for line in trained(study) if line.layers("entropy_share")]
    if not lines:
        return None
    shade = shades(study)
    with mpl.rc_context(STYLE):
        depth = max(len(line.layers("entropy_share") or ()) for line in lines)
        figure, axes = plt.subplots(figsize=(8.4, 3.6))
        width = 0.8 / len(lines)
        inked = [line.name for line in lines if shade[line.name] == INK]
        for index, line in enumerate(lines):
            after, before = line.layers("entropy_share"), line.layers("entropy_share", initial=True)
            assert after is not None
            assert before is not None
            x = np.arange(len(after)) + width * (index - (len(lines) - 1) / 2)
            axes.bar(
                x,
                [spread.mean for spread in after],
                0.9 * width,
                yerr=[spread.sd or 0 for spread in after],
                color=shade[line.name],
                ecolor=INK,
                error_kw={"alpha": 0.55, "elinewidth": 1.1},
                alpha=0.85 - (0.5 * inked.index(line.name) / len(inked) if line.name in inked else 0.0),
                label=line.label,
            )
            axes.hlines(
                [spread.mean for spread in before], x - 0.45 * width, x + 0.45 * width, color=INK, linewidth=1.4
            )
        axes.plot([], [], color=INK, linewidth=1.4, label="before training")
        axes.set_xticks(range(depth), [f"layer {i + 1}" for i in range(depth)])
        axes.set(ylabel="entropy / log n", ylim=(0, 1.05))
        axes.grid(visible=False, axis="x")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, "entropy of the attention weights per layer and variant")


def attention_maps(study: StudyResults) -> str:
    """Test images with the weights of the middle query in the last layer, mean over heads."""
    lines = trained(study)[:7]
    stored = square_maps(lines, "centre", "float32 N layers patches")
    images = stored[0]["images"]
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = pictures(len(images), len(lines) + 1, 1.55)
        for row, pixels in enumerate(images):
            image(grid[row, 0], pixels.squeeze())
            for column, (line, maps) in enumerate(zip(lines, stored, strict=True), start=1):
                middle = weights_picture(grid[row, column], maps["centre"][row, -1]) // 2
                grid[row, column].plot(middle, middle, "s", ms=5, mfc="none", mec="#7fd4ff", mew=1.2)
                if row == 0:
                    grid[0, column].set_title(line.label.replace(", ", "\n"), fontsize=8.5, loc="center")
        grid[0, 0].set_title("image", fontsize=8.5, loc="center")
        return svg(figure, "attention of the middle patch on test images, one column per variant")


def layer_maps(study: StudyResults) -> str:
    """One test image through the layers: the weight each patch receives, mean over heads and queries."""
    lines = trained(study)[:7]
    stored = square_maps(lines, "received", "float32 N LAYERS patches")
    depth = stored[0]["received"].shape[1]
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = pictures(len(lines), depth + 1, 1.5)
        for row, (line, maps) in enumerate(zip(lines, stored, strict=True)):
            image(grid[row, 0], maps["images"][0].squeeze())
            label = line.label.replace(", ", "\n")
            grid[row, 0].set_ylabel(label, fontsize=8.5, rotation=0, ha="right", va="center")
            for layer in range(depth):
                weights_picture(grid[row, layer + 1], maps["received"][0, layer])
                if row == 0:
                    grid[0, layer + 1].set_title(f"layer {layer + 1}", fontsize=8.5, loc="center")
        return svg(figure, "weight received by each patch of one image, layer by layer")


def square_maps(lines: Sequence[Line], name: str, kind: str) -> list[Arrays]:
    """`read_maps` of images and of weights of the patches of a square."""
    stored = read_maps(lines, {"images": "uint8 N side side channels", name: kind})
    for line, maps in zip(lines, stored, strict=True):
        patches = maps[name].shape[-1]
        if math.isqrt(patches) ** 2 != patches:
            raise UserError(f"{line.first_cell / MAPS_FILE}: {name} must have the patches of a square, got {patches}")
    return stored


def weights_picture(axes: Axes, weights: np.ndarray) -> int:
    """The weights of all patches of a square image; returns its side. Black is 0."""
    side = math.isqrt(weights.size)
    picture(axes, weights.reshape(side, side), cmap="magma", vmin=min(weights.min(), 0))
    return side
