"""Failures have the grade that they deserve, what is declined is not asked, and the exit status follows from both."""

import json
import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core, judge
from attnkit_conformance.__main__ import main
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters import families, serving
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.adapters.strict import Strict
from attnkit_conformance.golden import draw_case
from attnkit_conformance.golden.derivatives import Problem
from attnkit_conformance.golden.rest import sizes_at_rest
from attnkit_conformance.judge import derivatives, properties, selection, verdicts
from attnkit_conformance.model import grades, policies, tolerance
from attnkit_conformance.model.case import Case
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import files
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import screen
from tests.conformance.test_kit_can_fail import (
    Correct,
    FavoursEarlyKeys,
    HidesNaN,
    MultipliesPadding,
    RefusesSilently,
    Shifted,
    TanhSigmoid,
)

OP = "softmax_attention"
PLAIN, LARGE, POISONED = "pair.plain", "pair.values=large", "pair.poison=yes,key_lengths=some"
INFINITE = "pair.bias=infinite"


def case_of(name: str, op: str = OP, dtype: str = "float32") -> Case:
    return draw_case(rows.sample_named(BY_NAME[op], dtype, name))


def declining(base: type[Correct], *names: str) -> type[Any]:
    """What promises everything but the policies and properties with these names."""
    return type(f"{base.__name__}Declining", (base,), {"declines": names})


class Lacks(Correct):
    """Does not write dk of the last keys."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        gradients = super().vjp(op, arrays, params, cotangents)
        gradients["k"][..., -3:, :] = 0
        return gradients


class Scaled(Correct):
    """Everything is too large by this factor, the inputs too on the way to it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        return super().outputs(op, arrays, {name: self.factor * x for name, x in answer.items()}, params)


class Flushes(Correct):
    """Gradients have no entries below this many eps of their largest."""

    def __init__(self, least: float) -> None:
        self.least = least

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        def flushed(x: np.ndarray) -> np.ndarray:
            least = self.least * np.finfo(np.float32).eps * np.abs(x).max(initial=0)
            return np.where(np.abs(x) < least, 0, x).astype(x.dtype)

        return {name: flushed(x) for name, x in super().vjp(op, arrays, params, cotangents).items()}


class IgnoresInfinity(Correct):
    """A bias of -inf says nothing."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        return super().call(op, finite_bias(arrays), params)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        return super().vjp(op, finite_bias(arrays), params, cotangents)


def finite_bias(arrays: Any) -> Any:
    return {name: np.where(np.isneginf(x), x.dtype.type(0), x) if name == "bias" else x for name, x in arrays.items()}


class ReadsPadding(Correct):
    """Takes all keys for visible, and NaN for 0."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        few = {name: np.nan_to_num(x, posinf=0, neginf=0) for name, x in arrays.items() if name in "qkv"}
        return super().call(op, few, params)

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        raise Unsupported("no gradients")


class NowAndThen(Correct):
    """Is wrong in its first call only."""

    calls = 0

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        self.calls += 1
        wrong = {name: x + (self.calls == 1) for name, x in answer.items()}
        return super().outputs(op, arrays, wrong, params)


class CleansPadding(Correct):
    """Writes 0 over NaN in what it is given."""

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        for x in (arrays[name] for name in "qkv"):
            x[~np.isfinite(x)] = 0
        return super().call(op, arrays, params)


class Refuses(Correct):
    """Declares a scale and refuses it."""

    ops = (OP,)
    serves = {OP: {"scale": ("0.7",)}}  # noqa: RUF012

    def call(self, op: str, arrays: Any, params: Any) -> Any:
        raise Unsupported("not today")


