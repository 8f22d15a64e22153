"""Checkpoints of several processes: resumed to the bit on as many, loaded to the bit on any number, however sharded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from attnkit_experiments.engine.checkpoint import Checkpoints, seals, whole_weights
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.train import Run
from attnkit_experiments.engine.world import ALONE, World, joined

from .forks import forked
from .smallest import first_run
from .test_activation_checkpointing import SOFT

CPU = torch.device("cpu")


def process(task: str, sharding: str, folder: str, out: str) -> None:
    """Train and save, or restore; the main process writes what it has."""
    with joined(CPU, sharding) as world:
        if task == "save":
            run = training(Path(out) / str(world.rank), world)
            with checkpoints(run, Path(folder)) as saved:
                for step in range(2):
                    run.step(step)
                saved.save(step=2, seconds=0.5)
                write(run, Path(out) / "saved", world)
                run.step(2)
                write(run, Path(out) / "went-on", world)
        run = training(Path(out) / str(world.rank), world)
        with checkpoints(run, Path(folder)) as saved:
            assert saved.restore() == (2, 0.5)
        write(run, Path(out) / "restored", world)
        run.step(2)
        write(run, Path(out) / "resumed", world)


def training(out: Path, world: World) -> Run:
    """Of a model with batch normalisation, and with a moving average."""
    settings = (*SOFT, "methods=soft", "full_scale=false", "measured_batch=0", "ema=0.9")
    return first_run("002-table1", "digits", out, *settings, world=world)


def checkpoints(run: Run, folder: Path) -> Checkpoints:
    return Checkpoints(folder, config_hash="x", world=run.world, **run.state)


def everything(run: Run) -> dict[str, torch.Tensor]:
    """All tensors of a training, whole."""
    model, average = run.task.model, run.average.model
    moments = get_optimizer_state_dict(model, run.optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    tensors = {f"moment.{name}.{key}": x for name, values in moments.items() for key, x in values.items()}
    for kind, module in (("model", model), ("average", average)):
        run.world.same(module.buffers())
        tensors |= {f"{kind}.{name}": x for name, x in whole_weights(module).items()}
    return {name: x.detach().clone() for name, x in tensors.items()}


def write(run: Run, path: Path, world: World) -> None:
    tensors = everything(run)
    if world.main:
        save_file(tensors, path)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, x in found.items() if not torch.equal(x, expected[name])]


def test_what_is_evaluated_has_the_statistics_of_the_main_process(tmp_path, monkeypatch):
    run, shared = training(tmp_path, ALONE), []
    monkeypatch.setattr(World, "same", lambda world, tensors: shared.extend(map(id, tensors)))
    task = run.whole()
    statistics = [id(x) for name, x in task.model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    assert statistics
    assert set(statistics) <= set(shared)


@pytest.mark.survival
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_what_two_processes_save_is_loaded_to_the_bit_by_one_two_and_three(sharding, tmp_path):
    folder, out = tmp_path / "checkpoints", tmp_path / "two"
    out.mkdir()
    forked(__name__, (2, ("save", sharding, str(folder), str(out))))
    saved = load_file(out / "saved")
    assert_same(load_file(out / "restored"), saved)
    assert_same(load_file(out / "resumed"), load_file(out / "went-on"))
    (seal,) = seals(folder)
    assert len(json.loads(seal.read_text())["files"]) == 2, "each process writes its part"

    (tmp_path / "three").mkdir()
    other = {"ddp": "fsdp", "fsdp": "ddp"}[sharding]
    forked(__name__, (3, ("restore", other, str(folder), str(tmp_path / "three"))))
    assert_same(load_file(tmp_path / "three" / "restored"), saved)

    run = training(tmp_path / "one", ALONE)
    with checkpoints(run, folder) as alone:
        alone.restore()
    assert_same(everything(run), saved)

    part = sorted(seal.with_name(json.loads(seal.read_text())["folder"]).iterdir())[1]
    part.write_bytes(part.read_bytes()[:-1])
    with checkpoints(run, folder) as alone, pytest.raises(UserError, match=f"{part.name}: refused: it is damaged"):
        alone.restore()
