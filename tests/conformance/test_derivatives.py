"""Derivatives beyond gradients: every op has cases that tell something, and planted bugs are failures."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnkit.ops import entmax
from attnkit_conformance import judge
from attnkit_conformance.adapter import DERIVATIVES, Unsupported
from attnkit_conformance.adapters.torch import Autograd
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import declared, derivatives, selection
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.tolerance import Limit
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import smallest

OP = "softmax_attention"
LINEAR = "The op is linear: its second derivatives are 0."
NOTHING_TOLD: Mapping[tuple[str, str], str] = {
    ("landmarks.average_pool", "hvp"): LINEAR,
    ("landmarks.random", "hvp"): LINEAR,
    ("landmarks.biased", "hvp"): LINEAR,
    ("newton_inverse", "hvp"): "What is judged, A X A, is A where the iteration has converged.",
}


class Generic(Autograd):
    """attnkit's generic bodies, in which bugs are planted."""

    def __init__(self) -> None:
        super().__init__("planted", "generic", "cpu", "")


def verdicts(adapter: Any, op: str = OP, kinds: str = "jvp. or hvp. or vmap_grad.") -> list[CaseResult]:
    return list(judge.judge([adapter], "small", kinds, adapter.dtypes, ops=(op,)))


def statuses(results: list[CaseResult]) -> dict[str, set[str]]:
    """By derivative."""
    found: dict[str, set[str]] = {}
    for result in results:
        found.setdefault(result.id.split("/")[2].partition(".")[0], set()).add(result.status)
    return found


# -------------------------------------------------------------------------------------------------- the cases


def told(limits: Mapping[str, Limit]) -> bool:
    """Whether zeros fail for some entry."""
    return any(np.any(np.abs(limit.golden) > limit.allowed) for limit in limits.values())


@pytest.mark.parametrize("op", [op for op in OPDB if op.vjp], ids=lambda op: op.name)
def test_every_differentiable_op_has_cases_that_tell_something(op: Op) -> None:
    problems = [derivatives.problem_of(sample) for sample in derivatives.of_everyone(op)[: derivatives.HANDFUL]]
    lacking = {(op.name, kind) for kind in DERIVATIVES if not any(told(getattr(p.truth, kind)) for p in problems)}
    assert lacking == {key for key in NOTHING_TOLD if key[0] == op.name}


def test_the_arguments_of_an_op_all_have_derivatives() -> None:
    truth = derivatives.problem_of(derivatives.of_everyone(BY_NAME[OP])[0]).truth
    assert {*truth.jvp} == {"o"}
    assert {*truth.hvp} == {*truth.vmap_grad} == {"q", "k", "v"}


STEP = 2.0**-10
KINKS = np.linspace(-2.5, 2.5, 101) * STEP


def quotient(function: Any) -> Limit:
    """At 0, of results without errors."""
    golden = np.asarray(function(0.0))
    values = {n: np.asarray(function(n * STEP)) for n in tolerance.STEPS}
    return tolerance.quotient(Limit(golden, "float64", np.zeros(golden.shape), 1.0), values, STEP)


def test_a_quotient_is_as_good_as_it_says_beside_kinks() -> None:
    limit = quotient(lambda x: np.maximum(x - KINKS, 0.0))
    left, right = (KINKS < 0).astype(float), (KINKS <= 0).astype(float)
    error = np.minimum(np.abs(limit.golden - left), np.abs(limit.golden - right))
    slack = tolerance.eps("float64") / STEP
    assert np.all(error <= limit.allowed + slack)
    assert np.max(error) > 0.3, "kinks that matter"


def test_a_quotient_beside_jumps_tells_nothing() -> None:
    limit = quotient(lambda x: (x > KINKS).astype(float))
    assert np.all(np.abs(limit.golden) <= limit.allowed)
    assert np.sum(limit.allowed > 1) > 50


def test_a_quotient_of_a_smooth_function_is_exact_enough_to_tell() -> None:
    limit = quotient(np.exp)
    assert abs(limit.golden - 1) < limit.allowed < 1e-5


# ---------------------------------------------------------------------------------------------- planted bugs


class DropsTheTangentOfKeys(Generic):
    def jvp(self, op: str, arrays: Any, params: Any, tangents: Any) -> Any:
        return super().jvp(op, arrays, params, {**tangents, "k": torch.zeros_like(tangents["k"])})


class DropsTheTangentOfTheBias(Generic):
    """As a rule written before there was a bias may do."""

    def jvp(self, op: str, arrays: Any, params: Any, tangents: Any) -> Any:
        held = {name: torch.zeros_like(x) if name == "bias" else x for name, x in tangents.items()}
        return super().jvp(op, arrays, params, held)


class HasNoTangents(Generic):
    """As a custom operator without a rule for forward mode may have it."""

    def jvp(self, op: str, arrays: Any, params: Any, tangents: Any) -> Any:
        return {name: torch.zeros_like(x) for name, x in super().jvp(op, arrays, params, tangents).items()}


