"""Figures of SOFT: residuals of the inverse, heat maps."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from attnkit_conformance.report.pages.figures import DASHES, SERIES, STYLE, svg
from attnkit_experiments.report.plots import image as draw_image
from attnkit_experiments.report.plots import picture as draw_picture
from attnkit_experiments.report.plots import pictures, stamp, trained
from attnkit_experiments.report.results import StudyResults, read_maps
from attnkit_experiments.study.stored import MAPS_FILE

FLOOR = 1e-16  # a residual of 0 has no place on a logarithmic axis


def heat_maps(study: StudyResults) -> str:
    """Test images with the weights of the middle token, a column per variant and head."""
    lines = [line for line in trained(study)[:6] if (line.first_cell / MAPS_FILE).exists()]
    stored = read_maps(lines, {"images": "uint8 N side side channels", "maps": "float32 N heads grid grid"})
    columns = [
        (line, maps, head) for line, maps in zip(lines, stored, strict=True) for head in range(maps["maps"].shape[1])
    ]
    images = stored[0]["images"]
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = pictures(len(images), len(columns) + 1, 1.45)
        for row, pixels in enumerate(images):
            draw_image(grid[row, 0], pixels.squeeze())
            for column, (line, maps, head) in enumerate(columns, start=1):
                weights = maps["maps"][row, head]
                size = float(np.abs(weights).max()) or 1.0
                draw_picture(grid[row, column], weights, cmap="RdBu_r", vmin=-size, vmax=size)
                middle = len(weights) // 2
                grid[row, column].plot(middle, middle, "s", ms=4, mfc="none", mec="#2aa3b5", mew=1.2)
                if row == 0:
                    title = line.label.replace(", ", "\n") + f"\nhead {head + 1}"
                    grid[0, column].set_title(title, fontsize=8.5, loc="center")
        grid[0, 0].set_title("image", fontsize=8.5, loc="center")
        return svg(figure, "attention of the token in the middle on test images, a column per method and head")


def residuals(study: StudyResults) -> str:
    """Residual against the number of steps, a panel per variant and a line per stage, before and after training."""
    lines = [line for line in trained(study) if line.residual_curves()][:4]
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(lines), figsize=(max(4.6 * len(lines), 6.4), 3.9), sharey=True, squeeze=False
        )
        for axes, line in zip(panels[0], lines, strict=True):
            for index, trace in enumerate(line.residual_curves()):
                median, largest, before = (np.maximum(trace[key], FLOOR) for key in ("median", "largest", "initial"))
                steps = np.arange(len(median))
                axes.plot(steps, median, color=SERIES[index], label=f"stage {index + 1}")
                axes.fill_between(steps, median, largest, color=SERIES[index], alpha=0.15, linewidth=0)
                axes.plot(steps, before, color=SERIES[index], linestyle=DASHES[1], linewidth=1.2)
            axes.set_yscale("log")
            axes.set(xlabel="steps k", title=line.label)
            stamp(axes, study)
        panels[0][0].set_ylabel("residual")
        panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, "residual of Newton's iteration against its steps for every stage")
