"""A whole training step on a device: of every domain, with the numbers of the CPU, and nobody waits for the device."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.opening import choose
from attnkit_experiments.engine.counting import by_formula
from attnkit_experiments.engine.train import Run, Task, Waiting
from attnkit_experiments.engine.world import ALONE
from attnkit_experiments.study.recipe import Source, expand

from .elsewhere import DEVICE, Elsewhere, There
from .translation_cases import TINY

CPU = torch.device("cpu")
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \| ([\d,]+) \| (\d+) \| 0 \|$", re.MULTILINE)
DOCUMENTED = {
    name: (int(launches.replace(",", "")), int(copies))
    for name, launches, copies in ROW.findall((Path(__file__).parents[2] / "docs/experiments.md").read_text())
}
"""Launches and copies of a step, by the rows of the table."""
TEXT = ("length=16", "tokens=64", "alphas=1", "model=d32")
PICTURES = ("batch=96", "accumulate=2", "checkpoint_every=0")


class Example(NamedTuple):
    """A study of one cell, and where its data are: "pictures", "pairs", or a place."""

    recipe: str
    data: str
    settings: tuple[str, ...]


VIT = (*PICTURES, "image_size=8", "patch=4", "activations=relu", "alphas=1", "model=d32", "crop=inception",
       "augreg=medium1")  # fmt: skip
EXAMPLES = {
    "images, RandAugment and mixup": Example("000-fig2", "pictures", VIT),
    "images, decoded once": Example("000-fig2", "pictures", (*VIT, "lazy=true", "decoded_side=8")),
    "SOFT, with timm's augmentation": Example(
        "002-table1", "pictures", (*PICTURES, "image_size=16", "stem_stride=1", "full_scale=false", "methods=soft",
        "measured_batch=0", "crop=inception", "randaug=rand-m9-mstd0.5-inc1", "mixup=0.8", "cutmix=1.0", "erase=0.25",
        "drop_path=0.1"),
    ),
    "causal language": Example("000-causal", "pydoc", (*TEXT, "activations=relu")),
    "masked tokens": Example("000-masked", "pydoc", TEXT),
    "translation, regularised": Example("001-table4", "pairs", (*TINY, "methods=reluformer", "tokens=64")),
    "Long Range Arena, softmax": Example(
        "002-table6", "generated", ("train_samples=8", "valid_samples=4", "test_samples=4", "methods=transformer",
        "batch=4"),
    ),
}  # fmt: skip


def of_formulas(task: Task) -> Task:
    """A task whose every op is its plain array formula, which both sides compute."""
    for module in by_formula(task.model).modules():
        if hasattr(module, "statistics_impl"):
            module.statistics_impl = "generic"
    return task


def moved(task: Task) -> Task:
    """A task of the CPU with all that it has on the device."""
    for module in task.model.modules():
        for name, x in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(There(x.detach())))
        for name, x in module.named_buffers(recurse=False):
            module._buffers[name] = There(x)
    for each in (task, getattr(task, "pixels", None)):
        for name, x in [*vars(each).items()] if each else ():
            if isinstance(x, torch.Tensor):
                setattr(each, name, There(x))
            elif isinstance(x, torch.device):
                setattr(each, name, DEVICE)
    return task


@pytest.fixture
def runs(image_folder, corpus, tmp_path):
    """The run of an example on the CPU, and the same on the device."""

    def make(example: Example) -> tuple[Run, Run]:
        place = {"pictures": str(image_folder), "pairs": str(corpus / "pairs")}.get(example.data, example.data)
        recipe, study = choose(runner.Request(example.recipe, "cpu", place, tmp_path, example.settings))
        data = recipe.domain.load(Source(place, study, tmp_path))
        cell = expand(recipe, study, data)[0]

        def task() -> Task:
            return of_formulas(recipe.domain.task(cell, data, CPU))

        with Elsewhere():
            there = Run(lambda: moved(task()), cell.train, CPU, ALONE)
        return Run(task, cell.train, CPU, ALONE), there

    return make


def counted(run: Run, step: int) -> tuple[Waiting, Elsewhere, Elsewhere]:
    """A step on the device, and what it did there, without and with the optimiser alone."""
    update = run.optimizer.step

    def apart() -> None:
        with optimiser:
            update()

    with pytest.MonkeyPatch.context() as patch, Elsewhere() as device:
        optimiser = Elsewhere()
        patch.setattr(run.optimizer, "step", apart)
        return run.step(step), device, optimiser


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_step_is_that_of_the_cpu_and_nothing_waits(name, runs):
    """As docs/experiments.md counts it, in the second step; versions of torch may differ by a few launches."""
    here, there = runs(EXAMPLES[name])
    for step in range(2):
        wanted = here.step(step)
        found, device, optimiser = counted(there, step)
        assert isinstance(found.loss, There)
        assert not device.waits
        assert not optimiser.waits
        assert optimiser.copies == 0
        assert torch.equal(found.loss.here, wanted.loss)
        assert torch.equal(found.norm.here, wanted.norm)
    launches, copies = DOCUMENTED[name]
    assert sum(device.launches.values()) == pytest.approx(launches, rel=0.05)
    assert device.copies == copies


def test_the_table_has_nothing_else():
    assert DOCUMENTED.keys() == EXAMPLES.keys()


def test_a_loss_that_begins_on_the_cpu_is_seen(runs, monkeypatch):
    _, there = runs(EXAMPLES["causal language"])
    monkeypatch.setattr(there, "share", lambda *of: torch.zeros(()).to(DEVICE) + Run.share(there, *of))
    with Elsewhere() as device:
        there.step(0)
    assert device.waits == {"copy": 1}
