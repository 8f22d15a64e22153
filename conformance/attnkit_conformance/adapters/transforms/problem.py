"""Semantics E: what a library's transformation of an op must return, from the reference's explicit gradients.

With a cotangent that is 1 at one entry, `<op>_vjp` is a row of the Jacobian J, and the entry of J u is its product with
u. Second derivatives along u are differences of `<op>_vjp` at x ± hu and x ± 2hu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import attnkit_reference
from attnkit_conformance import core
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.binding import STATISTICS
from attnkit_conformance.model.case import PROFILES, Case, generator
from attnkit_conformance.model.golden import Golden, golden
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes.attention import scene_case, variant_label

ENTRIES = 3  # of the output whose rows of J are judged
STEP = 1e-6  # h: both its fourth power and eps/h lie below SECOND
LONG_STEP = 1e-8  # h for many scores, some of which would otherwise cross a kink
AWAY = 0.05  # offset along u at which derivatives are taken: samples hit kinks and ties on purpose
SECOND = 1e-6  # allowed error of a second derivative, relative to the root mean square of its row
ROUNDINGS = 8.0  # eps·|gradient|/h: for four gradients with rounding errors
# A derivative that vanishes step by step ends near the smallest normal number, below which XLA flushes products to 0:
# 8 of it remain of that of init_scale after 60 unrolled steps of SOFT's inverse.
TINY = 1024 * tolerance.smallest_normal("float64")
SHORT = (
    Scene("cross", 5, 7, d=4, e=3),
    Scene("square", 6, 6, d=4, e=4),
    Scene("causal", 6, 8, d=4, e=3, params={"causal": True}, options=("bias", "key_lengths")),
)
OWN_CASES = 3  # of ops without scenes

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Second:
    """A second derivative, and the rounding error of its finite differences."""

    golden: np.ndarray
    noise: float

    def allowed(self) -> np.ndarray:
        """For each entry."""
        rows = root_mean_square(self.golden, -1) if self.golden.ndim else np.abs(self.golden)
        return SECOND * rows + self.noise


@dataclass(frozen=True)
class Problem:
    """A case in float64, a direction u for every differentiable argument, and the truth about both."""

    case: Case
    step: float = STEP

    @property
    def op(self) -> Op:
        return BY_NAME[self.case.op]

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The arguments that have a gradient."""
        return {name: x for name, x in self.case.arrays.items() if name in self.op.differentiable}

    @cached_property
    def direction(self) -> dict[str, np.ndarray]:
        rng = generator(f"direction of {self.case.id}")
        u = {name: rng.standard_normal(x.shape) for name, x in self.inputs.items()}
        if "alpha" in u:  # of entmax, between 1 and 2
            alpha = self.inputs["alpha"]
            u["alpha"] = np.where((alpha == 1) | (alpha == 2), 0.0, np.sign(1.5 - alpha) * np.abs(u["alpha"]))
        return u

    @cached_property
    def entries(self) -> tuple[tuple[str, int], ...]:
        """Names of outputs, and the index of an entry in each, flattened."""
        rng = generator(f"entries of {self.case.id}")
        names = [name for name, x in self.case.cotangents.items() if x.size]
        outputs = [names[n % len(names)] for n in range(max(ENTRIES, len(names)))]
        return tuple((name, int(rng.integers(self.case.cotangents[name].size))) for name in outputs)

    def moved(self, step: float) -> Problem:
        """The case at x + step·u."""
        arrays = {**self.case.arrays, **{name: x + step * self.direction[name] for name, x in self.inputs.items()}}
        return replace(self, case=replace(self.case, arrays=arrays))

    @cached_property
    def golden(self) -> Golden:
        return golden(self.case)

    @property
    def gradient(self) -> dict[str, Limit]:
        """Gradients for the cotangents of the case."""
        return dict(self.golden.gradients)

    @cached_property
    def rows(self) -> tuple[dict[str, Limit], ...]:
        """Rows of the Jacobian at the entries."""
        rows = []
        for name, index in self.entries:
            cotangents = {other: np.zeros_like(x) for other, x in self.case.cotangents.items()}
            cotangents[name].reshape(-1)[index] = 1.0
            rows.append(dict(golden(replace(self.case, cotangents=cotangents)).gradients))
        return tuple({name: self.evenly(limit) for name, limit in row.items()} for row in rows)

    def evenly(self, limit: Limit) -> Limit:
        """Entries of an inverse have errors of its largest one, which a single cotangent does not meet."""
        return (
            replace(limit, allowed=np.full_like(limit.allowed, np.max(limit.allowed))) if self.op.converged else limit
        )

    @cached_property
    def tangents(self) -> tuple[Limit, ...]:
        """Entries of J u, with the errors that their summands may have."""
        limits = []
        for row in self.rows:
            products = [row[name].golden * u for name, u in self.direction.items()]
            errors = [row[name].allowed * np.abs(u) for name, u in self.direction.items()]
            total, allowed = (np.asarray(sum(np.sum(x) for x in parts)) for parts in (products, errors))
            limits.append(Limit(total, "float64", allowed, tolerance.largest(total)))
        return tuple(limits)

    @cached_property
    def second(self) -> dict[str, Second]:
        """The derivative of the gradients along u, by fourth-order differences."""
        near, far = ([self.moved(step).explicit() for step in (h, -h)] for h in (self.step, 2 * self.step))
        derivatives = {}
        for name, ahead in near[0].items():
            change = 8 * (ahead - near[1][name]) - (far[0][name] - far[1][name])
            noise = tolerance.eps("float64") * tolerance.largest(ahead) / self.step
            derivatives[name] = Second(change / (12 * self.step), ROUNDINGS * noise)
        return derivatives

    def explicit(self) -> dict[str, np.ndarray]:
        """The reference's gradients."""
        case = self.case
        grads = self.op.binding.vjp(attnkit_reference, self.op, case.arrays, case.params, case.cotangents)
        return {name: np.asarray(x) for name, x in grads.items()}


