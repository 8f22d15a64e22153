"""Adapters that cheat, and adapters that are right by luck: each dies by more than one verdict."""

import pickle
from typing import Any

import pytest

from attnkit_conformance.adapters.isolated import ENVIRONMENT, Isolated
from attnkit_conformance.adapters.serving import Served, load, traits_of
from attnkit_conformance.adapters.watch import REFERENCE
from attnkit_conformance.adapters.worker import Worker
from attnkit_conformance.judge import judge, repeats

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

    def ask(self, question: Any) -> Any:
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
    efforts = repeats.Effort(400, 400, 0.0), repeats.Effort(60, 60, 0.0)
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
    failed = failures(beside(name))
    assert len(failed) > 1, failed
    assert DIES_BY[name] & set.union(*failed.values()), failed
