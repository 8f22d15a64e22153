"""What derivatives of an op along a direction have to be, by difference quotients of the reference (semantics E).

Quotients of the outputs are their tangents, those of the explicit gradients are products with the Hessian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from attnkit_conformance.golden import KEPT, Content, golden
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case, generator
from attnkit_conformance.model.layout import TIED
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.probe import AT_ENDS, EXACT, explicit, may_be_on_kinks
from attnkit_conformance.model.store import remember
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import BY_NAME

Array = np.ndarray
Arrays = Mapping[str, Array]

STEP = 2.0**-17  # h, near the cube root of eps, where a central quotient is off by as much as its rounding errors
OTHER = 2  # steps from the case to the second sample
AWAY = 2**12  # steps off kinks, a 32nd of an entry
ENDS = (1.0, 2.0)  # of alpha


@dataclass(frozen=True)
class Derivatives:
    """Limits of tangents by output; of products with the Hessian and of gradients of two samples by argument.

    `product` is the sum of tangents times cotangents, exact unlike quotients.
    """

    jvp: Mapping[str, Limit]
    hvp: Mapping[str, Limit]
    vmap_grad: Mapping[str, Limit]
    product: Limit


@dataclass(frozen=True)
class Problem:
    """A case, a direction whose entries are relative to those of the case, and the derivatives along it."""

    case: Case
    step: float = STEP

    @property
    def op(self) -> Op:
        return BY_NAME[self.case.op]

    @property
    def inputs(self) -> dict[str, Array]:
        """The arguments that have a gradient."""
        return {name: x for name, x in self.case.arrays.items() if name in self.op.differentiable}

    @cached_property
    def direction(self) -> dict[str, Array]:
        """0 where the case is 0, NaN or infinite, or where alpha is at the ends of its range."""
        rng = generator(f"direction of {self.case.digest}")
        u = {}
        for name, x in self.inputs.items():
            still = ~np.isfinite(x) | (np.isin(x, ENDS) & (name in AT_ENDS))
            u[name] = np.asarray(np.where(still, 0.0, x) * rng.standard_normal(x.shape))
        return u

    def moved(self, steps: int) -> Case:
        """The case at some steps along the direction."""
        ahead = {name: np.asarray(x + steps * self.step * self.direction[name]) for name, x in self.inputs.items()}
        return replace(self.case, arrays={**self.case.arrays, **ahead})

    @cached_property
    def samples(self) -> dict[str, Array]:
        """The inputs of two samples, the case itself and one beside it, on a further axis in front."""
        other = self.moved(OTHER).arrays
        return {name: np.stack([x, other[name]]) for name, x in self.inputs.items()}

    @property
    def gradient(self) -> Mapping[str, Limit]:
        """The gradients at the case."""
        return golden(self.case).gradients

    @property
    def truth(self) -> Derivatives:
        """Its derivatives, once for all implementations that are judged on it."""
        return of_content(Content(self.case.digest, self.case), self.step)

    def compute(self) -> Derivatives:
        """Run the reference around the case."""
        limits = golden(self.case)
        with np.errstate(all="ignore"):
            results = {n: explicit(self.op, self.moved(n)) for n in tolerance.STEPS}
        outputs, grads = ({n: both[part] for n, both in results.items()} for part in (0, 1))

        def quotients(of: Mapping[int, Arrays], each: Mapping[str, Limit]) -> dict[str, Limit]:
            return {m: tolerance.quotient(x, {n: of[n][m] for n in of}, self.step) for m, x in each.items()}

        smooth = {name: x for name, x in limits.outputs.items() if name not in self.op.not_differentiable}
        samples = {name: of_samples(limit, grads[OTHER][name]) for name, limit in limits.gradients.items()}
        return Derivatives(
            quotients(outputs, smooth), quotients(grads, limits.gradients), samples, self.product_of(limits.gradients)
        )

    def product_of(self, gradients: Mapping[str, Limit]) -> Limit:
        """The sum of gradients times the direction."""
        moving = [(limit, self.direction[name]) for name, limit in gradients.items()]
        golden = np.asarray(sum(np.sum(limit.golden * u) for limit, u in moving))
        allowed = np.asarray(sum(np.sum(limit.allowed * np.abs(u)) for limit, u in moving))
        return Limit(golden, "float64", allowed, tolerance.largest(golden))

    def product(self, tangents: Mapping[str, Array]) -> Array:
        """The sum of tangents times cotangents, which has to be the same; cotangents of padding are not finite."""
        cotangents = {name: np.where(np.isfinite(x), x, 0.0) for name, x in self.case.cotangents.items()}
        return np.asarray(sum(np.sum(tangents[name] * x) for name, x in cotangents.items()))


def off_kinks(case: Case) -> Case:
    """The case, moved if its scores are exact: then kinks, thresholds and ties are among them. Entries that shared a
    place in memory are no longer equal.
    """
    if not may_be_on_kinks(BY_NAME[case.op], case):
        return case
    apart = {name: layout for name, layout in case.layouts.items() if layout not in TIED}
    return replace(Problem(case).moved(AWAY), tags=case.tags - EXACT, layouts=apart)


@lru_cache(maxsize=KEPT)
def of_content(content: Content, step: float) -> Derivatives:
    return remember(f"derivatives of {content.digest} by {step}", Problem(content.case, step).compute)


def of_samples(limit: Limit, other: Array) -> Limit:
    """The limit of a gradient, and of that of a sample beside it."""
    return Limit(np.stack([limit.golden, other]), limit.dtype, np.stack([limit.allowed] * 2), limit.largest)
