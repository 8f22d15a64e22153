"""What is no adapter is refused by a sentence and exit status 2; what an adapter raises is a verdict."""

import multiprocessing
import queue
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.__main__ import main
from attnkit_conformance.adapter import IllFormed
from attnkit_conformance.adapters.serving import Served
from attnkit_conformance.adapters.wire import Question
from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.judge import processes, properties
from attnkit_conformance.judge.selection import Terms, find
from attnkit_conformance.opdb import BY_NAME

MODULE = """
class Base:
    name, dtypes, ops = "mine", ("float32",), ("qk_layernorm",)

    def array(self, x, dtype):
        return x

    def numpy(self, x):
        return x

    def call(self, op, arrays, params):
        return {"q_normed": arrays["q"], "k_normed": arrays["k"]}

    def vjp(self, op, arrays, params, cotangents):
        return {}

class Bare:
    name, dtypes = "bare", ("float32",)

class Asking(Base):
    def __init__(self, size):
        pass

class Failing(Base):
    def __init__(self):
        raise KeyError("no device")

NUMBER, BARE = 3, Bare()

def nothing():
    return None
"""
PATHS = {
    ":": "expected package.module:ATTRIBUTE",
    "theirs:": "expected package.module:ATTRIBUTE",
    ":Base": "expected package.module:ATTRIBUTE",
    "no_such_module:Base": "ModuleNotFoundError: No module named 'no_such_module'",
    "theirs:Missing": "AttributeError: module 'theirs' has no attribute 'Missing'",
    "theirs_syntax:Base": "SyntaxError: ",
    "theirs_exits:Base": "SystemExit: 5",
    "theirs_fails:Base": "ZeroDivisionError: division by zero",
    "theirs:Asking": "missing 1 required positional argument: 'size'",
    "theirs:Failing": "KeyError: 'no device'",
    "theirs:BARE": "it lacks array, numpy, call, vjp",
    "theirs:Bare": "it lacks array, numpy, call, vjp",
    "theirs:NUMBER": "it lacks name, dtypes, array, numpy, call, vjp",
    "theirs:nothing": "it lacks name, dtypes, array, numpy, call, vjp",
}
ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "name": (3, "name must be a text; got 3"),
    "dtypes": ("float32", "dtypes must be a tuple of some of float64, .*; got 'float32'"),
    "dtypes ": (("float33",), r"dtypes must be a tuple of some of .*; got \('float33',\)"),
    "dtypes  ": ((), r"dtypes must be a tuple of some of .*; got \(\)"),
    "dtypes   ": (None, "dtypes must be a tuple of some of .*; got None"),
    "array": (3, "array must be a method; got 3"),
    "vjp": (None, "vjp must be a method; got None"),
    "ops": (("layernorm",), r"ops must be a tuple of names of ops \(softmax_attention, ...\); got \['layernorm'\]"),
    "ops ": ("qk_layernorm", "ops must be a tuple of names of ops .*; got 'qk_layernorm'"),
    "without": ("return_lse", "without must be a tuple of names; got 'return_lse'"),
    "unsupported": ("no", "unsupported must be a method; got 'no'"),
    "description": (3, "description must be a text; got 3"),
}
ANSWERS: dict[str, tuple[str, Any, str]] = {
    "none": ("call", None, "call must return a dict of arrays by name; got None"),
    "tuple": ("call", (np.zeros(3), np.zeros(3)), "call must return a dict of arrays by name; got tuple"),
    "keys": ("call", {0: np.zeros(3)}, r"call must return a dict of arrays by name; got the keys \[0\]"),
    "value": ("call", {"q_normed": None}, "numpy must return a NumPy array; got None for q_normed, None as"),
    "gradients": ("vjp", None, "vjp must return a dict of arrays by name; got None"),
    "numpy": ("numpy", [1.0], "numpy must return a NumPy array; got list for q, ndarray as the adapter has it"),
}

