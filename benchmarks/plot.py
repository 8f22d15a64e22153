"""Ratios against n with their quartiles, in the colours of the page: a figure of an op, with a panel for each mode."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnkit_conformance.report.pages import figures
from attnkit_conformance.report.pages.figures import INK, SERIES

Record = dict[str, Any]
CHOICE = "attnkit, its own choice"
CHOSEN, OURS, SOFTMAX = SERIES[0], SERIES[5], INK
COLOURS = {
    "naive": SERIES[8],
    "flex": SERIES[1],
    "entmax": SERIES[3],
    "fla": SERIES[2],
    "sdpa": SOFTMAX,
    "jax.nn": SOFTMAX,
}
"""{prefix of a contender's name: its colour}; lines of one colour differ in their dashes."""
DASHES = ("solid", *figures.DASHES)


class Series(NamedTuple):
    """A line: the ratios of a contender with their quartiles, by n."""

    name: str
    colour: str
    dashes: Any
    ratios: dict[int, dict[str, float]]


def draw(title: str, modes: Mapping[str, Sequence[Record]]) -> str:
    """The panels of some modes side by side, as an <svg>."""
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(10.4, 3.2), layout="constrained")
        panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
        for axes, (mode, records) in zip(panels, modes.items(), strict=True):
            draw_panel(axes, [*series(records)])
            axes.set_title(mode, fontweight="bold")
        low, high = panels[0].get_ylim()
        panels[0].set_ylim(min(low, 0.6), max(high, 1.6))
        lines = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=5, handlelength=3)
        return figures.in_page(figures.svg(figure, title))


def draw_panel(axes: Axes, lines: Sequence[Series]) -> None:
    """Lines with bars, which lie side by side; a ratio of 1 is the baseline."""
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.axhline(1, color=INK, linewidth=1)
    for i, (name, colour, dashes, ratios) in enumerate(lines):
        places = [n * 1.01 ** (2 * i - len(lines) + 1) for n in ratios]
        median, lower, upper = zip(*((x["median"], x["lower"], x["upper"]) for x in ratios.values()), strict=True)
        width = 3 if name == CHOICE else 1.6
        style: dict[str, Any] = {"color": colour, "zorder": 20 - i}
        axes.vlines(places, lower, upper, linewidth=width / 2, **style)
        axes.plot(places, median, "o", linestyle=dashes, label=name, linewidth=width, markersize=4, **style)
    ns = sorted({n for line in lines for n in line.ratios})
    axes.set_xticks(ns, [str(n) for n in ns])
    axes.set_xlabel("n")
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.minorticks_off()
    axes.grid(visible=False, axis="x")


def series(records: Sequence[Record]) -> Iterator[Series]:
    """attnkit's own choice first, then every contender; SDPA's backends only where the op is theirs."""
    ordered = sorted(records, key=lambda record: record["cell"]["n"])
    used = Counter[str]()
    if chosen := {r["cell"]["n"]: r["contenders"][r["auto"]]["ratio"] for r in ordered if r["auto"] in r["contenders"]}:
        yield Series(CHOICE, CHOSEN, DASHES[0], chosen)
    for name in dict.fromkeys(name for record in ordered for name in record["contenders"]):
        serving = [record for record in ordered if name in record["contenders"]]
        colour = next((colour for start, colour in COLOURS.items() if name.startswith(start)), OURS)
        if all(r["auto"] == name for r in serving) or (colour == SOFTMAX and ordered[0]["cell"]["op"] != "softmax"):
            continue
        ratios = {record["cell"]["n"]: record["contenders"][name]["ratio"] for record in serving}
        yield Series(name, colour, DASHES[used[colour] % len(DASHES)], ratios)
        used[colour] += 1
