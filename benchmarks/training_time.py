"""Seconds of a training step on one H100, from counted operations, measured kernels, and what is assumed.

Nothing of this was trained: a step is predicted to take the time of its launches or that of its arithmetic, whichever
is longer, and arithmetic that of matrix products at a share of the measured ceiling, beside attention as it was timed.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnkit_experiments.commands.estimate import Cost, Pairs

RESULTS = Path(__file__).parent / "results"
DEVICE = "nvidia-h100-80gb-hbm3.json"
LAUNCHES = 0.020
"""Seconds of a step of 000-fig2's preset digits on an H100, measured: of launching its operations one by one."""
UTILISATION = 0.4
"""Assumed: the share of the ceiling that matrix products of a training reach, with all that is between them."""
FLOAT32 = 60e12
"""Assumed: operations a second in float32 without TensorFloat-32; the data sheet says 67e12."""
OF_PAIRS = ("softmax", "relu", "sigmoid", "gelu", "sparsemax", "entmax15", "gaussian")
TIMED = {"float32": 2.0, "bfloat16": 1.0}
"""How many times attention in bfloat16, which was timed, takes in another precision: assumed for float32."""


class Measured(NamedTuple):
    """Attention forward and backward as it was timed: seconds for a pair of tokens of one head of 64 features."""

    op: str
    tokens: int
    causal: bool
    seconds: float


def content() -> Any:
    return json.loads((RESULTS / DEVICE).read_text())


def ceiling(found: Mapping[str, Any]) -> float:
    """Operations a second of large matrix products in bfloat16: the median of those timed beside the records."""
    return statistics.median(record["ceiling"]["flops_per_second"] for record in found["records"])


def measured(found: Mapping[str, Any]) -> list[Measured]:
    """Of every op on pairs of tokens that was timed with gradients at 64 features."""
    rows = []
    for record in found["records"]:
        cell = record["cell"]
        if record["mode"] == "forward+backward" and cell["d"] == 64 and cell["op"] in OF_PAIRS:
            pairs = cell["batch"] * cell["heads"] * cell["n"] ** 2 / (2 if cell["causal"] else 1)
            seconds = record["contenders"][record["auto"]]["seconds"]["median"] / pairs
            rows.append(Measured(cell["op"], cell["n"], cell["causal"], seconds))
    return rows


def attention_seconds(pairs: Pairs, samples: int, rows: list[Measured]) -> float:
    """Of a step, from the op's own times at the nearest number of tokens; from relu's where it has none."""
    own = [row for row in rows if row.op == pairs.op and row.causal == pairs.causal]
    own = own or [row for row in rows if row.op == "relu" and row.causal == pairs.causal]
    row = min(own, key=lambda each: abs(each.tokens - pairs.tokens))
    visible = pairs.heads * pairs.tokens**2 / (2 if pairs.causal else 1)
    return row.seconds * visible * samples * pairs.width / 64


def arithmetic_seconds(cost: Cost, found: Mapping[str, Any]) -> float:
    """Of a step's matrix products and attention."""
    rate = ceiling(found) * UTILISATION if cost.precision == "bfloat16" else FLOAT32 * UTILISATION
    if cost.pairs is None:
        return cost.step_flops / rate
    attention = attention_seconds(cost.pairs, cost.samples, measured(found)) * TIMED[cost.precision]
    return (cost.step_flops - cost.attention_flops) / rate + attention


def step_seconds(cost: Cost, found: Mapping[str, Any]) -> float:
    """Of a whole step on one GPU: see the module."""
    return max(LAUNCHES * cost.passes, arithmetic_seconds(cost, found))


def hours(cost: Cost, found: Mapping[str, Any]) -> float:
    """Of one cell on one GPU."""
    return cost.steps * step_seconds(cost, found) / 3600