HERE = Terms(here=True)


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of somebody else."""
    sources = {"theirs": MODULE, "theirs_syntax": "def f(:", "theirs_exits": "exit(5)", "theirs_fails": "1 / 0"}
    sources["theirs_crash"] = "import os; print('out of luck', flush=True); os.abort()"
    sources["theirs_hang"] = "import time; time.sleep(600)"
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_lead_to_no_adapter(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", path, "--here"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert repr(path) in told
    assert PATHS[path] in told


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("theirs:Failing", "cannot load adapter 'theirs:Failing': KeyError: 'no device'"),
        ("theirs:Bare", "'theirs:Bare' is no adapter: it lacks array, numpy, call, vjp"),
        ("theirs_crash:Base", "the worker was ended by SIGABRT while loading; it had written: out of luck"),
        ("theirs_hang:Base", "no answer within 0.7 s while loading"),
    ],
)
def test_paths_that_lead_to_no_adapter_in_a_process(path: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, and modules that end or stop their process."""
    assert main(["run", path, *(("--limit", "0.7") if "hang" in path else ())]) == 2
    told = capsys.readouterr()
    assert text in told.err
    assert told.err.count("\n") == 1, "a sentence"
    assert not told.out


def test_what_it_may_not_call_has_to_be_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "theirs:Base", "--calls", "math:pi"]) == 2
    assert (
        "--calls math:pi: expected a function or a class of Python's, or a builtin; got 3.14" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_another_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, text = ATTRIBUTES[name]
    (base,) = find(["theirs:Base"], HERE)
    monkeypatch.setattr(type(base), name.strip(), value, raising=False)
    with pytest.raises(IllFormed, match=f"^'theirs:Base' is no adapter: {text}; see attnkit_conformance.adapter$"):
        find(["theirs:Base"], HERE)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, value, text = ANSWERS[name]
    (mine,) = find(["theirs:Base"], HERE)
    monkeypatch.setattr(type(mine), method, lambda *arguments: value)
    case = next(core.cases("qk_layernorm", "small", ("float32",)))
    with pytest.raises(IllFormed, match=f"^adapter 'mine': {text}"):
        core.check(mine, case)


def test_an_answer_that_is_none_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the process that judges, in those that it spreads the work over, and from a worker."""
    (mine,) = find(["theirs:Base"], HERE)
    monkeypatch.setattr(type(mine), "call", lambda *arguments: None)
    assert main(["run", "theirs:Base", "--here", "--search", "60", "--dtype", "float32"]) == 2
    assert "error: adapter 'mine': call must return a dict of arrays by name; got None" in capsys.readouterr().err

    waiting: queue.Queue[Any] = queue.Queue()
    verdicts, here = multiprocessing.Pipe(duplex=False)
    for job in ((("theirs:Base",), "qk_layernorm"), None):
        waiting.put(job)
    processes.work(partial(find, terms=HERE), waiting, here, "small", None, ("float32",))
    running = [processes.Running(multiprocessing.current_process(), verdicts)]
    with pytest.raises(IllFormed, match="got None"):
        list(processes.collect(running, pytest.fail))

    kind, text, _ = Served(mine, ()).reply(Question("call", "qk_layernorm", {}, {}))
    assert (kind, text) == ("ill-formed", "adapter 'mine': call must return a dict of arrays by name; got None")


def test_what_a_worker_finds_ill_formed_is_so_here(tmp_path: Path) -> None:
    text = MODULE.replace('return {"q_normed": arrays["q"], "k_normed": arrays["k"]}', "return None")
    (tmp_path / "theirs_apart.py").write_text(text)
    adapter = WorkerAdapter("apart", "theirs_apart:Base")
    with pytest.raises(IllFormed, match="call must return a dict"):
        core.check(adapter, next(core.cases("qk_layernorm", "small", ("float32",))))
    adapter.close()


@pytest.mark.parametrize("method", ["array", "numpy", "call", "vjp"])
def test_what_a_method_raises_is_a_failure(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    (mine,) = find(["theirs:Base"], HERE)
    monkeypatch.setattr(type(mine), method, fail)
    verdict = core.check(mine, next(core.cases("qk_layernorm", "small", ("float32",))))
    assert verdict.status == "fail"
    assert "[exception] RuntimeError: out of memory" in verdict.message


def test_an_array_that_is_not_taken_does_not_end_the_judging_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise KeyError("int64")

    (mine,) = find(["theirs:Base"], HERE)
    monkeypatch.setattr(type(mine), "array", fail)
    op = BY_NAME["qk_layernorm"]
    verdict = properties.check_error(mine, op, next(sample for sample in op.errors(op) if sample.name == "q-integer"))
    assert verdict.status == "fail"
    assert "KeyError: 'int64'; expected TypeError" in verdict.message
