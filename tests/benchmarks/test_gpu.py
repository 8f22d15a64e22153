"""The jobs for a machine with a GPU: their commands are valid, and what they leave is one archive."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import tyro

import attnkit
from attnkit._core import dispatch
from attnkit.kernels import verdicts
from attnkit_conformance import __main__ as kit
from attnkit_conformance.adapters.base import implementations
from attnkit_conformance.adapters.torch import Autograd
from attnkit_conformance.core import covers
from attnkit_conformance.judge import matcher, select
from attnkit_conformance.opdb import OPDB
from attnkit_experiments.__main__ import Command
from benchmarks import __main__ as measuring
from benchmarks import tiles
from benchmarks.cells import cells
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import box, queue, reading, train
from benchmarks.gpu.jobs import FIRST, JOBS, KIT, MEASURE, SECONDS, Job

WORD = "print('finished')"


def job(name: str, code: str, **more) -> Job:
    return Job(name, "does it run?", ("-c", code), (), **more)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs jobs of its own, in a folder of its own; returns the exit status."""

    def run(*jobs: Job, arguments: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(gpu, "JOBS", jobs)
        monkeypatch.setattr(queue, "JOBS", jobs)
        return gpu.main([*arguments, "--out", str(tmp_path / "gpu"), "--wheels", str(tmp_path / "wheels")])

    return run


# ---------------------------------------------------------------------------------------------- the jobs


def test_the_first_cases_are_some_of_every_op():
    adapter = Autograd("torch_cuda-triton", "triton", "cpu", "a stand-in", implementations("torch")["triton"])
    beside = ("linear_attention_step", "newton_inverse")  # their cases have no names
    for op in (op for op in OPDB if covers(adapter, op.name) and op.name not in beside):
        assert [*select([adapter], op, "small", matcher(FIRST), ("bfloat16",))], op.name


def test_names_are_distinct():
    assert set(Counter(job.name for job in JOBS).values()) == {1}


@pytest.mark.parametrize("asked", JOBS, ids=lambda job: job.name)
def test_a_command_is_valid(asked, tmp_path):
    words = [word.format(out=tmp_path, workers=2, data=tmp_path, cache=tmp_path) for word in asked.arguments]
    if words[:2] == [*KIT]:
        options = kit.parser().parse_args(words[2:])
        assert getattr(options, "seconds", SECONDS) < box.LIMIT
    elif words[:2] == [*MEASURE]:
        options = measuring.parser().parse_args(words[2:])
        names = tiles.WORKLOADS if words[2] == "tiles" else [cell.name for cell in cells("full", "cuda")]
        assert [name for name in names if matcher(getattr(options, "k", None))(name)]
        assert getattr(options, "seconds", SECONDS) < box.LIMIT
    elif words[:2] == ["-m", "benchmarks.gpu.train"]:
        assert train.parser().parse_args(words[2:]).job == asked.name
    elif words[:2] == ["-m", "experiments"]:
        assert tyro.cli(Command, args=words[2:], config=(tyro.conf.OmitSubcommandPrefixes,)).device == "cuda"
    else:
        assert words[:2] == ["-m", "pytest"]
        assert all((box.ROOT / word).exists() for word in words[2:] if not word.startswith("-"))


# ---------------------------------------------------------------------------------------------- a machine


def test_jobs_run_once_and_leave_an_archive(machine, tmp_path, capsys):
    assert machine(job("one", WORD), job("two", "raise SystemExit(3)")) == 1
    printed = capsys.readouterr().out
    assert re.search(r"one {14}ok, \d s: finished", printed)
    assert "two              FAILED" in printed
    with tarfile.open(tmp_path / "gpu.tar.gz") as file:
        names = {*file.getnames()}
    assert names == {
        "gpu/about.json",
        "gpu/left-out.json",
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
            job("long", "import time; print('begun', flush=True); time.sleep(60)"),
            tmp_path,
            box.Places(tmp_path, tmp_path, tmp_path),
            2.0,
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


# ---------------------------------------------------------------------------------------------- the queue


def test_what_changed_is_due_and_verdicts_come_first(monkeypatch):
    """Kernels whose sources are those that were judged need no verdict; a job that ran on other ones is due."""
    monkeypatch.setattr(verdicts, "record", lambda: {"9.0": {key: verdicts.digest(key) for key in verdicts.all_keys()}})
    ran = {job.name: {"sources": queue.sources_of(job)} for job in JOBS}
    monkeypatch.setattr(queue, "record", lambda: ran)
    assert queue.due() == []
    monkeypatch.setattr(
        verdicts, "record", lambda: {"9.0": {key: verdicts.digest(key) for key in verdicts.all_keys()[1:]}}
    )
    monkeypatch.setattr(queue, "record", dict)
    found = queue.due()
    names = [each.job.name for each in found]
    assert names[:3] == ["verify", "first", "ops"]
    assert "cupy" not in names
    assert [each.job.worth for each in found] == sorted(each.job.worth for each in found)
    assert found[1].reason == "1 of 22 kernels are not judged as they are"
    monkeypatch.setattr(queue, "record", lambda: ran | {"times-relu": {"sources": "those of another commit"}})
    assert queue.due()[-1] == queue.Due(
        next(job for job in JOBS if job.name == "times-relu"), "its kernels changed since it ran"
    )


def test_every_job_fits_and_is_about_kernels():
    assert all(0 < job.minutes <= box.LIMIT / 60 for job in JOBS)
    assert all(queue.keys_of(job) for job in JOBS if job.about)


def test_the_queue_ends_in_time(machine, capsys):
    """A job that is expected to take longer than what is left does not start, and one that does is ended."""
    long = job("long", "import time; time.sleep(60)", minutes=0.0)
    later = job("later", WORD, minutes=0.1)
    assert machine(long, later, arguments=("--minutes", "0.03")) == 1
    printed = capsys.readouterr().out
    assert re.search(r"long {13}ended after its time, \d s", printed)
    assert "later            not started" in printed


def test_a_plan_runs_nothing(machine, tmp_path, capsys):
    jobs = [job(name, "raise SystemExit(1)", minutes=8) for name in ("one", "two", "three", "four")]
    assert machine(*jobs, arguments=("--dry-run",)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "24 of 25 minutes"
    assert machine(*jobs, arguments=("--list",)) == 0
    assert "one                8 min  does it run? it never ran" in capsys.readouterr().out
    assert not (tmp_path / "gpu").exists()


def test_a_queue_that_was_killed_goes_on(tmp_path):
    """The job that was cut short runs again, the one before it does not, and no process is left behind."""
    code = (
        "import sys; from benchmarks.gpu import __main__ as gpu, queue; from benchmarks.gpu.jobs import Job;"
        "jobs = tuple(Job(name, '?', ('-c', code), ()) for name, code in (('one', 'print(1)'), ('two', sys.argv[1])));"
        "gpu.JOBS = queue.JOBS = jobs; out = sys.argv[2];"
        "raise SystemExit(gpu.main(['--out', out, '--wheels', out + 'w']))"
    )
    out, sleeps = tmp_path / "gpu", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    environment = box.environment(tmp_path)
    first = subprocess.Popen([sys.executable, "-c", code, sleeps, str(out)], env=environment, cwd=box.ROOT)
    log = out / "two" / "log"
    while not (log.exists() and len(log.read_text().splitlines()) > 1):
        assert first.poll() is None
        time.sleep(0.1)
    first.terminate()
    assert first.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().splitlines()[1]), 0)
    assert (out / "one" / "done.json").exists()
    assert not (out / "two" / "done.json").exists()
    again = [sys.executable, "-c", code, "print('resumed')", str(out)]
    printed = subprocess.run(again, env=environment, cwd=box.ROOT, capture_output=True, text=True, check=True).stdout
    assert "one              done before" in printed
    assert re.search(r"two {14}ok, \d s: resumed", printed)


def test_other_kernels_are_run_again(machine, tmp_path, monkeypatch, capsys):
    assert machine(job("one", WORD)) == 0
    monkeypatch.setattr(queue, "sources_of", lambda job: "others")
    assert machine(job("one", WORD)) == 0
    assert "one              ok" in capsys.readouterr().out.splitlines()[-2]


def test_an_archive_has_a_largest_size(tmp_path):
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "small.json").write_text("{}")
    (folder / "large").write_bytes(os.urandom(1 << 17))
    path = box.archive(folder, 1 << 16)
    assert path.stat().st_size <= 1 << 16
    with tarfile.open(path) as file:
        assert {*file.getnames()} == {"gpu/small.json", "gpu/left-out.json"}
        assert json.load(file.extractfile("gpu/left-out.json")) == ["large"]


