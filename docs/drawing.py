"""How weights become a picture: colours, panels, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import attnkit
from attnkit_conformance.model.op import Op
from attnkit_conformance.report.pages import figures
from attnkit_conformance.report.pages.figures import INK, PAPER, SERIES

Array = Any
Params = Mapping[str, Any]

SIDE = 8
PHONE = 5.2  # inches: such a picture is shown at two thirds of its size on a phone
PAGES = Path(__file__).parent / "variants"
QUERIES = {"a": (3, 2), "b": (4, 4), "c": (0, 7)}  # (row, column): on the stroke, in the hole, in a corner


class Scene(NamedTuple):
    """The image and its 64 pixels as queries and keys (64, 8)."""

    image: Array
    q: Array
    k: Array


class Drawn(NamedTuple):
    """What one picture shows."""

    op: Op
    params: Params
    given: Scene
    arrays: Params  # the arrays of `<op>_weights`, by name
    weights: Array  # (64, 64), or (64, slots)
    pixels: Array  # (64, 64): the weights of pixels

    @property
    def causal(self) -> bool:
        """Whether no query gives a later key a weight."""
        return not np.triu(self.weights, 1).any()

    @property
    def visible(self) -> Array:
        """Which pairs may have a weight."""
        full = np.ones(self.weights.shape, dtype=bool)
        return np.tril(full) if self.causal else full

    @property
    def has_statistics(self) -> bool:
        """Whether `row_statistics` serves the call: not where v is among its arrays."""
        return self.op.statistics and "v" not in self.arrays

    def row_statistics(self, *fields: str) -> Any:
        """Of the rows of the weights, where the op has them."""
        return attnkit.row_statistics(getattr(attnkit, self.op.name), **self.arrays, fields=fields, **self.params)


# ------------------------------------------------------------------------------------------------- the numbers


def statistics(x: Drawn) -> list[tuple[str, str]]:
    """Numbers beside the picture: from `row_statistics` where it serves the op, else from the weights drawn."""
    signed = bool((x.weights < 0).any())
    of_rows: Any = None
    if x.has_statistics:
        fields = ("total", "nonzero", "visible", *(() if signed else ("entropy",)))
        of_rows = x.row_statistics(*fields)
    total = x.weights.sum(axis=-1) if of_rows is None else of_rows.total
    if of_rows is None:
        zeros = attnkit.analysis.sparsity(x.weights, x.visible).zeros
    else:
        zeros = 1 - of_rows.nonzero.sum() / of_rows.visible.sum()
    total = np.where(np.abs(total) < 1e-12 * np.abs(x.weights).sum(axis=-1), 0.0, total)  # what rounding left
    low, middle, high = (number(value) for value in (total.min(), total.mean(), total.max()))
    rows = [
        ("row sums", middle if low == high else f"{low} to {high}, mean {middle}"),
        ("exact zeros", f"{100 * float(zeros):.0f} % of visible pairs"),
    ]
    if of_rows is not None and not signed:
        valid = of_rows.total != 0
        entropy, most = float(of_rows.entropy[valid].mean()), float(np.log(of_rows.visible[valid]).mean())
        rows.append(("entropy", f"{entropy:.2f} of at most {most:.2f} nats"))
    if signed:
        rows.append(("negative", f"{100 * float((x.weights < 0).mean()):.0f} % of pairs"))
    else:
        share = attnkit.analysis.concentration(x.weights, 10, x.visible)
        rows.append(("largest 10 %", f"hold {100 * float(share):.0f} % of a row"))
    rows.append(("effective rank", f"{float(attnkit.analysis.effective_rank(x.weights)):.1f}"))
    return rows


def number(x: Any) -> str:
    return f"{float(x) + 0.0:.3g}"


# ------------------------------------------------------------------------------------------------- colours and panels

FAINT, MARK = "#8a9099", "#c2378a"
STROKE = "#2b3036"  # over weights, which are on white where the site has INK on black
HIDDEN = "#e4e6e9"  # pairs that are not visible
STEPS = 33  # colours of a scale: enough for the eye, and a third of the bytes
SEQUENTIAL = LinearSegmentedColormap.from_list("white left out", mpl.colormaps["YlGnBu"](np.linspace(0.1, 1)), STEPS)
DIVERGING = mpl.colormaps["PuOr_r"].resampled(STEPS)
FILE = figures.STYLE | {"figure.facecolor": PAPER}
"""Of pictures that are files: what shows them may be dark."""
STYLE = FILE | {
    "font.size": 8,
    "axes.edgecolor": FAINT,
    "axes.grid": False,
    "axes.linewidth": 0.6,
    "axes.spines.right": True,
    "axes.spines.top": True,
    "axes.titlelocation": "center",
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "contour.linewidth": 1.1,
}
"""Of pictures of weights."""


class Scale(NamedTuple):
    colours: Colormap
    norm: Normalize


def scale(w: Array) -> Scale:
    """Colours for weights: symmetric about 0 if any is negative; the largest 1 in 200 share the last colour."""
    largest = float(np.quantile(np.abs(w), 0.995)) or float(np.abs(w).max()) or 1.0
    if (w < 0).any():
        return Scale(DIVERGING, Normalize(-largest, largest))
    return Scale(SEQUENTIAL, Normalize(0, largest))


def coloured(w: Array, visible: Array, by: Scale) -> Array:
    """RGB of weights: exact zeros are white, what is not visible is grey."""
    rgb = np.array(by.colours(by.norm(w)))[..., :3]
    rgb[w == 0] = 1.0
    rgb[~visible] = mpl.colors.to_rgb(HIDDEN)
    return (rgb * 255).round().astype(np.uint8)


def draw_matrix(figure: Figure, left: float, x: Drawn, by: Scale) -> None:
    """The weights of all queries, with a bar that tells colours from values."""
    axes = figure.add_axes((left, 0.16, 0.216, 0.675))
    queries, keys = x.weights.shape
    axes.imshow(coloured(x.weights, x.visible, by), interpolation="none", extent=(0, 1, queries, 0), aspect="auto")
    axes.set_yticks(np.arange(0, queries + 1, 16))
    ticks = np.arange(0, keys + 1, 16 if keys > 16 else 4)
    axes.set_xticks(ticks / keys, [str(tick) for tick in ticks])
    axes.set(ylabel="query", xlabel="key" if keys == SIDE * SIDE else "slot")
    for name in QUERIES:
        axes.text(1.02, row_of(name) + 0.5, name, color=MARK, va="center", fontweight="bold")
    bar = figure.add_axes((left + 0.249, 0.16, 0.009, 0.675))
    low, high = float(by.norm.vmin or 0), float(by.norm.vmax or 0)
    steps = np.linspace(high, low, 128)[:, None]
    bar.imshow(by.colours(by.norm(steps))[..., :3], extent=(0, 1, low, high), aspect="auto")
    bar.yaxis.tick_right()
    bar.set_xticks([])
    bar.locator_params(axis="y", nbins=5)
    if float(np.abs(x.weights).max()) > high:
        bar.set_title(f"max {number(x.weights.max())}", fontsize=7, pad=3)


def draw_map(axes: Axes, x: Drawn, name: str, by: Scale) -> None:
    """The weights of one query over the image."""
    visible = (x.visible if x.weights is x.pixels else np.ones(x.pixels.shape, dtype=bool))[row_of(name)]
    colours = coloured(x.pixels[row_of(name)], visible, by)
    axes.imshow(colours.reshape(SIDE, SIDE, 3), interpolation="none", extent=(0, SIDE, SIDE, 0))
    draw_outline(axes, x.given.image)
    mark_query(axes, name)


def draw_outline(axes: Axes, image: Array) -> None:
    """The border of the stroke, and a frame without ticks."""
    centres = np.arange(-1, SIDE + 1) + 0.5
    axes.contour(centres, centres, np.pad(image, 1), [0.3], colors=STROKE)
    axes.set(xticks=[], yticks=[], xlim=(0, SIDE), ylim=(SIDE, 0))


def mark_query(axes: Axes, name: str) -> None:
    row, column = QUERIES[name]
    axes.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, fill=False, edgecolor=MARK, linewidth=1.8))
    axes.set_title(name, color=MARK, fontweight="bold", pad=3)


def row_of(name: str) -> int:
    return QUERIES[name][0] * SIDE + QUERIES[name][1]


def title_of(op: Op, params: Params) -> str:
    options = (f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in params.items())
    return f"{op.name}({', '.join(options)})"


def picture(x: Drawn) -> Figure:
    """Matrix, three queries over the image, numbers."""
    figure = Figure(figsize=(8.6, 2.75))
    by = scale(x.weights)
    draw_matrix(figure, 0.048, x, by)
    of_pixels = by if x.weights is x.pixels else scale(x.pixels)
    for n, name in enumerate(QUERIES):
        draw_map(figure.add_axes((0.375 + 0.152 * n, 0.398, 0.1398, 0.437)), x, name, of_pixels)
    figure.text(0.048, 0.925, title_of(x.op, x.params), fontsize=10, fontweight="bold")
    notes = ["white:", "exactly 0", *(["grey:", "not visible"] if x.causal else [])]
    figure.text(0.838, 0.82, "\n".join(notes), fontsize=7.5, color=FAINT, va="top")
    for n, (label, value) in enumerate(statistics(x)):
        left, bottom = 0.375 + 0.315 * (n % 2), 0.29 - 0.075 * (n // 2)
        figure.text(left, bottom, label, color=FAINT, fontsize=7.5)
        figure.text(left + 0.096, bottom, value, fontsize=7.5)
    return figure


def input_picture(scene: Scene, op: Op) -> Figure:
    """The image, the queries, and the scores that the variants with a product start from."""
    figure = Figure(figsize=(8.6, 2.75))
    axes = figure.add_axes((0.048, 0.16, 0.216, 0.675))
    axes.imshow(scene.image, cmap="Greys", interpolation="none", extent=(0, SIDE, SIDE, 0))
    draw_outline(axes, scene.image)
    for name, (row, column) in QUERIES.items():
        mark_query(axes, name)
        axes.text(column + 0.5, row + 0.53, name, color=MARK, ha="center", va="center", fontweight="bold")
    axes.set_title("")
    s = scene.q @ scene.k.T / np.sqrt(scene.q.shape[-1])
    x, by = Drawn(op, {}, scene, {}, s, s), scale(s)
    draw_matrix(figure, 0.33, x, by)
    for n, name in enumerate(QUERIES):
        draw_map(figure.add_axes((0.645 + 0.118 * n, 0.484, 0.1122, 0.351)), x, name, by)
    figure.text(0.048, 0.925, "64 pixels", fontsize=10, fontweight="bold")
    figure.text(0.33, 0.925, "scores q·k/√8", fontsize=10, fontweight="bold")
    figure.text(0.645, 0.925, "scores of three queries", fontsize=10, fontweight="bold")
    lines = "a  on the stroke", "b  in the hole", "c  in a corner", "black line: border of the stroke"
    for n, line in enumerate(lines):
        figure.text(0.645, 0.40 - 0.075 * n, line, fontsize=7.5)
    return figure


def panels(number_of_panels: int, columns: int = 6, width: float = 8.6) -> tuple[Figure, list[Axes]]:
    rows = -(-number_of_panels // columns)
    figure = Figure(figsize=(width, (width / columns + 0.19) * rows))
    axes = [figure.add_subplot(rows, columns, n + 1) for n in range(number_of_panels)]
    figure.subplots_adjust(0.01, 0.02, 0.99, 1 - 0.24 / figure.get_figheight(), wspace=0.08, hspace=0.22)
    return figure, axes


def title(op: Op) -> str:
    """What its page calls an op."""
    return (PAGES / f"{op.name}.md").read_text().partition("\n")[0].removeprefix("# ")


def short(op: Op) -> str:
    return title(op).partition(" attention")[0]


def overview_picture(defaults: list[Drawn], name: str = "a") -> Figure:
    """One query, all variants with their defaults, each in a colour scale of its own, legible on a phone."""
    figure, places = panels(len(defaults), columns=5, width=PHONE)
    for axes, x in zip(places, defaults, strict=True):
        draw_map(axes, x, name, scale(x.pixels[row_of(name)]))
        axes.set_title(short(x.op), color=INK, fontsize=9.5, pad=4)
    return figure


def speed_picture(rows: list[tuple[str, dict[str, float]]]) -> Figure:
    """Times as fast as torch's softmax, by variant and by mode of a call, the fastest call on top."""
    figure = Figure(figsize=(PHONE, 5.4), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=lambda row: row[1]["forward"])
    axes.axvline(1, color=INK, linewidth=1)
    for mode, label, fill in (("forward", "forward", SERIES[0]), ("forward+backward", "forward and backward", PAPER)):
        style: dict[str, Any] = {"color": SERIES[0], "markerfacecolor": fill, "markersize": 5.5}
        axes.plot([row[1][mode] for row in rows], range(len(rows)), "o", label=label, **style)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(xscale="log", xlim=(0.5, 100), ylim=(-0.6, len(rows) - 0.4), xlabel="times as fast as torch's softmax")
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.legend(loc="outside upper center", ncols=2, handletextpad=0.2)
    return figure


