"""A run that is told to stop: it ends after a step, saved, with the status that asks to be queued again, and what is
resumed ends as if never stopped.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import queue
from attnkit_experiments.commands.queue import LEASES
from attnkit_experiments.engine.checkpoint import Checkpoints, seals
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.leases import claim, held
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.preemption import SAVED, UNSAVED, Preempted, Stop, listening
from attnkit_experiments.images.task import ImageTask

from .forks import PATIENCE, environment
from .test_killed import deterministic

SETTINGS = ("evaluate_every=4", "checkpoint_every=3", "ema=0.9")
CELL = Path("cells", "relu-alpha1-seed0")
DRIVER = """
import os
import signal
import time

from attnkit_experiments.engine.preemption import SAVED, Preempted, listening


def step(signals, pause, unsaved, seconds):
    with listening(0.2 if seconds and len(signals) == 1 else 60) as stop, stop.after_a_step():
        stop.unsaved = unsaved
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(pause)
        time.sleep(seconds)


def status(*given):
    child = os.fork()
    if not child:
        try:
            step(*given)
        except Preempted:
            os._exit(SAVED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
print(status([TERM], 0, True, 60), status([USR1], 0, False, 60))
print(status([USR1, TERM], 1.1, True, 60), status([TERM] * 3, 0.01, True, 0))
"""

JOB = """
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

from attnkit_experiments.commands import runner
from attnkit_experiments.engine.preemption import SAVED, Preempted
from attnkit_experiments.images.task import ImageTask
from tests.experiments.forks import share_imports

out, told, hangs, sharding = json.loads(sys.argv[1])
loss = ImageTask.loss


def process(rank, size, port):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})

    def loss_and_signal(self, ids, step, own):
        if step == 4 and rank in told:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 4 and rank == hangs:
            time.sleep(60)
        return loss(self, ids, step, own)

    ImageTask.loss = loss_and_signal
    settings = ("activations=relu", "alphas=1", "image_size=8", "patch=4", "train_images=60", "test_images=20",
                "steps=6", "batch=8", "checkpoint_every=3", "evaluate_every=4", "ema=0.9")
    given = {"resume": True, "sharding": sharding, "grace": 3 if hangs >= 0 else 60}
    try:
        runner.run(runner.Request("000-fig4", "cpu", "digits", Path(out), settings, (0,), "cpu", 1, **given))
    except Preempted as stopped:
        print(stopped, flush=True)
        os._exit(SAVED)


share_imports()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
fork = multiprocessing.get_context("fork")
ranks = [fork.Process(target=process, args=(rank, 2, port)) for rank in range(2)]
for each in ranks:
    each.start()
for each in ranks:
    each.join()
