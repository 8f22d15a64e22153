"""Row of the op database: softmax attention."""

from __future__ import annotations

import numpy as np

from attnkit_conformance.model import errors, scoring
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_and_lse
from attnkit_conformance.scenes import attention
from attnkit_reference._core import Scores
from attnkit_reference.softmax import softmax_rows


def resummed(case: Case) -> tuple[np.ndarray, Scores]:
    """dw/ds = w where the sum of a row stays."""
    rows = softmax_rows("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case))
    return rows.w, rows.scores


OPS = (
    Op(
        name="softmax_attention",
        formula="w = exp(s - m) / Σ exp(s - m)",
        arguments=QKV,
        outputs=o_and_lse,
        samples=attention.attention_samples,
        group="a",
        own=("return_lse",),
        variants=({}, {"return_lse": True}),
        levels={"return_lse": (None, True)},
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, "bias", "scale"),
        compute_outputs=("lse",),
        errors=errors.attention_errors,
        exponent=always,
        resummed=resummed,
        weights=True,
        statistics=True,
        bias_inf=True,
    ),
)