def root_mean_square(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Over an axis, which is kept, or over all; 0 if empty."""
    if x.size == 0:
        return np.zeros(())
    return np.sqrt(np.mean(x * x, axis=axis, keepdims=axis is not None))


def missed(kind: str, got: Mapping[str, Any], limits: Mapping[str, Limit]) -> str | None:
    """What is wrong with first derivatives, or None."""
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


def missed_tangents(got: Any, problem: Problem) -> str | None:
    """What is wrong with entries of J u, or None."""
    names = [f"{name}[{index}]" for name, index in problem.entries]
    return missed("the tangent", dict(zip(names, got, strict=True)), dict(zip(names, problem.tangents, strict=True)))


def missed_second(got: Mapping[str, Any], golden: Mapping[str, Second]) -> str | None:
    """What is wrong with second derivatives, or None."""
    if set(got) != set(golden):
        return f"second derivatives of {sorted(got)}; expected {sorted(golden)}"
    for name, second in golden.items():
        x, truth = np.asarray(got[name]), second.golden
        if x.shape != truth.shape:
            return f"the second derivative of {name} has shape {x.shape}; expected {truth.shape}"
        excess = np.nan_to_num(np.abs(x - truth), nan=np.inf) / np.maximum(second.allowed(), TINY)
        if np.any(excess > 1):
            worst = np.unravel_index(int(np.argmax(excess)), truth.shape)
            at = tuple(map(int, worst))
            return f"the second derivative of {name} is {x[worst]:.9g} at {at}; expected {truth[worst]:.9g}"
    return None


# ---------------------------------------------------------------------------------------------- which cases


def differentiable() -> tuple[Op, ...]:
    """Ops with gradients."""
    return tuple(op for op in OPDB if op.vjp)


def finite(case: Case) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in case.arrays.values() if x.dtype.kind == "f")


def settings(op: Op) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Labels and own parameters under which an op is judged: each subject of statistics, each variant of others."""
    if op.binding is STATISTICS:
        for subject in op.subjects:
            left_out = () if "v" in op.arguments else subject.outside
            variant = subject.statistics_variant(subject.variants[0], left_out)
            yield subject.name, {"op": subject.name, **variant}
        return
    for variant in op.variants:
        yield variant_label(variant), variant


def problems(op: Op) -> Iterator[Problem]:
    """Small cases of an op: three scenes for each of its settings, or its own samples if it has no scenes."""
    if op.scene_case is None and (op.group or op.subjects):
        for label, params in settings(op):
            for scene in SHORT:
                adapted = op.adapted(scene, params)
                if adapted is not None:
                    yield Problem(scene_case(op, adapted, params, label, "float64")).moved(AWAY)
        return
    for profile in PROFILES:
        own = [case for case in core.cases(op.name, profile, ("float64",)) if finite(case)][:OWN_CASES]
        if own:
            converged = (replace(case, params={**case.params, **op.converged}) for case in own)
            yield from (Problem(case).moved(AWAY) for case in converged)
            return


def long_problem(op: Op, tokens: int) -> Problem:
    """A case with this many queries and keys."""
    lead = ((1, 1),) * 3
    scene = Scene(f"{tokens}x{tokens}", tokens, tokens, d=4, e=3, lead=lead, options=("key_lengths",))
    _, params = next(settings(op))
    case = scene_case(op, op.adapted(scene, params) or scene, params, "long", "float64")
    return Problem(case, LONG_STEP).moved(AWAY)
