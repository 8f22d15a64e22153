"""What all figures share: colours, matplotlib's settings, and how a figure becomes SVG, in a page or in a file.

A figure is drawn with `INK` on `PAPER`; inside a page these, and `LINE`, become the page's own colours, light or dark.
"""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

INK, LINE, PAPER = "#22262b", "#d5dae1", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b6cd8", "#8c564b", "#7d8794")
"""Lines: the seven of Okabe and Ito (2008) but yellow, which is too light on white and black is INK, and three more."""
BETTER, WORSE, UNDECIDED = SERIES[0], "#d2493f", SERIES[8]
DASHES = ((0, (5, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)), (0, (1, 1.5)))
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attnkit",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # for the layout; a viewer without it takes its own, which is narrower
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def svg(figure: Figure, description: str, *, crop: bool = True) -> str:
    """The figure, which it closes, as an <svg> element in fixed colours with a description for screen readers; `crop`:
    without its margins.
    """
    buffer = io.StringIO()
    box = "tight" if crop else None
    figure.savefig(buffer, format="svg", bbox_inches=box, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return with_description(text, description)


def with_description(picture: str, description: str) -> str:
    """An <svg> with a description, in place of one that it had."""
    picture = re.sub(r'(?s)^.*?<svg(?: role=\S+ aria-label=".*?")?', "<svg", picture, count=1)
    return picture.replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"', 1)


def in_page(picture: str) -> str:
    """An <svg> in the colours of the page that holds it, as wide as there is room."""
    for colour, name in ((INK, "ink"), (LINE, "line"), (PAPER, "paper")):
        picture = picture.replace(colour, f"var(--{name})")
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", picture, count=1)
