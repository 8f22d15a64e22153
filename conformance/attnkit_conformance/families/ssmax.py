"""Row of the op database: scalable-softmax attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnkit_conformance.model import errors, scoring, tolerance
from attnkit_conformance.model.case import Case, ErrorSample
from attnkit_conformance.model.errors import wrong
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_only
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.attention import CAUSAL, LENGTH_ARRAY
from attnkit_conformance.scenes.options import LEARNED
from attnkit_reference._core import Rows, Scores
from attnkit_reference.ssmax import ssmax_rows

NUMBERS = ("slope", "intercept")
OWN = (*NUMBERS, "length")
COUNTED = Scene("counted", 65, 65, params={**CAUSAL, "window": (20, 0)}, options=("key_mask", "key_lengths", "poison"))
"""n_i is neither i + 1 nor the number of keys that the mask leaves."""


GENTLE = {"slope": 0.25}
"""Scores of about the size that softmax has: those of slope 1 make most weights of a row too small to be looked at."""


def ssmax_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of ops that take a length, and numbers that are none."""
    yield from errors.length_errors(op)
    for name in NUMBERS:
        yield wrong(op, f"{name}-nan", ValueError, name, {name: float("nan")})
    yield wrong(op, "slope-shape", ValueError, "slope", slope=np.ones(3, np.float32))
    yield wrong(op, "gain-not-taken", ValueError, "unexpected argument 'gain'", {"gain": 1.0})


def rows_of(case: Case) -> Rows:
    """Weights and scores as softmax has them: of queries times the factors of their rows."""
    return ssmax_rows("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case, OWN))


def resummed(case: Case) -> tuple[np.ndarray, Scores, np.ndarray]:
    """dw/dt = w where the sum of a row stays."""
    rows = rows_of(case)
    return rows.w, rows.scores, case.cotangents["o"]


def ssmax_growth(case: Case) -> float:
    """1 + max|t|/16, t the scores times the factors of their rows."""
    sc = rows_of(case).scores
    return tolerance.growth_of_exponent(float(np.max(np.abs(sc.s), initial=0.0, where=sc.visible)))


OPS = (
    Op(
        name="ssmax_attention",
        formula="w = exp(t - m) / Σ exp(t - m), t = (slope · log n + intercept) · scale · q·k + bias",
        arguments=QKV,
        outputs=o_only,
        samples=attention.attention_samples,
        group="a",
        own=OWN,
        variants=(
            GENTLE,
            {},
            {"slope": 0.43, "intercept": -0.6, "length": "all"},
            {"slope": -0.3, "length": LENGTH_ARRAY},
        ),
        levels={
            "slope": (GENTLE["slope"], None, *LEARNED),
            "intercept": (None, 0.6, *LEARNED),
            "length": (None, "all", 20.0, LENGTH_ARRAY),
        },
        extra=((COUNTED, {"slope": "heads", "intercept": "heads"}),),
        optional=(*OPTIONAL, *NUMBERS),
        differentiable=(*QKV, "bias", "scale", *NUMBERS),
        errors=ssmax_errors,
        exponent=always,
        growth=ssmax_growth,
        resummed=resummed,
        ties=False,
        weights=True,
        statistics=True,
    ),
)
