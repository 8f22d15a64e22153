"""Implementations that nobody here wrote agree with the reference wherever xfails/ does not say why not."""

import importlib.util
from collections import Counter

import pytest

from attnkit_conformance import adapters, core, peers
from attnkit_conformance.adapters.base import Absent
from attnkit_conformance.judge import judge

PROFILES = {"fla": "full", "numpy_pinv": "full"}  # the quick profile has little that they serve
DOUBLE_AND_SINGLE = ("float64", "float32")


def installed(family: str) -> list:
    missing = [name for name in peers.REQUIRES[family] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (extra `peers`)")
    return adapters.find([family])


@pytest.mark.parametrize("family", peers.REQUIRES)
def test_peer_agrees_but_for_what_is_written_down(family: str) -> None:
    chosen = installed(family)
    ops = tuple({op: None for adapter in chosen for op in adapter.ops})
    results = list(judge(chosen, PROFILES.get(family, "quick"), dtypes=DOUBLE_AND_SINGLE, ops=ops))
    failures = [f"{result.adapter}::{result.id}\n{result.message}" for result in results if result.status == "fail"]
    assert not failures, "\n".join(failures)
    passed = Counter(result.adapter for result in results if result.status == "pass" and result.measured)
    assert set(passed) == {adapter.name for adapter in chosen}, "an adapter was judged on nothing"


def test_entmax_in_bfloat16_loses_sums_over_many_keys() -> None:
    exact = installed("entmax")[0]
    case = next(case for case in core.cases("entmax_attention", "full", ("bfloat16",)) if "many-keys" in case.id)
    failures = core.check(exact, case).failures
    assert any(check in ("bound", "second_rule") and text.startswith("o: ") for check, text in failures)


def test_names_select_one_function_or_a_library_or_all() -> None:
    assert [adapter.name for adapter in adapters.find(["numpy_pinv"])] == ["numpy_pinv"]
    assert [adapter.name for adapter in adapters.find(["torch_sdpa-math"])] == ["torch_sdpa-math"]
    assert {adapter.name.partition("-")[0] for adapter in adapters.find(["peers"])} == set(peers.REQUIRES)
    assert not set(adapters.default()) & {*peers.REQUIRES, peers.ALL}
    with pytest.raises(ValueError, match="torch_sdpa has torch_sdpa-auto, torch_sdpa-math"):
        adapters.find(["torch_sdpa-flash"])


def test_a_library_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REQUIRES", {**peers.REQUIRES, "fla": ("torch", "no_such_module")})
    (absent,) = peers.family("fla")
    assert isinstance(absent, Absent)
    assert absent.reason == "no_such_module is not installed"
