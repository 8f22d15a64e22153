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


SWEEPS = 5
"""Passes of a threshold of normal scores over its keys, each as dear as one of its steps on average."""


class Goal(NamedTuple):
    """How many times as fast as cuDNN's softmax a call is to be."""

    op: str
    n: int
    aim: float
    causal: bool = False
    mode: str = BOTH

    @property
    def cell(self) -> Cell:
        return Cell(self.op, self.n, self.causal, 64, "bfloat16", ITEMS // self.n, WIDTH, "cuda")

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of its calls in `WORKLOADS`."""
        if self.op == "statistics":
            return ("softmax: all statistics",)
        name = self.op.removesuffix("15") + ", causal" * self.causal
        forward = (f"{name}, a pass",) * SWEEPS if self.op in THRESHOLDS else (name,)
        return (*forward, f"{name}, gradients") if self.mode == BOTH else forward

    def seconds(self, model: Fit, calls: dict[str, dict[str, Record]]) -> float:
        """Of its kernels, launches not counted."""
        cell, gpu = self.cell, GPUS[1]
        units = cell.batch * cell.heads * (cell.n / TOKENS if cell.op == "linear" else cell.n**2 / PAIRS)
        return gpu.seconds(sum(model.clocks(calls[call]) for call in self.calls) * units / gpu.processors)


GOALS = (
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


def lines(calls: dict[str, dict[str, Record]]) -> list[list[str]]:
    """A table: times cuDNN's softmax, as it is aimed at, was timed, and is predicted by counts alone and by the fit."""
    seconds = {
        (Cell(**record["cell"]), record["mode"], name): contender["seconds"]["median"]
        for record in json.loads(TIMED.read_text())["records"]
        for name, contender in record["contenders"].items()
    }
    models = (Fit(1.0, 0.0), fit(counted()))
    table = [["call", "tokens", "goal", "timed before", "predicted by counts", "by the fit"]]
    for goal in GOALS:
        softmax = seconds[goal.cell._replace(op="softmax"), goal.mode, CUDNN]
        found = (softmax / seconds[goal.cell, goal.mode, TRITON], *(softmax / goal.seconds(x, calls) for x in models))
        name = goal.op + ", causal" * goal.causal + ", with gradients" * (goal.mode == BOTH)
        table.append([name, f"{goal.n:,}", f"{goal.aim:g}", *(f"{x:.2g}" for x in found)])
    return table
