"""The jobs for a machine with a GPU: their commands are valid, and what they leave is one archive."""

import json
import signal
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import tyro

from attnkit_conformance import __main__ as kit
from attnkit_conformance.adapters.base import implementations
from attnkit_conformance.adapters.torch import Autograd
from attnkit_conformance.core import covers
from attnkit_conformance.judge import matcher, selected
from attnkit_conformance.opdb import OPDB
from attnkit_experiments.__main__ import Command
from benchmarks import __main__ as measuring
from benchmarks import tiles
from benchmarks.cells import cells
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import box
from benchmarks.gpu.jobs import FIRST, JOBS, KIT, MEASURE, SECONDS, Job

WORD = "print('finished')"


def job(name: str, code: str, **more) -> Job:
    return Job(name, "does it run?", ("-c", code), (), **more)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs jobs of its own, in a folder of its own; returns the exit status."""

    def run(*jobs: Job, arguments: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(gpu, "JOBS", jobs)
        return gpu.main([*arguments, "--out", str(tmp_path / "gpu"), "--wheels", str(tmp_path / "wheels")])

    return run


# ---------------------------------------------------------------------------------------------- the jobs


def test_the_first_cases_are_some_of_every_op():
    adapter = Autograd("torch_cuda-triton", "triton", "cpu", "a stand-in", implementations("torch")["triton"])
    beside = ("linear_attention_step", "newton_inverse")  # their cases have no names
    for op in (op for op in OPDB if covers(adapter, op.name) and op.name not in beside):
        assert [*selected([adapter], op, "quick", matcher(FIRST), ("bfloat16",))], op.name


def test_names_are_distinct():
    assert set(Counter(job.name for job in JOBS).values()) == {1}


@pytest.mark.parametrize("asked", JOBS, ids=lambda job: job.name)
def test_a_command_is_valid(asked, tmp_path):
    words = [word.format(out=tmp_path, workers=2) for word in asked.arguments]
    if words[:2] == [*KIT]:
        options = kit.parser().parse_args(words[2:])
        assert getattr(options, "seconds", SECONDS) < box.LIMIT
    elif words[:2] == [*MEASURE]:
        options = measuring.parser().parse_args(words[2:])
        names = tiles.WORKLOADS if words[2] == "tiles" else [cell.name for cell in cells("full", "cuda")]
        assert [name for name in names if matcher(getattr(options, "k", None))(name)]
        assert getattr(options, "seconds", SECONDS) < box.LIMIT
    elif words[:2] == ["-m", "experiments"]:
        assert tyro.cli(Command, args=words[2:], config=(tyro.conf.OmitSubcommandPrefixes,)).device == "cuda"
    else:
        assert words[:2] == ["-m", "pytest"]
        assert all((box.ROOT / word).exists() for word in words[2:] if not word.startswith("-"))


# ---------------------------------------------------------------------------------------------- a machine


def test_jobs_run_once_and_leave_an_archive(machine, tmp_path, capsys):
    assert machine(job("one", WORD), job("two", "raise SystemExit(3)")) == 1
    printed = capsys.readouterr().out
    assert "one              ok, 0 s: finished" in printed
    assert "two              FAILED" in printed
    with tarfile.open(tmp_path / "gpu.tar.gz") as file:
        names = {*file.getnames()}
    assert names == {
        "gpu/about.json",
        *(f"gpu/{job}/{file}" for job in ("one", "two") for file in ("log", "done.json")),
    }
    assert json.loads((tmp_path / "gpu" / "about.json").read_text())["python"] == sys.version.split()[0]
    assert machine(job("one", "raise SystemExit(1)"), job("three", WORD)) == 0
    assert 'one              done before: {"job": "one", "status": 0' in capsys.readouterr().out
    assert machine(job("one", "raise SystemExit(1)"), arguments=("--again",)) == 1


def test_a_job_is_interrupted_in_the_background_too(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record = box.run(
            job("long", "import time; print('begun', flush=True); time.sleep(60)"), tmp_path, tmp_path, 2.0
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert record["late"]
    assert record["seconds"] < box.PATIENCE
    assert "begun" in (tmp_path / "log").read_text()


def test_what_cannot_run_is_said(machine, capsys):
    assert machine(job("bare", WORD)._replace(needs=("no_such_module",))) == 0
    assert "bare             left out: no_such_module is not on this machine" in capsys.readouterr().out
    assert machine(job("bare", WORD), arguments=("--minutes", "1")) == 0
    assert "bare             not started: 1 minutes would not suffice" in capsys.readouterr().out
    assert machine(job("bare", WORD), arguments=("other",)) == 2
    assert "unknown job 'other'; known are bare" in capsys.readouterr().err


def test_wheels_are_carried(machine, tmp_path, capsys):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried-1.0-py3-none-any.whl", "w") as file:
        file.writestr("carried.py", "WORD = 'from a wheel'")
    assert machine(job("one", "import carried, attnkit; print(carried.WORD)")._replace(needs=("carried",))) == 0
    assert "ok, " in capsys.readouterr().out
    assert "from a wheel" in (tmp_path / "gpu" / "one" / "log").read_text()
    (tmp_path / "wheels" / "other-1.0-cp312-cp312-linux_x86_64.whl").touch()
    assert machine(job("one", WORD)) == 2
    assert "only wheels of pure Python" in capsys.readouterr().err


def test_a_job_sees_the_device_and_leaves_memory(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    environment = box.environment(Path("site"))
    assert "JAX_PLATFORMS" not in environment
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