# ---------------------------------------------------------------------------------------------- read back

ABOUT = {"device": "A GPU, 580.1", "capability": "9.9", "commit": "abc", "versions": {"torch": "2"}}
CASE = {"adapter": "torch_cuda-triton", "op": "softmax_attention", "dtype": "bfloat16", "ratio": 0.4}


@pytest.fixture
def archived(tmp_path):
    """An archive of verdicts on softmax and relu, and of times, of kernels with these digests; reads it and returns
    what is printed, and the files."""

    def read(digests: dict[str, str], status: str = "pass") -> tuple[list[str], dict[str, str]]:
        folder, place = tmp_path / "gpu", tmp_path / "results"
        results = [CASE | {"id": "1", "status": "pass"}, CASE | {"id": "2", "status": status}]
        results += [CASE | {"id": "3", "status": "pass", "op": "pointwise_attention"}]
        times = {"environment": {"device": "A GPU"}, "records": [{"name": "relu", "mode": "forward", "seconds": 1}]}
        for job, kind, content in (("verify", "verdicts", {"results": results}), ("times-relu", "times", times)):
            (folder / job).mkdir(parents=True, exist_ok=True)
            done = {"job": job, "status": 0, "late": False, "seconds": 1, "sources": "s"}
            (folder / job / "done.json").write_text(json.dumps(done))
            (folder / job / f"{kind}.json").write_text(json.dumps(content))
        (folder / "about.json").write_text(json.dumps(ABOUT | {"kernels": digests}))
        place.mkdir(exist_ok=True)
        printed = [*reading.read(box.archive(folder), place, place / "judged.json", place / "gpu-jobs.json")]
        return printed, {path.name: path.read_text() for path in place.iterdir()}

    return read


