"""What the bounds let through: the share of results that could be 0, or off by a little, without a failure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnkit_conformance import core
from attnkit_conformance.golden import golden
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import INTEGER, compute_dtype
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.report.table import split_page

BEGIN, END = "<!-- unnoticed: begin -->", "<!-- unnoticed: end -->"
OFF = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # relative errors
MOST = {"float32": 0.05, "bfloat16": 1.0, "float16": 1.0}  # percent of zeros that need no reason
ROUNDING = 1e-8  # of what is allowed: float64 has no digits there
SPARE = 1e3  # times the smallest normal number, which is allowed everywhere
OVERWRITTEN = "What later keys overwrite is a difference of summands of the size of the other weights of its row."
SATURATED = "Where a few keys have all the weight, or keys are equal, a gradient is a difference of equal numbers."
FIRST = "The first token of a sequence sees one key, whose weight is 1 but for eps: its gradient is that of eps."
GATE = "The growth of the largest exponent in a gate holds for all entries of a case."
DISTANCE = "The growth of the largest distance holds for all rows of a case."
FALLING = "Gradients of a bias fall by decades along a row, and have a tenth of the probe of the largest."
BESIDE = "Small weights beside large ones in a row, of whose probe they have a tenth."
ALONE = "A key behind which everything was forgotten has a weight of 1: the entropy of its row is that of eps."
NORM = "The norm removes from a gradient what is along the output."
TOTAL = "The total of normalised weights is 1: its gradient is 0 or that of eps."
SIGNS = (
    "bfloat16: a sum with both signs may be a hundredth of its summands, and so much is the rounding of weights for a"
    " product (A7)."
)
REASONS: tuple[tuple[str, float, str], ...] = (  # op, results and dtype; percent that may be zeroed; why
    ("*newton_* outputs *", 15.0, "Residuals of converged steps are rounding errors."),
    ("linformer_attention_weights outputs float32", 1.5, BESIDE),
    ("softpick_attention_weights outputs float32", 4.0, BESIDE),
    ("linear_attention_weights outputs float32", 2.0, BESIDE),
    ("delta_attention_weights outputs float32", 7.0, OVERWRITTEN),
    ("*_weights outputs float32", 0.5, BESIDE),
    ("rela_attention outputs float32", 1.5, GATE),
    ("attention_with_statistics outputs float32", 0.5, GATE),
    ("gaussian_attention * float32", 0.1, DISTANCE),
    ("row_statistics outputs float32", 0.3, DISTANCE),
    ("row_statistics outputs float32", 0.4, ALONE),
    ("rela_attention gradients *", 8.0, NORM),
    ("key_value_memory gradients bfloat16", 15.0, NORM),
    ("performer_attention gradients float16", 2.0, "Small scores: features hardly differ, and with them keys."),
    ("nystrom_attention gradients float32", 1.0, "Small scores: landmarks hardly differ, and with them their weights."),
    ("row_statistics gradients *float16", 25.0, TOTAL),
    ("row_statistics gradients float32", 3.0, TOTAL),
    ("attention_with_statistics gradients float32", 0.5, TOTAL),
    ("linformer_attention gradients float32", 1.0, SATURATED),
    ("cosine_attention gradients float32", 6.0, SATURATED),
    ("softmax_attention gradients float32", 1.2, SATURATED),
    ("entmax_attention gradients float32", 0.5, SATURATED),
    ("entmax_attention gradients float16", 2.0, SATURATED),
    ("softpick_attention gradients float32", 1.5, SATURATED),
    ("softpick_attention gradients float16", 3.0, SATURATED),
    ("ssmax_attention gradients float32", 1.5, SATURATED),
    ("stick_breaking_attention gradients float32", 2.0, FALLING),
    ("forgetting_attention gradients float32", 4.0, FALLING),
    ("efficient_attention gradients float32", 0.5, SATURATED),
    ("efficient_attention gradients float16", 1.5, SATURATED),
    ("linear_attention gradients float32", 0.5, FIRST),
    ("linear_attention gradients float16", 1.5, FIRST),
    ("linear_attention_packed gradients float32", 1.5, FIRST),
    ("*_step gradients float32", 15.0, FIRST),
    ("linear_attention_step gradients bfloat16", 10.0, FIRST),
    ("* gradients float32", 0.1, SATURATED),
    ("sima_attention * bfloat16", 15.0, SIGNS),
    ("* bfloat16", 8.0, SIGNS),
)


@dataclass(frozen=True)
class Unnoticed:
    """Percentages of the results of an op in a dtype, nan without results."""

    op: str
    results: str  # outputs or gradients
    dtype: str
    zeroed: float
    off: float

    @property
    def reason(self) -> str | None:
        """Why so much may be zeroed; None where nobody knows."""
        name = f"{self.op} {self.results} {self.dtype}"
        fitting = (
            reason for pattern, most, reason in REASONS if fnmatch.fnmatchcase(name, pattern) and self.zeroed <= most
        )
        return next(fitting, None)


def of_op(op: Op) -> Iterator[Unnoticed]:
    """The percentages in the quick cases of an op, by dtype."""
    for dtype in OFF:
        outputs: list[np.ndarray] = []
        gradients: list[np.ndarray] = []
        for case in core.cases(op.name, "small", (dtype,)):
            truth = golden(case)
            outputs += (relative(x) for x in truth.outputs.values() if x.dtype != INTEGER)
            gradients += map(relative, truth.gradients.values())
        yield percentages(op.name, "outputs", dtype, outputs)
        if op.vjp:
            yield percentages(op.name, "gradients", dtype, gradients)


def relative(limit: Limit) -> np.ndarray:
    """What is allowed relative to the golden numbers, where these are in the range of the dtype, and not themselves
    what rounding left of 0.
    """
    size = tolerance.finite_size(limit.golden)
    least = max(tolerance.smallest_normal(limit.dtype), SPARE * tolerance.smallest_normal(compute_dtype(limit.dtype)))
    told = size > np.maximum(ROUNDING * limit.allowed, least)
    relative: np.ndarray = limit.allowed[told] / size[told]
    return relative


def percentages(op: str, results: str, dtype: str, parts: Sequence[np.ndarray]) -> Unnoticed:
    ratios = np.concatenate(parts) if parts else np.zeros(0)
    zeroed, off = (100 * float(np.mean(ratios >= error)) if ratios.size else np.nan for error in (1.0, OFF[dtype]))
    return Unnoticed(op, results, dtype, zeroed, off)


def markdown(found: Iterable[Unnoticed]) -> str:
    """The table between its markers, and the reasons."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in found:
        cell = "–" if np.isnan(one.off) else f"{one.zeroed:.2g} / {one.off:.2g}"
        rows.setdefault((one.op, one.results), {})[one.dtype] = cell
    lines = [["op", "", *OFF], ["---"] * (2 + len(OFF))]
    lines += [
        [f"`{op}`", results, *cells.values()] for (op, results), cells in rows.items() if {*cells.values()} != {"–"}
    ]
    reasons = [f"- `{pattern}`, up to {most:g} %: {reason}" for pattern, most, reason in REASONS]
    return "\n".join((BEGIN, *("| " + " | ".join(cells) + " |" for cells in lines), "", *reasons, END))


def write(path: Path) -> None:
    """Replace the table in a file."""
    before, _, after = split_page(path, BEGIN, END)
    path.write_text(before + markdown(one for op in OPDB for one in of_op(op)) + after)