def entropy_picture(defaults: list[Drawn]) -> Figure:
    """Entropy of each query under each op whose rows have one, in one colour scale."""
    panels_of = [x for x in defaults if x.op.statistics and not (x.weights < 0).any()]
    figure, places = panels(len(panels_of))
    by = Scale(SEQUENTIAL, Normalize(0, 1.6 * np.log(SIDE * SIDE)))  # the outline stays legible
    for axes, x in zip(places, panels_of, strict=True):
        entropy = x.row_statistics("entropy").entropy
        colours = coloured(entropy.reshape(SIDE, SIDE), np.ones((SIDE, SIDE), dtype=bool), by)
        axes.imshow(colours, interpolation="none", extent=(0, SIDE, SIDE, 0))
        draw_outline(axes, x.given.image)
        axes.set_title(f"{short(x.op)}  {entropy.mean():.2f}", fontsize=8.5, pad=4)
    return figure


def concentration_picture(defaults: list[Drawn]) -> Figure:
    """Share of the row sum against share of the keys, of ops without negative weights."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.subplots()
    percents = [0.5 * n for n in range(1, 201)]
    items = [x for x in defaults if x.weights is x.pixels and not (x.weights < 0).any()]
    curves: dict[tuple[float, ...], list[str]] = {}
    for x in items:
        shares = attnkit.analysis.concentration_curve(x.weights, percents, fractional=True)
        curves.setdefault(tuple(np.round(100 * shares, 3)), []).append(short(x.op))
    dashes = ("-", *figures.DASHES)
    for n, curve in enumerate(sorted(curves, key=lambda curve: -curve[19])):
        style: dict[str, Any] = {"color": SERIES[n % len(SERIES)], "linestyle": dashes[n // len(SERIES)]}
        axes.plot([0, *percents], [0, *curve], label=", ".join(curves[curve]), **style)
    axes.plot([0, 100], [0, 100], color=FAINT, linewidth=0.8, linestyle=figures.DASHES[0], label="equal weights")
    axes.set(
        xlabel="largest weights of a row, % of the keys", ylabel="share of the row sum, %", xlim=(0, 100), ylim=(0, 101)
    )
    figure.legend(loc="outside right center", fontsize=8, handlelength=3)
    return figure