class IsOffInTheTenthDigit(Generic):
    """Which no quotient notices, but the product with the cotangents."""

    def jvp(self, op: str, arrays: Any, params: Any, tangents: Any) -> Any:
        return {name: x * (1 + 1e-10) for name, x in super().jvp(op, arrays, params, tangents).items()}


class LosesTheSecondGraph(Generic):
    """Gradients that are constants."""

    def hvp(self, op: str, arrays: Any, params: Any, cotangents: Any, tangents: Any) -> Any:
        return {name: torch.zeros_like(x) for name, x in tangents.items()}


class ForgetsHowCotangentsReachValues(Generic):
    """The gradient of v has a derivative through the weights."""

    def hvp(self, op: str, arrays: Any, params: Any, cotangents: Any, tangents: Any) -> Any:
        grads = super().hvp(op, arrays, params, cotangents, tangents)
        return {**grads, "v": torch.zeros_like(grads["v"])}


class AddsUpSamples(Generic):
    def vmap_grad(self, op: str, arrays: Any, params: Any, cotangents: Any, samples: Any) -> Any:
        grads = super().vmap_grad(op, arrays, params, cotangents, samples)
        return {name: x.mean(0, keepdim=True).expand_as(x).contiguous() for name, x in grads.items()}


class ExchangesSamples(Generic):
    def vmap_grad(self, op: str, arrays: Any, params: Any, cotangents: Any, samples: Any) -> Any:
        return {n: x.flip(0) for n, x in super().vmap_grad(op, arrays, params, cotangents, samples).items()}


class KeepsOneSample(Generic):
    def vmap_grad(self, op: str, arrays: Any, params: Any, cotangents: Any, samples: Any) -> Any:
        return {n: x[:1] for n, x in super().vmap_grad(op, arrays, params, cotangents, samples).items()}


class RefusesWithoutAName(Generic):
    """As torch does where it has no rule."""

    def forward(self, op: str, arrays: Any, params: Any) -> Any:
        raise NotImplementedError("the derivative for 'aten::_fused' is not implemented")


class RaisesSomething(Generic):
    def forward(self, op: str, arrays: Any, params: Any) -> Any:
        raise RuntimeError("internal assert failed")


BUGS = {
    DropsTheTangentOfKeys: {"jvp": "bound"},
    DropsTheTangentOfTheBias: {"jvp": "bound"},
    HasNoTangents: {"jvp": "bound"},
    IsOffInTheTenthDigit: {"jvp": "bound"},
    LosesTheSecondGraph: {"hvp": "bound"},
    ForgetsHowCotangentsReachValues: {"hvp": "bound"},
    AddsUpSamples: {"vmap_grad": "bound"},
    ExchangesSamples: {"vmap_grad": "bound"},
    KeepsOneSample: {"vmap_grad": "shape"},
    RefusesWithoutAName: dict.fromkeys(DERIVATIVES, "exception"),
    RaisesSomething: dict.fromkeys(DERIVATIVES, "exception"),
}


def test_what_is_right_passes() -> None:
    assert statuses(verdicts(Generic())) == {kind: {"pass"} for kind in DERIVATIVES}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_fail(bug: type[Generic]) -> None:
    """Each by three verdicts at least: none hangs by a thread."""
    results = verdicts(bug())
    told = Counter(result.id.split("/")[2].partition(".")[0] for result in results if result.status == "fail")
    assert {*told} == {*BUGS[bug]}
    assert min(told.values()) >= 3
    assert {result.status for result in results} <= {"pass", "fail"}
    for result in (result for result in results if result.status == "fail"):
        assert result.checks == {BUGS[bug][result.id.split("/")[2].partition(".")[0]]}


@pytest.mark.parametrize("bug", [DropsTheTangentOfKeys, LosesTheSecondGraph, KeepsOneSample, RaisesSomething])
def test_a_failure_has_the_program_of_its_smallest_case(bug: type[Generic]) -> None:
    (kind, check), *_ = BUGS[bug].items()
    adapter = bug()
    (first, *_) = [result for result in verdicts(adapter, kinds=f"/{kind}.") if result.status == "fail"]
    text = smallest.program_of(adapter, first)
    told: dict[str, Any] = {}
    exec(text, told)
    assert told["k"].size <= 4
    assert f"\n# {kind} of {OP}(q, k, v" in text
    assert ("q_dot" in told, "do" in told) == (kind != "vmap_grad", kind != "jvp")
    assert {"exception": "\n# raises ", "shape": "\n# [shape] ", "bound": " should be "}[check] in text


