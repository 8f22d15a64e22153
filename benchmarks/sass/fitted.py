"""How long an H100 takes for what was counted: a model of two constants, fitted to the calls that one was timed for.

A kernel takes the longer of `times` the clocks counted, and of `wait` clocks for each product and barrier of the
longest chain that wait for one another, shared by the programs of a multiprocessor. Gradients are forward and gradients
together without forward. Rows are the plain calls of head size 64 in bfloat16 with 4,096 and 16,384 tokens; forward
linear attention, whose launches take as long as its kernels, is left out.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from attnkit.kernels.predicted import GPUS
from benchmarks.cells import Cell
from benchmarks.sass.budgets import Record
from benchmarks.sass.workloads import PAIRS, TOKENS

RESULTS = Path(__file__).parents[1] / "results"
TIMED = RESULTS / "nvidia-h100-80gb-hbm3.json"
COUNTED = RESULTS / "predicted-when-timed.json"
"""The counts of these calls as they were next to the times, by call: kernels that change leave the fit alone."""
OPS, LENGTHS, TRITON = ("softmax", "relu", "sigmoid", "gelu", "gaussian", "linear"), (4096, 16384), "attnkit triton"
TIMES, WAITS = [n / 100 for n in range(80, 160, 2)], range(0, 1000, 25)  # that are tried


class Timed(NamedTuple):
    """A call of `WORKLOADS`, and the clocks of a multiprocessor that an H100 took for a unit of its work."""

    call: str
    tokens: int
    clocks: float


class Fit(NamedTuple):
    times: float
    wait: float

    def clocks(self, kernels: Iterable[Record]) -> float:
        """Of a unit of work of a call."""
        return sum(max(self.times * x["predicted"], self.wait * steps_of(x)) for x in kernels)


def steps_of(kernel: Record) -> float:
    """Products and barriers of the chain, for a unit of work of a multiprocessor that is full."""
    return float(sum(kernel["chain"]) / kernel["units"] / kernel["programs"])


def timed() -> list[Timed]:
    """What was measured."""
    seconds: dict[tuple[Cell, str], float] = {}
    for record in json.loads(TIMED.read_text())["records"]:
        if TRITON in record["contenders"]:
            seconds[Cell(**record["cell"]), record["mode"]] = record["contenders"][TRITON]["seconds"]["median"]
    rows, gpu = list[Timed](), GPUS[1]
    for (cell, mode), both in seconds.items():
        linear = cell.op == "linear"
        if cell.op not in OPS or (cell.d, cell.dtype) != (64, "bfloat16") or cell.n not in LENGTHS:
            continue
        if (mode == "forward" and linear) or (cell.causal and not linear):
            continue
        taken = both if mode == "forward" else both - seconds[cell, "forward"]
        units = cell.batch * cell.heads * (cell.n / TOKENS if linear else cell.n**2 / PAIRS)
        name = cell.op + ", causal" * cell.causal + ", gradients" * (mode != "forward")
        rows.append(Timed(name, cell.n, taken / gpu.seconds(1) * gpu.processors / units))
    return rows


def off_by(rows: list[Timed], clocks: Callable[[str], float]) -> tuple[float, float]:
    """The factor by which a model is off: the root mean square of logarithms, and the most."""
    errors = [abs(math.log(clocks(row.call) / row.clocks)) for row in rows]
    return math.exp(math.hypot(*errors) / math.sqrt(len(errors))), math.exp(max(errors))


def fit(calls: dict[str, dict[str, Record]]) -> Fit:
    """The constants whose model is off least."""
    rows = timed()
    tried = [Fit(times, wait) for times in TIMES for wait in WAITS]
    return min(tried, key=lambda each: off_by(rows, lambda call: each.clocks(calls[call].values()))[0])


def counted() -> dict[str, dict[str, Record]]:
    """The calls that were timed: counts of their kernels."""
    calls: dict[str, dict[str, Record]] = json.loads(COUNTED.read_text())
    return calls


def lines() -> list[list[str]]:
    """A table: every row that was timed, what was counted and what the fit says, and by how much both are off."""
    calls = counted()
    rows, found, plain = timed(), fit(calls), Fit(1.0, 0.0)
    table = [["call", "tokens", "clocks, timed", "counted", f"{found.times:g} of them, or {found.wait:g} a step"]]
    models = [lambda call, each=each: each.clocks(calls[call].values()) for each in (plain, found)]
    table += [
        [row.call, f"{row.tokens:,}", *(f"{x:,.0f}" for x in (row.clocks, *(f(row.call) for f in models)))]
        for row in rows
    ]
    ends = [off_by(rows, model) for model in models]
    table.append(["off by a factor of, typically", "", "", *(f"{typical:.2f}" for typical, _ in ends)])
    table.append(["at most", "", "", *(f"{most:.2f}" for _, most in ends)])
    return table
