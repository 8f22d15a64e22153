"""Metrics shown in TensorBoard and Weights & Biases: every row, a resumed run too, and neither needed otherwise."""

import json
import sys
from types import ModuleType

import pytest

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.metrics import read_metrics

from .stopping import stopped_after

CELL = "relu-alpha1-seed0"
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Board(ModuleType):
    """What a study calls of torch.utils.tensorboard and of wandb."""

    class Error(Exception):
        """The base of wandb's errors."""

    def __init__(self):
        super().__init__("board")
        self.started, self.shown, self.closed = [], [], 0

    def SummaryWriter(self, folder, purge_step):
        self.started.append((folder, purge_step))
        return self

    def add_scalar(self, name, value, step):
        self.shown.append((step, name, value))

    def init(self, **given):
        self.started.append(given)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row):
        self.shown += [(row["step"], name, value) for name, value in row.items() if name != "step"]

    def close(self):
        self.closed += 1

    finish = close


@pytest.fixture
def board(monkeypatch):
    made = Board()
    for name in MODULES.values():
        monkeypatch.setitem(sys.modules, name, made)
    return made


def expected(folder):
    """The numbers of the metrics of a cell."""
    for row in read_metrics(folder / "metrics.jsonl"):
        for name, value in row.items():
            if name == "evaluation":
                yield from ((row["step"], f"eval/{key}", number) for key, number in value.items())
            elif name in ("loss", "lr", "grad_norm", "samples"):
                yield row["step"], f"train/{name}", value
            elif name not in ("step", "ids"):
                yield row["step"], f"perf/{name}", value


@pytest.mark.parametrize("track", MODULES)
def test_every_number_is_shown_from_where_a_run_goes_on(track, board, tiny, tmp_path):
    settings = ("steps=4", "evaluate_every=3", "checkpoint_every=2")
    with stopped_after(2):
        tiny(tmp_path / "out", *settings, track=track)
    first, board.shown = board.shown, []
    tiny(tmp_path / "out", *settings, resume=True, track=track)
    folder = tmp_path / "out" / "cells" / CELL
    shown = [each for each in first if each[0] <= 2] + board.shown
    assert shown[: len(list(expected(folder)))] == list(expected(folder))
    begun, resumed, _ = board.started  # and the second cell
    if track == "tensorboard":
        assert (begun, resumed) == ((str(folder / "tensorboard"), 1), (str(folder / "tensorboard"), 3))
    else:
        assert begun == resumed
        assert begun["name"] == CELL
        assert begun["resume"] == "allow"
        assert begun["config"] == json.loads((folder / "config.json").read_text())
    assert board.closed == 3


def test_wandbs_refusal_is_told_in_a_sentence(board, tiny, tmp_path, monkeypatch):
    def refuse(**given):
        raise board.Error("api_key not configured")

    monkeypatch.setattr(board, "init", refuse)
    with pytest.raises(UserError, match=r"^--track wandb: api_key not configured$"):
        tiny(tmp_path / "out", track="wandb")


@pytest.mark.parametrize("track", MODULES)
def test_a_package_that_is_not_installed_is_named_before_anything_is_read(track, tmp_path, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, MODULES[track], None)
    words = ["run", "000-fig4", "--data", "digits", "--out", str(tmp_path / "out"), "--track", track]
    assert f"error: --track {track}: expected the package {track} to be installed, got: " in refusal(*words)
    assert not (tmp_path / "out").exists()