def test_a_failure_may_be_expected(tmp_path: Path) -> None:
    (tmp_path / "planted.txt").write_text(f"{OP}/float64/hvp.plain a rule is missing\n")
    adapter = LosesTheSecondGraph()
    (result,) = judge.judge([adapter], "small", "/hvp.plain", ("float64",), ops=(OP,), xfails=tmp_path)
    assert (result.status, result.reason) == ("xfail", "a rule is missing")


def test_a_second_derivative_without_that_of_the_threshold_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entmax, "_STEPS", 1)
    found = statuses(verdicts(Generic(), "entmax_attention"))
    assert "fail" in found["hvp"]
    assert found["jvp"] == found["vmap_grad"] == {"pass"}


def test_a_kernel_refuses_by_its_name() -> None:
    (adapter,) = selection.find(["torch-blocked"])
    plain = verdicts(adapter, kinds=".plain and (jvp or hvp or vmap_grad)")
    assert statuses(plain) == {kind: {"unsupported"} for kind in DERIVATIVES}
    assert all("blocked" in result.reason and "generic" in result.reason for result in plain)


def test_an_adapter_without_methods_is_not_judged() -> None:
    (adapter,) = selection.find(["numpy-generic"])
    assert verdicts(adapter) == []


# ---------------------------------------------------------------------------------------------- declarations


class Declaring(Generic):
    """attnkit's softmax, of which two derivatives are declared."""

    ops = (OP,)

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.dtypes, self.ops, self.refused = ("float64",), (OP,), refused
        self.serves = {OP: {"scale": ("0.7",), "derivatives": ("jvp", "vmap_grad")}}

    def forward(self, op: str, arrays: Any, params: Any) -> Any:
        row = BY_NAME[op]
        if {*arrays, *params} - {*row.arguments, "scale"} or {x.shape[:-2] for x in arrays.values()} != {(2, 2)}:
            raise NotImplementedError("planted: softmax with a scale, batch and heads; else generic")
        return super().forward(op, arrays, params)

    def derivatives(self, kind: str, op: str, arrays: Any, params: Any, *others: Any) -> Any:
        if kind in self.refused:
            raise Unsupported(f"no {kind}")
        return super().derivatives(kind, op, arrays, params, *others)


def test_declared_derivatives_are_judged_and_others_are_not_covered() -> None:
    adapter = Declaring("hvp")
    assert list(selection.what_is_wrong(adapter)) == []
    results = verdicts(adapter)
    assert statuses(results) == {"jvp": {"pass"}, "vmap_grad": {"pass"}}
    assert {"scale=0.7" in result.id for result in results} == {True, False}
    (line,) = declared.summary(adapter, results)
    assert f"{len(results)} of {len(results)} cases within what it declares" in line
    assert line.endswith("derivatives (hvp)")


def test_a_declared_derivative_that_is_refused_is_a_failure() -> None:
    found = verdicts(Declaring("jvp", "hvp"))
    assert statuses(found) == {"jvp": {"fail"}, "vmap_grad": {"pass"}}
    assert "refused within what it declares: no jvp" in found[0].message


def test_a_derivative_that_is_not_declared_has_to_be_refused() -> None:
    found = verdicts(Declaring())
    assert statuses(found) == {"jvp": {"pass"}, "hvp": {"fail"}, "vmap_grad": {"pass"}}
    assert any("answered hvp, which it does not declare" in result.message for result in found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"serves": {OP: {"derivatives": ("hessian",)}}}, "declares the derivative 'hessian', but it has jvp, hvp"),
        ({"jvp": None}, "declares the derivative 'jvp', but it has hvp, vmap_grad"),
        ({"jvp": "forward"}, "jvp must be a method; got 'forward'"),
        ({"dtypes": ("float32",)}, "declares derivatives, which are judged in float64"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused(changes: dict[str, Any], text: str) -> None:
    adapter = Declaring()
    for name, value in changes.items():
        setattr(adapter, name, value)
    assert text in "; ".join(selection.what_is_wrong(adapter))


def test_planned_verdicts_are_those_that_come() -> None:
    adapter, kinds = Generic(), f"{OP}/ and (jvp. or hvp. or vmap_grad.)"
    assert judge.count_verdicts([adapter], "small", kinds, adapter.dtypes) == len(verdicts(adapter, kinds=kinds))


@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize(
    "levels",
    [
        # moved off kinks, where they are equal no longer
        {"layout": "expanded_first", "laid": "k", "values": "integers"},
        {"layout": "overlapping", "laid": "arguments"},
    ],
    ids=lambda levels: levels["layout"],
)
def test_arrays_whose_entries_share_a_place(levels: Mapping[str, str], kind: str) -> None:
    op = BY_NAME["sparsemax_attention"]
    (sample,) = rows.samples_of(op, "pair.", [{**rows.grammar(op).plain, "dtype": "float64", **levels}])
    (adapter,) = selection.find(["torch-generic"])
    problem = derivatives.problem_of(sample)
    assert derivatives.check(adapter, problem, kind, sample.id).status == "pass"
