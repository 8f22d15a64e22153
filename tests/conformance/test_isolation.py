"""An adapter by path is judged in a process of its own: whatever it does there, the run goes on and says so."""

import json
from pathlib import Path

import pytest

from attnkit_conformance import core, judge
from attnkit_conformance.__main__ import main
from attnkit_conformance.adapters import isolated
from attnkit_conformance.adapters.isolated import Isolated
from attnkit_conformance.adapters.surroundings import surround
from attnkit_conformance.golden import draw_case
from attnkit_conformance.judge import surroundings
from attnkit_conformance.judge.selection import find
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import files
from attnkit_conformance.scenes import rows
from attnkit_conformance.search import smallest

HOSTILE = """
import os, signal, sys, time
from tests.conformance.plain import OnNumpy

class Hostile(OnNumpy):
    name, dtypes = "hostile", ("float32",)
    ops = ("softmax_attention", "pointwise_attention", "sigmoid_attention", "reluformer_attention", "qk_layernorm")

    def call(self, op, arrays, params):
        from attnkit_conformance.adapter import Unsupported
        if op == "softmax_attention":
            print("about to crash", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if op == "pointwise_attention":
            time.sleep(600)
        if op == "sigmoid_attention":
            raise RuntimeError("x" * 2_800_000)
        print("chatter" * 100_000)
        os.write(2, b"more" * 100_000)
        raise Unsupported("not here")

    vjp = call

class Crashing(Hostile):
    ops = ("softmax_attention", "qk_layernorm")
"""
ROUNDED = """
import numpy as np
from contextlib import contextmanager
from tests.conformance.cheats import Honest, weights

class Rounded(Honest):
    name, dtypes, surroundings = "rounded", ("float32",), "also"
    threads, given_back = 1, ()

    @contextmanager
    def with_threads(self, number):
        self.threads = number
        yield
        self.threads = 1

    def freed(self, x):
        return None

    def call(self, op, arrays, params):
        for name, x in arrays.items():
            if x is None:
                raise ValueError(f"softmax_attention: {name} has no storage")
        if self.threads > 1:
            raise ValueError(f"{self.threads} threads are too many")
        with np.errstate(**({} if np.geterr()["over"] == "raise" else {"over": "ignore"})):
            if np.geterr()["over"] == "raise":
                raise FloatingPointError("seen in its process")
            return super().call(op, arrays, params)
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "theirs_hostile.py").write_text(HOSTILE)
    (tmp_path / "theirs_rounded.py").write_text(ROUNDED)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_crash_and_a_hang_are_verdicts_and_the_run_goes_on(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smallest, "smaller", lambda adapter, result, case, kind="": case)
    report = theirs / "report.json"
    chosen = ["-k", "float32/pair.plain", "--limit", "2", "--json", str(report)]
    assert main(["run", "theirs_hostile:Hostile", *chosen]) == 1
    told = capfd.readouterr()
    assert "chatter" not in told.out + told.err
    verdicts = {verdict["op"]: verdict for verdict in json.loads(report.read_text())["results"]}
    messages = {op: [each["message"] for each in verdict["failures"]] for op, verdict in verdicts.items()}
    assert messages["softmax_attention"] == [
        "WorkerDied: hostile: the worker was ended by SIGSEGV while running call of softmax_attention; "
        "it had written: about to crash"
    ]
    assert messages["pointwise_attention"] == [
        "WorkerDied: hostile: no answer within 2 s while running call of pointwise_attention"
    ]
    for op in ("softmax_attention", "pointwise_attention"):
        assert "q = np.array(" in verdicts[op]["program"]
        assert f"# {op}(q, k, v" in verdicts[op]["program"]
    (long,) = messages["sigmoid_attention"]
    assert len(long) < 3000
    assert long.endswith("characters left out)")
    assert (verdicts["qk_layernorm"]["status"], verdicts["qk_layernorm"]["reason"]) == ("unsupported", "not here")


def test_an_adapter_that_crashes_again_and_again_is_given_up(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolated, "GIVES_UP", 2)
    monkeypatch.setattr(smallest, "MOST", 0)
    assert main(["run", "theirs_hostile:Crashing", "--profile", "small"]) == 1
    out = capsys.readouterr().out
    assert "its process crashed or hung again and again: the rest of its cases is not judged" in out
    assert ", 3 fail," in out, "two crashes, and the sentence"
    planned = judge.count_verdicts(find(["theirs_hostile:Crashing"]), "small", None, ("float32",))
    assert f"hostile gave up: {planned - 3} of {planned} cases are not judged" in out


def test_the_page_of_long_errors_stays_small() -> None:
    """Those of 2.8 MB, in every case of a full profile, cut as findings cut them."""
    findings = core.Findings()
    findings.fail("exception", "x" * 2_800_000)
    failing = [
        core.CaseResult(f"qk_layernorm/float32/{n}", "a", "qk_layernorm", "float32", "fail", (), (*findings.failures,))
        for n in range(1000)
    ]
    refused = [
        core.CaseResult(f"qk_layernorm/float32/{n}", "a", "qk_layernorm", "float32", "unsupported", reason=f"{n}" * 600)
        for n in range(1000)
    ]
    assert len(files.as_html([*failing, *refused], files.header([], "full"))) < 1_000_000


def test_what_adapters_may_have_is_had_in_a_process(theirs: Path) -> None:
    """Surroundings, numbers of threads, and arrays without storage."""
    (adapter,) = find(["theirs_rounded:Rounded"])
    assert isinstance(adapter, Isolated)
    case = draw_case(rows.sample_named(BY_NAME["softmax_attention"], "float32", "pair.plain"))
    assert core.check(adapter, case).status == "pass"
    with adapter.with_threads(3):
        assert "3 threads are too many" in core.check(adapter, case).message
    assert core.check(adapter, case).status == "pass"
    results = list(judge.judge([adapter], "small", "freed", ("float32",), ops=("softmax_attention",)))
    assert [result.message for result in results] == [""] * 3
    every = surroundings.check_all(
        adapter, BY_NAME["softmax_attention"], "full", ("float32",), lambda identity: identity.endswith(".plain")
    )
    verdicts = {result.id.split(".")[1]: result for result in every}
    assert {name: result.status for name, result in verdicts.items()} == {
        "errstate": "fail", "warnings": "pass", "threads": "pass",
    }  # fmt: skip
    assert "seen in its process" in verdicts["errstate"].message
    inside = surround(adapter, "errstate")
    assert inside.name == "rounded@errstate"
    assert "seen in its process" in core.check(inside, case).message
    adapter.close()
