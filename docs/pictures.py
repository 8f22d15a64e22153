"""Pictures of attention weights: every variant on one real input, with the same queries and keys for all of them.

    python docs/pictures.py                      # all of them, into docs/families/pictures
    python docs/pictures.py --only entmax_attention --out FOLDER

The ops come from the op database of the conformance kit: every row with weights gets a picture of each of its settings
in `SETTINGS`, or of its defaults. The input is one 8×8 image of scikit-learn's digits; docs/families/index.md says what
q and k are. The same bytes come out of two runs on one machine.
"""

from __future__ import annotations

import argparse
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "reference"), str(ROOT / "conformance")]  # this checkout, installed or not

import matplotlib as mpl  # noqa: E402

mpl.use("agg")

import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import attnkit  # noqa: E402
from attnkit_conformance.op import Op, weights_of  # noqa: E402
from attnkit_conformance.opdb import PUBLIC  # noqa: E402

Array = Any
Params = Mapping[str, Any]

FOLDER = ROOT / "docs" / "families" / "pictures"
SIDE, FEATURES, POOL = 8, 8, 2
DIGIT = 0  # the first image of the set, a nought
QUERIES = {"a": (3, 2), "b": (4, 4), "c": (0, 7)}  # (row, column): on the stroke, in the hole, in a corner

# ------------------------------------------------------------------------------------------------- the input


class Scene(NamedTuple):
    """The image and its 64 pixels as queries and keys (64, 8)."""

    image: Array
    q: Array
    k: Array


def positions() -> Array:
    """√2 cos(π u (x + ½)/8) of row and of column, u = 1, 2: (64, 4), orthogonal, of mean 0 and variance 1."""
    along = [np.sqrt(2) * np.cos(np.pi * u * (np.arange(SIDE) + 0.5) / SIDE) for u in (1, 2)]
    rows = [np.repeat(x, SIDE) for x in along]
    columns = [np.tile(x, SIDE) for x in along]
    return np.stack([*rows, *columns], axis=1)


