"""The yardstick of the second rule: its formulas say what the reference says, and rounding is all that they add."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.model import golden, tolerance
from attnkit_conformance.model.case import Case, rounded
from attnkit_conformance.model.golden import Golden
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes.attention import HALF_TYPES
from attnkit_reference.linear.attention import elu_plus_one

from .test_kit_can_fail import Correct, common

WITH_FORMULA = [op.name for op in OPDB if op.naive is not None]
# A step's gradients need those of a state, those of SOFT and Nyström attention go back through an iteration.
OUTPUTS_ONLY = ("_weights", "_step", "soft_attention", "nystrom_attention", "sima_attention", "rela_attention")


def values(op: str, case: Case) -> Mapping[str, np.ndarray]:
    """Outputs and gradients, these with a d, of the formula in the dtype of the case."""
    formula = BY_NAME[op].naive
    assert formula is not None
    with np.errstate(all="ignore"):
        outputs, gradients = formula(case)
    return {**outputs, **{f"d{name}": x for name, x in gradients.items()}}


def limits(truth: Golden) -> Mapping[str, tolerance.Limit]:
    return {**truth.outputs, **{f"d{name}": limit for name, limit in truth.gradients.items()}}


def misses(op: str, case: Case, dtype: str) -> list[str]:
    """Where the formula in `dtype` is not within the bound that the case has in float64."""
    allowed, found = limits(golden.compute(case)), values(op, replace(case, dtype=dtype))
    assert set(found) <= set(allowed), case.id
    for name, x in found.items():
        assert x.shape == allowed[name].golden.shape, f"{case.id}: {name}"
    measured = [tolerance.measure(name, x, allowed[name]) for name, x in found.items()]
    return [f"{case.id}: {text}" for m in measured for _, text in m.failures]


@pytest.mark.parametrize("op", WITH_FORMULA)
def test_formula_without_rounding_is_the_reference(op: str) -> None:
    failures = [text for case in core.cases(op, "scenes", ("float64",)) for text in misses(op, case, "float64")]
    assert not failures, "\n".join(failures[:10])


@pytest.mark.parametrize("op", WITH_FORMULA)
def test_formula_rounded_to_float32_is_not(op: str) -> None:
    assert any(misses(op, case, "float32") for case in core.cases(op, "quick", ("float64",)))


@pytest.mark.parametrize("op", WITH_FORMULA)
def test_second_rule_is_the_stricter_one(op: str) -> None:
    stricter = set()
    for case in core.cases(op, "quick", HALF_TYPES):
        for name, limit in limits(golden.compute(case)).items():
            if limit.naive_units is not None and limit.naive_units < limit.bound:
                stricter.add(name)
    assert stricter & set(BY_NAME[op].outputs({}))
    assert op.endswith(OUTPUTS_ONLY) or any(name.startswith("d") for name in stricter)


class SumsInHalf(Correct):
    """Linear attention whose two sums are rounded to the dtype of the inputs after every `chunk` keys."""

    chunk = 4  # one key at a time fails the first rule as well

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        sc, dtype = common(arrays, {}), arrays["q"].dtype.name
        weights = elu_plus_one(sc.q) @ np.swapaxes(elu_plus_one(sc.k), -1, -2)
        v = np.concatenate([sc.v, np.ones((*sc.v.shape[:-1], 1))], axis=-1)
        sums = np.zeros(())
        for keys in chunks(v.shape[-2], self.chunk):
            sums = self.kept(sums + weights[..., keys] @ v[..., keys, :], dtype)
        return super().outputs(op, arrays, {"o": sums[..., :-1] / (sums[..., -1:] + 1e-6)}, params)

    def kept(self, sums: np.ndarray, dtype: str) -> np.ndarray:
        return rounded(sums, dtype)


class SumsInFloat32(SumsInHalf):
    """The same with sums in the compute dtype."""

    def kept(self, sums: np.ndarray, dtype: str) -> np.ndarray:
        return rounded(sums, "float32")


def chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, n, size))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_sums_in_a_half_type_are_caught_by_the_second_rule_alone(dtype: str) -> None:
    cases = core.cases("linear_attention", "scenes", (dtype,))
    case = next(case for case in cases if "positive-values" in case.tags)
    found = core.check(SumsInHalf(), case)
    assert found.checks == {"second_rule"}, found.message
    assert core.check(SumsInFloat32(), case).status == "pass"


def test_second_rule_leaves_what_scores_in_float32_need() -> None:
    """Equal keys have equal scores in any arithmetic that adds them up in one order: the formula then has no error."""
    x = np.full(8, 0.027)
    assert tolerance.limit(x, "float16", growth=1.0, naive=x).naive_units == pytest.approx(1.0, rel=2e-2)
    needed = 1.0 + 16.0 * 1000.0 * 2.0**-23 / 2.0**-10
    assert tolerance.limit(x, "float16", growth=1000.0, naive=x).naive_units == pytest.approx(needed)
