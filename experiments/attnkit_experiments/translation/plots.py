"""The figures of translation studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from safetensors import SafetensorError, safe_open

from attnkit_conformance.report.pages.figures import DASHES, STYLE, svg
from attnkit_experiments.engine.arrays import conform_arrays
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.schema import conform
from attnkit_experiments.report.plots import colours, shades, spread_line, stamp, trained
from attnkit_experiments.report.results import StudyResults
from attnkit_experiments.study.stored import MAPS_FILE

READABLE = 40  # tokens of a map whose words are written beside it


def against_size(study: StudyResults) -> str | None:
    """BLEU and the anisotropy of slots against the number that the recipe varies: slots, or tokens of a document."""
    points = {line.name: line.variant["point"].partition(" ") for line in trained(study)}
    sizes = {int(number) for number, _, _ in points.values() if number.isdigit()}
    if len(sizes) < 2:
        return None
    colour, unit = colours(study), next(iter(points.values()))[2]
    with mpl.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(9.4, 3.6), gridspec_kw={"wspace": 0.3})
        for series in dict.fromkeys(line.variant["series"] for line in trained(study)):
            lines = [line for line in trained(study) if line.variant["series"] == series]
            for axes, key in zip(both, ("bleu", "slot_anisotropy"), strict=True):
                spreads = [line.over_seeds(key) for line in lines]
                x = [int(points[line.name][0]) for line in lines]
                spread_line(axes, x, spreads, color=colour[series], marker="o", capsize=4, label=series)
        for axes, name in zip(both, ("BLEU", "anisotropy of value slots"), strict=True):
            axes.set(xlabel=unit, ylabel=name, xscale="log")
            axes.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
            axes.minorticks_off()
        stamp(both[0], study)
        both[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
        return svg(figure, f"BLEU and anisotropy against the number of {unit}")


def gradient_norms(study: StudyResults) -> str:
    """Norm of the gradient against the step, diverged runs included."""
    shade = shades(study)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 3.6))
        for line in study.lines:
            x, means = line.norm_curve()
            style: Any = "-" if line.results else DASHES[1]
            label = line.label if line.results else f"{line.label} (diverged)"
            axes.plot(x, means, color=shade[line.name], linestyle=style, label=label)
        axes.set(xlabel="step", ylabel="gradient norm", yscale="log")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, "norm of the gradient against step for every variant")


def concentration(study: StudyResults) -> str:
    """Share held by the largest p % of the slots of memories and of the weights of attention."""
    shade = shades(study)
    with mpl.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(9.4, 3.6), sharey=True)
        for line in trained(study):
            for axes, kind in zip(both, ("slots", "attention"), strict=True):
                if shares := line.shares(kind):
                    x = sorted(shares)
                    axes.plot(x, [100 * shares[p] for p in x], color=shade[line.name], marker=".", label=line.label)
        for axes, title in zip(both, ("slots of memories", "weights of attention"), strict=True):
            axes.set(title=title, xlabel="largest p %", xscale="log")
        both[0].set_ylabel("share of the sum, %")
        both[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
        return svg(figure, "share of the sum that the largest weights hold")


class Words(TypedDict):
    """The tokens of a sentence as texts."""

    source: list[str]
    target: list[str]


def read_sentence(path: Path) -> tuple[Words, np.ndarray, np.ndarray]:
    """The words of the sentence in a cell's maps; means over heads of the weights of the encoder's layer and of the
    decoder's to the source. UserError if there are none.
    """
    try:
        with safe_open(path, framework="np") as stored:
            words = json.loads((stored.metadata() or {}).get("attnkit", "null"))
            maps = {name.partition(".")[0]: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no dict)
        conform(words, Words)
        lengths = {name: len(each) for name, each in words.items()}
        conform_arrays(
            maps, {"encoder": "float32 heads source source", "decoder": "float32 heads target source"}, lengths
        )
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as the weights of a sentence ({error})") from None
    return words, maps["encoder"].mean(0), maps["decoder"].mean(0)


def attention_maps(study: StudyResults) -> str | None:
    """One sentence: the last encoder layer above, the last cross-attention below, mean over heads."""
    lines = [line for line in trained(study) if (line.first_cell / MAPS_FILE).exists()]
    if not lines:
        return None
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = plt.subplots(
            2, len(lines), figsize=(3.3 * len(lines) + 1, 7.4), squeeze=False, layout="constrained"
        )
        for column, line in enumerate(lines):
            words, encoder, decoder = read_sentence(line.first_cell / MAPS_FILE)
            for row, (weights, queries) in enumerate(((encoder, words["source"]), (decoder, words["target"]))):
                axes = grid[row][column]
                axes.imshow(weights, cmap="magma", aspect="auto", vmin=min(0.0, float(weights.min())))
                if max(weights.shape) <= READABLE:
                    axes.set_xticks(range(weights.shape[1]), words["source"], rotation=90, fontsize=7)
                    axes.set_yticks(range(weights.shape[0]), queries, fontsize=7)
                if row == 0:
                    axes.set_title(line.label)
        return svg(figure, "attention weights of one sentence for every variant")