def looks(image: Array) -> Array:
    """The first four principal components of the 3×3 neighbourhoods of one image, whitened: (64, 4)."""
    padded = np.pad(image, 1)
    near = np.stack([padded[r : r + SIDE, c : c + SIDE].ravel() for r in range(3) for c in range(3)], axis=1)
    near = near - near.mean(axis=0)
    axes = np.linalg.eigh(near.T @ near / len(near))[1][:, : -FEATURES // 2 - 1 : -1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    found = near @ axes
    return found / found.std(axis=0)


def scene() -> Scene:
    """k = z, the features of a pixel; q = z R with R a fixed rotation near the identity. Nothing is trained."""
    image = load_digits().images[DIGIT] / 16
    z = np.concatenate([looks(image), positions()], axis=1)
    drawn = np.random.default_rng(0).standard_normal((FEATURES, FEATURES))
    turn, one = 0.1 * (drawn - drawn.T), np.eye(FEATURES)
    return Scene(image, z @ np.linalg.solve(one + turn, one - turn), z)


def pooling() -> Array:
    """Means over windows of 2×2 pixels as a matrix, (16, 64)."""
    return attnkit.landmarks.average_pool(np.eye(SIDE * SIDE), SIDE, SIDE, POOL)


def drawn(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape)


# Arguments of `<op>_weights`, by name: what an op gets for them.
ARGUMENTS: dict[str, Callable[[Scene], Array]] = {
    "q": lambda x: x.q,
    "k": lambda x: x.k,
    "qk": lambda x: x.k,
    "landmarks": lambda x: attnkit.landmarks.average_pool(x.q, SIDE, SIDE, POOL),
    "proj_k": lambda x: pooling(),
    "projection": lambda x: drawn(64, FEATURES),
    "rotations": lambda x: drawn(FEATURES, 2, 4),
}

# File name and parameters of each picture of an op; an op that is not here is drawn once, with its defaults.
SETTINGS: dict[str, dict[str, Params]] = {
    "softmax_attention": {"": {}, "causal": {"causal": True}},
    "pointwise_attention": {
        "": {},
        "alpha-0": {"alpha": 0.0},
        "causal": {"causal": True},
        "relu-squared": {"activation": "relu_squared"},
        "softplus": {"activation": "softplus"},
        "gelu": {"activation": "gelu"},
        "identity": {"activation": "identity"},
    },
    "entmax_attention": {"": {}, "alpha-1.25": {"alpha": 1.25}},
    "gaussian_attention": {"": {}, "wide": {"scale": 0.1}},
    "soft_attention": {"": {}, "steps-2": {"newton_steps": 2}},
    "nystrom_attention": {"": {"num_landmarks": 16}, "steps-20": {"num_landmarks": 16, "inverse_steps": 20}},
    "lsh_attention": {"": {"chunk_size": 16}},
}

# Weights of slots, (64, m), as weights of pixels: what they are multiplied with, (m, 64).
SLOTS: dict[str, Callable[[], Array]] = {"linformer_attention": pooling}


def arguments(op: Op, given: Scene, params: Params) -> list[Array]:
    """The arrays of `<op>_weights`, in order."""
    found = []
    for name in weights_of(op).arguments:
        if name not in ARGUMENTS:
            raise LookupError(f"{op.name}: argument {name!r} has no value; add it to ARGUMENTS in docs/pictures.py")
        found.append(ARGUMENTS[name](given))
    for name, parameter in inspect.signature(getattr(attnkit, f"{op.name}_weights")).parameters.items():
        needed = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if needed and name not in params:
            raise LookupError(f"{op.name}: parameter {name!r} has no value; add it to SETTINGS in docs/pictures.py")
    return found


class Drawn(NamedTuple):
    """What one picture shows."""

    op: Op
    params: Params
    given: Scene
    weights: Array  # (64, 64), or (64, slots)
    pixels: Array  # (64, 64): the weights of pixels

    @property
    def visible(self) -> Array:
        """Which pairs may have a weight."""
        full = np.ones(self.weights.shape, dtype=bool)
        return np.tril(full) if self.params.get("causal") else full


def weigh(op: Op, params: Params, given: Scene) -> Drawn:
    w = getattr(attnkit, f"{op.name}_weights")(*arguments(op, given, params), **params)
    size = SIDE * SIDE
    pixels = w @ SLOTS[op.name]() if op.name in SLOTS else w
    if pixels.shape != (size, size):
        text = f"weights {w.shape} are not weights of {size} pixels; add their matrix to SLOTS in docs/pictures.py"
        raise LookupError(f"{op.name}: {text}")
    return Drawn(op, params, given, w, pixels)


# ------------------------------------------------------------------------------------------------- the numbers


def statistics(x: Drawn) -> list[tuple[str, str]]:
    """Numbers beside the picture: from `row_statistics` where it serves the op, else from the weights drawn."""
    signed = bool((x.weights < 0).any())
    of_rows = None
    if x.op.statistics:
        fields = ("total", "nonzero", "visible", *(() if signed else ("entropy",)))
        of_rows = attnkit.row_statistics(x.op.name, x.given.q, x.given.k, fields=fields, **x.params)
    total = x.weights.sum(axis=-1) if of_rows is None else of_rows.total
    if of_rows is None:
        zeros = attnkit.analysis.sparsity(x.weights, x.visible).zeros
    else:
        zeros = 1 - of_rows.nonzero.sum() / of_rows.visible.sum()
    total = np.where(np.abs(total) < 1e-12 * np.abs(x.weights).sum(axis=-1), 0.0, total)  # what rounding left
    low, middle, high = (number(value) for value in (total.min(), total.mean(), total.max()))
    found = [
        ("row sums", middle if low == high else f"{low} to {high}, mean {middle}"),
        ("exact zeros", f"{100 * float(zeros):.0f} % of visible pairs"),
    ]
    if of_rows is not None and not signed:
        valid = of_rows.total != 0
        entropy, most = (float(value[valid].mean()) for value in (of_rows.entropy, np.log(of_rows.visible)))
        found.append(("entropy", f"{entropy:.2f} of at most {most:.2f} nats"))
    if signed:
        found.append(("negative", f"{100 * float((x.weights < 0).mean()):.0f} % of pairs"))
    else:
        share = attnkit.analysis.concentration(x.weights, 10, x.visible)
        found.append(("largest 10 %", f"hold {100 * float(share):.0f} % of a row"))
    found.append(("effective rank", f"{float(attnkit.analysis.effective_rank(x.weights)):.1f}"))
    return found


def number(x: Any) -> str:
    return f"{float(x) + 0.0:.3g}"


# ------------------------------------------------------------------------------------------------- the drawing

INK, FAINT, MARK = "#22262b", "#8a9099", "#c2378a"
HIDDEN = "#e4e6e9"  # pairs that are not visible
STEPS = 33  # colours of a scale: enough for the eye, and a third of the bytes
SEQUENTIAL = LinearSegmentedColormap.from_list("white left out", mpl.colormaps["YlGnBu"](np.linspace(0.1, 1)), STEPS)
DIVERGING = mpl.colormaps["PuOr_r"].resampled(STEPS)
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "attnkit",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # for the layout; a viewer without it takes its own, which is narrower
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "axes.titlesize": 8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "contour.linewidth": 1.1,
}


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
    rgb = by.colours(by.norm(w))[..., :3]
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
    shown = coloured(x.pixels[row_of(name)], visible, by)
    axes.imshow(shown.reshape(SIDE, SIDE, 3), interpolation="none", extent=(0, SIDE, SIDE, 0))
    draw_outline(axes, x.given.image)
    mark_query(axes, name)


