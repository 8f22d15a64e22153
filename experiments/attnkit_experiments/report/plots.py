"""The figures of reports, as SVG."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    ScalarFormatter,
)

from attnkit_conformance.report.pages import Markup, card
from attnkit_conformance.report.pages.figures import DASHES, INK, SERIES, STYLE, WORSE, in_page, svg
from attnkit_experiments.report.claims import Claims
from attnkit_experiments.report.results import Line, StudyResults
from attnkit_experiments.report.statistics import Spread
from attnkit_experiments.study.measurement import Row

STAMP = 44  # characters per line of the label inside a figure, as two figures are side by side


def in_card(figure: str) -> Markup:
    """An <svg> in a frame of the page and in its colours."""
    return card(Markup(in_page(figure)))


def colours(study: StudyResults) -> dict[str, str]:
    """A colour for each series; softmax takes the colour of the ink."""
    series = list(dict.fromkeys(line.variant["series"] for line in study.lines))
    others = [name for name in series if name != "softmax"]
    return {"softmax": INK} | {name: SERIES[i % len(SERIES)] for i, name in enumerate(others)}


def shades(study: StudyResults) -> dict[str, str]:
    """A colour for each variant, for plots where every variant is its own line."""
    others = [line.name for line in study.lines if line.variant["series"] != "softmax"]
    coloured = {name: SERIES[i % len(SERIES)] for i, name in enumerate(others)}
    return coloured | {line.name: INK for line in study.lines if line.name not in coloured}


def trained(study: StudyResults) -> list[Line]:
    return [line for line in study.lines if line.results]


def points(study: StudyResults) -> list[str]:
    """The model sizes of a study, or [""] if it has one."""
    return list(dict.fromkeys(line.variant["point"] for line in trained(study)))


@dataclass(frozen=True)
class Axis:
    """The vertical axis: `key` of a result; `share` says whether it is shown in percent."""

    key: str
    name: str
    share: bool = True


ACCURACY = Axis("accuracy", "test accuracy")


def has_softmax(study: StudyResults) -> bool:
    """Whether softmax was trained beside the variants, as a level in figures."""
    return any(line.variant["series"] == "softmax" for line in trained(study))


def against_alpha(study: StudyResults, point: str, axis: Axis = ACCURACY) -> str | None:
    """`axis` against alpha, a line per series with its standard deviation, softmax as a level, at one point."""
    here_alone = [line for line in trained(study) if line.variant["point"] == point]
    lines = [line for line in here_alone if line.variant["alpha"] is not None]
    if not lines:
        return None
    colour = colours(study)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 4.2))
        for line in here_alone:
            if line.variant["series"] == "softmax":
                level = line.over_seeds(axis.key)
                axes.axhline(level.mean, color=INK, linestyle=DASHES[0], label="softmax")
                if level.sd is not None:
                    axes.axhspan(level.mean - level.sd, level.mean + level.sd, color=INK, alpha=0.1, linewidth=0)
        series = list(dict.fromkeys(line.variant["series"] for line in lines))
        for index, name in enumerate(series):
            here = [line for line in lines if line.variant["series"] == name]
            shift = 0.008 * (index - (len(series) - 1) / 2)
            x = [line.variant["alpha"] + shift for line in here]
            spreads = [line.over_seeds(axis.key) for line in here]
            spread_line(axes, x, spreads, color=colour[name], marker="o", markersize=6, capsize=4, label=name)
            for at, line in zip(x, here, strict=True):
                seeds = [result[axis.key] for result in line.results.values()]
                axes.plot([at] * len(seeds), seeds, ".", color=colour[name], alpha=0.5, markersize=8)
        axes.margins(y=0.15)
        alphas = [line.variant["alpha"] for line in lines]
        axes.set_xlim(min(alphas) - 0.06, max(alphas) + 0.06)
        axes.set(xlabel=r"α  (weights are $L^{-α}\,h$)", ylabel=axis.name, title=point)
        axes.set_xticks(sorted(set(alphas)))
        if axis.share:
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if _wide(axes) else 1))
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        stamp(axes, study)
        beside = ", softmax as a line" if has_softmax(study) else ""
        return svg(figure, f"{axis.name} against alpha{beside}")


def against_seconds(study: StudyResults, axis: Axis) -> str | None:
    """`axis` of every evaluation against the seconds of training before it, means over seeds, a line per variant.

    Nothing where variants were evaluated once: of points alone the seconds are noise.
    """
    scores = {line.name: line.scores(axis.key) for line in trained(study)}
    if all(len(each) < 2 for each in scores.values()):
        return None
    shade, dashed = shades(study), itertools.cycle(DASHES)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 4.0))
        for line in trained(study):
            seconds, values = zip(*scores[line.name], strict=True)
            dashes: Any = next(dashed) if line.variant["series"] == "softmax" else "-"
            axes.plot(
                seconds, values, color=shade[line.name], linestyle=dashes, marker="o", markersize=4, label=line.label
            )
        axes.set(xlabel="seconds (steps × median step)", ylabel=axis.name)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        stamp(axes, study)
        return svg(figure, f"{axis.name} against seconds of training for every variant")


def spread_line(axes: Axes, x: Sequence[float], spreads: Sequence[Spread], **style: Any) -> None:
    """Means over seeds with their standard deviations."""
    axes.errorbar(x, [spread.mean for spread in spreads], yerr=[spread.sd or 0 for spread in spreads], **style)


def _wide(axes: Axes) -> bool:
    low, high = axes.get_ylim()
    return high - low > 0.05


def stamp(axes: Axes, study: StudyResults) -> None:
    """The preset, inside every figure that shows an accuracy, so that a copied figure keeps its label."""
    text = "SMOKE · not a result" if study.smoke else textwrap.fill(study.label, STAMP, break_long_words=False)
    axes.text(
        0.5 if study.smoke else 0.995,
        0.5 if study.smoke else 0.02,
        text,
        transform=axes.transAxes,
        ha="center" if study.smoke else "right",
        va="center" if study.smoke else "bottom",
        fontsize=17 if study.smoke else 8.5,
        color=WORSE if study.smoke else INK,
        alpha=0.35 if study.smoke else 0.6,
        rotation=12 if study.smoke else 0,
        zorder=0,
    )


def against_compute(study: StudyResults, key: str = "accuracy", name: str = "test accuracy") -> str:
    """Accuracy against counted FLOPs and against measured core hours of training."""
    colour = colours(study)
    with mpl.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(10.2, 3.9), sharey=True)
        for axes, place, label in (
            (both[0], lambda line: line.first["training_flops"], "training FLOPs (counted)"),
            (both[1], Line.core_hours, "core hours (cores × steps × median step)"),
        ):
            for series in dict.fromkeys(line.variant["series"] for line in trained(study)):
                here = sorted((line for line in trained(study) if line.variant["series"] == series), key=place)
                spreads = [line.over_seeds(key) for line in here]
                spread_line(
                    axes,
                    [place(line) for line in here],
                    spreads,
                    color=colour[series],
                    marker="s" if series == "softmax" else "o",
                    linestyle="-" if any(line.variant["point"] for line in here) else "none",
                    capsize=3,
                    label=series,
                )
                for line, spread in zip(here, spreads, strict=True):
                    alpha = line.variant["alpha"]
                    note = line.variant["point"] or (f"α={alpha:g}" if alpha is not None else "")
                    if note and axes is both[1]:
                        at = (place(line), spread.mean)
                        axes.annotate(
                            note, at, xytext=(6, -3), textcoords="offset points", fontsize=8.5, color=colour[series]
                        )
            axes.set(xlabel=label, xscale="log")
            round_ticks(axes)
            stamp(axes, study)
        both[0].set_ylabel(name)
        both[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if _wide(both[0]) else 1))
        both[1].legend(loc="upper left", bbox_to_anchor=(1.09, 1))
        return svg(figure, f"{name} against floating-point operations and core hours")


def round_ticks(axes: Axes) -> None:
    """A logarithmic axis of x that spans less than two decades has a few round numbers, where it would have nine a
    decade.
    """
    low, high = axes.get_xlim()
    if high < 100 * low:
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf)))
    if high < 10 * low:
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(ScalarFormatter(useMathText=True))


def against_tokens(
    rows: Sequence[Row],
    panels: Mapping[str, Callable[[Row], float | None]],
    ink: Mapping[str, Any],
    *,
    smoke: bool,
    name: str = "",
    xscale: str = "linear",
) -> str:
    """A number of each row against its tokens, a panel for each, a line per method; `ink` has dashes of softmax's."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colour = dict(zip((method for method in methods if method not in ink), itertools.cycle(SERIES), strict=False))
    with mpl.rc_context(STYLE):
        figure, both = plt.subplots(1, len(panels), figsize=(10.2, 3.9), gridspec_kw={"wspace": 0.22})
        for axes, (title, number) in zip(both, panels.items(), strict=True):
            for method in methods:
                here = [
                    (row["tokens"], y) for row in rows if row["method"] == method and (y := number(row)) is not None
                ]
                axes.plot(
                    [x for x, _ in here],
                    [y for _, y in here],
                    marker="o",
                    color=colour.get(method, INK),
                    linestyle=ink.get(method, "-"),
                    markersize=4,
                    label=method,
                )
            axes.set(xlabel="tokens n", title=title, xscale=xscale, yscale="log")
            if smoke:
                axes.text(0.5, 0.5, "SMOKE · not a result", transform=axes.transAxes, ha="center", color=WORSE)
        both[0].set_ylabel(name)
        both[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, f"{name} {' and '.join(panels)} against the number of tokens for every method".lstrip())


