"""Row of the op database: softpick attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnkit_conformance.model import errors, scoring
from attnkit_conformance.model.case import Case, ErrorSample
from attnkit_conformance.model.errors import wrong
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_only
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention
from attnkit_reference._core import Scores
from attnkit_reference.softpick import softpick_rows

SINGLE = Scene("single", 1, 1, d=2, e=1, lead=((3, 4),) * 3, size=0.3)
"""One key, a small score and a large eps: elsewhere dw and Σ w dw cancel, and bfloat16 has no digit of dq."""

BELOW = Scene("below", 1, 1, d=2, e=3, lead=((3, 4),) * 3, options=("integers",), params={"scale": 240.0})
"""One key, often with a score far below 0: exp(-m) overflows, in float64 too, where 0 is left out of m."""

STEEP = (
    tuple(  # scores up to 81: beyond 64 a library has another formula; exact, and often 0, as those of hidden keys are
        Scene(f"steep{name}", 33, 33, d=2, options=("integers",), params={"scale": 4.5, **params})
        for name, params in (("", {}), ("-causal", attention.CAUSAL))
    )
)


def softpick_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a, and eps that is not above 0."""
    yield from errors.attention_errors(op)
    for name, eps in (("zero", 0.0), ("negative", -1e-6), ("nan", float("nan"))):
        yield wrong(op, f"eps-{name}", ValueError, "eps", {"eps": eps})
    yield wrong(op, "length-not-taken", ValueError, "unexpected argument 'length'", {"length": "all"})


def exact_ties(scene: Scene, params: Params) -> Scene:
    """A scene of equal keys with scores that are exact, or a library's rounding decides which of them is the first
    maximum: products of columns beyond a block are summed in another order."""
    return replace(scene, d=16, options=(*scene.options, "grid")) if "equal_keys" in scene.options else scene


def resummed(case: Case) -> tuple[np.ndarray, Scores, np.ndarray]:
    """dw/ds = exp(s - m)/D where D stays, s > 0: of a small score much more than its weight."""
    rows = softpick_rows("sample", case.arrays["q"], case.arrays["k"], **scoring.options(case, ("eps",)))
    s = np.where(rows.scores.visible & (rows.w > 0), rows.scores.s, np.inf)
    return rows.w / -np.expm1(-s), rows.scores, case.cotangents["o"]


OPS = (
    Op(
        name="softpick_attention",
        formula="w = relu(a) / (Σ abs(a) + eps), a = exp(s - m) - exp(-m), m = max(0, max s)",
        arguments=QKV,
        outputs=o_only,
        samples=attention.attention_samples,
        group="a",
        own=("eps",),
        variants=({}, {"eps": 0.1}),
        levels={
            "eps": (None, 0.1),
            # rounding decides which of equal keys is the first maximum, and rows near 0 are too steep for quotients
            "values": ("normal", "tiny", "large"),
        },
        # in every profile: scores of 0, exact ties
        extra=((SINGLE, {"eps": 4.0}), (BELOW, {}), (attention.KINKS, {"eps": 0.1}), *((scene, {}) for scene in STEEP)),
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, "bias", "scale"),
        errors=softpick_errors,
        exponent=always,
        resummed=resummed,
        kinks=lambda params: (0.0,),
        steep=always,
        adapt=exact_ties,
        weights=True,
        statistics=True,
    ),
)
