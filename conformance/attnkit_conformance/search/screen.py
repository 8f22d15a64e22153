"""The bound of a search: what is cheap to say of a result, and what is said where that does not do.

First the reference runs once, and a result may be off by D's roundings of the summands of its last contraction, without
anything for what comes before. Nearly all results are that near. Of the others D decides as a whole, with its probes.
Where a result is further off than that, but no further than the reference jumps, it tells nothing: jumps are how far
the reference moves when the inputs move by a few roundings of the compute dtype, and are large beside a kink, a
threshold or a tie. Nor does it tell where hardly a digit is left (`Golden.blurred`) and it is a few bounds off.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from attnkit_conformance import core, golden
from attnkit_conformance.adapter import Adapter, IllFormed, Unsupported, arrays_of, as_numpy
from attnkit_conformance.core import CaseResult, Findings
from attnkit_conformance.golden.rest import sizes_at_rest
from attnkit_conformance.model import probe, tolerance
from attnkit_conformance.model.case import Case, compute_dtype
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import BY_NAME

Array = np.ndarray
Limits = tuple[Mapping[str, Limit], Mapping[str, Limit]]  # of outputs, of gradients
JUMPS = 4  # moves of the inputs
A_FEW = 4.0  # bounds: seen are 2.5, where nearly opposite vectors have the weight 1 + cos
ROUNDINGS = 8.0  # of the compute dtype, by which they move


class Truth:
    """What is known of a case: more, the more often it is asked."""

    def __init__(self, case: Case) -> None:
        self.case, self.op = case, BY_NAME[case.op]
        self.results = probe.explicit(self.op, case)

    @cached_property
    def cheap(self) -> Limits:
        """D's roundings of the last contraction."""
        summands = golden.magnitudes(self.op, self.case)
        growth = golden.growth_of(self.op, self.case)

        def limit(name: str, x: Array, dtype: str) -> Limit:
            return tolerance.limit(x, dtype, summands.get(name, 0.0), growth=growth)

        outputs, gradients = self.results
        return (
            {name: limit(name, x, self.op.output_dtype(name, self.case.dtype)) for name, x in outputs.items()},
            {name: limit(name, x, self.case.dtype_of(name)) for name, x in gradients.items()},
        )

    @cached_property
    def whole(self) -> golden.Golden:
        """D."""
        return golden.compute(self.case)

    @property
    def dear(self) -> Limits:
        """D's limits."""
        return self.whole.outputs, self.whole.gradients

    @cached_property
    def wide(self) -> Limits:
        """D's limits and the jumps of the reference."""
        rng, step = np.random.default_rng(0), ROUNDINGS * tolerance.eps(compute_dtype(self.case.dtype))
        with np.errstate(all="ignore"):
            moved = [probe.explicit(self.op, probe.shaken(self.op, self.case, rng, step)) for _ in range(JUMPS)]

        def wider(of: int, name: str, limit: Limit) -> Limit:
            jumps = sum((tolerance.distance(results[of][name], limit.golden) for results in moved), np.zeros(()))
            return replace(limit, allowed=limit.allowed + jumps)

        outputs, gradients = ({n: wider(of, n, x) for n, x in limits.items()} for of, limits in enumerate(self.dear))
        return outputs, gradients


def check(adapter: Adapter, case: Case, truth: Truth | None = None) -> CaseResult | None:
    """Judge one adapter on one case; None where its result tells nothing, for bounds are meaningless there or results
    leave the range of their dtype. What its process noticed is a failure whatever the result.
    """
    asked = core.case_for(adapter, case)
    result = check_once(adapter, asked, truth if truth is not None and asked is case else Truth(asked))
    if result is None:
        return None
    named = replace(result, id=case.id)
    return core.by_policy(named, asked, lambda plain: check_once(adapter, plain, Truth(plain)))


