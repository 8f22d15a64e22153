"""The golden values of a case: the float64 reference on rounded inputs, with the limits and exact rules they imply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

import attnkit_reference
from attnkit_conformance.model import scoring, tolerance
from attnkit_conformance.model.case import Case, NoDraw, Sample, compute_dtype, numpy_dtype
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.probe import explicit, probes
from attnkit_conformance.model.store import remember
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.model.types import option
from attnkit_conformance.opdb import BY_NAME
from attnkit_reference._core import reduce_to

FAINTEST = 1e3  # smallest normal numbers, below which rounding may leave nothing
NEAR = 1e-5  # relative distance of weights that are equal but for rounding to float32
FEW_DIGITS = 0.01  # of the largest entry: a larger bound leaves less than two digits to judge
TINY = 1e-20  # smaller row sums, except 0, lose precision or underflow in float32
HALVINGS = 8
DRAWS = 3  # of which one has no near tie
VALUES = {"v", "v_t", "values", "initial_S", "proj_v"}  # what a cotangent of o is multiplied by
KEPT = 128  # golden values, of which an adapter after another asks for the same
QUERY_OUTPUTS = ("o", "total", "entropy", "sum_squares", "maximum", "nonzero", "visible")


@dataclass(frozen=True)
class Golden:
    """Limits by output and by gradient, the entries that must be exactly 0, and wrong arrays that would pass."""

    outputs: Mapping[str, Limit]
    gradients: Mapping[str, Limit]
    zero_outputs: Mapping[str, np.ndarray]
    zero_gradients: Mapping[str, np.ndarray]
    blind_spots: tuple[str, ...]  # empty for a sound kit

    def tells(self) -> bool:
        """Whether bounds are meaningful and finite, gradients are finite and fit their dtypes, outputs too (lse is -inf
        on null rows), and no row is dead up to numbers that only float64 represents: its entropy jumps there.
        """
        fits = all(np.all(np.isfinite(x.allowed)) for x in (*self.outputs.values(), *self.gradients.values()))
        fits &= all(np.all(np.isfinite(in_dtype(x))) for x in self.gradients.values())
        fits &= all(np.all(in_dtype(x) < np.inf) and representable(x) for x in self.outputs.values())
        total = np.abs(self.outputs["total"].golden) if "total" in self.outputs else np.ones(1)
        return fits and not np.any((total > 0) & (total < TINY)) and not self.blind_spots

    def fits(self) -> bool:
        """Whether what is finite stays finite in the dtype under judgement."""
        return all(map(representable, (*self.outputs.values(), *self.gradients.values())))

    def blurred(self) -> set[str]:
        """The outputs and the gradients, such as "dq", of which inputs that move by their last digits leave less than
        two digits: eight probes may say half of what rounding costs there. Half types have no more by themselves.
        """
        every = {**self.outputs, **{f"d{name}": x for name, x in self.gradients.items()}}
        single = {name: x for name, x in every.items() if x.dtype in ("float64", "float32")}
        return {name for name, x in single.items() if np.any(x.allowed > FEW_DIGITS * tolerance.largest(x.golden))}


def in_dtype(limit: Limit) -> np.ndarray:
    """The golden values rounded to the dtype under judgement, in float64."""
    with np.errstate(over="ignore"):
        return limit.golden.astype(numpy_dtype(limit.dtype)).astype(np.float64)


def representable(limit: Limit) -> bool:
    """Whether finite values stay finite in the dtype under judgement."""
    return np.array_equal(np.isfinite(in_dtype(limit)), np.isfinite(limit.golden))


def golden(case: Case) -> Golden:
    """Golden values of `case`, once for all implementations that are judged on it."""
    return of_content(Content(case.digest, case))


@dataclass(frozen=True)
class Content:
    """A case as a key: equal to any other with the same call."""

    digest: str
    case: Case = field(compare=False)


@lru_cache(maxsize=KEPT)
def of_content(content: Content) -> Golden:
    return remember(content.digest, lambda: compute(content.case))


def draw_case(sample: Sample) -> Case:
    """The case of a sample, halved until its bounds are meaningful; the last one if they never are. NoDraw where its
    results are beyond its dtype even then: whoever is judged on it would be wrong.
    """
    for halvings in range(HALVINGS):
        case = without_near_tie(sample, halvings)
        op = BY_NAME[case.op]
        growth = op.subject(case.params).growth
        small = growth is None or growth(case) <= tolerance.LARGEST_GROWTH.get(case.dtype, np.finfo(np.float64).max)
        if small and golden(case).tells() and not has_near_tie(op, case):
            return case
    if not is_bounded(op, case) or not golden(case).fits():
        raise NoDraw(f"{case.id}: no draw in {HALVINGS} has results that {case.dtype} has")
    return case


def without_near_tie(sample: Sample, halvings: int) -> Case:
    """The first draw of so many halvings without a near tie, which halved numbers would have too; the last one if all
    have one.
    """
    for again in range(DRAWS):
        case = sample.draw(halvings, again)
        if not has_near_tie(BY_NAME[case.op], case):
            break
    return case


def is_bounded(op: Op, case: Case) -> bool:
    """Whether the growth of a case is finite."""
    growth = op.subject(case.params).growth
    return growth is None or bool(np.isfinite(growth(case)))


def has_near_tie(op: Op, case: Case) -> bool:
    """Whether rounding decides which key of some query has the largest weight, and with it the gradient of that."""
    if "maximum" not in case.cotangents:
        return False
    w = weights_of(op, case)
    gap = np.max(w, axis=-1, keepdims=True, initial=0.0) - w
    return bool(np.any((gap > 0) & (gap < NEAR * (gap + np.abs(w)))))


def counts_faint_weights(op: Op, case: Case) -> bool:
    """Whether weights are counted that are not 0, but may be in the compute dtype."""
    if "nonzero" not in op.outputs(case.params):
        return False
    w = np.abs(weights_of(op, case))
    return bool(np.any((w > 0) & (w < FAINTEST * tolerance.smallest_normal(compute_dtype(case.dtype)))))


def weights_of(op: Op, case: Case) -> np.ndarray:
    """The weights that statistics are of."""
    of_weights = BY_NAME[f"{op.subject(case.params).name}_weights"]
    arrays = {name: x for name, x in case.arrays.items() if name in (*of_weights.arguments, *of_weights.optional)}
    names = (*of_weights.own, *scoring.COMMON)
    params = {name: x for name, x in case.params.items() if name in names and name != "dropout"}
    w: np.ndarray = of_weights.binding.forward(attnkit_reference, of_weights, arrays, params)["w"]
    return w


@np.errstate(over="ignore", invalid="ignore")
def compute(case: Case) -> Golden:
    """Run the reference on a case, and near it; inputs may be infinite."""
    op = BY_NAME[case.op]
    results = explicit(op, case)
    near_outputs, near_gradients = probes(op, case, results)
    limit = limits_of(op, case)
    outputs = {n: limit(n, x, near_outputs[n], op.output_dtype(n, case.dtype)) for n, x in results[0].items()}
    gradients = {n: limit(n, x, near_gradients[n], case.dtype_of(n)) for n, x in results[1].items()}
    every = (*outputs.items(), *((f"d{name}", x) for name, x in gradients.items()))
    blind = tuple(text for name, x in every for text in tolerance.blind_spots(name, x))
    return Golden(outputs, gradients, *exact_zeros(op, case), blind)


def limits_of(op: Op, case: Case) -> Callable[[str, np.ndarray, np.ndarray, str], Limit]:
    """The limit of an output or a gradient by its name, value, probe and dtype."""
    summands = magnitudes(op, case)
    before = magnitudes(op, without_signs(case)) if summands and VALUES & case.arrays.keys() else summands
    growth = growth_of(op, case)
    wide = tolerance.growth_of_width(case.arrays["q"].shape[-1]) if "q" in case.arrays else 1.0
    hidden = {**hidden_noise(op, case), **faint_noise(op, case)}
    # errors of weights count twice in their squares, and those of sums of numbers that are rounded alike add up
    twice = dict.fromkeys(("sum_squares", *op.alike), 2.0 * growth)

    def limit(name: str, x: np.ndarray, near: np.ndarray, dtype: str) -> Limit:
        own = summands.get(name, np.zeros(()))
        earlier = summands.get(f"{name}_before", before.get(name, own))
        noise = wide * near + np.maximum(earlier - own, 0.0) + hidden.get(name, 0.0)
        return tolerance.limit(x, dtype, own, noise, twice.get(name, growth))

    return limit


def hidden_noise(op: Op, case: Case) -> Mapping[str, np.ndarray]:
    """What no probe sees of dv: kernels sum up the scores of a row twice, for what it is divided by and for its
    weights, in two orders, and in exact arithmetic a row of one key has a weight of 1 whatever its score.
    """
    resummed = op.subject(case.params).resummed
    if resummed is None or "v" not in op.differentiable or "o" not in case.cotangents:
        return {}
    found = resummed(case)
    if found is None:
        return {}
    slopes, sc, do = found
    moved = slopes * scoring.score_movement(sc) * (1.0 if sc.keep is None else np.abs(sc.keep))
    dv = np.swapaxes(moved, -1, -2) @ np.abs(np.nan_to_num(do))
    return {"v": reduce_to(dv, case.arrays["v"].shape, sc.groups) / tolerance.BOUND["float32"]}


FADING = ("log_decay", "log_gate")


def faint_noise(op: Op, case: Case) -> Mapping[str, np.ndarray]:
    """What no probe sees of sums that fade: an entry of a state below the normal range may become 0, and what is
    multiplied with it does so for every entry of a row or a column: v in dk, φ(k) in dv, do in dq, φ(q) in o.
    """
    arrays = {name.removesuffix("_t"): x for name, x in case.arrays.items()}
    cotangent = case.cotangents.get("o", case.cotangents.get("o_t"))
    if cotangent is None or not any(name.removesuffix("_t") in FADING for name in (*case.arrays, *case.params)):
        return {}
    tokens = 0 if "q_t" in case.arrays else 1
    plain = "feature_map" not in op.own or case.params.get("feature_map") == "identity"
    below = 0.0 if plain else 1.0  # φ(x) is at most that and |x|
    scale = abs(option(case.params, "scale", 1.0) or 1.0)

    def row(x: np.ndarray, beside: float = 0.0) -> float:
        return float(np.max(np.sum(beside + np.where(np.isfinite(x), np.abs(x), 0.0), axis=-1), initial=0.0))

    def times(name: str) -> float:
        """Over how many leading axes the gradient is summed."""
        whole, own = (math.prod(x.shape[: x.ndim - 1 - tokens]) for x in (cotangent, arrays[name]))
        return max(1.0, whole / max(own, 1))

    beside = {
        "o": scale * row(arrays["q"], below),
        "q": scale * row(cotangent) * times("q"),
        "k": row(arrays["v"]) * times("k"),
        "v": row(arrays["k"], below) * times("v"),
    }
    dtype = compute_dtype(case.dtype)
    suffix = "" if tokens else "_t"
    return {
        f"{n}{suffix}": np.asarray(x * tolerance.smallest_normal(dtype) / tolerance.eps(dtype))
        for n, x in beside.items()
    }


def magnitudes(op: Op, case: Case) -> Mapping[str, np.ndarray]:
    """D's mag by output and gradient: the summands of last contractions in absolute value. NAME_before has those of the
    contraction before it, where both may cancel.
    """
    if not has(f"{op.name}_magnitudes"):
        return {}
    return op.binding.backward(attnkit_reference, op, case.arrays, case.params, case.cotangents, "_magnitudes")


def without_signs(case: Case) -> Case:
    """The case with |v| and absolute cotangents. Their products have errors where they cancel too: a weight of 1 hides
    from the probe that do·v was added up in two ways.
    """
    arrays = {name: np.abs(x) if name in VALUES else x for name, x in case.arrays.items()}
    return replace(case, arrays=arrays, cotangents={name: np.abs(x) for name, x in case.cotangents.items()})


def has(name: str) -> bool:
    """Whether the reference has a function of this name, possibly in a submodule."""
    module, _, function = name.rpartition(".")
    return hasattr(getattr(attnkit_reference, module, None) if module else attnkit_reference, function)


def growth_of(op: Op, case: Case) -> float:
    """D: 1 + max|visible exponent|/16 for ops that exponentiate, else 1, or what the op's row says."""
    subject = op.subject(case.params)
    if subject.growth is not None:
        return subject.growth(case)
    if "q" not in case.arrays or not subject.exponent(case.params):
        return 1.0
    return tolerance.growth_of_exponent(scoring.largest_exponent(case, subject.settings))


def exact_zeros(op: Op, case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A5 and A6: entries of outputs and gradients that are exactly 0 in any arithmetic."""
    subject = op.subject(case.params)
    own_outputs, own_gradients = ({}, {}) if subject.zeros is None else subject.zeros(case)
    if subject.group != "a":
        return dict(own_outputs), dict(own_gradients)
    sc = scoring.case_scores(case)
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
