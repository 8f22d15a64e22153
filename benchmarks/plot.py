"""A plot of ratios against n with error bars, as SVG in the page's colours."""

import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 430, 250
LEFT, RIGHT, TOP, BOTTOM = 48, 20, 26, 28


class Point(NamedTuple):
    """A ratio and its quartiles at one n."""

    n: int
    median: float
    lower: float
    upper: float


class Series(NamedTuple):
    """A line: `kind` is its class in the style sheet, `dash` the number of its pattern."""

    name: str
    kind: str
    dash: int
    points: tuple[Point, ...]


class Axis(NamedTuple):
    """A logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def powers_of_two(low: float, high: float, most: int) -> list[float]:
    """Ticks between low and high, 1 among them, at most so many."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    return [2.0**i for i in range(first, last + 1) if i % step == 0]


def limits(series: Sequence[Series]) -> tuple[float, float]:
    """A range of ratios that contains all points and 1."""
    values = [x for one in series for p in one.points for x in (p.lower, p.upper, p.median)]
    return min([*values, 0.7]) / 1.15, max([*values, 1.4]) * 1.15


def ticks(x: Axis, y: Axis, ns: Sequence[int]) -> list[str]:
    """Grid and labels."""
    parts = []
    for value in powers_of_two(y.low, y.high, 6):
        kind, at = "one" if value == 1 else "grid", y.at(value)
        parts.append(f'<line class="{kind}" x1="{x.start - 6}" x2="{x.end + 6}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{x.start - 11}" y="{at + 3.5:.1f}" text-anchor="end">{value:g}×</text>')
    for n in ns:
        at = x.at(n)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">n = {n}</text>')
    return parts


def path_of(one: Series, x: Axis, y: Axis, shift: float) -> str:
    """Line, error bars and dots, moved by `shift` pixels so that bars of different lines lie side by side."""
    places = [(x.at(p.n) + shift, y.at(p.median), y.at(p.lower), y.at(p.upper)) for p in one.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in places)
    parts = [f'<polyline class="dash{one.dash}" points="{path}"/>']
    for p, (a, b, low, high) in zip(one.points, places, strict=True):
        parts.append(f'<line x1="{a:.1f}" x2="{a:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        title = f"{one.name}, n = {p.n}: {p.median:.2f}× [{p.lower:.2f}, {p.upper:.2f}]"
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3"><title>{title}</title></circle>')
    return f'<g class="{one.kind}">{"".join(parts)}</g>'


def panel(title: str, series: Sequence[Series], bounds: tuple[float, float]) -> str:
    """One picture; a ratio of 1 is the baseline."""
    ns = sorted({p.n for one in series for p in one.points})
    x = Axis(ns[0], max(ns[-1], ns[0] + 1), LEFT + 14, WIDTH - RIGHT - 14)
    y = Axis(*bounds, HEIGHT - BOTTOM, TOP)
    middle = (len(series) - 1) / 2
    lines = [path_of(one, x, y, 3.0 * (i - middle)) for i, one in enumerate(series)]
    heading = f'<text class="heading" x="{x.start - 6}" y="14">{title}</text>'
    body = "".join([heading, *ticks(x, y, ns), *reversed(lines)])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{body}</svg>'
