"""No recipe calls an operation that throws on a GPU under torch.use_deterministic_algorithms: in training, inspection
and report.
"""

import pytest
import torch

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.results import read_study

from .nondeterministic import THROWING, TORCH, documented, gated
from .translation_cases import TINY

IMAGES = ("steps=1", "train_images=24", "test_images=12", "batch=4")
SMALLEST = {
    "images": IMAGES,
    "soft images": (*IMAGES, "full_scale=false"),
    "translation": (*TINY, "steps=1"),
    "language": ("steps=1", "tested=2"),
    "sequences": ("steps=1", "train_samples=8", "valid_samples=4", "test_samples=4"),
}
DOCUMENTS = ("001-table6", "001-fig4")
SOON = ("000-causal", "001-table4", "002-table6")
"""Recipes of different domains, beside the images below; `make survival` runs all."""
RECIPES_NOW = [
    pytest.param(name, marks=() if name in SOON else pytest.mark.survival) for name in (*RECIPES, *MEASUREMENTS)
]


@pytest.fixture
def places(corpus, tmp_path):
    """Where the data of a recipe are."""
    text = tmp_path / "text.txt"
    text.write_text("all human beings are born free and equal in dignity and rights " * 300)
    of_domain = {"translation": corpus / "pairs", "language": text, "sequences": "generated"}

    def place(name: str) -> str:
        if name in DOCUMENTS:
            return str(corpus / "documents")
        if name == "003-copying":
            return "generated"
        return str(of_domain.get(RECIPES[name].domain.name, "digits")) if name in RECIPES else ""

    return place


def run(name, data, out, *settings, preset="smoke"):
    """One step of every cell, an inspection and a report."""
    small = SMALLEST[RECIPES[name].domain.name] if name in RECIPES else ()
    seeds = (0,) if name in RECIPES else None
    request = runner.Request(name, preset, data, out, (*small, *settings), seeds, "cpu", 1, keep_going=True)
    write_report(runner.run(request))
    if name in RECIPES:
        assert not read_study(out).uninspected


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
