"""The figures of the results: narrow enough for a phone, with ink on white for light and dark pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from attnkit_conformance.report.pages import figures
from attnkit_conformance.report.pages.figures import BETTER, DASHES, INK, PAPER, SERIES, UNDECIDED, WORSE, svg
from attnkit_experiments.evidence.estimates import Estimate
from attnkit_experiments.evidence.measures import headline, measure_of
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.report.statistics import Difference
from attnkit_experiments.study.recipe import Published

WIDTH = 5.2  # inches; on a phone a figure is shown at two thirds of its size
STYLE = figures.STYLE | {"font.size": 11, "axes.titlesize": 11.5, "figure.facecolor": PAPER, "legend.fontsize": 10}
SOFTMAX = ("softmax", "transformer", "vanilla")
"""Series and variants that are softmax attention."""


def is_softmax(run: Run, variant: str) -> bool:
    return variant in SOFTMAX or run.first(variant)["series"] in SOFTMAX


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each series; softmax has that of the ink."""
    others = [name for name in dict.fromkeys(names) if name not in SOFTMAX]
    return dict(zip(others, itertools.cycle(SERIES), strict=False)) | dict.fromkeys(SOFTMAX, INK)


@dataclass(frozen=True)
class Comparison:
    """A row of a forest plot: a difference of losses, which `factor` turns into nats, and whether it is decided after
    correction.
    """

    name: str
    estimate: Difference
    factor: float
    decided: bool
    too_small: bool = False


REACH = 0.4  # nats; what lies beyond is an arrow, and its number is in the row's name


def forest(rows: Sequence[Comparison], title: str) -> str | None:
    """Differences with their 95 % intervals over seeds, one below the other, names and numbers above each."""
    if not rows:
        return None
    names = [row.name if len(row.name) < 46 else row.name.replace(" beside ", "\nbeside ") for row in rows]
    places = list(itertools.accumulate(1.1 + 0.45 * name.count("\n") for name in names))
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 0.7 + 0.33 * places[-1]))
        across = axes.get_yaxis_transform()
        for name, place, row in zip(names, places, rows, strict=True):
            mean, width = (row.factor * x for x in (row.estimate.mean, row.estimate.half_width or 0.0))
            colour = UNDECIDED if not row.decided else BETTER if mean < 0 else WORSE
            low, high = (min(max(x, -REACH), REACH) for x in (mean - width, mean + width))
            axes.plot([low, high], [-place, -place], color=colour, linewidth=2.2 if row.decided else 1.4)
            for end, marker in ((-REACH, "<"), (REACH, ">")):
                if end in (low, high):
                    axes.plot(end, -place, marker, color=colour, markersize=5, clip_on=False)
            if abs(mean) < REACH:
                inside = PAPER if row.too_small else colour
                axes.plot(mean, -place, "o", color=colour, markerfacecolor=inside, markersize=5.5)
            ink = colour if row.decided else INK
            look: dict[str, Any] = {"transform": across, "fontsize": 9, "va": "bottom", "color": ink}
            axes.text(0.0, -place + 0.18, name, **look)
            axes.text(
                1.0, -place + 0.18, f"{round(mean, 3) + 0.0:+.3f} ± {width:.3f}".replace("-", "−"), ha="right", **look
            )
        axes.axvline(0, color=INK, linewidth=1, zorder=0)
        axes.set(xlim=(-REACH * 1.04, REACH * 1.04), ylim=(-places[-1] - 0.5, 0.0), yticks=[])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("difference in loss, nats: better left, worse right")
        return svg(figure, f"comparisons of {title}, with intervals")


def differences(run: Run) -> str | None:
    """The loss that decides of each variant less its baseline's, paired by seed, with 95 % intervals."""
    measure, rows = measure_of(run.recipe), []
    for variant in run.variants:
        found = difference(run, variant, measure.key)
        if found:
            rows.append((run.label(variant), found))
    if not rows:
        return None
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH - 1.6, 0.6 + 0.34 * len(rows)))
        for place, (_, found) in enumerate(rows):
            colour = BETTER if found.decided else UNDECIDED
            width = measure.factor * (found.half_width or 0)
            axes.errorbar(
                measure.factor * found.mean, -place, xerr=width, fmt="o", color=colour, capsize=3, markersize=5
            )
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks([-place for place in range(len(rows))], [name for name, _ in rows])
        axes.grid(axis="y", visible=False)
        axes.margins(y=0.3 / len(rows) + 0.05)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(f"difference in {measure.head}")
        return svg(figure, f"differences in {measure.name} of {run.recipe}, with intervals")


