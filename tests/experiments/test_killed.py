"""A run killed at random moments, again and again, and resumed ends as if never killed: bit for bit in its losses,
sample ids, weights and their moving average. What it leaves of checkpoints are those that are sealed.
"""

import json
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.engine.files import PARTIAL
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.speed import RATES

from .forks import PATIENCE, environment

SETTINGS = (
    *("activations=relu", "alphas=1", "image_size=8", "patch=4", "train_images=60", "test_images=20"),
    *("steps=16", "warmup=4", "batch=8", "checkpoint_every=3", "ema=0.9"),
)
# SIGALRM ends a process at once, at any instruction
DRIVER = """
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from attnkit_experiments.commands import runner

SETTINGS, SHARDING = tuple(json.loads(sys.argv[2])), sys.argv[3]


def process(rank, size, port, out, seconds):
    if size > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    given = {"resume": True, "sharding": SHARDING}
    runner.run(runner.Request("000-fig4", "cpu", "digits", Path(out), SETTINGS, (0,), "cpu", 1, **given))
    signal.setitimer(signal.ITIMER_REAL, 0)


def attempt(size, out, seconds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    killed = int(1000 * seconds) % size  # one of them; the others end by themselves, or are ended
    ranks = [
        fork.Process(target=process, args=(rank, size, port, out, seconds if rank == killed else 0))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    while ranks[killed].is_alive():
        time.sleep(0.01)
    for each in ranks:
        each.join(1 if ranks[killed].exitcode else None)
        if each.is_alive():
            each.kill()
            each.join()
    return [each.exitcode for each in ranks]


size, out, shares = json.loads(sys.argv[1])
start = time.monotonic()
assert attempt(size, out + "-whole", 0) == [0] * size
whole = time.monotonic() - start
for _ in range(6):
    ends = [attempt(size, out, share * whole) for share in shares]
    if any(-signal.SIGALRM in end for end in ends):
        break
    shutil.rmtree(out)  # it ended before: the machine has become faster
    whole /= 2
else:
    sys.exit("no run was killed before its end")
assert attempt(size, out, 0) == [0] * size
"""
KILLS = 20
CELLS = ("relu-alpha1-seed0", "relu-alpha1-gate-seed0")


def deterministic(row):
    """Without the times."""
    return {key: value for key, value in row.items() if key not in (*RATES, "seconds")}


@pytest.mark.survival
@pytest.mark.parametrize(("processes", "sharding"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_killed_at_random_moments_equals_never_killed(processes, sharding, tmp_path):
    draw = random.Random(processes)
    shares = [draw.uniform(0.05, 0.5) for _ in range(KILLS)]
    job = json.dumps((processes, str(tmp_path / "out"), shares))
    words = [sys.executable, "-c", DRIVER, job, json.dumps(SETTINGS), sharding]
    limit = PATIENCE * (1 + KILLS // 4)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    out, whole = tmp_path / "out", tmp_path / "out-whole"
    assert not list(out.rglob(PARTIAL)) + list((out / "leases").glob("[!.]*"))
    for cell in CELLS:
        left = sorted(path.name for path in (out / "cells" / cell / "checkpoints").iterdir())
        assert [name[:13] for name in left] == ["step-00000015"] * 2 + ["step-00000016"] * 2
        folders = out / "cells" / cell, whole / "cells" / cell
        rows, expected = (list(map(deterministic, read_metrics(folder / "metrics.jsonl"))) for folder in folders)
        assert rows == expected
        for name in ("weights.safetensors", "weights_ema.safetensors"):
            ours, theirs = (load_file(folder / name) for folder in folders)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
