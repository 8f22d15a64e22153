"""What an H100 is predicted to find of calls whose kernels have changed since it ran them, beside cuDNN's softmax."""

import json
from typing import NamedTuple

from attnkit.kernels.predicted import GPUS
from benchmarks.cells import BOTH, FORWARD, Cell
from benchmarks.sass.budgets import Record
from benchmarks.sass.fitted import TIMED, TRITON, Fit, counted, fit
from benchmarks.sass.workloads import PAIRS, TOKENS

CUDNN, THRESHOLDS = "sdpa cudnn", ("sparsemax", "entmax15")
WIDTH, ITEMS = 16, 16384  # heads of 64 in bfloat16, and tokens of all sequences together
STEPS = 3
"""Newton steps of a threshold of normal scores in half types; a test counts them."""


class Goal(NamedTuple):
    """How many times as fast as cuDNN's softmax a call is to be."""

    op: str
    n: int
    aim: float
    causal: bool = False
    mode: str = BOTH
    like: int = 0
    """Tokens of the softmax that was timed, if none was of `n`: a pair of it is taken to cost as much at `n`."""

    @property
    def name(self) -> str:
        return self.op + ", causal" * self.causal + ", with gradients" * (self.mode == BOTH)

    @property
    def cell(self) -> Cell:
        n = self.like or self.n
        return Cell(self.op, n, self.causal, 64, "bfloat16", ITEMS // n, WIDTH, "cuda")

    def kernels(self, calls: dict[str, dict[str, Record]]) -> list[Record]:
        """Those of its calls in `WORKLOADS`; a threshold takes its passes one by one."""
        if self.op == "statistics":
            return [*calls["softmax: all statistics"].values()]
        name = self.op.removesuffix("15") + ", causal" * self.causal
        if self.op in THRESHOLDS:
            record = calls[f"{name}, a pass"]["forward_tiled"]
            first, step, last = record["passes"]
            forward = [record | {"predicted": clocks} for clocks in (first, *[step] * STEPS, last)]
        else:
            forward = [*calls[name].values()]
        gradients = f"{name}, gradients" + ", 256 tokens" * (self.n <= 256)
        return [*forward, *calls[gradients].values()] if self.mode == BOTH else forward

    def seconds(self, model: Fit, calls: dict[str, dict[str, Record]]) -> float:
        """Of its kernels, launches not counted."""
        cell, gpu = self.cell, GPUS[1]
        units = cell.batch * cell.heads * (cell.n / TOKENS if cell.op == "linear" else cell.n**2 / PAIRS)
        return gpu.seconds(model.clocks(self.kernels(calls)) * units / gpu.processors)


GOALS = (
    Goal("relu", 197, 1.25, like=1024),
    Goal("relu", 4096, 1.1),
    Goal("sigmoid", 4096, 0.65),
    Goal("gelu", 4096, 0.5),
    Goal("gaussian", 4096, 0.45),
    Goal("linear", 4096, 6.0),
    Goal("linear", 4096, 3.0, causal=True),
    Goal("linear", 16384, 10.0, causal=True),
    Goal("statistics", 4096, 1.0, mode=FORWARD),
    Goal("sparsemax", 4096, 0.3, mode=FORWARD),
    Goal("entmax15", 4096, 0.3, mode=FORWARD),
    Goal("entmax15", 4096, 0.3),
)


class Found(NamedTuple):
    """Times cuDNN's softmax."""

    goal: Goal
    timed: float
    by_counts: float
    by_fit: float


def compare(calls: dict[str, dict[str, Record]]) -> list[Found]:
    """Every goal, as it was timed, and is predicted by counts alone and by the fit."""
    seconds = {
        (Cell(**record["cell"]), record["mode"], name): contender["seconds"]["median"]
        for record in json.loads(TIMED.read_text())["records"]
        for name, contender in record["contenders"].items()
    }
    models, rows = (Fit(1.0, 0.0), fit(counted())), list[Found]()
    for goal in GOALS:
        softmax = seconds[goal.cell._replace(op="softmax"), goal.mode, CUDNN]
        by_counts, by_fit = (softmax / goal.seconds(model, calls) for model in models)
        rows.append(Found(goal, softmax / seconds[goal.cell, goal.mode, TRITON], by_counts, by_fit))
    return rows


def lines(calls: dict[str, dict[str, Record]]) -> list[list[str]]:
    """A table."""
    table = [["call", "tokens", "goal", "timed before", "predicted by counts", "by the fit"]]
    for goal, timed, *predicted in compare(calls):
        before = "no" if goal.like else f"{timed:.2g}"
        table.append([goal.name, f"{goal.n:,}", f"{goal.aim:g}", before, *(f"{x:.2g}" for x in predicted)])
    return table


def describe_missed(calls: dict[str, dict[str, Record]]) -> str:
    """Which goals are predicted to be missed, in a sentence."""
    rows = compare(calls)
    by_counts, by_fit = (
        [f"{row.goal.name} at {row.goal.n:,} ({value:.2f})" for row, value in zip(rows, values, strict=True)
         if value < row.goal.aim]
        for values in ([row.by_counts for row in rows], [row.by_fit for row in rows])
    )  # fmt: skip
    return f"Missed by the counts alone: {'; '.join(by_counts) or 'none'}. By the fit: {'; '.join(by_fit) or 'none'}."