def draw_outline(axes: Axes, image: Array) -> None:
    """The border of the stroke, and a frame without ticks."""
    centres = np.arange(-1, SIDE + 1) + 0.5
    axes.contour(centres, centres, np.pad(image, 1), [0.3], colors=INK)
    axes.set(xticks=[], yticks=[], xlim=(0, SIDE), ylim=(SIDE, 0))


def mark_query(axes: Axes, name: str) -> None:
    row, column = QUERIES[name]
    axes.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, fill=False, edgecolor=MARK, linewidth=1.8))
    axes.set_title(name, color=MARK, fontweight="bold", pad=3)


def row_of(name: str) -> int:
    return QUERIES[name][0] * SIDE + QUERIES[name][1]


def title_of(op: Op, params: Params) -> str:
    given = (f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in params.items())
    return f"{op.name}({', '.join(given)})"


def picture(x: Drawn) -> Figure:
    """Matrix, three queries over the image, numbers."""
    figure = Figure(figsize=(8.6, 2.75))
    by = scale(x.weights)
    draw_matrix(figure, 0.048, x, by)
    of_pixels = by if x.weights is x.pixels else scale(x.pixels)
    for n, name in enumerate(QUERIES):
        draw_map(figure.add_axes((0.375 + 0.152 * n, 0.398, 0.1398, 0.437)), x, name, of_pixels)
    figure.text(0.048, 0.925, title_of(x.op, x.params), fontsize=10, fontweight="bold")
    notes = ["white:", "exactly 0", *(["grey:", "not visible"] if x.params.get("causal") else [])]
    figure.text(0.838, 0.82, "\n".join(notes), fontsize=7.5, color=FAINT, va="top")
    for n, (label, value) in enumerate(statistics(x)):
        left, bottom = 0.375 + 0.315 * (n % 2), 0.29 - 0.075 * (n // 2)
        figure.text(left, bottom, label, color=FAINT, fontsize=7.5)
        figure.text(left + 0.096, bottom, value, fontsize=7.5)
    return figure


def input_picture(given: Scene) -> Figure:
    """The image, the queries, and the scores that the variants with a product start from."""
    figure = Figure(figsize=(8.6, 2.75))
    axes = figure.add_axes((0.048, 0.16, 0.216, 0.675))
    axes.imshow(given.image, cmap="Greys", interpolation="none", extent=(0, SIDE, SIDE, 0))
    draw_outline(axes, given.image)
    for name, (row, column) in QUERIES.items():
        mark_query(axes, name)
        axes.text(column + 0.5, row + 0.53, name, color=MARK, ha="center", va="center", fontweight="bold")
    axes.set_title("")
    s = given.q @ given.k.T / np.sqrt(FEATURES)
    x, by = Drawn(PUBLIC[0], {}, given, s, s), scale(s)
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


def overview_picture(defaults: list[Drawn], name: str = "a") -> Figure:
    """One query, all variants with their defaults, each in a colour scale of its own."""
    columns = 6
    rows = -(-len(defaults) // columns)
    figure = Figure(figsize=(8.6, 1.62 * rows))
    for n, x in enumerate(defaults):
        axes = figure.add_subplot(rows, columns, n + 1)
        draw_map(axes, x, name, scale(x.pixels[row_of(name)]))
        axes.set_title(x.op.name.removesuffix("_attention"), color=INK, fontsize=9, pad=4)
    figure.subplots_adjust(0.01, 0.02, 0.99, 1 - 0.24 / figure.get_figheight(), wspace=0.08, hspace=0.22)
    return figure


# ------------------------------------------------------------------------------------------------- files


def save(figure: Figure, path: Path) -> None:
    """SVG without dates, versions and indentation."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    path.write_text(re.sub(r"\n\s*", "\n", text))
    print(path.name, f"{path.stat().st_size / 1024:.0f} KB")


def ops(only: list[str]) -> list[Op]:
    found = [op for op in PUBLIC if op.weights]
    unknown = set(only) - {op.name for op in found}
    if unknown:
        raise LookupError(f"no op with weights is called {', '.join(sorted(unknown))}")
    return [op for op in found if not only or op.name in only]


def draw(folder: Path, only: list[str]) -> None:
    """The pictures of the named ops, or of all, the input and the overview."""
    folder.mkdir(parents=True, exist_ok=True)
    given, first = scene(), []
    with mpl.rc_context(STYLE):
        for op in ops(only):
            for label, params in SETTINGS.get(op.name, {"": {}}).items():
                x = weigh(op, params, given)
                first += [] if label else [x]
                save(picture(x), folder / f"{op.name}{'-' if label else ''}{label}.svg")
        if not only:
            save(input_picture(given), folder / "input.svg")
            save(overview_picture(first), folder / "overview.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--only", nargs="*", default=[], metavar="OP", help="only these ops")
    chosen = parser.parse_args()
    draw(chosen.out, chosen.only)


if __name__ == "__main__":
    main()
