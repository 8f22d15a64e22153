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
from typing import NamedTuple

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
from benchmarks import compare, tiles
from benchmarks.cells import cells
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import box, queue, reading, train
from benchmarks.gpu.jobs import AIMS, FIRST, JOBS, KIT, MEASURE, SECONDS, Job

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
    for op in (op for op in OPDB if covers(adapter, op.name)):
        assert next(select([adapter], op, "small", matcher(FIRST), ("bfloat16", "float32")), None), op.name


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
        *(f"gpu/{job}/{file}" for job in ("one", "two") for file in ("log", "done.json", "sources")),
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
    judged = {key: {"sources": verdicts.digest(key), "cases": {"float32": 1}} for key in verdicts.all_keys()}
    monkeypatch.setattr(verdicts, "record", lambda: {"9.0": judged})
    ran = {job.name: {"sources": queue.sources_of(job)} for job in JOBS}
    monkeypatch.setattr(queue, "record", lambda: ran)
    assert queue.due() == []
    del judged["torch triton, pointwise"]
    monkeypatch.setattr(queue, "record", dict)
    found = queue.due()
    names = [each.job.name for each in found]
    assert names[:3] == ["verify", "first", "ops"]
    assert "cupy" not in names
    assert [each.job.worth for each in found] == sorted(each.job.worth for each in found)
    assert found[1].reason == "1 of 22 kernels are not judged as they are"
    assert found[1].job.minutes == 1
    assert f"({FIRST}) and (::pointwise_attention/)" in found[1].job.arguments
    judged["cupy cuda, newton"]["left"] = 3  # of a run that was cut
    assert [each.job.arguments[-2:] for each in queue.due() if each.job.name == "cupy"] == [("-k", "::newton_inverse/")]
    monkeypatch.setattr(queue, "record", lambda: ran | {"times-relu": {"sources": "those of another commit"}})
    assert queue.due()[-1] == queue.Due(
        next(job for job in JOBS if job.name == "times-relu"), "its kernels changed since it ran"
    )


def test_every_job_fits_and_is_about_kernels():
    assert all(0 < job.minutes <= box.LIMIT / 60 for job in JOBS)
    assert all(queue.keys_of(job) for job in JOBS if job.about)
    found = queue.due()
    assert found[0].job.name == "verify"
    assert sum(each.job.minutes for each in found if each.job.worth <= AIMS) <= gpu.MINUTES


def test_all_cells_are_timed_once_and_what_matters_first():
    """In the minutes that are planned, half a minute of them for the start and three seconds for each record."""
    found = Counter()
    for each in (job for job in JOBS if job.says == "times"):
        options = measuring.parser().parse_args([word.format(out="") for word in each.arguments[2:]])
        chosen = [cell for cell in cells("full", "cuda") if matcher(options.k)(cell.name)]
        found.update(cell.name for cell in chosen)
        assert each.minutes >= 0.5 + 3 / 60 * sum(len(cell.modes) for cell in chosen), each.name
        assert {"naive", "flex", "sdpa math"} <= {*options.without}
        assert options.resume
    assert found == Counter(cell.name for cell in cells("full", "cuda"))
    relu = [(cell.d, cell.n) for cell in cells("full", "cuda") if cell.op == "relu" and not cell.causal]
    assert relu[:6] == [(64, 197), (64, 1024), (64, 4096), (128, 197), (128, 1024), (128, 4096)]


