"""A study as a queue: workers share its cells, and what one that dies has begun is ended by another."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import queue, runner
from attnkit_experiments.commands.queue import LEASES
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.leases import held
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.world import World

from .forks import PATIENCE, environment
from .test_killed import deterministic

SETTINGS = ("alphas=0,1", "steps=6", "checkpoint_every=2")
DRIVER = """
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from attnkit_experiments.commands import queue, runner
from attnkit_experiments.engine.metrics import Metrics
from tests.experiments.forks import share_imports

share_imports()
out = Path(sys.argv[1])
write = Metrics.write


def write_and_die(self, row):
    write(self, row)
    if row["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def worker(dies):
    queue.POLL_SECONDS = 0.1
    if dies:
        Metrics.write = write_and_die
    runner.work(out, data="digits", threads=1)


fork = multiprocessing.get_context("fork")
dying = fork.Process(target=worker, args=(True,))
others = [fork.Process(target=worker, args=(False,)) for _ in range(2)]
dying.start()
while not list(out.glob("cells/*/metrics.jsonl")):  # it has begun a cell
    dying.join(0.01)
for each in others:
    each.start()
dying.join()
for each in others:
    each.join()
assert [dying.exitcode, *(each.exitcode for each in others)] == [-signal.SIGKILL, 0, 0]
"""


@pytest.mark.survival
def test_three_workers_one_of_which_dies_end_as_one_run(tiny, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    tiny(out, *SETTINGS, enqueue=True)
    assert not (out / "cells").exists()
    words = [sys.executable, "-c", DRIVER, str(out)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("]") >= 4
    assert held(out / LEASES) == {}
    assert_equal_studies(out, tiny(whole, *SETTINGS))


def assert_equal_studies(out, whole):
    cells = json.loads((out / "study.json").read_text())["cells"]
    assert json.loads((out / "finished.json").read_text()) == json.loads((whole / "finished.json").read_text())
    for cell in cells:
        folders = [folder / "cells" / cell for folder in (out, whole)]
        rows, expected = (list(map(deterministic, read_metrics(folder / "metrics.jsonl"))) for folder in folders)
        assert rows == expected
        ours, theirs = (load_file(folder / "weights.safetensors") for folder in folders)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


KILLER = """
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

from attnkit_experiments.commands import queue, runner
from tests.experiments.forks import share_imports

share_imports()
out, kills = Path(sys.argv[1]), int(sys.argv[2])
fork, draw = multiprocessing.get_context("fork"), random.Random(3)


def worker():
    queue.POLL_SECONDS = 0.1
    runner.work(out, data="digits", threads=1)


def started():
    process = fork.Process(target=worker)
    process.start()
    return process


workers, killed = [started() for _ in range(3)], 0
while killed < kills:
    time.sleep(draw.uniform(0.05, 0.6))
    number = draw.randrange(3)
    os.kill(workers[number].pid, signal.SIGKILL)
    workers[number].join()
    killed += workers[number].exitcode == -signal.SIGKILL
    if (out / "finished.json").exists():
        break
    workers[number] = started()
for each in workers:
    each.join()
print(killed)
"""


@pytest.mark.survival
def test_three_workers_that_are_killed_twenty_times_end_as_one_run(tiny, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    settings = ("alphas=0,1", "steps=120", "checkpoint_every=3")
    tiny(out, *settings, enqueue=True)
    words = [sys.executable, "-c", KILLER, str(out), "20"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == 20, "they have finished before"
    assert held(out / LEASES) == {}
    assert_equal_studies(out, tiny(whole, *settings))


def test_work_has_nothing_left_to_do_in_a_finished_study(tiny, tmp_path, capsys):
    out = tiny(tmp_path / "out")
    capsys.readouterr()
    assert main(["work", str(out), "--data", "digits", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("already there") == 2
    assert f"done; python -m experiments report {out}" in said


@pytest.mark.parametrize("looks", [0, 3])
def test_a_cell_that_others_train_is_waited_for_and_announced_once(looks, tmp_path, monkeypatch):
    """Between two looks there is a pause, and none after the last cell."""
    taken, events = [None] * looks, list[str]()

    class Taken:
        check, release = None, staticmethod(lambda: None)

    monkeypatch.setattr(queue, "claim", lambda folder, name: taken.pop() if name == "slow" and taken else Taken)
    monkeypatch.setattr(queue, "run_cell", lambda study, cell, world, **options: {"name": cell.name})
    monkeypatch.setattr(queue, "say", events.append)
    monkeypatch.setattr(queue.time, "sleep", lambda seconds: events.append("pause"))
    study = SimpleNamespace(cells=[SimpleNamespace(name=name) for name in ("slow", "fast")], out=tmp_path)
    assert queue.train_cells(study, World()) == [{"name": "slow"}, {"name": "fast"}]
    assert events == ["waiting for what others train: slow"] * (looks > 0) + ["pause"] * looks


def test_work_without_a_study_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no study; python -m experiments run starts one"):
        runner.work(tmp_path)
    out = runner.run(runner.Request("002-table3", "smoke", "", tmp_path / "out", device="cpu", threads=1))
    with pytest.raises(UserError, match="002-table3 is measured, not trained"):
        runner.work(out)


def test_what_only_work_does_is_not_dropped_in_silence(tiny, tmp_path):
    trained = tiny(tmp_path / "trained")
    with pytest.raises(UserError, match=r"run --enqueue trains nothing: give --reuse and --keep-going to work"):
        tiny(tmp_path / "out", enqueue=True, reuse=(trained,), keep_going=True)
    assert not (tmp_path / "out" / "study.json").exists()
