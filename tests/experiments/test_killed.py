"""A run killed with SIGKILL and resumed ends as if never killed: losses, sample ids and weights, bit for bit."""

import signal
import subprocess
import sys
import time

import torch
from safetensors.torch import load_file

from experiments.metrics import read_metrics

SETTINGS = (
    *("activations=relu", "alphas=1", "image_size=16", "patch=4", "train_images=200", "test_images=50"),
    *("steps=80", "batch=16", "checkpoint_every=10"),
)
CELL = "relu-alpha1-seed0"


def command(out, *flags):
    words = ["run", "000-fig4", "--preset", "cpu", "--data", "digits", "--out", str(out), "--seeds", "0"]
    return [sys.executable, "-m", "experiments", *words, "--device", "cpu", "--set", *SETTINGS, *flags]


def test_killed_and_resumed_equals_never_killed(tmp_path, tiny):
    out, whole = tmp_path / "out", tmp_path / "whole"
    metrics = out / "cells" / CELL / "metrics.jsonl"
    process = subprocess.Popen(command(out, "--threads", "1"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 25):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "cells" / CELL / "result.json").exists()
    reached = len(read_metrics(metrics))
    assert 25 <= reached < 80

    subprocess.run(command(out, "--resume"), check=True, stdout=subprocess.DEVNULL)
    tiny(whole, *SETTINGS)
    for cell in (CELL, "relu-alpha1-gate-seed0"):
        rows = [
            [
                (
                    row["step"],
                    row.get("loss"),
                    row.get("grad_norm"),
                    row.get("lr"),
                    row.get("ids"),
                    row.get("evaluation"),
                )
                for row in read_metrics(folder / "cells" / cell / "metrics.jsonl")
            ]
            for folder in (out, whole)
        ]
        assert rows[0] == rows[1]
        ours, theirs = (load_file(folder / "cells" / cell / "weights.safetensors") for folder in (out, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
