"""The n-th write, flush, rename or allocation of a run fails: it ends in one sentence, and `--resume` ends with the
bits of an undisturbed run.
"""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from attnkit_experiments.__main__ import main
from attnkit_experiments.engine import checkpoint
from attnkit_experiments.engine.files import PARTIAL, read_json
from attnkit_experiments.engine.leases import held
from attnkit_experiments.engine.metrics import Metrics, read_metrics
from attnkit_experiments.language.task import LanguageTask

from .test_killed import deterministic

SETTINGS = (
    *("length=16", "tokens=64", "steps=3", "tested=4", "methods=linear", "evaluate_every=0", "checkpoint_every=1"),
    "model=d32",
)
CELL = Path("cells", "linear-seed0")
CALLS = (
    (os, "fsync"), (os, "replace"), (Path, "write_text"), (Path, "mkdir"), (Metrics, "write"), (LanguageTask, "loss"),
    (checkpoint, "save_file"), (HuggingFaceStorageWriter, "write_data"),
)  # fmt: skip
NUMBERS = ("steps", "first_loss", "last_loss", "bits_per_byte", "parameters")
FEW = (2, 9, 22, 33, 54, 61)
"""Calls without a checkpoint before them, between two, and after the last."""


def run(out: Path, failing: int = 0) -> tuple[int, int]:
    """The study in `out`, begun or resumed, whose call number `failing` fails: its exit status, and its calls."""
    done = 0

    def guarded(call, name):
        def counted(*given, **options):
            nonlocal done
            done += 1
            if done == failing:
                if name == "loss":
                    raise torch.OutOfMemoryError("tried to allocate more than there is")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*given, **options)

        return counted

    words = ["run", "003-copying", "--data", "generated", "--seeds", "0", "--threads", "1", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        for place, name in CALLS:
            patch.setattr(place, name, guarded(getattr(place, name), name))
        status = main([*words, "--out", str(out), "--resume", *(f"--set={each}" for each in SETTINGS)])
    return status, done


def assert_survives(failing: int, out: Path, whole: Path, capsys) -> None:
    capsys.readouterr()
    status, _ = run(out, failing)
    said = capsys.readouterr().err
    if "Traceback" not in said:  # of the inspection, which costs no cell
        assert (status, said.count("\n")) == (2, 1), failing
    assert not held(out / "leases")
    assert run(out)[0] == 0, failing
    rows, expected = (list(map(deterministic, read_metrics(place / CELL / "metrics.jsonl"))) for place in (out, whole))
    assert rows == expected, failing
    ours, theirs = (load_file(place / CELL / "weights.safetensors") for place in (out, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys()), failing
    results = [read_json(place / CELL / "result.json") for place in (out, whole)]
    assert [results[0][key] for key in NUMBERS] == [results[1][key] for key in NUMBERS], failing
    assert not list(out.rglob(PARTIAL)), failing


def test_a_write_or_an_allocation_that_fails_costs_no_bit(tmp_path, capsys, monkeypatch):
    restored, restore = [], checkpoint.Checkpoints.restore
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", lambda self: restored.append(restore(self)) or restored[-1])
    status, calls = run(tmp_path / "whole")
    assert (status, calls > FEW[-1]) == (0, True)
    for failing in FEW:
        assert_survives(failing, tmp_path / str(failing), tmp_path / "whole", capsys)
    assert any(0 < step < 3 for step, _ in restored)  # otherwise no forgotten moment would be told


@pytest.mark.survival
def test_every_write_or_allocation_that_fails_costs_no_bit(tmp_path, capsys):
    _, calls = run(tmp_path / "whole")
    for failing in range(1, calls + 1):
        assert_survives(failing, tmp_path / str(failing), tmp_path / "whole", capsys)
