"""Adapters that cheat, and adapters that are right by luck: each dies by more than one verdict."""

import json
import operator
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.adapters.isolated import ENVIRONMENT, Isolated
from attnkit_conformance.adapters.serving import Served, load, traits_of
from attnkit_conformance.adapters.watch import REFERENCE, Watch
from attnkit_conformance.adapters.worker import Worker
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import judge, repeats
from attnkit_conformance.judge.selection import Terms, find
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import screen
from tests.conformance import cheats

CHEATS = "tests.conformance.cheats"
BASELINE = f"{CHEATS}:baseline"
DTYPES = ("float32", "float64")
FEW = "pair.plain or pair.scale or repeats"
DIES_BY = {
    "Remembers": {"bound"},
    "CallsBaseline": {"calls"},
    "CallsReference": {"calls"},
    "ChangesInputs": {"inputs"},
    "ReusesMemory": {"outputs"},
    "LeavesUnwritten": {"bound", "nonfinite"},
    "Races": {"rerun", "bound"},
    "Wobbles": {"rerun"},
    "TiresSoon": {"rerun", "bound"},
    "Picks": {"refusal"},
}


class Beside(Worker):
    """A worker without a process: the same questions and messages, and no time to start."""

    def start(self) -> dict[str, Any]:
        adapter = load(self.target)
        self.served, self.close = Served(adapter, (REFERENCE, *self.calls)), lambda: None
        return traits_of(adapter)

    def ask(self, question: Any, calls: int = 1) -> Any:
        reply = self.served.reply(pickle.loads(pickle.dumps(question)))
        return self.told(pickle.dumps(reply))


def beside(name: str) -> Isolated:
    return Isolated(Beside(name, f"{CHEATS}:{name}", ENVIRONMENT, 60.0, (BASELINE,)), seed=3)


def failures(adapter: Any, expression: str = FEW, profile: str = "quick") -> dict[str, set[str]]:
    """The failing checks by the id of a verdict."""
    results = judge([adapter], profile, expression, DTYPES, ops=("softmax_attention",))
    return {result.id: result.checks for result in results if result.status == "fail"}


@pytest.fixture
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of calls that do not depend on time."""
    efforts = repeats.Effort(150, 150, 0.0, 60.0), repeats.Effort(50, 50, 0.0, 60.0)
    monkeypatch.setattr(repeats, "EFFORTS", {"quick": efforts, "full": efforts})


@pytest.mark.usefixtures("few_repeats")
def test_an_honest_adapter_passes() -> None:
    results = list(judge([beside("Honest")], "quick", FEW, DTYPES, ops=("softmax_attention",)))
    assert {result.status for result in results} == {"pass"}, [r.message for r in results]
    repeats = [result for result in results if "/repeats." in result.id]
    assert {result.dtype for result in repeats} == {*DTYPES}
    assert all({"o", "dq", "dk", "dv"} == {m.output for m in r.measured} for r in repeats if "plain" in r.id)


@pytest.mark.usefixtures("few_repeats")
@pytest.mark.parametrize("name", DIES_BY)
def test_a_cheat_dies_by_more_than_one_verdict(name: str) -> None:
    failed = failures(beside(name), "not property" if name == "Picks" else FEW)
    assert len(failed) > 1, failed
    assert DIES_BY[name] & set.union(*failed.values()), failed


def test_a_search_and_properties_say_what_a_process_noticed() -> None:
    case = draw_case(rows.sample_named(BY_NAME["softmax_attention"], "float32", "pair.plain"))
    found = screen.check(beside("ChangesInputs"), case)
    assert found is not None
    assert found.checks == {"inputs"}
    failed = failures(beside("ChangesInputs"), "property.batch_mates")
    assert {"inputs"} in failed.values()


def test_calls_are_noticed_under_other_names_and_in_threads() -> None:
    """Of functions, of methods of a class, of builtins, and of all that a module defines."""
    watch = Watch(("operator:matmul", f"{CHEATS}:Honest", BASELINE, "json"))
    x = np.ones((1, 2, 2))
    alias, other = operator.matmul, cheats.baseline
    called: dict[str, Callable[[], object]] = {
        "operator:matmul": lambda: alias(x, x),
        f"{CHEATS}:Honest": lambda: cheats.Remembers().array(x, "float64"),
        BASELINE: lambda: other({"q": x, "k": x, "v": x}, {}),
        "json:dumps": lambda: json.dumps([]),
    }
    for name, call in called.items():
        call()
        assert not watch.new_calls(), "nobody watches"
        thread = threading.Thread(target=call)
        with watch.calls():
            thread.start()
            thread.join()
        assert name in watch.new_calls()
        with watch.calls():
            call()
        assert name in watch.new_calls()
    with watch.calls():
        x.sum()
    assert watch.new_calls() == []


def test_the_judge_cannot_be_replaced_from_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process it can: the reason that there is another."""
    monkeypatch.setattr(core, "judge_arrays", core.judge_arrays)
    path = f"{CHEATS}:ReplacesTheJudge"
    (apart,) = find([path])
    failed = failures(apart, "pair.plain or cross")
    apart.close()
    assert len(failed) > 1
    assert set.union(*failed.values()) <= {"bound", "null_rows"}, failed
    (here,) = find([path], Terms(here=True))
    assert not failures(here, "pair.plain or cross")


def test_what_a_process_sends_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARMED", raising=False)
    (adapter,) = find([f"{CHEATS}:SendsCode"])
    results = list(judge([adapter], "quick", "float32/cross or float32/pair.plain", DTYPES, ops=("softmax_attention",)))
    adapter.close()
    failed = [result.message for result in results if result.status == "fail"]
    assert all("the worker sent what is no answer" in message for message in failed), failed
    assert len(failed) > 1
    assert "HARMED" not in os.environ


@pytest.mark.referee
@pytest.mark.parametrize(
    ("name", "profile"), [*((name, "quick") for name in (*DIES_BY, "Tires")), ("RacesRarely", "full")]
)
def test_a_cheat_dies_in_a_process_with_the_efforts_of_a_run(name: str, profile: str) -> None:
    (adapter,) = find([f"{CHEATS}:{name}"], Terms(calls=(BASELINE,), seed=5))
    failed = failures(adapter, "not property and not triple and not tile", profile)
    adapter.close()
    assert len(failed) > 1, failed
