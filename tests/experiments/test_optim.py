"""Optimisers against steps written in NumPy, big_vision's weight decay, and Adafactor's state through a checkpoint."""

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from attnkit_conformance.model import tolerance
from attnkit_experiments.engine.adafactor import Adafactor
from attnkit_experiments.engine.optim import TrainConfig, learning_rate, make_optimizer
from tests.experiments.stopping import stopped_after
from tests.library.arrays import assert_agrees, assert_close

SHAPES = ((32, 40), (40, 31), (33,))  # in factors, a side too short, no matrix
CELL = "cells/relu-alpha1-seed0"


def gradients(step):
    rng = np.random.default_rng(step)
    return [(10.0 ** rng.uniform(-3, 3) * rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES]


def adafactor_in_numpy(w, *, lr, decay, steps):
    """float64 but for the momentum, which is kept in bfloat16."""
    kept = [np.zeros(shape) for shape in SHAPES]
    square, rows, columns = np.zeros((3, 1)), np.zeros(32), np.zeros(40)
    square = [0.0, np.zeros(SHAPES[1]), np.zeros(SHAPES[2])]
    for step in range(steps):
        beta = min(0.999, 1 - (step + 1) ** -0.8)
        for n, g in enumerate(gradients(step)):
            s = g.astype(np.float64) ** 2 + 1e-30
            if n == 0:
                rows = beta * rows + (1 - beta) * s.mean(axis=1)
                columns = beta * columns + (1 - beta) * s.mean(axis=0)
                v = np.outer(rows, columns) / rows.mean()
            else:
                square[n] = v = beta * square[n] + (1 - beta) * s
            m = 0.9 * kept[n] + 0.1 * g / np.sqrt(v)
            kept[n] = m.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
            w[n] = w[n] - lr * (m + decay * w[n])
    return w


def start():
    return [np.random.default_rng(9).standard_normal(shape) for shape in SHAPES]


def test_adafactor_takes_the_steps_written_in_numpy():
    parameters = [nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in start()]
    optimizer = Adafactor(parameters, lr=0.02, weight_decay=0.1)
    for step in range(4):
        for p, g in zip(parameters, gradients(step), strict=True):
            p.grad = torch.tensor(g)
        optimizer.step()
    for p, w in zip(parameters, adafactor_in_numpy(start(), lr=0.02, decay=0.1, steps=4), strict=True):
        # one unit of the momentum's bfloat16 where the rounding falls the other way, elsewhere that of the weights
        gap = np.abs(p.detach().numpy() - w)
        assert gap.max() <= 0.02 * 2**-8
        assert gap.mean() <= tolerance.BOUND["float32"] * tolerance.eps("float32") * np.abs(w).mean()


def test_adafactor_keeps_a_matrix_in_factors_and_caps_its_memory():
    parameter = nn.Parameter(torch.zeros(32, 32))
    optimizer = Adafactor([parameter], lr=1.0)
    state = optimizer.state[parameter]
    parameter.grad = torch.ones(32, 32)
    optimizer.step()
    assert state.keys() == {"step", "momentum", "rows", "columns"}
    state["step"].fill_(10**6)
    state["rows"].fill_(2.0)
    optimizer.step()
    assert_close(state["rows"], torch.full((32,), 0.999 * 2 + 0.001))


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_decay_per_step_follows_the_schedule_and_not_the_rate(optimizer):
    """big_vision: w ← w - schedule·(lr·u + wd·w); without a gradient that matters only wd·w is left."""
    for lr in (1e-3, 1e-2):
        config = TrainConfig(
            steps=10, lr=lr, warmup=2, weight_decay=1e-4, decay_per_step=True, optimizer=optimizer, eps=1e30
        )
        model = nn.Linear(3, 3, bias=False)
        before = model.weight.detach().clone().double()
        stepper = make_optimizer(model, config)
        model.weight.grad = torch.zeros(3, 3)
        for step in range(4):
            for group in stepper.param_groups:
                group["lr"] = learning_rate(step, config)
            stepper.step()
            before = before * (1 - 1e-4 * learning_rate(step, config) / lr)
        assert_agrees(model.weight, before)


def test_adamw_with_a_tenth_is_big_visions_decay_at_its_own_rate():
    """m̂/(√v̂ + eps) by hand; decoupled decay: 1e-4 of the schedule is 0.1 of the rate 1e-3."""
    w, m, v = np.array([[0.5, -1.5]]), 0.0, 0.0
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(w))
    config = TrainConfig(steps=20, lr=1e-3, warmup=5)
    optimizer = make_optimizer(model, config)
    for step in range(3):
        g = np.array([[0.3 * (step + 1), -0.01]])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        w = w - (step + 1) / 5 * (1e-3 * u + 1e-4 * w)
        optimizer.param_groups[0]["lr"] = learning_rate(step, config)
        model.weight.grad = torch.tensor(g)
        optimizer.step()
    assert_close(model.weight, w)


def test_an_optimiser_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adafactor; got 'lion'"):
        TrainConfig(steps=1, optimizer="lion")


def test_adafactor_is_resumed_to_the_bit_and_takes_a_step_in_parts(tiny, tmp_path, monkeypatch):
    settings = ("optimizer=adafactor", "accumulate=2", "checkpoint_every=2", "softmax=no")
    monkeypatch.setattr("attnkit_experiments.report.claims.measure", dict)
    with stopped_after(4):
        tiny(tmp_path / "out", *settings, recipe="000-fig2")
    (file,) = (tmp_path / "out" / CELL / "checkpoints").glob("step-00000004-*/*.safetensors")
    stored = load_file(file)
    assert {x.dtype for name, x in stored.items() if name.endswith(".momentum")} == {torch.bfloat16}
    assert any(name.endswith(".rows") for name in stored)
    tiny(tmp_path / "out", *settings, recipe="000-fig2", resume=True)
    tiny(tmp_path / "whole", *settings, recipe="000-fig2")
    ours, theirs = (load_file(tmp_path / name / CELL / "weights.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
