"""The problems of an op under transformations, and what is wrong with a result."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnkit_conformance.golden.derivatives import Problem
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.model.types import Arrays
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.scenes.attention import scene_case

LONG_STEP = 2.0**-26  # for many scores, some of which would otherwise cross a kink


def differentiable() -> tuple[Op, ...]:
    """Ops with gradients."""
    return tuple(op for op in OPDB if op.vjp)


def long_problem(op: Op, tokens: int, values: int = 3, options: tuple[str, ...] = ("key_lengths",)) -> Problem:
    """A case with this many queries and keys, and values with so many features."""
    lead = ((1, 1),) * 3
    scene = Scene(f"{tokens}x{tokens}", tokens, tokens, d=4, e=values, lead=lead, options=options)
    params = op.variants[0]
    return Problem(scene_case(op, op.adapted(scene, params) or scene, params, "long", "float64"), LONG_STEP)


def missed_tangents(tangents: Mapping[str, np.ndarray], problem: Problem) -> str | None:
    """What is wrong with tangents or with their product with the cotangents, or None."""
    return missed("the tangent", tangents, problem.truth.jvp) or missed(
        "the product", {"tangents": problem.product(tangents)}, {"tangents": problem.truth.product}
    )


def missed(kind: str, got: Arrays, limits: Mapping[str, Limit]) -> str | None:
    """What is wrong with derivatives, or None."""
    if set(got) != set(limits):
        return f"{kind} of {sorted(got)}; expected {sorted(limits)}"
    for name, limit in limits.items():
        x = np.asarray(got[name])
        if x.shape != limit.golden.shape:
            return f"{kind} of {name} has shape {x.shape}; expected {limit.golden.shape}"
        failures = tolerance.measure(f"{kind} of {name}", x, limit).failures
        if failures:
            return failures[0][1]
    return None