@pytest.mark.parametrize(
    ("adapter", "name", "grade", "told"),
    [
        (Correct(), PLAIN, "", ""),
        (Lacks(), PLAIN, "wrong", "wrong"),
        (Lacks(), LARGE, "wrong", "wrong"),
        (Scaled(1.1), PLAIN, "wrong", "wrong"),
        (Scaled(1.0001), PLAIN, "inaccurate", "inaccurate: up to "),
        (Flushes(60.0), LARGE, "tail", "tail"),
        (Flushes(1e5), LARGE, "wrong", "wrong"),
        (RefusesSilently(), PLAIN, "refused", "refused"),
        (MultipliesPadding(), POISONED, "policy", "policy: poisoned_padding, right without it"),
        (ReadsPadding(), POISONED, "wrong", "wrong"),
        (CleansPadding(), POISONED, "wrong", "wrong"),
        (NowAndThen(), POISONED, "wrong", "wrong"),
        (IgnoresInfinity(), INFINITE, "policy", "policy: infinite_bias, right without it"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Correct) else None,
)
def test_a_planted_error_has_its_grade(adapter: Any, name: str, grade: str, told: str) -> None:
    result = core.check(adapter, case_of(name))
    assert (result.status, result.grade) == ("fail" if grade else "pass", grade), result.message
    assert verdicts.describe_failure(result).startswith(told)
    assert result.id == f"{OP}/float32/{name}"


def test_how_far_an_inaccurate_result_is_off_is_said() -> None:
    told = re.fullmatch(
        "inaccurate: up to (.*) bounds, (.*) of the largest number",
        verdicts.describe_failure(core.check(Scaled(1.0001), case_of(PLAIN))),
    )
    assert told is not None
    assert 10 < float(told[1]) < 100
    assert 5e-5 < float(told[2]) <= 1e-4


def test_a_failure_of_two_reasons_has_the_grade_of_what_is_left() -> None:
    class Both(MultipliesPadding):
        def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
            return super().outputs(op, arrays, {name: 1.0001 * x for name, x in answer.items()}, params)

    result = core.check(Both(), case_of(POISONED))
    assert (result.grade, result.policy) == ("inaccurate", "poisoned_padding")
    assert verdicts.describe_failure(result) == "inaccurate: poisoned_padding, inaccurate without it"


@pytest.mark.parametrize(
    ("adapter", "op", "name", "grade"),
    [
        (MultipliesPadding(), OP, "padding_contents", "policy"),
        (ReadsPadding(), OP, "padding_contents", "wrong"),
        (HidesNaN(), "pointwise_attention", "visible_nan", "policy"),
        (TanhSigmoid(), "sigmoid_attention_weights", "sigmoid_tail", "tail"),
        (FavoursEarlyKeys(), OP, "key_permutation", "wrong"),
        (Scaled(1.0001), OP, "key_permutation", "inaccurate"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_properties_have_grades_too(adapter: Any, op: str, name: str, grade: str) -> None:
    (result,) = properties.check_all(adapter, BY_NAME[op], "small", ("float32",), lambda text: text.endswith(name))
    assert (result.status, result.grade) == ("fail", grade)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_where_one_grade_ends_and_another_begins(dtype: str) -> None:
    eps = tolerance.eps(dtype)
    golden = np.array([1.0, 1e-2, 1e-20])
    allowed = eps * golden
    half, lost = eps**-0.5, grades.loss_of(golden, dtype)

    def grade(*gap: float) -> str:
        off = np.array(gap)
        return grades.of_entries(off, off / allowed, golden, dtype)

    assert grade(eps, 0.01 * eps, 1e-20 * eps) == ""
    assert grade(0, 0, 0.99 * lost) == "tail"
    assert grade(0, 0, 1.01 * lost) == "wrong"
    assert grade(2 * max(eps, lost), 0, 0.99 * lost) == "inaccurate", "the worst of the entries"
    assert grade(0, 0.99 * half * allowed[1], 0) in ("inaccurate", "tail")
    assert grade(0, 1.01 * max(lost, half * allowed[1]), 0) == "wrong"
    assert grade(0, 0, np.inf) == "wrong"


def test_a_bound_as_large_as_the_numbers_calls_nothing_inaccurate() -> None:
    """Half of the digits of a bound that leaves none are none."""
    golden, allowed = np.array([1.0, 2.0]), np.array([0.01, 0.01])
    for gap, grade in (([0.0, 0.19], "inaccurate"), ([0.0, 0.21], "wrong")):
        assert grades.of_entries(np.array(gap), np.array(gap) / allowed, golden, "float32") == grade
    assert grades.of_entries(np.ones(2), np.full(2, np.inf), np.array([1e9, 1e9]), "integer") == "wrong"


def test_one_entry_of_twice_its_bound_is_inaccurate_in_every_dtype() -> None:
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        case = case_of("pair.width=8x8", dtype=dtype)
        assert core.check(Shifted(case, 2), case).grade in ("inaccurate", "tail")


def result_of(grade: str, adapter: str = "mine", status: str = "fail") -> core.CaseResult:
    """A failure with this grade."""
    checks = {"wrong": "exception", "refused": "refused", "tail": "sigmoid_tail"}
    measured = core.Measured("o", "float32", 3.0, 1.0, 1e-5, (("bound", "o: off"),), grade)
    failures = ((checks[grade], "o: is off"),) if grade in checks else measured.failures
    policy = "visible_nan" if grade == "policy" else ""
    return core.CaseResult(f"{OP}/float32/x", adapter, OP, "float32", status, (measured,), failures, policy=policy)


@pytest.mark.parametrize("grade", grades.GRADES)
def test_the_exit_status_is_decided_by_a_grade(grade: str) -> None:
    result, place = result_of(grade), tuple(grades.GRADES).index(grade)
    assert result.grade == grade
    for threshold in grades.GRADES:
        decides = verdicts.deciding([result], (), threshold) == [result]
        assert decides == (place <= tuple(grades.GRADES).index(threshold))
    assert bool(verdicts.deciding([result], (), None)) == (grade in ("wrong", "inaccurate", "refused"))

    promises = declining(Correct)()
    promises.name = "mine"
    assert verdicts.deciding([result], [promises], None) == [result], "it promises everything"
    assert verdicts.deciding([result_of(grade, status="xfail")], [promises], "policy") == []


def test_a_refusal_within_a_declaration_is_no_wrong_result() -> None:
    results = list(judge.judge([Refuses()], "small", "not property", ("float32",), ops=(OP,)))
    assert {result.grade for result in results} == {"refused"}


POLICIES = [("poisoned_padding", POISONED, MultipliesPadding), ("infinite_bias", INFINITE, IgnoresInfinity)]


@pytest.mark.parametrize(("policy", "name", "adapter"), POLICIES, ids=[policy for policy, _, _ in POLICIES])
def test_what_is_declined_is_not_asked_and_the_rest_is_judged(policy: str, name: str, adapter: type[Correct]) -> None:
    honest, wrong, case = declining(adapter, policy)(), declining(Scaled, policy)(1.1), case_of(name)
    assert policies.asked_by(case) == (policy,)
    assert core.check(honest, case).status == "pass"
    assert (core.check(wrong, case).status, core.check(wrong, case).policy) == ("fail", "")
    assert core.case_for(Correct(), case) is case
    assert policies.asked_by(core.case_for(honest, case)) == ()


def test_padding_without_nan_holds_numbers_as_large_as_others() -> None:
    """Zeros there would hide that they are read, from sums of relu(s) for one."""
    case = case_of(POISONED)
    plain = policies.without(case, ("poisoned_padding",))
    hidden = ~np.isfinite(case.arrays["v"])
    assert np.any(hidden)
    assert np.all(np.isfinite(plain.arrays["v"]))
    assert np.abs(plain.arrays["v"][hidden]).mean() > 0.3
    assert np.array_equal(plain.arrays["v"][~hidden], case.arrays["v"][~hidden])
    assert policies.without(plain, tuple(policies.POLICIES)) is plain


class Torch(Correct):
    """Sigmoid attention by torch, whose gradient of the sigmoid is s(1 - s): 0 where s rounds to 1."""

    def vjp(self, op: str, arrays: Any, params: Any, cotangents: Any) -> Any:
        import torch

        q, k, v = leaves = [torch.tensor(arrays[name], requires_grad=True) for name in "qkv"]
        s = params.get("scale", q.shape[-1] ** -0.5) * q @ k.mT - np.log(k.shape[-2])
        gradients = torch.autograd.grad(torch.sigmoid(s) @ v, leaves, torch.tensor(cotangents["o"]))
        return {name: x.numpy() for name, x in zip("qkv", gradients, strict=True)}


@pytest.mark.parametrize("name", ["pair.shape=13x7,values=large", "pair.shape=1x11,batch=none,values=large,scale=-0.3"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_gradient_of_the_sigmoid_of_torch_fails_in_its_tail(name: str, dtype: str) -> None:
    """In one query with eleven keys nearly all is tail: no entry of dk is as large as it is at scores of 0."""
    pytest.importorskip("torch")
    case = case_of(name, "sigmoid_attention", dtype)
    result = core.check(Torch(), case)
    assert (result.status, result.grade) == ("fail", "tail"), result.message
    assert core.check(declining(Torch, "tails")(), case).status == "pass"


def test_only_scores_that_are_products_are_at_rest_at_0() -> None:
    assert sizes_at_rest(case_of("pair.plain", "cosine_attention")) == {}
    sizes = sizes_at_rest(case_of("pair.plain"))
    assert sizes.keys() == {"o", "dq", "dk", "dv"}
    assert 0.01 < sizes["dk"] < 10


def test_a_state_without_a_maximum_asks_for_no_policy() -> None:
    """Its level is -inf, as the definition has it."""
    (case,) = (
        case
        for case in core.cases("efficient_attention", "small", ("float32",))
        if "initial_m" in case.arrays and "poison" not in case.tags and np.any(np.isneginf(case.arrays["initial_m"]))
    )
    assert policies.asked_by(case) == ()


def test_nan_where_there_is_none_is_wrong() -> None:
    limit = tolerance.limit(np.ones(2), "float32")
    assert tolerance.measure("o", np.array([1.0, np.nan]), limit).grade == "wrong"


def test_small_entries_may_be_declined() -> None:
    coarse = declining(Flushes, "tails")
    result = core.check(coarse(60.0), case_of(LARGE))
    assert (result.status, result.ratio <= 1) == ("pass", True)
    assert core.check(coarse(1e6), case_of(LARGE)).grade == "wrong"
    integer = tolerance.limit(np.array([1e9]), "integer")
    assert tolerance.without_tails(integer) is integer, "integers are exact"


def test_a_property_may_be_declined_by_an_adapter_and_by_an_op() -> None:
    """Its keys may have an order."""
    names = ("key_permutation", "visible_nan", "poisoned_padding", "tails")
    ordered_keys = declining(Correct, *names)()
    op, every = BY_NAME[OP], properties.check_all
    asked = {result.id.partition("property.")[2] for result in every(Correct(), op, "small", ("float32",))}
    left = {result.id.partition("property.")[2]: result for result in every(ordered_keys, op, "small", ("float32",))}
    assert asked - left.keys() == {"key_permutation", "visible_nan"}
    ordered = replace(op, declines=("key_permutation",))
    of_op = [result.id for result in every(Correct(), ordered, "small", ("float32",))]
    assert len(of_op) == len(asked) - 1
    assert not any("key_permutation" in identity for identity in of_op)
    reads_nan = declining(MultipliesPadding, *names)()
    contents = [result for result in every(reads_nan, op, "small", ("float32",)) if "padding_contents" in result.id]
    assert [result.status for result in contents] == ["pass"], "finite contents are asked all the same"
    weights = [result.id for result in every(ordered_keys, BY_NAME["sigmoid_attention_weights"], "small", ("float32",))]
    assert weights
    assert not any("sigmoid_tail" in identity for identity in weights)


@pytest.mark.parametrize(
    ("declines", "text"),
    [
        (("infinite_biases",), r"declines must be a tuple of some of infinite_bias, .*key_permutation.*\('infinite_bi"),
        ("tails", "got 'tails'"),
    ],
)
def test_a_name_of_nothing_cannot_be_declined(declines: Any, text: str) -> None:
    misspelt = declining(Correct)()
    misspelt.declines = declines
    (told,) = selection.what_is_wrong(misspelt)
    assert re.search(text, told), told


def test_a_search_and_derivatives_know_policies() -> None:
    result = screen.check(MultipliesPadding(), case_of(POISONED))
    assert result is not None
    assert (result.grade, result.policy) == ("policy", "poisoned_padding")

    class Tangents(Correct):
        def jvp(self, op: str, arrays: Any, params: Any, tangents: Any) -> Any:
            held = Problem(replace(case, arrays=arrays)).truth.jvp
            return {name: limit.golden + 0 * arrays["v"].sum() for name, limit in held.items()}

    case = case_of(POISONED, dtype="float64")
    found = derivatives.check(Tangents(), Problem(case), "jvp", "x")
    assert (found.status, found.policy) == ("fail", "poisoned_padding")


def test_adapters_of_this_repository_promise_everything() -> None:
    """Every grade of theirs decides the exit status."""
    every = [adapter for name in ("auto", "numpy", "torch", "cupy") for adapter in families.family(name)]
    assert len(every) > 5
    assert all(isinstance(adapter, Absent) or adapter.declines == () for adapter in every)


def test_a_worker_tells_what_its_adapter_declines() -> None:
    strict, undeclared = (serving.traits_of(adapter) for adapter in (Strict(), Correct()))
    assert strict["declines"] == (True, ())
    assert "declines" not in undeclared


THEIRS = """
from tests.conformance import test_grades

class Mine(test_grades.{base}):
    name, dtypes, ops = "mine", ("float32",), ("softmax_attention",)
    {declines}
"""


def test_a_run_says_the_grades_and_ends_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, base, declines in (
        ("theirs_polite", "MultipliesPadding", ""),
        ("theirs_strict", "MultipliesPadding", "declines = ()"),
        ("theirs_open", "MultipliesPadding", 'declines = ("poisoned_padding", "key_permutation")'),
        ("theirs_wrong", "Lacks", ""),
    ):
        (tmp_path / f"{name}.py").write_text(THEIRS.format(base=base, declines=declines))
    chosen = ("-k", "/cross or causal-padded or property.padding_contents", "--workers", "1", "--here")
    assert main(["run", "theirs_polite:Mine", *chosen]) == 0
    told = capsys.readouterr().out
    assert "(policy: poisoned_padding, right without it)" in told
    assert "the failures by grade: 2 policy" in told
    assert "exit status 0: these grades do not count without --fail-on policy" in told
    assert main(["run", "theirs_polite:Mine", "--fail-on", "policy", *chosen]) == 1
    assert main(["run", "theirs_polite:Mine", "--fail-on", "tail", *chosen]) == 0
    assert main(["run", "theirs_strict:Mine", *chosen]) == 1
    assert main(["run", "theirs_wrong:Mine", *chosen]) == 1
    capsys.readouterr()
    assert main(["run", "theirs_open:Mine", "--json", str(tmp_path / "open.json"), *chosen]) == 0
    assert "mine does not promise: poisoned_padding, key_permutation" in capsys.readouterr().out
    data = json.loads((tmp_path / "open.json").read_text())
    assert data["adapters"]["mine"]["declines"] == ["poisoned_padding", "key_permutation"]
    assert data["grades"] == {}


def test_reports_have_grades() -> None:
    mine = Correct()
    mine.name = "mine"
    results = [result_of(grade) for grade in grades.GRADES]
    data = json.loads(files.as_json(results, files.header([mine], "small")))
    assert data["grades"] == dict.fromkeys(grades.GRADES, 1)
    assert data["adapters"]["mine"]["declines"] is None
    assert [result["grade"] for result in data["results"]] == [*grades.GRADES]
    assert [failure["grade"] for result in data["results"] for failure in result["failures"]] == [*grades.GRADES]
    suite = xml.fromstring(files.as_junit(results, {}))[0]
    assert [failure.get("type") for failure in suite.iter("failure")] == [*grades.GRADES]
    assert suite.find("testcase[2]/failure").get("message") == (  # type: ignore[union-attr]
        "inaccurate: up to 3 bounds, 1e-05 of the largest number (bound)"
    )
    page = files.as_html(results, files.header([mine], "small"))
    assert "failed, on mine: 1 wrong, 1 inaccurate, 1 refused, 1 tail, 1 policy." in page
