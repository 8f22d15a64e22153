"""What the experiment tests share: a study of seconds, and image folders made on the spot."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import runner
from attnkit_experiments.recipes import RECIPES
from tests.attacks.data import samples

from .doubles import SHALLOW

# What torch says of checkpoints to nobody takes a tenth of a training of seconds.
logging.disable(logging.DEBUG)

TINY = ("image_size=8", "patch=4", "train_images=60", "test_images=30", "steps=6", "batch=12")
FEW = ("activations=relu", "alphas=1", f"model={SHALLOW}")


def run_tiny(out: Path, *settings: str, recipe: str = "000-fig4", preset: str = "cpu", **options) -> Path:
    """Run a tiny study on digits in this process: run_tiny(out, "key=value", ..., resume=True, ...).

    It saves at its end alone: saving takes longer than training.
    """
    few = FEW if recipe != "000-fig1" else ()
    options = {"seeds": (0,), "threads": 1, "device": "cpu", "data": "digits"} | options
    return runner.run(runner.Request(recipe, preset, out=out, settings=(*TINY, *few, *settings), **options))


@pytest.fixture(scope="session")
def tiny():
    return run_tiny


@pytest.fixture
def refusal(capsys):
    """What a command says that ends with status 2: one line."""

    def said(*words: str) -> str:
        assert main([*words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    return said


def write_images(folder: Path) -> Path:
    """An ImageFolder of two classes, 6 train and 3 test images each, colours by class; returns its path."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 100, (8, 8, 3), dtype=np.uint8)
                pixels[..., label] += 120
                Image.fromarray(pixels).save(folder / split / name / f"{index:04d}.png")
    return folder


@pytest.fixture
def image_folder(tmp_path):
    return write_images(tmp_path / "images")


@pytest.fixture
def image_zip(image_folder, tmp_path):
    """The same images in a zip, inside one more folder."""
    return samples.write(tmp_path / "images.zip", samples.zipped(samples.files_of(image_folder, "top/")))


WORDS = {
    "de": ("ein", "hund", "läuft", "über", "die", "straße", "und", "bellt"),
    "en": ("a", "dog", "runs", "across", "the", "street", "and", "barks"),
}


def lines(language: str, count: int, documents: bool) -> list[str]:
    """Sentences of one to seven words, which both languages have in the same order."""
    made = []
    for n in range(count):
        if documents and n % 5 == 0:
            made.append("<d>")
        made.append(" ".join(WORDS[language][(n * 3 + place) % 8] for place in range(1 + n % 7)))
    return made


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Pairs in the layout of Multi30k, and documents beside them."""
    folder = tmp_path_factory.mktemp("data")
    for name, splits, documents in (
        ("pairs", {"train": 60, "val": 10, "test2016": 6}, False),
        ("documents", {"train": 60, "dev": 10, "test": 5}, True),
    ):
        (folder / name).mkdir()
        for split, count in splits.items():
            for language in WORDS:
                text = "".join(f"{line}\n" for line in lines(language, count, documents))
                (folder / name / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


DOCUMENTS = ("001-table6", "001-fig4")
GENERATED = ("003-copying", "005-recall")


@pytest.fixture
def places(corpus, tmp_path):
    """Where the data of a recipe are."""
    text = tmp_path / "text.txt"
    text.write_text("all human beings are born free and equal in dignity and rights " * 300)
    of_domain = {"translation": corpus / "pairs", "language": text, "sequences": "generated"}

    def place(name: str) -> str:
        if name in DOCUMENTS:
            return str(corpus / "documents")
        if name in GENERATED:
            return "generated"
        return str(of_domain.get(RECIPES[name].domain.name, "digits")) if name in RECIPES else ""

    return place
