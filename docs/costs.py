"""The page of what preset paper costs: its tables and its picture, from what was counted, measured and assumed.

python -m experiments cost --out benchmarks/results/cost-of-paper.json     # counts anew, after presets have changed
python docs/costs.py                                                       # draws the picture anew
python docs/facts.py                                                       # writes the tables anew
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments"), str(ROOT / "conformance")]  # this checkout, installed or not

import matplotlib as mpl  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from attnkit_conformance.report.pages import figures  # noqa: E402
from attnkit_experiments.commands.estimate import Cost, of_row  # noqa: E402
from benchmarks import training_time  # noqa: E402
from benchmarks.gpu.studies import EVIDENCE  # noqa: E402
from docs import choosing  # noqa: E402
from docs.drawing import FILE  # noqa: E402

COUNTED = ROOT / "benchmarks" / "results" / "cost-of-paper.json"
PICTURE = ROOT / "docs" / "cost-of-paper.svg"
PREDICTED = ROOT / "benchmarks" / "results" / "evidence.json"
TIMED_TOKENS = (1024, 4096, 16384)
Found = Any


class Bill(NamedTuple):
    """What a preset of a recipe costs: its cells' costs, with how many of each there are."""

    recipe: str
    preset: str
    says: str
    costs: tuple[tuple[Cost, int], ...]

    @property
    def cells(self) -> int:
        return sum(count for _, count in self.costs)

    def flops(self) -> float:
        return sum(cost.flops * count for cost, count in self.costs)

    def hours(self, found: Found) -> float:
        return sum(training_time.hours(cost, found) * count for cost, count in self.costs)


def bills() -> list[Bill]:
    return [
        Bill(row["recipe"], row["preset"], row["says"], tuple((of_row(cell), cell["count"]) for cell in row["cells"]))
        for row in json.loads(COUNTED.read_text())
    ]


def span(values: Iterable[float]) -> str:
    """The least and the most of some numbers, of two digits below a hundred."""
    found = [*values]
    texts = dict.fromkeys(amount(x) for x in (min(found), max(found)))
    return " to ".join(texts)


def amount(x: float) -> str:
    """Two digits that count, or all of a whole number."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def table() -> str:
    """By recipe and preset: models, operations, input, memory, hours."""
    found = training_time.content()
    lines = [
        ["recipe", "preset", "cells", "parameters, M", "GFLOPs of a sample", "operations of all cells",
         "input a second", "memory, GiB", "hours of one H100", "the preset says"],
    ]  # fmt: skip
    for bill in bills():
        costs = [cost for cost, _ in bill.costs]
        inputs = span(cost.samples / training_time.step_seconds(cost, found) for cost in costs)
        lines.append([
            f"`{bill.recipe}`", bill.preset, str(bill.cells),
            span(cost.traced.parameters / 1e6 for cost in costs),
            span(2 * cost.traced.multiply_adds / 1e9 for cost in costs),
            f"{bill.flops():.1e}", f"{inputs} {costs[0].unit}", span(cost.memory / 2**30 for cost in costs),
            amount(bill.hours(found)), bill.says,
        ])  # fmt: skip
    return choosing.table(lines)


def speeds() -> str:
    """What the hours are made of: attention as it was timed, and the ceiling of matrix products."""
    found = training_time.content()
    lines = [["attention, forward and backward", *(f"{n:,} tokens" for n in TIMED_TOKENS)]]
    rows = {(row.op, row.causal, row.tokens): row.seconds for row in training_time.measured(found)}
    for op, causal in dict.fromkeys((op, causal) for op, causal, _ in rows):
        times = [rows.get((op, causal, n)) for n in TIMED_TOKENS]
        lines.append([op + ", causal" * causal, *("–" if x is None else f"{x * 1e12:.2f} ps a pair" for x in times)])
    ceiling = f"{training_time.ceiling(found) / 1e12:,.0f} TFLOP/s"
    where = f"{found['environment']['device']}, torch {found['environment']['torch']}"
    about = f"Matrix products in bfloat16: {ceiling}, the median of those timed beside the records ({where}).\n"
    return f"{about}\n{choosing.table(lines)}"


def assumed() -> str:
    """What was not measured."""
    share = f"{100 * training_time.UTILISATION:.0f} % of"
    rows = [
        ["", "", ""],
        ["a step takes at least", f"{1000 * training_time.LAUNCHES:.0f} ms for each of its parts", "measured"],
        ["matrix products reach", f"{share} that ceiling", "assumed"],
        ["in float32", f"{share} {training_time.FLOAT32 / 1e12:.0f} TFLOP/s", "assumed"],
    ]
    return choosing.table(rows)


def evidence() -> str:
    """The jobs that train on a GPU in minutes, with what is predicted for each."""
    predicted = json.loads(PREDICTED.read_text())["jobs"]
    lines = [["job", "report", "cells", "steps", "operations", "launches of a step", "predicted minutes"]]
    for name, study in EVIDENCE.items():
        row = predicted[name]
        numbers = [
            str(row["cells"]),
            f"{study.steps:,}",
            f"{row['flops']:.1e}",
            row["launches"],
            f"{row['minutes']:.1f}",
        ]
        lines.append([f"`{name}`", study.name, *numbers])
    return choosing.table(lines)


# ---------------------------------------------------------------------------------------------- the picture


def draw(path: Path = PICTURE) -> None:
    """Bars of predicted hours by recipe, in the order of the table, on a scale of powers of ten."""
    found = training_time.content()
    listed = [bill for bill in bills() if bill.preset == "paper"]
    hours = [bill.hours(found) for bill in listed]
    with mpl.rc_context(FILE):
        figure = Figure(figsize=(7.2, 0.22 * len(listed) + 0.9), layout="constrained")
        axes = figure.subplots()
        colours = [figures.SERIES[int(bill.recipe[2])] for bill in listed]
        bars = axes.barh(range(len(listed)), hours, color=colours)
        axes.bar_label(bars, [amount(x) for x in hours], padding=3, fontsize=8)
        axes.set_yticks(range(len(listed)), [f"{bill.recipe}, {bill.cells} cells" for bill in listed], fontsize=8)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xscale("log")
        axes.set_xlim(right=max(hours) * 4)
        axes.set_xlabel("hours of one H100, predicted, for all cells of preset paper")
        axes.grid(visible=False, axis="y")
        text = figures.svg(figure, "Predicted hours of one H100 by recipe")
    path.write_text(re.sub(r"\n\s*", "\n", text))


TABLES = {"cost": table, "cost_speeds": speeds, "cost_assumed": assumed, "evidence": evidence}

if __name__ == "__main__":
    draw()
