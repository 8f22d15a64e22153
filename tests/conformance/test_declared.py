"""An adapter that declares what it serves is judged inside of it, whole, and has to refuse what lies beside it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from attnkit_conformance import judge
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import declared, selection
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.search import Search
from attnkit_conformance.search.recipe import grammar_of, of_op
from tests.conformance.plain import OnNumpy

OP = "pointwise_attention"
SERVED = {"scale": ("0.7", "-0.3"), "causal": ("lower_right",), "key_lengths": ("some", "zero", "number")}


@dataclass
class Partial(OnNumpy):
    """relu attention with scale, causality and key lengths, as somebody's kernel may serve it, and a bug of it."""

    bug: str = ""
    name: str = "partial"
    dtypes: tuple[str, ...] = ("float32",)
    ops: ClassVar = (OP,)
    serves: Any = None

    def __post_init__(self) -> None:
        self.serves = {OP: SERVED} if self.serves is None else self.serves

    def call(self, op: str, arrays: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        others = {*arrays, *params} - {"q", "k", "v", "key_lengths", "scale", "causal"}
        q, k, v = (arrays[name] for name in "qkv")
        if (
            others - {self.bug}
            or "scale" in arrays
            or params.get("causal") == "upper_left"
            or len({x.shape[:-2] for x in (q, k, v)}) > 1
        ):
            raise Unsupported("scale, causal and key_lengths")
        if q.ndim != 4 or (self.bug == "refuses" and params.get("scale") == -0.3):
            raise Unsupported("batch and heads")
        (L, d), S = q.shape[-2:], k.shape[-2]
        j, i = np.arange(S), np.arange(L)[:, None]
        seen = j < np.asarray(arrays.get("key_lengths", params.get("key_lengths", S)))[..., None, None]
        seen = seen & (j <= i + S - L) if params.get("causal") else seen
        if self.bug == "drops the tail" and S > 64 and S % 8:
            seen = seen & (j < S - S % 8)
        s = (q @ k.swapaxes(-1, -2)) * np.asarray(params.get("scale") or d**-0.5, q.dtype)
        n = np.maximum(np.broadcast_to(seen, s.shape).sum(-1, keepdims=True), 1)
        n = S if self.bug == "divides by the padded length" else n
        return {"o": ((np.where(seen & (s > 0), s, 0) / n) @ v).astype(q.dtype)}


def verdicts(adapter: Any, profile: str = "small") -> list[CaseResult]:
    return list(judge.judge([adapter], profile, "not property", adapter.dtypes, ops=(OP,)))


def test_every_case_lies_inside_and_none_is_refused() -> None:
    adapter = Partial()
    assert list(selection.what_is_wrong(adapter)) == []
    results = verdicts(adapter)
    assert {result.status for result in results} == {"pass"}
    assert len(results) > 30
    assert judge.count_verdicts([adapter], "small", OP + "/", adapter.dtypes) == len(results)
    (line,) = declared.summary(adapter, results)
    of_all = f"{len(results)} of {len(results)} cases within what it declares, which are 29% of the quick profile"
    assert f"{of_all}; not covered: heads (grouped, shared)" in line


def test_pairs_and_triples_inside_are_covered() -> None:
    adapter, op = Partial(), BY_NAME[OP]
    small = declared.grammar(adapter, op)
    assert set(small.factors["mask"]) == {"none"}
    assert small.factors["causal"] == ("none", "lower_right")
    held = [sample.id for sample in declared.samples(adapter, op, "full", ("float32",))]
    assert len(held) == len({*held})
    assert len(held) > 100


@pytest.mark.parametrize("bug", ["divides by the padded length", "drops the tail"])
def test_a_bug_of_a_partial_adapter_is_found_by_run_and_by_search(bug: str, tmp_path: Path) -> None:
    adapter = Partial(bug, bug.replace(" ", "-"))
    assert any("bound" in result.checks for result in verdicts(adapter))
    search = Search([adapter], 60.0, 0, tmp_path, ("float32",), lambda text: True)
    for turn in range(100):
        search.end = search.clock() + 60.0
        search.look(of_op(BY_NAME[OP], grammar_of(OP), random.Random(turn)), turn)
        if search.findings:
            break
    assert search.findings
    assert "bound" in search.findings[0].result.checks


def test_a_refusal_inside_is_a_failure() -> None:
    failed = [result for result in verdicts(Partial("refuses")) if result.status == "fail"]
    assert failed
    assert all("refused within what it declares: batch and heads" in result.message for result in failed)


def test_a_result_outside_is_a_failure() -> None:
    failed = [result for result in verdicts(Partial("bias")) if result.status == "fail"]
    assert {result.id.rpartition("outside.")[2] for result in failed} == {
        f"bias={name}" for name in ("pairs", "2d", "heads", "keys", "queries")
    }
    assert "bias=2d, which it does not declare" in {r.id.rpartition("=")[2]: r for r in failed}["2d"].message


@pytest.mark.parametrize(
    ("serves", "text"),
    [
        ({OP: {"windw": ("left",)}}, "has no option 'windw'"),
        ({OP: {"window": ("wide",)}}, "window has no level 'wide'; expected some of none, left"),
        ({"soft_atention": {}}, "'soft_atention' is not an op"),
        ([OP], "serves must be a dict of dicts"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_refused(serves: Any, text: str) -> None:
    assert text in "; ".join(selection.what_is_wrong(Partial(serves=serves)))
