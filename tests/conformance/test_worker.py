"""An adapter in a process of its own: what it raises, refuses and returns comes back, and a crash is a failure."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from attnkit_conformance import core
from attnkit_conformance.adapters import worker
from attnkit_conformance.adapters.isolated import Isolated, process_of
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.model.case import numpy_dtype


def plain_case(op: str, dtype: str) -> Any:
    return next(case for case in core.cases(op, "small", (dtype,)) if "cross" in case.tags)


CRASHING = """
import os
from attnkit_conformance.adapter import Unsupported
from tests.conformance.plain import OnNumpy

class Crashing(OnNumpy):
    name, dtypes, errors = "crashing", ("float32", "bfloat16"), False

    def call(self, op, arrays, params):
        if op == "softmax_attention":
            os._exit(3)
        if op == "qk_layernorm":
            import time
            time.sleep(60)
        if op == "sigmoid_attention":
            raise Unsupported("not here")
        return {"o": arrays["v"][..., :1, :].repeat(arrays["q"].shape[-2], -2)}

    vjp = call

class Lingering(Crashing):
    def __init__(self):
        import atexit
        import time
        atexit.register(time.sleep, 600)

class Boasting(Crashing):
    def unsupported(self, op, arrays, params):
        return "I do not do this"
"""


HALF = """
import os, struct, sys, time
from tests.conformance.plain import OnNumpy

PIPE = int(sys.argv[1])

class Half(OnNumpy):
    name, dtypes = "half", ("float32",)

    def call(self, op, arrays, params):
        if op == "softmax_attention":  # dies in the middle of an answer
            os.write(PIPE, struct.pack("!i", 1000) + b"half")
            sys.stderr.write("out of luck\\n")
            sys.stderr.flush()
            os._exit(3)
        if op == "sigmoid_attention":  # hangs there
            os.write(PIPE, struct.pack("!i", 1000) + b"half")
            time.sleep(600)
        if op == "rela_attention":  # a text in front of an answer
            os.write(PIPE, b"printed by C\\n")
        if op == "sima_attention":  # a short text, read as the length of 170 MB
            os.write(PIPE, b"\\n1 of")
            time.sleep(600)
        if op == "gaussian_attention":  # an answer that is none
            os.write(PIPE, struct.pack("!i", 4) + b"text")
        if op == "linear_attention":  # something behind an answer
            import threading
            threading.Timer(0.2, os.write, (PIPE, b"later")).start()
        return {"o": arrays["v"][..., :1, :].repeat(arrays["q"].shape[-2], -2)}

    vjp = call
"""


@pytest.fixture
def half(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Isolated]:
    (tmp_path / "half_adapter.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    adapter = Isolated(process_of("half_adapter:Half", limit=1.0))
    yield adapter
    adapter.close()


def test_answers_that_are_none_are_verdicts_on_their_cases(half: Isolated) -> None:
    """A worker that ends or stops in the middle of an answer, or writes something else to the pipe."""
    told = {
        "softmax_attention": "got end of file during message",
        "sigmoid_attention": "stopped in the middle",
        "rela_attention": "bad message length",
        "sima_attention": "stopped in the middle",
        "gaussian_attention": "what is no answer",
    }
    for op, text in told.items():
        started = time.monotonic()
        result = core.check(half, plain_case(op, "float32"))
        assert (result.status, result.checks) == ("fail", {"exception"}), op
        assert text in result.message
        assert f"call of {op}" in result.message
        assert time.monotonic() - started < 30
    assert half.worker.deaths == 2 * worker.HANG + 3 * worker.CRASH
    assert core.check(half, plain_case("cosine_attention", "float32")).measured, "a fresh process goes on"


def test_what_is_sent_after_an_answer_is_not_taken_for_the_next(half: Isolated) -> None:
    case = plain_case("linear_attention", "float32")
    arrays = core.typed_arrays(half, case)
    half.call(case.op, arrays, case.params)
    time.sleep(0.5)
    with pytest.raises(worker.WorkerDied, match="sent something unasked before running call of cosine_attention"):
        half.call("cosine_attention", arrays, {})
    assert half.call("cosine_attention", arrays, {})


@pytest.fixture
def crashing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "crashing_adapter.py").write_text(CRASHING)
    monkeypatch.syspath_prepend(tmp_path)
    return "crashing_adapter"


def test_worker_that_dies_is_a_failure_and_not_a_hang(crashing: str) -> None:
    adapter = WorkerAdapter("crashing", f"{crashing}:Crashing")
    result = core.check(adapter, plain_case("softmax_attention", "float32"))
    assert result.status == "fail"
    assert "exit code 3" in result.message
    refused = core.check(adapter, plain_case("sigmoid_attention", "float32"))
    assert (refused.status, refused.reason) == ("unsupported", "not here"), "a fresh worker goes on"
    adapter.close()


def test_worker_that_does_not_answer_is_a_failure(crashing: str) -> None:
    adapter = WorkerAdapter("crashing", f"{crashing}:Crashing")
    adapter.worker.patience = 1
    assert "no answer within 1 s" in core.check(adapter, plain_case("qk_layernorm", "float32")).message
    adapter.close()


def test_worker_that_declares_itself_unsupported_must_refuse(crashing: str) -> None:
    adapter = WorkerAdapter("boasting", f"{crashing}:Boasting")
    case = plain_case("pointwise_attention", "bfloat16")
    assert "declared" in core.check(adapter, case).checks
    assert core.outputs(adapter, case)["o"].dtype == numpy_dtype("bfloat16"), "bfloat16 travels through the pipe"
    adapter.close()


def test_a_worker_is_awaited_however_it_ends(crashing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is closed and lingers is killed, and so is one that nobody closed; one that cannot be loaded has ended.

    Of a process that nobody awaits Python warns, which is an error here.
    """
    monkeypatch.setattr(worker, "FAREWELL", 0.0)
    closed, forgotten = (WorkerAdapter("lingering", f"{crashing}:Lingering") for _ in range(2))
    closed.close()
    ended = [closed.worker.process, forgotten.worker.process]
    del closed, forgotten
    gc.collect()
    assert [process.returncode for process in ended] == [-9, -9]
    with pytest.raises(worker.NotLoaded, match=r"AttributeError: .*Missing"):
        WorkerAdapter("missing", f"{crashing}:Missing")
    gc.collect()