print(*(each.exitcode for each in ranks))
"""


def job(*given):
    """Two processes as one run; what they say, in lines, the last of which are their statuses."""
    words = [sys.executable, "-c", JOB, json.dumps(given)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.survival
@pytest.mark.parametrize(("told", "sharding"), [((1,), "ddp"), ((0,), "fsdp"), ((0, 1), "ddp")])
def test_processes_agree_on_the_step_after_which_they_stop(told, sharding, tmp_path):
    """Whichever is told. One that was not says so, and the run goes on from there."""
    out, whole = str(tmp_path / "out"), str(tmp_path / "whole")
    assert job(whole, (), -1, sharding)[0][-1] == "0 0"
    said, _ = job(out, told, -1, sharding)
    assert said[-1] == f"{SAVED} {SAVED}"
    stopped = [line for line in said if "stopped after step 5 by" in line]
    assert len(stopped) == 2
    assert sum("by a signal to another process" in line for line in stopped) == 2 - len(told)
    assert not held(Path(out) / LEASES)
    assert job(out, (), -1, sharding)[0][-1] == "0 0"
    assert_equal_cells(Path(out), Path(whole))


@pytest.mark.survival
def test_where_a_peer_does_not_answer_the_last_whole_checkpoint_stays(tmp_path):
    out, whole = str(tmp_path / "out"), str(tmp_path / "whole")
    said, errors = job(out, (0, 1), 1, "ddp")
    assert said[-1] == f"{UNSAVED} {UNSAVED}"
    assert errors.count("not stopped within --grace 3 after SIGTERM; steps after the last checkpoint are lost") == 2
    assert [path.name for path in seals(Path(out) / CELL / "checkpoints")] == ["step-00000003.json"]
    assert job(out, (), -1, "ddp")[0][-1] == job(whole, (), -1, "ddp")[0][-1] == "0 0"
    assert_equal_cells(Path(out), Path(whole))


def assert_equal_cells(ours, theirs, cell=CELL):
    rows, expected = (list(map(deterministic, read_metrics(out / cell / "metrics.jsonl"))) for out in (ours, theirs))
    assert rows == expected
    for name in ("weights.safetensors", "weights_ema.safetensors"):
        found, wanted = (load_file(out / cell / name) for out in (ours, theirs))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in found)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("whole") / "out", *SETTINGS)


@pytest.fixture
def told(monkeypatch):
    """Send a signal to this process while the loss of a step is computed."""
    loss = ImageTask.loss

    def at(last, number):
        def loss_and_signal(self, ids, step, own):
            if step + 1 == last:
                os.kill(os.getpid(), number)
            return loss(self, ids, step, own)

        monkeypatch.setattr(ImageTask, "loss", loss_and_signal)

    yield at
    monkeypatch.setattr(ImageTask, "loss", loss)


TOLD = [
    *(pytest.param(step, signal.SIGTERM, marks=pytest.mark.survival) for step in (1, 2, 3, 5, 6)),
    (4, signal.SIGUSR1),
]


@pytest.mark.parametrize(("step", "number"), TOLD)
def test_a_run_that_is_told_to_stop_saves_its_step_and_goes_on_from_there(step, number, told, whole, tiny, tmp_path):
    """Before the first checkpoint, where one or an evaluation is due, and after the last step."""
    out, before = tmp_path / "out", signal.getsignal(number)
    told(step, number)
    with pytest.raises(Preempted) as stopped:
        tiny(out, *SETTINGS)
    text = f"[1/2] relu-alpha1-seed0: stopped after step {step} by {number.name}, and saved; --resume continues there"
    assert str(stopped.value) == text
    assert signal.getsignal(number) == before
    assert int(seals(out / CELL / "checkpoints")[-1].stem[-8:]) == step
    assert not held(out / LEASES)
    told(0, number)
    tiny(out, *SETTINGS, resume=True)
    assert_equal_cells(out, whole)


def test_the_exit_status_asks_for_a_requeue_and_work_gives_its_lease_back(told, whole, tiny, tmp_path, capsys):
    out = tmp_path / "out"
    tiny(out, *SETTINGS, enqueue=True)
    told(2, signal.SIGTERM)
    assert main(["work", str(out), "--data", "digits", "--threads", "1"]) == SAVED == 75
    said = capsys.readouterr()
    assert "stopped after step 2 by SIGTERM, and saved" in said.err
    assert not list((out / LEASES).glob("[!.]*"))
    told(0, signal.SIGTERM)
    assert main(["work", str(out), "--data", "digits", "--threads", "1"]) == 0
    assert "a stop by SIGTERM or SIGUSR1 needs " in capsys.readouterr().out
    assert_equal_cells(out, whole)


def test_a_worker_that_waits_for_others_stops_at_once(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    tiny(out, *SETTINGS, enqueue=True)
    monkeypatch.setattr(queue.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGUSR1))
    monkeypatch.setattr(queue, "run_cell", lambda study, cell, world, **options: {"name": cell.name})
    with claim(out / LEASES, "relu-alpha1-seed0") as other:
        assert main(["work", str(out), "--data", "digits", "--threads", "1"]) == SAVED
        assert [*held(out / LEASES)] == ["relu-alpha1-seed0"]
        other.check()
    assert "stopped by SIGUSR1; --resume continues at the last checkpoint" in capsys.readouterr().err


def test_a_stop_that_takes_too_long_ends_by_itself_and_a_second_signal_at_once():
    """Statuses: in a step that hangs, in one that is saved, at a second signal, and after three that were one."""
    words = [sys.executable, "-c", DRIVER]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == [str(status) for status in (UNSAVED, SAVED, 128 + signal.SIGTERM, SAVED)]
    assert "not stopped within --grace 0.2 after SIGTERM; steps after the last checkpoint are lost" in done.stderr
    assert "ended by a second SIGTERM" in done.stderr


def test_what_a_stop_needs_is_said_once_and_again_when_it_is_more(capsys):
    stop = Stop(grace=5)
    for step, save in ((1.0, 0.5), (1.2, 0.5), (1.2, 4.4), (1.2, 4.4)):
        stop.announce(step, save)
    need = "a stop by SIGTERM or SIGUSR1 needs {}"
    assert capsys.readouterr().out.splitlines() == [
        need.format("1.5 s: 1.0 to the end of a step or an evaluation, 0.5 for a checkpoint"),
        need.format(
            "5.6 s: 1.2 to the end of a step or an evaluation, 4.4 for a checkpoint; that is more than --grace 5"
        ),
    ]


def test_a_checkpoint_of_a_stop_takes_the_place_of_none(tmp_path):
    """Of those whose mean is taken, where `average` is above 1; it goes with the next that is due."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    left = []
    with Checkpoints(
        tmp_path, config_hash="x", model=model, optimizer=optimizer, due=lambda step: step % 3 == 0
    ) as checkpoints:
        for step in (3, 6, 7, 9):
            checkpoints.save(step=step, seconds=0.0)
            checkpoints.wait()
            left.append([int(path.stem[-8:]) for path in seals(tmp_path)])
    assert left == [[3], [3, 6], [3, 6, 7], [6, 9]]


def test_a_grace_that_is_none_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="--grace 0: expected seconds above 0"):
        tiny(tmp_path / "out", grace=0)
    with pytest.raises(UserError, match="--grace nan"), listening(float("nan")):
        pass
