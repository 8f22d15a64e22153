"""The same run on several processes, in float64: equal within rounding, resumed on another number, ended by the first
error.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.commands import runner
from attnkit_experiments.engine.checkpoint import seals, stored_weights
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.world import World
from tests.library.arrays import assert_agrees, assert_close

from .doubles import SHALLOW, in_float64
from .forks import PATIENCE, environment, forked
from .stopping import stopped_after
from .translation_cases import TINY, TRANSLATOR

CELL, GATED = Path("cells", "relu-alpha1-seed0"), Path("cells", "relu-alpha1-gate-seed0")
SETTINGS = (
    *("activations=relu", "alphas=1", f"model={SHALLOW}", "image_size=8", "patch=4", "train_images=0", "test_images=0"),
    *("steps=6", "batch=6", "checkpoint_every=2", "ema=0.6", "lazy=true", "crop=inception"),
)
WEIGHTS, AVERAGE = "weights.safetensors", "weights_ema.safetensors"
RECOMPUTED = "activation_checkpointing=true"
NUMBERS = ("loss", "grad_norm", "lr")
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # else restarted processes find the addresses of those before
DRIVER = """
import json
import os
import signal
import sys
import time
from pathlib import Path

from attnkit_experiments.commands import runner
from attnkit_experiments.images.task import ImageTask
from tests.experiments.doubles import in_float64

fault, given = sys.argv[1], json.loads(sys.argv[2])
loss = ImageTask.loss


def fail(self, ids, step, own):
    if self.model.config.gate and step == 3 and own.start:
        raise RuntimeError("this process has had enough")
    return loss(self, ids, step, own)


def hang(self, ids, step, own):
    time.sleep(3600 if step == 1 and own.start else 0)
    return loss(self, ids, step, own)


def die(self, ids, step, own):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == 3 and own.start:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(self, ids, step, own)


ImageTask.loss = {"fail": fail, "hang": hang, "die": die}.get(fault, loss)
given |= {"out": Path(given["out"]), "settings": tuple(given["settings"]), "seeds": (0,)}
with in_float64():
    runner.run(runner.Request(**given))
"""


def request(out, *settings, **options):
    """What a process is asked to run."""
    given = {"recipe": "000-fig4", "preset": "cpu", "data": "digits", "device": "cpu", "threads": 1, "out": str(out)}
    return given | {"settings": settings or SETTINGS} | options


def together(tmp_path, processes, given, fault="", restarts=0):
    """Run a study in several processes that torchrun starts; the finished subprocess."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*command, "--max-restarts", str(restarts), str(driver), fault, json.dumps(given)]
    variables = environment() | ({FRESH_STORE: "1"} if restarts else {})
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False)


def process(given):
    """Run a study as one of several processes."""
    given = json.loads(given)
    given |= {"out": Path(given["out"]), "settings": tuple(given["settings"]), "seeds": (0,)}
    with in_float64():
        runner.run(runner.Request(**given))


def assert_equal_runs(ours, theirs, cell=CELL, left_out=()):
    """The same samples, losses that differ by the rounding of float32, in which they are written down, and weights.

    AdamW divides by the root of the second moment and 1e-8, so that rounding of a gradient moves a weight by as much as
    lr/1e-8 times that in a step.
    """
    rows, expected = (read_metrics(out / cell / "metrics.jsonl") for out in (ours, theirs))
    assert [row.get("ids") for row in rows] == [row.get("ids") for row in expected]
    for row, other in zip(rows, expected, strict=True):
        numbers, wanted = (x.get("evaluation", {k: x.get(k) for k in NUMBERS}) for x in (row, other))
        assert numbers.keys() == wanted.keys()
        for key in numbers.keys() - {*left_out}:
            assert_agrees(float(numbers[key]), float(wanted[key]), dtype="float32")
    steps = [row for row in expected if "loss" in row]
    moved = sum(row["lr"] for row in steps) / TrainConfig(steps=1).eps
    gradient = min(max(row["grad_norm"] for row in steps), TrainConfig(steps=1).clip)
    for kind in (WEIGHTS, AVERAGE):
        assert (ours / cell / kind).exists() == (theirs / cell / kind).exists()
        if not (ours / cell / kind).exists():
            continue
        found, wanted = (load_file(out / cell / kind) for out in (ours, theirs))
        assert found.keys() == wanted.keys()
        for name, x in found.items():  # the gradient went there and back through the model
            assert x.dtype == torch.float64
            assert_close(x, wanted[name], 2 * TRANSLATOR * moved, magnitude=gradient)


@pytest.fixture
def whole(tiny, image_folder, tmp_path):
    """The run in one process, which decodes every image when a step needs it."""
    with in_float64():
        return tiny(tmp_path / "whole", *SETTINGS, data=str(image_folder))