def difference(run: Run, variant: str, key: str) -> Estimate | None:
    """A variant less its baseline, over the seeds that both have."""
    baseline = run.first(variant)["baseline"]
    if not baseline or baseline not in run.variants:
        return None
    ours, theirs = run.numbers(variant, key), run.numbers(baseline, key)
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return Estimate.of(gaps, run.ends(variant, baseline, key, gaps)) if gaps else None


def against_alpha(run: Run) -> str | None:
    """The headline against α, a line for each series, softmax as a level."""
    return _against(run, lambda variant: run.first(variant)["alpha"], "α", "")


def against_size(key: str = "", unit: str = "") -> Callable[[Run], str | None]:
    """A number against what points of the study are, such as "32 slots", on a logarithmic axis."""

    def size(run: Run) -> str | None:
        def place(variant: str) -> str:
            return "".join(character for character in run.first(variant)["point"] if character.isdigit())

        return _against(run, place, unit, key, xscale="log")

    return size


def _against(run: Run, place: Callable[[str], str], name: str, key: str, *, xscale: str = "linear") -> str | None:
    measure = measure_of(run.recipe, key) if key else headline(run.recipe)
    series: dict[str, list[tuple[float, str]]] = {}
    for variant in run.variants:
        if run.spread(variant, measure.key):
            at = place(variant)
            label = run.first(variant)["series"]
            if xscale == "log" and run.first(variant)["alpha"]:
                label += f", α = {float(run.first(variant)['alpha']):g}"
            series.setdefault(label, []).append((float(at) if at else float("nan"), variant))
    places = sorted({x for each in series.values() for x, _ in each if x == x})
    if len(places) < 2:
        return None
    colour = colours(list(series))
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3.4))
        for aside, (label, each) in zip(_beside_each_other(len(series)), series.items(), strict=True):
            spreads = [run.spread(variant, measure.key) for _, variant in each]
            means = [measure.factor * spread.mean for spread in spreads if spread]
            errors = [measure.factor * (spread.sd or 0) for spread in spreads if spread]
            if each[0][0] != each[0][0]:  # softmax has no α
                axes.axhline(means[0], color=INK, linestyle=DASHES[0], label=label)
                axes.axhspan(means[0] - errors[0], means[0] + errors[0], color=INK, alpha=0.1, linewidth=0)
            else:
                x = [_moved(at, aside, places, xscale) for at, _ in each]
                axes.errorbar(x, means, yerr=errors, color=colour[label], marker="o", capsize=3, label=label)
        axes.set(xlabel=name, ylabel=measure.head, xscale=xscale)
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.minorticks_off()
        below(axes)
        return svg(figure, f"{measure.name} against {name} of {run.recipe}")


def _beside_each_other(count: int) -> list[float]:
    """How far each of some series is moved, in widths of the axis: bars at one place stay legible."""
    return [0.012 * (number - (count - 1) / 2) for number in range(count)]


def _moved(x: float, aside: float, places: Sequence[float], xscale: str) -> float:
    low, high = places[0], places[-1]
    return x * (high / low) ** aside if xscale == "log" else x + (high - low) * aside


