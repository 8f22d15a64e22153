"""An adapter in a process of its own: what it raises, refuses and returns comes back, and a crash is a failure."""

import gc
from typing import Any

import pytest

from attnkit_conformance import core
from attnkit_conformance.adapters import worker
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.model.case import numpy_dtype


def plain_case(op: str, dtype: str) -> Any:
    return next(case for case in core.cases(op, "quick", (dtype,)) if "cross" in case.tags)


CRASHING = """
import os
from attnkit_conformance.adapter import Unsupported

class Crashing:
    name, dtypes, errors = "crashing", ("float32", "bfloat16"), False

    def array(self, x, dtype):
        return x

    def numpy(self, x):
        return x

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
