"""No recipe calls an operation that throws on a GPU under torch.use_deterministic_algorithms: in training, inspection
and report.
"""

import pytest
import torch

from attnkit_experiments.commands import runner
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES

from .nondeterministic import THROWING, TORCH, documented, gated
from .smallest import run

SOON = ("000-causal", "002-table6")
"""Recipes of different domains, beside the images below; `make survival` runs all."""
LEFT = "003-memory"
"""It measures what implementations keep; the gate is a mode of torch, under which there is the generic one alone."""
RECIPES_NOW = [
    pytest.param(name, marks=() if name in SOON else pytest.mark.survival)
    for name in (*RECIPES, *MEASUREMENTS)
    if name != LEFT
]


@pytest.mark.parametrize("name", RECIPES_NOW)
def test_a_recipe_calls_nothing_that_throws_on_a_gpu(name, places, tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(runner, "check_smoke", lambda *arguments: None)  # a step is too few for a loss to fall
    with gated():
        run(name, places(name), tmp_path / "out")


def test_neither_does_augmentation_as_in_the_papers(image_folder, tmp_path, undrawn):
    settings = (
        *("methods=soft", "image_size=16", "stem_stride=1", "crop=inception", "randaug=rand-m9-mstd0.5-inc1"),
        *("cutmix=1", "erase=0.25", "drop_path=0.1", "ema=0.9", "train_images=0", "test_images=0"),
    )
    with gated():
        run("002-table1", str(image_folder), tmp_path / "out", *settings, preset="cpu")


def test_the_list_is_that_of_the_installed_torch():
    assert documented() == THROWING.keys(), f"written for torch {TORCH}, this is {torch.__version__}"


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x.median(0), "median.dim"),
        (lambda x: x.cumsum(0), "cumsum.default"),
        (lambda x: torch.nn.functional.interpolate(x[None, None], 9, mode="linear").sum().backward(), "upsample"),
    ],
)
def test_the_gate_sees_what_is_planted(compute, name):
    with pytest.raises(AssertionError, match=f"torch would throw on CUDA in {name}"), gated():
        compute(torch.randn(5, requires_grad=True))


def test_the_gate_lets_pass_what_is_deterministic():
    with gated():
        torch.arange(5).cumsum(0)
        torch.arange(5).bincount()
        torch.randn(5).median()