def below(axes: Axes) -> None:
    """The legend under the figure, which leaves the width to the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), ncols=2, columnspacing=1.2, handlelength=1.6)


def beside(run: Run, columns: Sequence[Published]) -> str | None:
    """Ours left, the paper's numbers right, a row for each variant: to compare their order, not their values."""
    columns = [column for column in columns if any(_pairs(run, column))]
    if not columns:
        return None
    rows = max(len(_pairs(run, column)) for column in columns)
    size = (WIDTH, len(columns) * (0.95 + 0.32 * rows))
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(len(columns), 2, figsize=size, squeeze=False, layout="constrained")
        for (left, right), column in zip(grid, columns, strict=True):
            pairs = _pairs(run, column)
            left.set_zorder(1)  # its title runs over the other axes
            for place, (variant, ours, theirs) in enumerate(pairs):
                colour = INK if is_softmax(run, variant) else SERIES[0]
                if ours:
                    left.errorbar(ours.mean, -place, xerr=ours.half_width or 0, fmt="o", color=colour, capsize=3)
                if theirs is not None:
                    right.plot(theirs, -place, "s", color=colour)
                else:
                    right.text(0.5, -place, "did not converge", transform=right.get_yaxis_transform(), ha="center",
                               va="center", fontsize=9)  # fmt: skip
            left.set_title(column.name)
            for axes, origin in ((left, "here"), (right, "paper")):
                axes.set_xlabel(origin)
                axes.xaxis.set_major_locator(MaxNLocator(3))
                axes.set_ylim(-len(pairs) + 0.5, 0.5)
                axes.margins(x=0.2)
                axes.grid(axis="y", visible=False)
            left.set_yticks([-place for place in range(len(pairs))], [run.label(variant) for variant, *_ in pairs])
            right.set_yticks([-place for place in range(len(pairs))], [""] * len(pairs))
        names = " and ".join(column.name for column in columns)
        return svg(figure, f"{names} of {run.recipe}, ours beside the paper's")


def _pairs(run: Run, column: Published) -> list[tuple[str, Difference | None, float | None]]:
    """(variant, ours with its interval, the paper's) of the variants that both have."""
    pairs = []
    for variant, value in column.values.items():
        numbers = run.numbers(variant, column.key) if variant in run.variants else {}
        if not numbers and not (variant in run.variants and run.diverged(variant)[0]):
            continue
        factor, reference = column.factor, 1.0
        if column.relative_to:
            others = run.spread(column.relative_to, column.key)
            factor, reference = (1 / others.mean if others else 0), column.values[column.relative_to] or 1.0
        ours = Difference.of([factor * number for number in numbers.values()]) if numbers else None
        pairs.append((variant, ours, None if value is None else value / reference))
    return pairs


def against_tokens(key: str, name: str, factor: float, where: Mapping[str, str]) -> Callable[[Run], str | None]:
    """A column of a measurement against the number of tokens, both logarithmic, a line for each method."""

    def figure_of(run: Run) -> str | None:
        rows = [row for row in run.results if row[key] and all(row[name] == value for name, value in where.items())]
        methods = list(dict.fromkeys(row["method"] for row in rows))
        colour = colours(methods)
        with mpl.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=(WIDTH, 3.4))
            for method in methods:
                points = [(float(row["tokens"]), factor * float(row[key])) for row in rows if row["method"] == method]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour[method], label=method)
            axes.set(xlabel="tokens n", ylabel=name, xscale="log", yscale="log")
            sizes = sorted({int(row["tokens"]) for row in rows})
            doubled = [size for size in sizes if math.log2(size / sizes[0]).is_integer()]
            axes.set_xticks(doubled, [f"{size:,}" for size in doubled])
            axes.minorticks_off()
            below(axes)
            return svg(figure, f"{name} against the number of tokens")

    return figure_of


def curves(run: Run) -> str | None:
    """The training loss of each seed, thin, and their mean; diverged trainings are dotted to where they end."""
    if not run.curves:
        return None
    colour, drawn = colours(run.variants), {row["variant"] for row in run.curves}
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3.4))
        starts: list[float] = []
        for variant in (name for name in run.variants if name in drawn):
            seeds: dict[str, dict[int, float]] = {}
            for row in run.curves:
                if row["variant"] == variant and row["loss"]:
                    seeds.setdefault(row["seed"], {})[int(row["step"])] = float(row["loss"])
            lost, _ = run.diverged(variant)
            style: Any = DASHES[1] if lost else "-"
            label = run.label(variant) + (" (diverged)" if lost else "")
            look = {"linestyle": style, "color": colour[variant]}
            for losses in seeds.values():
                axes.plot(list(losses), list(losses.values()), linewidth=0.8, alpha=0.5, **look)
            steps = sorted(set().union(*seeds.values()))
            means = [fmean(losses[step] for losses in seeds.values() if step in losses) for step in steps]
            axes.plot(steps, means, label=label, **look)
            starts.append(means[0])
        axes.set(xlabel="step", ylabel="training loss")
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.5 * max(starts)))
        below(axes)
        return svg(figure, f"training loss of {run.recipe} against the step")
