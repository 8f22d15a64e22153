"""The moving average of the weights: its formula, and that it is judged, kept and resumed beside them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from attnkit_experiments.commands.report import write_report
from attnkit_experiments.engine.ema import MovingAverage, decay_at
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.train import weights_in_place
from attnkit_experiments.engine.world import World
from tests.experiments.stopping import stopped_after
from tests.library.arrays import assert_agrees

CELL = "relu-alpha1-seed0"
CPU = torch.device("cpu")


def test_the_decay_rises_to_its_limit():
    assert [decay_at(step, 0.5) for step in (0, 1, 8, 9, 1000)] == [0.1, 2 / 11, 0.5, 0.5, 0.5]
    assert decay_at(10_000, 0.99996) == 10_001 / 10_010
    with pytest.raises(ValueError, match=r"ema must lie in \[0, 1\), got 1"):
        TrainConfig(steps=1, ema=1.0)


def test_the_average_is_that_of_the_formula():
    """Weights and what batch normalisation has counted; the number of its batches is copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = MovingAverage(model, 0.3, World(), CPU)
    wanted = {name: x.double() for name, x in model.state_dict().items()}
    for step in range(6):
        model(torch.randn(5, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        average.update(model, step)
        d = min(0.3, (1 + step) / (10 + step))
        wanted = {name: d * wanted[name] + (1 - d) * x for name, x in model.state_dict().items()}
    found = average.model.state_dict()
    assert found.pop("1.num_batches_tracked") == 6
    for name, x in found.items():
        assert_agrees(x, wanted[name], growth=6)  # steps, each with its rounding
    assert not any(p.requires_grad for p in average.model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_weights_are_put_back_bit_for_bit():
    model = nn.Linear(2, 2)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with weights_in_place(model, {name: x + 1 for name, x in before.items()}):
        assert torch.equal(model.bias, before["bias"] + 1)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_judged_beside_the_weights_and_resumed_as_if_never_stopped(tiny, tmp_path, undrawn):
    settings = ("ema=0.6", "evaluate_every=2", "checkpoint_every=2", "lr=0.01")
    plain, whole = tiny(tmp_path / "plain", *settings[1:]), tiny(tmp_path / "whole", *settings)
    with stopped_after(4):
        tiny(tmp_path / "out", *settings)
    out = tiny(tmp_path / "out", *settings, resume=True)
    rows, without = (
        [row["evaluation"] for row in read_metrics(run / "cells" / CELL / "metrics.jsonl") if "evaluation" in row]
        for run in (whole, plain)
    )
    assert [row["test_loss"] for row in rows] == [row["test_loss"] for row in without], "training is what it was"
    assert {"accuracy_ema", "test_loss_ema"} <= rows[-1].keys()
    assert rows[-1]["test_loss_ema"] != rows[-1]["test_loss"]
    assert "accuracy_ema" in json.loads((whole / "cells" / CELL / "result.json").read_text())
    assert "averaged" in write_report(whole).read_text()
    assert "(moving average of weights" in (whole / "summary.md").read_text()
    for name in ("weights.safetensors", "weights_ema.safetensors"):
        ours, theirs = (load_file(run / "cells" / CELL / name) for run in (out, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    raw, averaged = (load_file(whole / "cells" / CELL / f"weights{end}.safetensors") for end in ("", "_ema"))
    assert not torch.equal(raw["head.weight"], averaged["head.weight"])
    assert not (plain / "cells" / CELL / "weights_ema.safetensors").exists()
