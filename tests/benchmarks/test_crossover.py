"""Kernels beside generic bodies as calls grow, rehearsed with launches that end in a stub."""

import pytest
import torch

from attnkit.kernels import predicted
from benchmarks import crossover
from benchmarks.__main__ import main
from benchmarks.stubbed import stubbed

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (("ITEMS", (1,)), ("KEYS", (256,)), ("STATES", (16,)), ("WIDTHS", (64,)), ("TOKENS", 32)):
        monkeypatch.setattr(crossover, name, values)
    monkeypatch.setattr(crossover, "DTYPES", ("float32",))
    monkeypatch.setattr(crossover, "AT_LEAST", 0.0)


def test_every_kind_that_is_predicted_is_timed(few: None) -> None:
    kinds = [problem.kind for problem in crossover.problems()]
    assert {*kinds} == {*predicted.HALF, *(f"{kind}, one query" for kind in crossover.ONCE), "step"}


def test_kernels_and_generic_body_take_turns(few: None) -> None:
    problems = (*crossover.steps("pointwise", "float32", 64), *crossover.once("softmax", "float32", 64))
    with stubbed():
        for problem in problems:
            record = crossover.record_of(problem, 2, lambda: None)
            assert record["seconds"]["triton"]["median"] > 0
            assert len(record["ratio"]) == 3
            assert not record["taken"], "so small a call"
            assert f"{record['units']:,}: triton" in crossover.line(record)


def test_a_refusal_is_said() -> None:
    def refuse() -> None:
        raise NotImplementedError("float64 is served by the generic implementation")

    problem = crossover.Problem("softmax", "float64", 64, 5, {"triton": refuse}, False, "forward")
    assert crossover.line(crossover.record_of(problem, 2, lambda: None)).endswith(
        "served by the generic implementation"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crossover"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