def test_wheels_are_pinned():
    text = (box.ROOT / "Makefile").read_text().partition("-d $(OUT)/wheels ")[2].partition("\n\n")[0]
    lines = (box.ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert {"fla-core", "einops", "entmax"} <= {*text.replace("\\", "").split()} <= pins


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
    assert capsys.readouterr().out.splitlines()[-1] == "24 of 25 minutes; later: four (8)"
    assert machine(*jobs, arguments=("--list",)) == 0
    assert "one                 8 min  does it run? it never ran" in capsys.readouterr().out
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


def test_what_failed_is_run_again(machine, tmp_path, capsys):
    """From its beginning, unless it resumes."""
    assert machine(job("one", "raise SystemExit(3)")) == 1
    (tmp_path / "gpu" / "one" / "half").touch()
    assert machine(job("one", "raise SystemExit(3)")) == 1
    assert not (tmp_path / "gpu" / "one" / "half").exists()
    assert "one              FAILED" in capsys.readouterr().out.splitlines()[-2]


COUNTS = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
found = json.loads(path.read_text())["records"] if path.exists() else []
for n in range(len(found), 3):
    found.append(n)
    path.write_text(json.dumps(dict(left=2 - n, records=found)))
    if sys.argv[2] == "ends" and n == 0: break
    if sys.argv[2] == "hangs" and n == 1: time.sleep(60)
print(len(found), "records")
"""


def counting(how: str) -> Job:
    """Makes three records: the first alone, then the second and hangs, then the rest."""
    arguments = ("-c", COUNTS, "{out}/times.json", how)
    return Job("counts", "?", arguments, (), resumes=True, says="times", minutes=0.01)


def test_a_job_that_is_cut_goes_on_with_what_it_left(machine, tmp_path, monkeypatch, capsys):
    path = tmp_path / "gpu" / "counts" / "times.json"
    assert machine(counting("ends")) == 1
    assert re.search(r"counts {11}not finished, \d s: 1 records", capsys.readouterr().out)
    assert machine(counting("hangs"), arguments=("--minutes", "0.03")) == 1
    assert "counts           ended after its time" in capsys.readouterr().out
    assert json.loads(path.read_text())["records"] == [0, 1]
    assert machine(counting("ends")) == 0
    assert "counts           ok" in capsys.readouterr().out
    assert json.loads(path.read_text())["records"] == [0, 1, 2]
    assert machine(counting("ends")) == 0
    assert "counts           done before" in capsys.readouterr().out
    monkeypatch.setattr(queue, "sources_of", lambda job: "others")
    assert machine(counting("ends")) == 1  # of other kernels, which begin anew
    assert json.loads(path.read_text())["records"] == [0]


def test_what_came_back_of_a_job_is_carried_to_the_next_device(machine, tmp_path, monkeypatch):
    """Of these kernels and such a device, unless it is all of it."""
    sources = queue.sources_of(counting("ends"))
    rows = [{"n": 0, "sources": sources}, {"n": 1, "sources": "others"}]
    (tmp_path / "a-gpu.json").write_text(json.dumps({"records": rows}))
    monkeypatch.setattr(reading.records_of, "__defaults__", (tmp_path,))
    monkeypatch.setattr(box, "nvidia_smi", lambda query: "A GPU")
    path = tmp_path / "gpu" / "counts" / "times.json"
    assert machine(counting("")) == 0
    assert json.loads(path.read_text())["records"] == [rows[0], 1, 2]
    for device, known in (("Another", {}), ("A GPU", {"counts": {"sources": sources}})):
        monkeypatch.setattr(box, "nvidia_smi", lambda query, device=device: device)
        monkeypatch.setattr(queue, "record", lambda known=known: known)
        machine(counting(""), arguments=("--again", "counts"))
        assert json.loads(path.read_text())["records"] == [0, 1, 2]


def test_what_was_judged_before_is_left_out(tmp_path):
    """A run of the kit that was cut, and one whose file is only a part; that kernels are wrong is an answer."""
    assert box.but_for(tmp_path) == []
    last, done = tmp_path / "verdicts.json", {"status": 0, "late": False}
    cut = {"left": 3, "results": []}
    last.write_text(json.dumps(cut))
    cupy = next(job for job in JOBS if job.name == "cupy")
    assert not queue.is_whole(cupy, done, box.content_of(last))
    assert box.but_for(tmp_path) == ["--but", str(tmp_path / "verdicts-1.json")]
    last.write_text(json.dumps(cut)[:9])
    assert not queue.is_whole(cupy, done, box.content_of(last))
    assert box.but_for(tmp_path) == ["--but", str(tmp_path / "verdicts-1.json")]
    last.write_text(json.dumps(cut | {"left": 0}))
    assert queue.is_whole(cupy, done | {"status": 1}, box.content_of(last))
    assert box.but_for(tmp_path) == ["--but", *(str(tmp_path / f"verdicts-{n}.json") for n in (1, 2))]


def test_times_go_on_with_the_records_of_their_file(tmp_path, monkeypatch):
    """Of two cells with two modes, where time is up in the third."""
    path, asked = tmp_path / "times.json", []

    def measure(cell, mode, rows, settings):
        asked.append((cell.name, mode))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"ceiling": None, "baseline": None, "contenders": {}, "skipped": {}}

    monkeypatch.setattr(compare, "measure", measure)
    words = ["run", "-k", "relu and full", "--resume", "--out", str(path)]
    with pytest.raises(KeyboardInterrupt):
        measuring.main(words)
    assert json.loads(path.read_text())["left"] == 2
    assert measuring.main(words) == 0
    assert asked[2] == asked[3]
    found = json.loads(path.read_text())
    assert "left" not in found
    assert len({(record["name"], record["mode"]) for record in found["records"]}) == len(found["records"]) == 4
    assert measuring.main(words) == 0
    assert len(asked) == 5


def test_a_sweep_goes_on_with_the_tiles_whose_turn_did_not_come(monkeypatch):
    calls = ["relu, gradients"]
    monkeypatch.setattr(tiles.Prediction, "record", lambda bench, trial: tiles.record_of(trial) | {"ratio": [1, 1, 1]})
    every = [*tiles.sweep(calls, tiles.Prediction(90), 0, 60.0)]
    cut = [*tiles.sweep(calls, tiles.Prediction(90), 0, -1.0)]
    assert all(map(tiles.is_untimed, cut))
    known = json.loads(json.dumps(every[:2]))
    assert [*tiles.sweep(calls, tiles.Prediction(90), 0, 60.0, known)] == every[2:]


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

    def read(
        digests: dict[str, str], status: str = "pass", more: dict | None = None
    ) -> tuple[list[str], dict[str, str]]:
        folder, place = tmp_path / "gpu", tmp_path / "results"
        results = [CASE | {"id": "1", "status": "pass"}, CASE | {"id": "2", "status": status}]
        results += [CASE | {"id": "3", "status": "pass", "op": "pointwise_attention"}]
        times = {"environment": {"device": "A GPU"}, "records": [{"name": "relu", "mode": "forward", "seconds": 1}]}
        for job, kind, content in (
            ("first", "verdicts", {"results": results} | (more or {})),
            ("times-relu", "times", times),
        ):
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
    assert json.loads(files["judged.json"]) == {
        "9.9": {
            relu: {"sources": digests[relu], "cases": {"bfloat16": 1}},
            softmax: {"sources": digests[softmax], "cases": {"bfloat16": 2}},
        }
    }
    assert json.loads(files["a-gpu.json"])["records"] == [
        {"commit": "abc", "sources": "s", "name": "relu", "mode": "forward", "seconds": 1}
    ]
    rows = json.loads(files["verdicts-a-gpu.json"])["rows"]
    assert [(row["op"], row["pass"], row["worst"]) for row in rows] == [
        ("pointwise_attention", 1, 0.4),
        ("softmax_attention", 2, 0.4),
    ]
    assert {*json.loads(files["gpu-jobs.json"])} == {"first", "times-relu"}
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


def test_verdicts_that_were_cut_are_due_again(archived, tmp_path, monkeypatch):
    """Of two jobs the one that left fewer cases counts; a later one that leaves none ends it."""
    digests = {key: verdicts.digest(key) for key in verdicts.all_keys()}
    softmax = "torch triton, softmax"
    left = {"left": 4, "left_of": {"torch_cuda-triton": {"softmax_attention": 3, "pointwise_attention_packed": 1}}}
    _, files = archived(digests, more=left)
    judged = json.loads(files["judged.json"])["9.9"]
    assert judged[softmax] == {"sources": digests[softmax], "cases": {"bfloat16": 2}, "left": 3}
    assert "left" not in judged["torch triton, pointwise"]
    assert [*json.loads(files["gpu-jobs.json"])] == ["times-relu"]
    monkeypatch.setattr(verdicts, "record", lambda: {"9.9": judged})
    assert softmax in queue.without_verdict()
    assert "torch triton, pointwise" not in queue.without_verdict()
    assert verdicts.unjudged("torch triton", "softmax_attention") is None
    _, files = archived(digests, more={"results": [CASE | {"id": "1", "status": "unsupported"}]})
    assert [*json.loads(files["gpu-jobs.json"])] == ["times-relu"]
    _, files = archived(digests)
    assert "left" not in json.loads(files["judged.json"])["9.9"][softmax]
    assert {*json.loads(files["gpu-jobs.json"])} == {"first", "times-relu"}


def test_the_job_that_left_the_fewest_cases_counts():
    """By its last run; one that ended in a crash left what the run before said."""

    def said(left: int) -> dict:
        left_of = {CASE["adapter"]: {"softmax_attention": left}}
        return {"results": [CASE | {"id": "1", "status": "pass"}], "left_of": left_of}

    jobs = {"verify": {"verdicts": said(9)}, "first": {"verdicts-1": said(2), "verdicts": said(4)}}
    assert reading.left_in(reading.Archive({}, jobs)) == {"torch triton, softmax": 4}
    del jobs["first"]["verdicts"]
    assert reading.left_in(reading.Archive({}, jobs)) == {"torch triton, softmax": 2}


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


class Cuda(NamedTuple):
    """A device as CuPy has it."""

    compute_capability: str = "90"


class OnCuda(NamedTuple):
    dtype: str
    device: Cuda = Cuda()


def test_a_verdict_is_on_dtypes_and_a_class_of_devices(monkeypatch):
    key, op = "cupy cuda, softmax", "softmax_attention"
    cases = {"float16": 16, "float32": 71}
    monkeypatch.setattr(verdicts, "record", lambda: {"9.0": {key: {"sources": verdicts.digest(key), "cases": cases}}})
    assert verdicts.unjudged_for("cupy cuda", op, OnCuda("float32")) is None
    assert verdicts.unjudged_for("cupy cuda", op, OnCuda("float64")) == "judged in float16, float32 only"
    assert verdicts.unjudged_for("cupy cuda", op, OnCuda("float32", Cuda("120"))) == "judged on 9.0 only"
    assert verdicts.unjudged_for("cupy cuda", op, torch.zeros(1, dtype=torch.float64)).endswith("float32 only")


def test_explain_says_what_no_gpu_has_judged(monkeypatch):
    q = torch.zeros(1, 1, 4, 4)
    assert repr(attnkit.explain("softmax_attention", q, q, q)).endswith("}")
    monkeypatch.setattr(dispatch, "_unjudged", lambda kernels, op, x: "no GPU" if kernels == "torch generic" else None)
    answer = attnkit.explain("softmax_attention", q, q, q)
    assert answer.unjudged == {"generic": "no GPU"}
    assert repr(answer) == f"{dict(answer)!r}  # generic: no GPU"