def learning_curves(study: StudyResults) -> str:
    """Training loss, averaged over short stretches of steps and over seeds; the band is the standard deviation."""
    shade, dashed = shades(study), itertools.cycle(DASHES)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 4.0))
        for line in trained(study):
            x, mean, sd = line.loss_curve()
            dashes: Any = next(dashed) if line.variant["series"] == "softmax" else "-"
            axes.plot(x, mean, color=shade[line.name], linestyle=dashes, label=line.label)
            if sd is not None:
                axes.fill_between(x, mean - sd, mean + sd, color=shade[line.name], alpha=0.14, linewidth=0)
        axes.set(xlabel="step", ylabel="training loss")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, "training loss against step for every variant")


def image(axes: Axes, pixels: np.ndarray) -> None:
    """A test image."""
    picture(axes, pixels, cmap="gray", vmin=0, vmax=255)


def picture(axes: Axes, pixels: np.ndarray, **how: Any) -> None:
    axes.imshow(pixels, interpolation="nearest", **how)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def pictures(rows: int, columns: int, size: float) -> tuple[Figure, Any]:
    """A grid of axes, `size` inches each."""
    return plt.subplots(
        rows,
        columns,
        figsize=(size * columns, size * rows),
        squeeze=False,
        gridspec_kw={"wspace": 0.06, "hspace": 0.06},
    )