def check_once(adapter: Adapter, case: Case, truth: Truth) -> CaseResult | None:
    """The same of the case as it is."""
    result = judged(adapter, case, truth)
    if faults := core.faults_of(adapter):
        result = result or verdict(adapter, case, "fail")
        return replace(result, status="fail", failures=(*result.failures, *faults))
    return result


def judged(adapter: Adapter, case: Case, truth: Truth) -> CaseResult | None:
    """The same for the result alone."""
    try:
        got = answers(adapter, case)
    except IllFormed:
        raise
    except Unsupported as refusal:
        if is_undeclared(adapter, case):
            text = f"refused without having declared it: {refusal}"
            return verdict(adapter, case, "fail", Findings(failures=[("refused", text)]))
        return verdict(adapter, case, "unsupported", reason=str(refusal) or "unsupported")
    except Exception as error:  # an adapter may raise anything, and the search goes on
        return verdict(adapter, case, "fail", Findings(failures=[("exception", f"{type(error).__name__}: {error}")]))
    found = compared(adapter, case, got, truth.cheap)
    if not found.failures:
        return verdict(adapter, case, "pass", found)
    if not truth.whole.tells():
        return None
    found = compared(adapter, case, got, truth.dear)
    if not found.failures:
        return verdict(adapter, case, "pass", found)
    if not compared(adapter, case, got, truth.wide).failures:
        return None
    result = verdict(adapter, case, "fail", found)
    return None if is_blurred(result, truth.whole) else result


def is_undeclared(adapter: Adapter, case: Case) -> bool:
    """Whether an adapter that says beforehand what it refuses does not say so of a case."""
    declares = getattr(adapter, "unsupported", None)
    return declares is not None and declares(case.op, core.typed_arrays(adapter, case), case.params) is None


def answers(adapter: Adapter, case: Case) -> tuple[dict[str, Array], dict[str, Array] | None]:
    """The outputs of an adapter and its gradients, None where it has none; ValueError if it changes its inputs."""
    arrays = core.typed_arrays(adapter, case)
    before = {name: as_numpy(adapter, name, x).tobytes() for name, x in arrays.items()}
    outputs, gradients = arrays_of(adapter, "call", adapter.call(case.op, arrays, case.params)), None
    if BY_NAME[case.op].vjp:
        with suppress(Unsupported):
            cotangents = core.typed_cotangents(adapter, case)
            gradients = arrays_of(adapter, "vjp", adapter.vjp(case.op, arrays, case.params, cotangents))
    for name, x in arrays.items():
        if adapter.numpy(x).tobytes() != before[name]:
            raise ValueError(f"{name} was changed by the call")
    return outputs, gradients


def compared(
    adapter: Adapter, case: Case, got: tuple[Mapping[str, Array], Mapping[str, Array] | None], limits: Limits
) -> Findings:
    """What is wrong with outputs and gradients."""
    findings = Findings()
    for kind, results, of_kind in zip(("output", "gradient"), got, limits, strict=True):
        if results is not None:
            wide = core.limits_for(adapter, case, of_kind, "d" if kind == "gradient" else "")
            core.judge_arrays(findings, kind, results, wide, {}, lambda: sizes_at_rest(case))
    return findings


def verdict(adapter: Adapter, case: Case, status: str, found: Findings | None = None, reason: str = "") -> CaseResult:
    """The verdict on a case."""
    found = found or Findings()
    measured, failures = tuple(found.measured), tuple(found.failures)
    axes = core.axes_of(adapter, case)
    return CaseResult(case.id, adapter.name, case.op, case.dtype, status, measured, failures, reason, axes=axes)


def is_blurred(result: CaseResult, truth: golden.Golden) -> bool:
    """Whether a failure is one of arrays alone whose digits are lost to rounding, and no more than a few bounds."""
    failing = [x for x in result.measured if x.failures]
    near = all(x.ratio <= A_FEW for x in failing)
    return result.checks == {"bound"} and near and {x.output for x in failing} <= truth.blurred()