SIZES = {
    2: ("accumulate=2",),
    3: ("accumulate=2", RECOMPUTED),
    4: (),
    5: ("accumulate=2", RECOMPUTED),
}
"""Numbers of processes, and settings of their trainings. Those of odd numbers hold a part of the model each (FSDP2)."""


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((4, 5), marks=pytest.mark.survival)])
def test_any_batch_on_any_number_of_processes_equals_one(sizes, corpus, tmp_path):
    """Of translation with its regulariser: tokens and rows of the whole step are what shares are divided by. Steps have
    one to three sentences, so that most leave processes without any.
    """
    settings = (*TINY, "methods=reluformer", "tokens=32", "steps=4")
    recipe = {"recipe": "001-table4", "data": str(corpus / "pairs")}
    asked = runner.Request("001-table4", "cpu", recipe["data"], tmp_path / "one", settings, (0,), "cpu", 1)
    with in_float64():
        one = runner.run(asked)
    cell = Path("cells", "reluformer-seed0")
    samples = [row["samples"] for row in read_metrics(one / cell / "metrics.jsonl") if "samples" in row]
    assert {*samples} == {1, 2, 3}
    jobs = {
        size: request(tmp_path / str(size), *settings, *SIZES[size], sharding=("ddp", "fsdp")[size % 2], **recipe)
        for size in sizes
    }
    forked(__name__, *((size, (json.dumps(job),)) for size, job in jobs.items()))
    for size in sizes:
        out = tmp_path / str(size)
        assert json.loads((out / "study.json").read_text())["environment"]["processes"] == size
        assert_equal_runs(out, one, cell, left_out=("decode_seconds",))


@pytest.mark.survival
def test_a_run_goes_on_in_parts_on_another_number_of_processes(whole, tiny, image_folder, tmp_path):
    """Stopped in one process, resumed by two of which each holds a part (FSDP2), and another decodes its images. A run
    of two from its start, whose images are mixed with their neighbours, equals that of one too, and so does the moving
    average of its weights.
    """
    out, two = tmp_path / "out", tmp_path / "two"
    with stopped_after(4), in_float64():
        tiny(out, *SETTINGS, data=str(image_folder))
    assert read_metrics(out / CELL / "metrics.jsonl")[-1]["step"] == 4
    resumed = request(out, data=str(image_folder), sharding="fsdp", workers=1, resume=True)
    forked(__name__, *((2, (json.dumps(job),)) for job in (resumed, request(two, data=str(image_folder)))))
    assert_equal_runs(out, whole)
    stored, weights = stored_weights(seals(out / CELL / "checkpoints")[-1]), load_file(out / CELL / WEIGHTS)
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], x) for name, x in weights.items()), "parts are put together"
    assert_equal_runs(two, whole)
    assert (whole / CELL / AVERAGE).exists()


@pytest.mark.survival
def test_a_process_that_fails_ends_the_job_with_its_error(whole, image_folder, tmp_path):
    """In its second cell."""
    done = together(tmp_path, 2, request(tmp_path / "out", data=str(image_folder)), fault="fail")
    assert done.returncode != 0
    assert "this process has had enough" in done.stderr
    assert not (tmp_path / "out" / GATED / "result.json").exists()
    assert_equal_runs(tmp_path / "out", whole)


@pytest.mark.survival
def test_a_job_that_is_restarted_goes_on_at_its_checkpoint(whole, image_folder, tmp_path):
    """One process is killed in a fourth step, and torchrun starts all of them again with --resume."""
    given = request(tmp_path / "out", data=str(image_folder), resume=True)
    done = together(tmp_path, 2, given, fault="die", restarts=1)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert_equal_runs(tmp_path / "out", whole)
    assert_equal_runs(tmp_path / "out", whole, GATED)


@pytest.mark.survival
def test_a_process_that_hangs_ends_the_job_after_the_timeout(image_folder, tmp_path):
    done = together(tmp_path, 2, request(tmp_path / "out", data=str(image_folder), timeout=0.05), fault="hang")
    assert done.returncode != 0
    assert "Timed out waiting 3000ms" in done.stderr


def test_a_timeout_that_is_none_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="--timeout 0: expected minutes above 0"):
        tiny(tmp_path / "out", timeout=0)


@pytest.mark.parametrize(("rank", "order"), [(0, ["read", "wait"]), (1, ["wait", "read"])])
def test_the_main_process_reads_first_and_every_process_once(rank, order, monkeypatch):
    done = []

    def read():
        done.append("read")
        return rank + 3

    monkeypatch.setattr(World, "wait", lambda world: done.append("wait"))
    assert World(rank, 2).in_turn(read) == rank + 3
    assert done == order


def test_shares_of_a_step_cover_it_once():
    for size, accumulate in ((1, 1), (3, 2), (4, 1)):
        for samples in (13, 2, 1):
            worlds = [World(rank, size, sharding) for rank in range(size) for sharding in ("ddp", "fsdp")]
            parts = [(world.sharding, part) for world in worlds for part in world.parts(samples, accumulate)]
            for kind in ("ddp", "fsdp"):
                assert [n for sharding, part in parts if sharding == kind for n in range(samples)[part]] == [
                    *range(samples)
                ]


def test_every_process_has_a_part_and_the_main_one_a_sample():
    assert World(0, 3).parts(1, 1) == [slice(0, 1)]
    assert World(2, 3).parts(1, 1) == [slice(1, 1)]
    assert World(0, 1).parts(1, 4) == [slice(0, 1)]
    assert len(World(2, 3, "fsdp").parts(1, 4)) == 4
