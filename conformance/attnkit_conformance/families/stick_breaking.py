"""Row of the op database: stick-breaking attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnkit_conformance.model import errors, scoring, tolerance
from attnkit_conformance.model.case import Case, ErrorSample, compute_dtype, finfo, rounded
from attnkit_conformance.model.errors import wrong
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, always, o_and_remainder
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention
from attnkit_reference._core import Scores

STEEP = 30.0
SATURATED = Scene("saturated", 33, 65, d=1, params={"scale": 1.0}, options=("saturated",))
"""Scores of ±30: shares of a stick that are 1 to rounding, or 10^-13 of it."""
LONG = Scene("long", 3, 4096, d=4, e=3, lead=((1,),) * 3, params={"scale": 0.5}, options=("faint",))
"""4,096 scores about -8, whose small shares add up to one."""


def adapt_scene(scene: Scene, params: Params) -> Scene:
    """The scene without causality, which is no option, but with the order that the op has itself."""
    order = "up_to" if params.get("attend_current") else "before"
    options = tuple(option for option in scene.options if option not in attention.EARLIER)
    without = {name: x for name, x in scene.params.items() if name != "causal"}
    return replace(scene, options=(*options, order), params=without)


def complete(case: Case) -> Case:
    """q and k of the scenes whose scores are ±30, or about -8."""
    q, k = case.arrays["q"], case.arrays["k"]
    if "saturated" in case.tags:
        j = np.arange(k.shape[-2])[:, None]
        q = np.where(np.arange(q.shape[-2])[:, None] % 2 == 0, 1.0, -1.0) * np.ones(q.shape)
        k = np.where(j % 3 == 0, k, np.where(j % 11 == 5, STEEP, -STEEP))
    elif "faint" in case.tags:
        q, k = q.copy(), k.copy()
        q[..., 0], k[..., 0] = 4.0, -4.0
    else:
        return case
    return replace(case, arrays={**case.arrays, "q": rounded(q, case.dtype), "k": rounded(k, case.dtype)})


def growth(case: Case) -> float:
    """D: 1 + max|visible exponent|/16, of scores and of the logarithms of weights, as far as these do not vanish; where
    the scores of a row are equal, times that of sums of equal numbers, which are rounded alike."""
    sc = scoring.case_scores(case, with_v=False)
    taken = np.where(sc.visible, np.logaddexp(0.0, sc.s), 0.0).sum(axis=-1)
    vanishing = -np.log(float(finfo(compute_dtype(case.dtype)).smallest_subnormal))
    of_weights = min(float(np.max(taken, initial=0.0)), vanishing)
    largest = max(of_weights, float(np.max(np.abs(sc.s), initial=0.0, where=sc.visible)))
    return tolerance.growth_of_exponent(largest) * tolerance.growth_of_equal_summands(equal_scores(sc))


def equal_scores(sc: Scores) -> int:
    """The most keys that a row sees whose scores are all equal."""
    if 0 in sc.s.shape:
        return 0
    low, high = np.where(sc.visible, sc.s, np.inf).min(axis=-1), np.where(sc.visible, sc.s, -np.inf).max(axis=-1)
    return int(np.max(np.sum(sc.visible, axis=-1), initial=0, where=low == high))


def stick_breaking_errors(op: Op) -> Iterator[ErrorSample]:
    """The errors of group a, but causality is no option; and `attend_current` that is none of two."""
    yield from (sample for sample in errors.attention_errors(op) if sample.name != "causal-unknown")
    yield wrong(op, "causal-not-taken", ValueError, "unexpected argument 'causal'", {"causal": True})
    yield wrong(op, "attend-current-number", TypeError, "attend_current", {"attend_current": 1})


OPS = (
    Op(
        name="stick_breaking_attention",
        formula="w = β · Π (1 - β) over the keys between key and query, β = sigmoid(s)",
        arguments=QKV,
        outputs=o_and_remainder,
        samples=attention.attention_samples,
        group="a",
        own=("attend_current", "return_remainder"),
        variants=({}, {"return_remainder": True}, {"attend_current": True, "return_remainder": True}),
        levels={"attend_current": (None, True), "return_remainder": (None, True), "causal": ("none",)},
        extra=((SATURATED, {"return_remainder": True}), (SATURATED, {"attend_current": True}), (LONG, {})),
        optional=tuple(name for name in OPTIONAL if name != "length"),
        differentiable=(*QKV, "bias", "scale"),
        compute_outputs=("r",),
        errors=stick_breaking_errors,
        exponent=always,
        growth=growth,
        alike=("r", "w", "k", "v"),
        complete=complete,
        adapt=adapt_scene,
        falling=True,
        invariances=("causal_prefix",),
        declines=("key_permutation", "padding_amount"),  # keys have an order, and positions are aligned at the last
        outside=("return_remainder",),
        weights=True,
        statistics=True,
    ),
)
