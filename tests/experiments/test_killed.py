"""A run killed with SIGKILL and resumed by another process ends as if never killed: bit for bit in its losses, sample
ids and weights.
"""

import signal
import subprocess
import sys

import torch
from safetensors.torch import load_file

from attnkit_experiments.engine.metrics import read_metrics

SETTINGS = (
    *("activations=relu", "alphas=1", "image_size=16", "patch=4", "train_images=200", "test_images=50"),
    *("steps=24", "warmup=4", "batch=16", "checkpoint_every=5"),
)
KILLED_AT = 13  # between two checkpoints, in the second epoch
CELL = "relu-alpha1-seed0"
DRIVER = f"""
import os
import signal
import sys

from attnkit_experiments.__main__ import main
from attnkit_experiments.engine.metrics import Metrics

write = Metrics.write


def write_and_die(self, row):
    write(self, row)
    if row["step"] == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)


Metrics.write = write_and_die
main(sys.argv[1:])
"""


def test_killed_and_resumed_equals_never_killed(tmp_path, tiny):
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = ["run", "000-fig4", "--preset", "cpu", "--data", "digits", "--out", str(out), "--seeds", "0"]
    words += ["--device", "cpu", "--threads", "1", "--set", *SETTINGS]
    killed = subprocess.run([sys.executable, "-c", DRIVER, *words], stdout=subprocess.DEVNULL, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "cells" / CELL / "result.json").exists()
    assert read_metrics(out / "cells" / CELL / "metrics.jsonl")[-1]["step"] == KILLED_AT

    tiny(out, *SETTINGS, resume=True)
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
