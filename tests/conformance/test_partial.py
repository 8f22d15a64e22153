"""Kernels for some sizes alone are judged on these, whether they say so or not; and how much was met is said."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core, judge
from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.judge import declared, probing, selection
from attnkit_conformance.judge.verdicts import share, too_few
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import files, terminal
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import Search
from attnkit_conformance.search.recipe import drawn
from tests.conformance.plain import OnNumpy

OP = "softmax_attention"
SIZES = {"lengths": ("equal", 8), "width": ("64x64", "128x128")}


class Kernel(OnNumpy):
    """Softmax of as many queries as keys, multiples of 8, in heads of 64 and 128, as a kernel may serve it."""

    dtypes, ops = ("float32",), (OP,)

    def __init__(self, name: str = "kernel", bug: str = "", serves: Any = None) -> None:
        self.name, self.bug, self.asked = name, bug, set[tuple[int, ...]]()
        if serves is not None:
            self.serves = {OP: serves}

    def call(self, op: str, arrays: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        q, k, v = (arrays[name] for name in "qkv")
        if q.ndim < 4:
            raise Unsupported("batch and heads")
        (L, d), S = q.shape[-2:], k.shape[-2]
        shapes = {x.shape[:-2] for x in (q, k, v)}
        others = {*arrays, *params} - {"q", "k", "v", "causal", "scale"}
        if others or "scale" in arrays or params.get("causal") == "upper_left" or len(shapes) > 1:
            raise Unsupported("causal and scale alone")
        if L != S or L % 8 or d not in (64, 128) or v.shape[-1] != d:
            raise Unsupported("equal lengths, multiples of 8, heads of 64 and 128")
        self.asked.add((L, d))
        s = params.get("scale", d**-0.5) * (q @ k.swapaxes(-1, -2))
        if params.get("causal"):
            s = np.where(np.tri(L, dtype=bool), s, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        w = w / w.sum(-1, keepdims=True)
        if self.bug == "half of wide heads" and d > 64:
            v = np.concatenate([v[..., :64], v[..., :64]], axis=-1)
        return {"o": w @ v}


DECLARED = {**SIZES, "causal": ("lower_right",), "scale": ("0.7", "-0.3")}


SOME = "/cross or plain or lower_right or values=tiny or mask=keys"


def verdicts(adapter: Any, profile: str = "small", expression: str = SOME) -> list[core.CaseResult]:
    return list(judge.judge([adapter], profile, f"({expression}) and not property", adapter.dtypes, ops=(OP,)))


def test_declared_sizes_are_what_a_kernel_is_asked() -> None:
    adapter = Kernel(serves=DECLARED)
    assert list(selection.what_is_wrong(adapter)) == []
    results = verdicts(adapter, "quick", f"{SOME} or size or outside")
    inside = [result for result in results if "/outside." not in result.id]
    assert {result.status for result in inside} == {"pass"}
    assert {d for _, d in adapter.asked} == {64, 128}
    assert len({L for L, _ in adapter.asked}) > 5
    assert max(L for L, _ in adapter.asked) > 256


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"width": ("64",)}, "width such as '12x20'; got '64'"),
        ({"width": ()}, "width such as"),
        ({"shape": ("64x64x64",)}, "shape such as '9x9'; got '64x64x64'"),
        ({"lengths": ("even",)}, "lengths are 'equal', multiples of a number, or both; got"),
        ({"lengths": (8, 16)}, "lengths are 'equal', multiples of a number, or both; got"),
        ({"values": ("odd",)}, "values has no level 'odd'"),
        ({"dtype": ("float32",)}, "has no option 'dtype'"),
    ],
)
def test_a_size_that_cannot_be_read_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"serves|grammar") as error:
        declared.grammar(Kernel(serves=wrong), BY_NAME[OP])
    assert text in str(error.value)


def test_values_and_lengths_are_restricted_by_name() -> None:
    own = declared.grammar(Kernel(serves={"values": ("tiny",), "shape": ("8x8", "16x24")}), BY_NAME[OP])
    assert own.factors["values"] == ("normal", "tiny")
    assert own.factors["shape"] == ("8x8", "16x24")
    assert len(own.factors["width"]) > 1


def test_a_search_stays_within_declared_sizes(tmp_path: Path) -> None:
    adapter = Kernel(serves=DECLARED)
    search = Search([adapter], 60.0, 3, tmp_path, ("float32",), lambda text: True)
    for n in range(400):
        recipe = drawn(3, n)
        if recipe.op == OP:
            search.look(recipe, n)
    assert adapter.asked
    assert all(d in (64, 128) and L % 8 == 0 for L, d in adapter.asked)
    assert not [finding for finding in search.findings if "equal lengths" in finding.result.message]


def test_an_undeclared_kernel_is_judged_on_what_it_is_found_to_serve() -> None:
    adapter = Kernel()
    found = probing.find_calls(adapter, BY_NAME[OP], "float32")
    assert found is not None
    assert found["width"] == ("64x64", "128x128")
    assert "1x512" not in found["shape"]
    assert found["causal"] == ("lower_right",)
    assert not any(levels for name, levels in found.items() if name not in ("shape", "width", "causal", "scale"))
    results = verdicts(adapter)
    answered = [result for result in results if result.status == "pass"]
    assert len(answered) > 8
    assert any("causal" in result.id for result in answered)
    wrong = [result for result in verdicts(Kernel(bug="half of wide heads")) if result.status == "fail"]
    assert len(wrong) >= 2
    assert all("128x128" in result.id for result in wrong)


def test_what_answers_a_usual_case_or_says_what_it_refuses_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "find_calls", lambda *arguments: pytest.fail("probed"))
    declares = Kernel()
    declares.unsupported = lambda op, arrays, params: "never"  # type: ignore[attr-defined]
    results = list(judge.judge([declares], "small", "/pair.plain", ("float32",), ops=(OP,)))
    assert {result.status for result in results} == {"unsupported"}


def test_a_run_says_how_much_of_the_profile_is_declared() -> None:
    adapter, whole = Kernel(serves=DECLARED), Kernel(serves={})
    results = verdicts(adapter)
    assert share(results) == 1, "all that it declares"
    part, of_plain = (declared.share_of_profile(one, "small") for one in (adapter, whole))
    assert part is not None
    assert of_plain is not None
    assert part < of_plain < 1 / 3
    factors = rows.grammar(BY_NAME[OP]).factors
    every = Kernel(serves={n: x for n, x in factors.items() if n not in ("dtype", "laid")})
    assert declared.share_of_profile(every, "small") == 1
    assert declared.share_of_profile(Kernel(), "small") is None
    (line,) = declared.summary(adapter, results, "small")
    assert f"cases within what it declares, which are {part:.0%} of the small profile; not covered" in line
    head = files.header([adapter], "small")
    assert head["adapters"]["kernel"]["declared"] == pytest.approx(part, rel=1e-3)
    assert 'name="declared_share_of_profile"' in files.as_junit(results, head)


def test_a_run_says_how_much_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    results = verdicts(Kernel())
    assert share(results) < 1 / 3
    assert too_few(results) == {"kernel": share(results)}
    terminal.show(results)
    out = capsys.readouterr().out
    assert f"kernel answered {share(results):.0%} of what it was asked: too little to say that it passes" in out
    assert " pass, " not in out
    assert json.loads(files.as_json(results, files.header([Kernel()], "small")))["shares"] == {
        "kernel": pytest.approx(share(results), rel=1e-3)
    }
    assert 'name="share"' in files.as_junit(results, {})
    assert f"kernel answered {share(results):.0%}" in files.conclusion(results)
    enough = [result for result in results if result.status == "pass"]
    terminal.show(enough)
    assert f"{len(enough)} pass, 0 fail" in capsys.readouterr().out
