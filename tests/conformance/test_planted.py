"""Bugs planted in one honest adapter: the kit notices them, other rules less, and none hangs by a single verdict."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnkit_reference
from attnkit._core import activations
from attnkit_conformance import judge
from attnkit_conformance.__main__ import main
from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge import selection
from attnkit_conformance.report.table import split_page
from attnkit_conformance.studies import planted as room
from attnkit_conformance.studies.planted import BUGS, BY_NAME, HONEST, page, planted, rules
from attnkit_conformance.studies.planted.bugs import text_with

from .planting import plant
from .test_kit_can_fail import Correct, widened

PAGE = Path(__file__).parents[2] / "docs" / "judging-yours.md"
SOURCE = Path(room.__file__).with_name("softmax.py").read_text()


def failed(adapter: Any, expression: str, op: str = rules.OP) -> list[CaseResult]:
    """The verdicts that fail, of some in the quick profile."""
    results = list(judge.judge([adapter], "quick", expression, ops=(op,)))
    assert len(results) >= 3, f"{expression} matches {len(results)} cases"
    return [result for result in results if result.status == "fail"]


# -------------------------------------------------------------------------------------------------- the adapter


def test_the_honest_adapter_computes_by_itself():
    tree = ast.parse(SOURCE)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in modules if name.split(".")[0] in ("attnkit", "attnkit_reference")]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_change_fits_the_text_and_leaves_a_program(bug):
    ast.parse(text_with(SOURCE, bug.changes))


def test_a_change_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected 'nowhere' once in the text to be changed, found it 0 times"):
        text_with(SOURCE, (("nowhere", ""),))


def test_adapters_share_nothing():
    first, second = planted("second_call_same_shapes"), planted("second_call_same_shapes")
    call = rules.drawn((), "float32", 0)
    once, again = (rules.answers(adapter, call)["o"] for adapter in (first, second))
    assert once.equal(again)
    assert not once.equal(rules.answers(first, call)["o"])


def test_adapters_are_found_by_name():
    (adapter,) = selection.find([f"{room.__name__}:head_gt_64"])
    assert adapter.name == "head_gt_64"
    with pytest.raises(ValueError, match="has no bug 'head'; they are causal_upper_left"):
        selection.find([f"{room.__name__}:head"])


# ----------------------------------------------------------------------------------------------------- the rules

FEW = "float32 and (pair.causal or pair.window or pair.plain or /causal-padded or gqa-mask)"


@pytest.mark.parametrize(
    ("name", "check"),
    [
        (HONEST, None),
        ("window_off_by_one", "bound"),
        ("padded_query_nan", "nonfinite"),
        ("inplace_scale", "inputs"),
        ("batch_and_heads", "null_rows"),
    ],
)
def test_the_kit_notices(name, check):
    checks = {check for result in failed(planted(name), FEW) for check in result.checks}
    assert check in checks if check else not checks


def test_draws_notice_what_they_meet(monkeypatch):
    monkeypatch.setattr(rules, "TOKENS", 64)
    rules.expected.cache_clear()
    told = {
        name: (rules.by_draws(name, False), rules.by_draws(name, True)) for name in (HONEST, "gqa_modulo", "no_max")
    }
    assert told == {HONEST: (False, False), "gqa_modulo": (False, True), "no_max": (False, False)}
    rules.expected.cache_clear()


def test_the_page_has_every_bug():
    inside = split_page(PAGE, page.BEGIN, page.END)[1]
    assert [bug.name for bug in BUGS if f"| `{bug.name}` | {bug.text} |" not in inside] == []


def test_the_command_shows_some_bugs_and_says_what_hides_them(capsys, monkeypatch):
    monkeypatch.setattr(rules, "by_draws", lambda name, with_options: with_options)
    monkeypatch.setattr(rules, "by_opinfo", lambda name: False)
    monkeypatch.setattr(rules, "by_kit", lambda names, profile: {name: [] for name in names})
    assert main(["planted", "-k", "head_gt", "--profile", "quick"]) == 0
    out = capsys.readouterr().out
    assert "| `head_gt_64` | features beyond 64 are ignored | **lives** | **lives** | dies | **lives** |" in out
    assert "- `head_gt_64` lives in quick: it takes more than 64 features." in out
    assert main(["planted", "-k", "nothing"]) == 2
    assert "-k 'nothing' matches none of causal_upper_left" in capsys.readouterr().err


@pytest.mark.referee
@pytest.mark.parametrize("profile", page.KIT)
def test_the_honest_adapter_passes_everything(profile):
    results = list(judge.judge([planted(HONEST)], profile, ops=(rules.OP,)))
    assert {result.id: result.message for result in results if result.status != "pass"} == {}
    assert {result.dtype for result in results} == {*rules.DTYPES}


@pytest.mark.referee
def test_the_page_says_who_lives_in_quick():
    """And that each of them has its reason there."""
    dead = {name for name, verdicts in rules.by_kit(tuple(BY_NAME), "quick").items() if verdicts}
    lines = [
        line.split(" | ") for line in split_page(PAGE, page.BEGIN, page.END)[1].splitlines() if line.startswith("| `")
    ]
    assert {cells[0].strip("| `") for cells in lines if cells[2] != page.LIVES} == dead
    assert [bug.name for bug in BUGS if bug.name not in dead and not bug.needs] == []


@pytest.mark.referee
def test_the_other_rules_pass_the_honest_adapter():
    assert not rules.by_draws(HONEST, True)
    assert not rules.by_opinfo(HONEST)
    assert rules.by_opinfo("normaliser_detached")


# ---------------------------------------------------------------------------------------------------- no threads


class LongestSequence(Correct):
    """Sequences of a pack are causal as if each had as many queries and keys as the longest."""

    def outputs(self, op: str, arrays: Any, answer: Any, params: Any) -> Any:
        if params.get("causal") is not True:
            return super().outputs(op, arrays, answer, params)
        made = {name: x.copy() for name, x in answer.items()}
        kept = {name: x for name, x in params.items() if name in ("window", "scale", "enable_gqa")}
        for rows, keys, mask in self.sequences(arrays, params):
            q, k, v = (widened(arrays[name][at]).swapaxes(0, 1) for name, at in (("q", rows), ("k", keys), ("v", keys)))
            made["o"][rows] = attnkit_reference.softmax_attention(q, k, v, mask=mask, **kept).swapaxes(0, 1)
        return super().outputs(op, arrays, made, params)

    def sequences(self, arrays: Any, params: Any) -> Iterator[tuple[slice, slice, np.ndarray]]:
        edges = [np.asarray(arrays.get(name, params.get(name))) for name in ("cu_seqlens_q", "cu_seqlens_k")]
        offset = np.subtract(*(np.diff(x).max(initial=0) for x in reversed(edges)))
        for (a, b), (c, d) in zip(*(np.stack((x[:-1], x[1:]), -1) for x in edges), strict=True):
            yield slice(a, b), slice(c, d), np.arange(d - c) <= np.arange(b - a)[:, None] + offset


def test_the_longest_sequence_of_a_pack():
    assert len(failed(LongestSequence(), "lower_right or causal.", "softmax_attention_packed")) >= 3


def test_the_strides_of_v():
    told = failed(planted("v_stride"), "layout=")
    assert len([result for result in told if "exception" not in result.checks]) >= 2, "not only addresses outside"
    assert len(told) >= 3


def test_the_second_kink_of_relu6(monkeypatch):
    plant(monkeypatch, activations._d_relu6, "s >= 6", "s > 6")
    (adapter,) = selection.find(["numpy-generic"])
    assert len(failed(adapter, "/kinks", "pointwise_attention")) >= 3