def claim_plots(claims: Claims) -> str:
    """Mean weight against L for relu, and output variance against n, both with the expected line."""
    lengths = claims["lengths"]
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.2, 3.9))
        rows = [row for row in claims["weights"] if row["activation"] == "relu"]
        for index, row in enumerate(rows):
            left.loglog(lengths, row["means"], "o", color=SERIES[index], label=f"relu, α = {row['alpha']:g}")
            ideal = [row["means"][0] * (length / lengths[0]) ** -row["alpha"] for length in lengths]
            left.loglog(lengths, ideal, "-", color=SERIES[index], linewidth=1, alpha=0.7)
        left.loglog(lengths, claims["softmax"], "s--", color=INK, markersize=4, linewidth=1.2, label="softmax, 1/L")
        left.set(xlabel="L", ylabel="mean |w|", title="mean weight (lines: slope -α)")
        left.legend(fontsize=8.5)
        n = [row["n"] for row in claims["variance"]]
        right.loglog(n, [row["relu"] for row in claims["variance"]], "o", color=SERIES[0], label="relu, no scale")
        right.loglog(n, [row["expected"] for row in claims["variance"]], "-", color=SERIES[0], linewidth=1, label="n/2")
        flat = [row["reluformer"] for row in claims["variance"]]
        right.loglog(n, flat, "o", color=SERIES[2], label="reluformer")
        right.axhline(1, color=SERIES[2], linewidth=1)
        right.set(xlabel="n", ylabel="variance of the output", title="output variance")
        right.legend(fontsize=8.5)
        for axes in (left, right):
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
        return svg(figure, "mean weight against L and output variance against n")
