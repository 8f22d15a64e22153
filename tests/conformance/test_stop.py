"""A run that is stopped by a signal: its failures were shown as they came, and what was judged is reported."""

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import __main__ as program
from attnkit_conformance import core
from attnkit_conformance.__main__ import main
from attnkit_conformance.judge import stop
from attnkit_conformance.report import terminal_rich
from tests.conformance.plain import OnNumpy


class WrongAndStopped(OnNumpy):
    """Wrong by 1, and stopped by a signal in the middle of the third call."""

    name, dtypes, ops = "mine", ("float64",), ("softmax_attention",)

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def call(self, op: str, arrays: Any, params: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), self.number)
            raise AssertionError("the signal came, and the call goes on")
        return {"o": np.ones((*arrays["q"].shape[:-1], arrays["v"].shape[-1]))}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_has_shown_its_failures_and_reports_them(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(one) for one in stop.TEXTS]
    monkeypatch.setattr(program, "find", lambda names, terms: [WrongAndStopped(number)])
    files = {name: tmp_path / f"verdicts.{name}" for name in ("json", "html")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert main(["run", "mine:ADAPTER", "--dtype", "float64", *options]) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = [n for n, line in enumerate(lines) if line.startswith("failed (")]
    table = next(n for n, line in enumerate(lines) if line.startswith("worst error"))
    assert shown
    assert max(shown) < table
    assert lines[0].startswith("failed (1 of 1 so far): mine::softmax_attention/float64/")
    assert " (wrong): [bound] o: off by " in lines[0]
    judged = json.loads(files["json"].read_text())
    assert len(judged["results"]) == len(shown) == 2
    assert lines[-1] == f"{stop.TEXTS[number]}: {judged['left']} of {judged['left'] + 2} cases are not judged"
    assert f"{judged['left']:,} cases are not judged: the run was stopped." in files["html"].read_text()
    assert [signal.getsignal(one) for one in stop.TEXTS] == before


def three() -> Generator[core.CaseResult, None, None]:
    """Three verdicts."""
    for n in range(3):
        yield core.CaseResult(f"x/float32/{n}", "mine", "x", "float32", "pass")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_verdict_is_shown_ends_after_it(number: signal.Signals) -> None:
    ended: list[str] = []
    shown = []
    for verdict in stop.until(three(), None, ended):
        os.kill(os.getpid(), number)
        shown.append(verdict)
    assert len(shown) == 1
    assert ended == [stop.TEXTS[number]]
    assert stop.status(ended) == 128 + number


def test_failures_are_shown_above_the_bar_too(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = core.CaseResult("x/float32/1", "mine", "x", "float32", "fail", failures=(("bound", "[o] is off\nby 3"),))
    assert terminal_rich.show_progress([*three(), wrong], lambda: 4)[-1] is wrong
    assert "failed (1 of 4 so far): mine::x/float32/1 (wrong): [bound] [o] is off\n" in capsys.readouterr().out
