"""The golden values of a case: the float64 reference on rounded inputs, with the limits and exact rules they imply."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import attnkit_reference
from attnkit_conformance.model import lowprecision, tolerance
from attnkit_conformance.model.case import Case, Sample, numpy_dtype
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import BY_NAME
from attnkit_reference._core import reduce_to

TINY = 1e-20  # smaller row sums, except 0, lose precision or underflow in float32
HALVINGS = 8
QUERY_OUTPUTS = ("o", "total", "entropy", "sum_squares", "maximum", "nonzero", "visible")


@dataclass(frozen=True)
class Golden:
    """Limits by output and by gradient, and the entries that must be exactly 0."""

    outputs: Mapping[str, Limit]
    gradients: Mapping[str, Limit]
    zero_outputs: Mapping[str, np.ndarray]
    zero_gradients: Mapping[str, np.ndarray]

    @cached_property
    def blind_spots(self) -> list[str]:
        """Wrong arrays that would pass the checks of this case. Empty for a sound kit."""
        limits = (*self.outputs.items(), *((f"d{name}", limit) for name, limit in self.gradients.items()))
        return [text for name, limit in limits for text in tolerance.blind_spots(name, limit)]

    def tells(self) -> bool:
        """Whether bounds are meaningful, gradients are finite and fit their dtypes, outputs too (lse is -inf on null
        rows), and no row is dead up to numbers that only float64 represents: its entropy jumps there.
        """
        fits = all(np.all(np.isfinite(in_dtype(x))) for x in self.gradients.values())
        fits &= all(np.all(in_dtype(x) < np.inf) and representable(x) for x in self.outputs.values())
        total = np.abs(self.outputs["total"].golden) if "total" in self.outputs else np.ones(1)
        return fits and not np.any((total > 0) & (total < TINY)) and not self.blind_spots


def in_dtype(limit: Limit) -> np.ndarray:
    """The golden values rounded to the dtype under judgement, in float64."""
    with np.errstate(over="ignore"):
        return limit.golden.astype(numpy_dtype(limit.dtype)).astype(np.float64)


def representable(limit: Limit) -> bool:
    """Whether finite values stay finite in the dtype under judgement."""
    return np.array_equal(np.isfinite(in_dtype(limit)), np.isfinite(limit.golden))


cache = threading.local()


def golden(case: Case) -> Golden:
    """Golden values of `case`; each thread caches the last one, because adapters are judged case by case."""
    if getattr(cache, "case", None) is not case:
        cache.case, cache.values = case, compute(case)
    values: Golden = cache.values
    return values


def draw_case(sample: Sample) -> Case:
    """The case of a sample, halved until its bounds are meaningful; the last one if they never are."""
    for halvings in range(HALVINGS):
        case = sample.draw(halvings)
        growth = BY_NAME[case.op].subject(case.params).growth
        if (growth is None or growth(case) <= tolerance.LARGEST_GROWTH.get(case.dtype, np.inf)) and golden(
            case
        ).tells():
            break
    return case


def compute(case: Case) -> Golden:
    """Run the reference and the low-precision formula on a case."""
    op = BY_NAME[case.op]
    binding = op.binding
    outputs = binding.forward(attnkit_reference, op, case.arrays, case.params)
    gradients: dict[str, np.ndarray] = {}
    magnitudes: dict[str, np.ndarray] = {}
    if op.vjp:
        call = (attnkit_reference, op, case.arrays, case.params, case.cotangents)
        gradients = binding.vjp(*call)
        if hasattr(attnkit_reference, f"{op.name}_magnitudes"):
            magnitudes = binding.backward(*call, "_magnitudes")
    elif has(f"{op.name}_magnitudes"):
        magnitudes = binding.backward(attnkit_reference, op, case.arrays, case.params, {}, "_magnitudes")
    naive_outputs, naive_gradients = naive(op, case)
    growth = growth_of(op, case)
    twice = {"sum_squares": 2.0 * growth}  # errors of the weights count twice in their squares
    zero_outputs, zero_gradients = exact_zeros(op, case)
    return Golden(
        {
            name: tolerance.limit(
                np.asarray(x, np.float64), op.output_dtype(name, case.dtype), magnitudes.get(name),
                twice.get(name, growth), naive_outputs.get(name),
            )
            for name, x in outputs.items()
        },
        {
            name: tolerance.limit(
                np.asarray(x), case.dtype_of(name), magnitudes.get(name), growth,
                naive_gradients.get(name), "gradient",
            )
            for name, x in gradients.items()
        },
        zero_outputs,
        zero_gradients,
    )  # fmt: skip


def has(name: str) -> bool:
    """Whether the reference has a function of this name, possibly in a submodule."""
    module, _, function = name.rpartition(".")
    return hasattr(getattr(attnkit_reference, module, None) if module else attnkit_reference, function)


def naive(op: Op, case: Case) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """The low-precision evaluation, for half types only."""
    formula = op.subject(case.params).naive
    if formula is None or case.dtype not in ("float16", "bfloat16"):
        return {}, {}
    with np.errstate(all="ignore"):
        return formula(case)


def growth_of(op: Op, case: Case) -> float:
    """D: 1 + max|visible exponent|/16 for ops that exponentiate, else 1, or what the op's row says."""
    subject = op.subject(case.params)
    if subject.growth is not None:
        return subject.growth(case)
    if "q" not in case.arrays or not subject.exponent(case.params):
        return 1.0
    return tolerance.growth_of_exponent(lowprecision.largest_exponent(case, subject.settings))


def exact_zeros(op: Op, case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A5 and A6: entries of outputs and gradients that are exactly 0 in any arithmetic."""
    subject = op.subject(case.params)
    own_outputs, own_gradients = ({}, {}) if subject.zeros is None else subject.zeros(case)
    if subject.group != "a":
        return dict(own_outputs), dict(own_gradients)
    sc = lowprecision.case_scores(case)
    null, unseen = np.asarray(~sc.visible.any(-1)), np.asarray(~sc.visible.any(-2))
    zeros = {name: null[..., None] if name == "o" else null for name in QUERY_OUTPUTS}
    outputs: dict[str, np.ndarray] = {**zeros, "w": ~sc.visible}
    gradients = {"q": reduce_to(null[..., None], (*case.arrays["q"].shape[:-1], 1), 1, np.logical_and)}
    for name in ("k", "v"):
        if name in op.differentiable:
            shape = (*case.arrays[name].shape[:-1], 1)
            gradients[name] = reduce_to(unseen[..., None], shape, sc.groups, np.logical_and)
    if "bias" in case.arrays:
        gradients["bias"] = reduce_to(~sc.visible, case.arrays["bias"].shape, 1, np.logical_and)
    gradients = {name: zero for name, zero in {**gradients, **own_gradients}.items() if name in op.differentiable}
    return {**outputs, **own_outputs}, gradients
