"""Blocks that are compiled: in every cell of a process alike, with the numbers of eager ones; or an error that names
the cell.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from attnkit_experiments.commands import runner
from attnkit_experiments.engine import compiling
from attnkit_experiments.engine.errors import Diverged, UserError
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.engine.train import train
from attnkit_experiments.engine.world import ALONE
from tests.experiments.forks import forked
from tests.experiments.stopping import stopped_after
from tests.experiments.translation_cases import TINY as TRANSLATION

# torch looks at .grad of what it compiles, and hides its warning from any filter but "error"
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

CPU = torch.device("cpu")
STEPS, CELLS, WIDTH = 3, 8, 4


class Graphs:
    """A backend that runs graphs as they are, and counts them and their calls."""

    def __init__(self):
        self.made = self.calls = 0

    def __call__(self, graph, examples):
        self.made += 1

        def call(*inputs):
            self.calls += 1
            return graph(*inputs)

        return call


@pytest.fixture
def graphs(monkeypatch):
    backend = Graphs()
    monkeypatch.setattr(compiling, "BACKEND", backend)
    return backend


class Power(nn.Module):
    """x + |linear(x)|^power, with dropout, whose training and evaluation are two graphs."""

    def __init__(self, power):
        super().__init__()
        self.linear, self.drop, self.power = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), power

    def forward(self, x):
        return x + self.drop(self.linear(x).abs() ** self.power)


class Broken(Power):
    def forward(self, x):
        print("a graph ends here")
        return super().forward(x)


class Fitting(Power):
    """A graph for each number of samples."""

    def forward(self, x):
        torch._dynamo.mark_static(x)
        return super().forward(x)


class Exploding(Power):
    def forward(self, x):
        return super().forward(x) * 1e30


class Model(nn.Module):
    """Two blocks behind a linear map."""

    def __init__(self, kind, power):
        super().__init__()
        self.embed, self.blocks = nn.Linear(1, WIDTH), nn.ModuleList(kind(power) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Problem:
    """A model that learns to return 0, on batches of `sizes` by turns."""

    def __init__(self, kind=Power, power=1.0, sizes=(3,)):
        torch.manual_seed(0)
        self.model, self.sizes = Model(kind, power), sizes
        self.apply, self.outcomes = self.model, {}

    def sample_ids(self, step):
        return np.arange(self.sizes[step % len(self.sizes)])

    def flops(self, ids):
        return 1

    def loss(self, ids, step, own):
        torch.manual_seed(step)
        return self.apply(torch.ones(len(ids), 1)[own]).square().sum() / len(ids)

    @torch.no_grad()
    def evaluate(self, world=ALONE):
        return {"value": float(self.model(torch.ones(2, 1)).sum())}


def trained(out, *, make=Problem, label="cell", **config):
    config = TrainConfig(**{"steps": STEPS, "compile": True} | config)
    return train(make, config, out, config_hash="x", device=CPU, label=label)


def test_every_cell_of_a_process_is_compiled(graphs, tmp_path):
    """torch keeps 8 graphs of a code object: those of four cells, if all of them share it."""
    counts = []
    for cell in range(CELLS):
        made, calls = graphs.made, graphs.calls
        task, result = trained(tmp_path / str(cell), make=lambda power=cell: Problem(power=1.0 + power))
        counts.append((result["compiled"], graphs.made - made, graphs.calls - calls))
        task.model(torch.ones(1, 1))  # an inspection
    assert counts == [({"blocks": 2, "graphs": 2}, 2, 2 * (STEPS + 1))] * CELLS


def test_blocks_that_are_computed_again_are_compiled(tmp_path):
    """In one graph forward and one backward, which has the second forward pass, as aot_eager makes them."""
    runs = []
    for settings in ({"compile": False}, {"compile": True}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "BACKEND", "aot_eager")
            _, result = trained(tmp_path / str(len(runs)), activation_checkpointing=True, **settings)
        runs.append(result)
    assert runs[1]["compiled"] == {"blocks": 2, "graphs": 2}
    for key in ("first_loss", "last_loss", "value"):
        assert runs[1][key] == pytest.approx(runs[0][key], rel=1e-5)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.survival)])
def test_a_compiled_run_that_goes_on_is_the_same(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", backend)
    runs = []
    for stops in ((), (2,)):
        out = tmp_path / str(len(stops))
        for step in stops:
            with stopped_after(step):
                trained(out, steps=4, checkpoint_every=2)
        task, result = trained(out, steps=4, checkpoint_every=2)
        losses = [row.get("loss") for row in read_metrics(out / "metrics.jsonl")]
        runs.append((losses, result["value"], result["compiled"], task.model.state_dict()))
    whole, resumed = runs
    assert whole[:2] == resumed[:2]
    assert whole[2] == resumed[2] == {"blocks": 2, "graphs": 2}
    assert all(torch.equal(x, resumed[3][name]) for name, x in whole[3].items())


def test_what_is_not_one_graph_is_an_error_of_the_cell(graphs, tmp_path):
    with pytest.raises(
        UserError, match=r"^\[3/8\] relu: compile=true needs every block in one graph, .* got Unsupported: "
    ):
        trained(tmp_path, make=lambda: Problem(Broken), label="[3/8] relu")
    trained(tmp_path, make=lambda: Problem(Broken), compile=False)


def test_more_graphs_than_a_block_may_have_are_an_error(graphs, tmp_path, monkeypatch):
    """One for each of four batches, and one of the evaluation, where two blocks may have two."""
    monkeypatch.setattr(compiling, "GRAPHS", 1)
    wrong = r"^cell: .* at most 2 graphs for 2 blocks, got FailOnRecompileLimitHit: "
    with pytest.raises(UserError, match=wrong):
        trained(tmp_path, make=lambda: Problem(Fitting, sizes=(2, 3, 4, 5)), steps=4)
    assert graphs.made == 2


def test_an_environment_without_compiler_is_an_error(monkeypatch, tmp_path):
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match="torch compiled none of 2 blocks"):
        trained(tmp_path)


def test_a_diverged_cell_is_diagnosed_by_its_modules(graphs, tmp_path):
    with pytest.raises(Diverged, match=r"the first output that is not finite is that of blocks.1"):
        trained(tmp_path, make=lambda: Problem(Exploding))


# ---------------------------------------------------------------------------------------------- with every domain

IMAGES = ("train_images=24", "test_images=12", "image_size=8", "patch=4", "batch=4", "steps=3", "checkpoint_every=0")
SOFT = ("train_images=24", "test_images=12", "image_size=16", "stem_stride=1", "batch=4", "full_scale=false")
SEQUENCES = ("batch=4", "train_samples=8", "valid_samples=4", "test_samples=4")
DOMAINS = {
    "000-causal": ("model=d32", "length=16", "tokens=64", "tested=4", "activations=relu", "alphas=1"),
    "000-masked": ("model=d32", "length=16", "tokens=64", "tested=4", "alphas=1"),
    "003-copying": ("model=d32", "length=16", "tokens=64", "tested=4", "methods=linear,performer"),
    "001-table4": (*TRANSLATION, "methods=vanilla,sparsemax,reluformer"),
    "002-table1": (*SOFT, "methods=soft,nystromformer"),
    "002-table6": (*SEQUENCES, "methods=reformer,linformer,soft"),
}
"""Beside images, which all other tests have."""


@pytest.mark.survival
@pytest.mark.parametrize("recipe", DOMAINS)
def test_cells_of_every_domain_compile_and_learn_the_same(recipe, places, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    runs = []
    for compiled in ("false", "true"):
        settings = (*DOMAINS[recipe], "steps=3", "checkpoint_every=0", f"compile={compiled}")
        asked = runner.Request(recipe, "cpu", places(recipe), tmp_path / compiled, settings, (0,), "cpu", 1)
        folders = sorted((runner.run(asked) / "cells").iterdir())
        runs.append([json.loads((folder / "result.json").read_text()) for folder in folders])
    for eager, other in zip(*runs, strict=True):
        assert "compiled" not in eager
        assert other["compiled"]["graphs"] >= 1
        for key in {"first_loss", "last_loss", "test_loss", "valid_loss"} & eager.keys():
            assert other[key] == pytest.approx(eager[key], rel=1e-4)


def process(sharding, checkpointing, out):
    """A compiled run as one of two processes, and what it was compiled to in this one."""
    backend = compiling.BACKEND = Graphs()
    few = (*IMAGES, "activations=relu", "alphas=1", "compile=true", f"activation_checkpointing={checkpointing}")
    out = Path(out)
    runner.run(runner.Request("000-fig2", "cpu", "digits", out, few, (0,), "cpu", 1, sharding=sharding))
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps([backend.made, backend.calls]))


@pytest.mark.survival
@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_processes_compile_the_same(sharding, checkpointing, tmp_path):
    """A step and an evaluation of two cells, in two graphs each."""
    forked(__name__, (2, (sharding, checkpointing, str(tmp_path))))
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    steps, evaluation = 3 * 4, 4  # calls in two cells of four blocks; the only batch of an evaluation is the first's
    assert counts == [[4, 2 * (steps + evaluation)], [2, 2 * steps]]
    for name in ("softmax", "relu-alpha1"):
        result = json.loads((tmp_path / "cells" / f"{name}-seed0" / "result.json").read_text())
        assert result["compiled"] == {"blocks": 4, "graphs": 2}