def test_an_archive_is_read_and_twice_is_once(archived):
    digests = {key: verdicts.digest(key) for key in verdicts.all_keys()}
    printed, files = archived(digests)
    assert {*files} == {"verdicts-a-gpu.json", "a-gpu.json", "judged.json", "gpu-jobs.json"}
    softmax, relu = "torch triton, softmax", "torch triton, pointwise"
    assert json.loads(files["judged.json"]) == {"9.9": {relu: digests[relu], softmax: digests[softmax]}}
    rows = json.loads(files["verdicts-a-gpu.json"])["rows"]
    assert [(row["op"], row["pass"], row["worst"]) for row in rows] == [
        ("pointwise_attention", 1, 0.4),
        ("softmax_attention", 2, 0.4),
    ]
    assert {*json.loads(files["gpu-jobs.json"])} == {"verify", "times-relu"}
    assert printed[0].startswith("of commit abc; this is ")
    assert archived(digests) == (printed, files)


def test_what_is_wrong_or_of_other_sources_is_not_judged(archived, monkeypatch):
    digests = {key: verdicts.digest(key) for key in verdicts.all_keys()}
    archived(digests)
    printed, files = archived(digests, "fail")
    assert "WRONG, not judged: torch triton, softmax" in printed
    assert [*json.loads(files["judged.json"])["9.9"]] == ["torch triton, pointwise"]
    _, right = archived(digests)
    _, files = archived(digests | {"torch triton, softmax": "of another commit"})
    assert json.loads(files["judged.json"]) == json.loads(right["judged.json"])  # what is judged is not taken back
    archived(digests, "fail")
    printed, files = archived(digests | {"torch triton, softmax": "of another commit"})
    assert "of other sources than these, and said nothing of them: torch triton, softmax" in printed
    monkeypatch.setattr(verdicts, "record", lambda: json.loads(files["judged.json"]))
    assert (
        verdicts.unjudged("torch triton", "softmax_attention") == "no GPU has judged these kernels since they changed"
    )
    assert verdicts.unjudged("torch triton", "pointwise_attention_vjp") is None
    assert verdicts.unjudged("torch triton", "linear_attention") == "no GPU has judged these kernels"
    assert verdicts.unjudged("torch blocked", "linear_attention") is None


def test_what_is_no_archive_of_a_gpu_is_refused(tmp_path):
    folder = tmp_path / "gpu"
    folder.mkdir()
    for about, text in (({}, "says nothing"), (ABOUT | {"kernels": {}, "capability": None}, "without a GPU")):
        (folder / "about.json").write_text(json.dumps(about))
        with pytest.raises(ValueError, match=text):
            reading.opened(box.archive(folder))


# ---------------------------------------------------------------------------------------------- who is judged


def test_every_kernel_belongs_to_an_op_and_every_op_has_its_kernels():
    found = {name for key in verdicts.all_keys() for name in verdicts.files_of(key)}
    files = {
        f"{each.parent.name}/{each.name}"
        for kind in ("triton/*.py", "cuda/*.cuh")
        for each in verdicts.FOLDER.glob(kind)
    }
    assert files - found == {"triton/__init__.py", "triton/sizes.py"}
    for kernels in verdicts.SOURCES:
        library, impl = kernels.split()
        if library != "cupy":
            served = implementations(library)[impl]
            assert {verdicts.key_of(kernels, op) for op in served} <= {*verdicts.all_keys()}, kernels


def test_comments_are_no_change():
    code = 'def f(x):\n    """Says what."""\n    return x  # so\n'
    assert verdicts.essence(code) == verdicts.essence("def f(x):\n    return x\n")
    assert verdicts.essence(code) != verdicts.essence("def f(x):\n    return -x\n")


def test_explain_says_what_no_gpu_has_judged(monkeypatch):
    q = torch.zeros(1, 1, 4, 4)
    assert repr(attnkit.explain("softmax_attention", q, q, q)).endswith("}")
    monkeypatch.setattr(dispatch, "_unjudged", lambda kernels, op: "no GPU" if kernels == "torch generic" else None)
    answer = attnkit.explain("softmax_attention", q, q, q)
    assert answer.unjudged == {"generic": "no GPU"}
    assert repr(answer) == f"{dict(answer)!r}  # generic: no GPU"
