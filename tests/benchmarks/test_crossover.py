"""Kernels beside generic bodies as calls grow: what a GPU said decides, and a run is rehearsed with a stub."""

import json
from pathlib import Path

import pytest
import torch

from attnkit.kernels import predicted
from benchmarks import crossover
from benchmarks.__main__ import RESULTS, main
from benchmarks.stubbed import stubbed

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (("ITEMS", (1,)), ("KEYS", (256,)), ("STATES", (16,)), ("WIDTHS", (64,)), ("TOKENS", 32)):
        monkeypatch.setattr(crossover, name, values)
    monkeypatch.setattr(crossover, "DTYPES", ("float32",))
    monkeypatch.setattr(crossover, "AT_LEAST", 0.0)


@pytest.mark.parametrize("path", [*RESULTS.glob("crossover-*.json")], ids=lambda path: path.stem)
def test_auto_takes_what_was_timed_to_be_faster(path: Path) -> None:
    """No kernels that were slower, and the generic body for few that were faster, by 3 %."""
    result = json.loads(path.read_text())
    records = [x for x in result["records"] if "refused" not in x]
    chosen = [crossover.taken(x["kind"], x["dtype"], x["width"], x["units"], result["capability"]) for x in records]
    slower = [x for x, took in zip(records, chosen, strict=True) if took and x["ratio"][0] < 0.97]
    missed = [x for x, took in zip(records, chosen, strict=True) if not took and x["ratio"][0] > 1.03]
    assert not slower
    assert len(missed) < len(records) / 10


def test_every_kind_that_is_predicted_is_timed(few: None) -> None:
    kinds = {problem.kind for problem in crossover.problems()}
    assert {*predicted.HALF, *(f"{kind}, one query" for kind in predicted.ONCE[2] if kind != "step")} <= kinds
    assert {"step", "inverse", "softmax, packed"} <= kinds


def test_kernels_and_generic_body_take_turns(few: None) -> None:
    problems = (*crossover.steps("pointwise", "float32", 64), *crossover.once("softmax", "float32", 64))
    with stubbed():
        for problem in problems:
            record = crossover.record_of(problem, 2, lambda: None)
            assert record["seconds"]["triton"]["median"] > 0
            assert len(record["ratio"]) == 3
            assert f"{record['units']:,}: triton" in crossover.line(record)


def test_a_refusal_is_said() -> None:
    def refuse() -> None:
        raise NotImplementedError("float64 is served by the generic implementation")

    problem = crossover.Problem("softmax", "float64", 64, 5, {"triton": refuse}, "forward")
    assert crossover.line(crossover.record_of(problem, 2, lambda: None)).endswith(
        "served by the generic implementation"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crossover"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
