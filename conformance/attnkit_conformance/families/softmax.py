"""Row of the op database: softmax attention."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from attnkit_conformance.model import errors, scoring, tolerance
from attnkit_conformance.model.case import Case, ErrorSample
from attnkit_conformance.model.errors import wrong
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_and_lse
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.options import LEARNED
from attnkit_reference._core import Scores
from attnkit_reference.softmax import softmax_rows

OF_NULL_ROWS = Scene(
    "sinks", 33, 65, lead=((2, 4), (2, 2), (2, 2)), params=attention.GQA, options=("gqa", "mask", "bias_inf")
)
"""Rows without keys, and with scores of -inf alone: they have no sink."""

OFF_BY_ONE = Scene("off-by-one", 65, 100, params=attention.CAUSAL, options=("key_lengths", "poison"))


def softmax_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a, and sinks that are none."""
    yield from errors.attention_errors(op)
    for name, sink in (("nan", math.nan), ("infinite", math.inf)):
        yield wrong(op, f"sink-{name}", ValueError, "sink", {"sink": sink})
    yield wrong(op, "sink-shape", ValueError, "sink", sink=np.ones(3, np.float32))
    yield wrong(op, "sink-integer", TypeError, "sink", sink=np.ones(2, np.int32))
    yield wrong(op, "slope-not-taken", ValueError, "unexpected argument 'slope'", {"slope": 1.0})


def softmax_growth(case: Case) -> float:
    """1 + max|x|/16, x the scores and the sinks."""
    sink = np.abs(np.asarray(case.arrays.get("sink", case.params.get("sink", 0.0)), np.float64))
    largest = float(np.max(sink, initial=0.0, where=np.isfinite(sink)))
    return tolerance.growth_of_exponent(max(largest, scoring.largest_exponent(case, None)))


def resummed(case: Case) -> tuple[np.ndarray, Scores, np.ndarray]:
    """dw/ds = w where the sum of a row stays."""
    rows = softmax_rows("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case, ("sink",)))
    return rows.w, rows.scores, case.cotangents["o"]


OPS = (
    Op(
        name="softmax_attention",
        formula="w = exp(s - m) / (exp(sink - m) + Σ exp(s - m))",
        arguments=QKV,
        outputs=o_and_lse,
        samples=attention.attention_samples,
        group="a",
        own=("return_lse", "sink"),
        variants=({}, {"return_lse": True}),  # sinks have scenes of their own, so that who has none lacks no other
        levels={"return_lse": (None, True), "sink": (None, 0.0, -math.inf, 12.0, *LEARNED)},
        extra=(
            (OF_NULL_ROWS, {"sink": "heads", "return_lse": True}),
            (OF_NULL_ROWS, {"sink": "array"}),
            (OFF_BY_ONE, {"sink": 0.0, "return_lse": True}),
        ),
        optional=(*(name for name in OPTIONAL if name != "length"), "sink"),
        differentiable=(*QKV, "bias", "scale", "sink"),
        compute_outputs=("lse",),
        errors=softmax_errors,
        exponent=always,
        resummed=resummed,
        growth=softmax_growth,
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
)
