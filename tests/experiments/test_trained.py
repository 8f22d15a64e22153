"""The models that come with the package: small, as good as their cards say, and made by the command on the card."""

import math

import pytest
import torch
from torch.nn import functional as F

from attnkit_experiments.commands import trained
from attnkit_experiments.commands.classify import normalised
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.text.symbols import generate
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.study.overrides import override

MIB = 1 << 20
FLIPPED = 1  # images that another processor may put on the other side of a tie


def test_they_are_small():
    sizes = [sum(path.stat().st_size for path in (trained.FOLDER / name).iterdir()) for name in trained.names()]
    assert sizes
    assert max(sizes) <= 3 * MIB
    assert sum(sizes) <= 12 * MIB


@pytest.mark.parametrize("name", trained.names())
def test_the_card_is_that_of_the_model_and_names_a_recipe_that_there_is(name):
    about = trained.load(name).about
    assert (trained.FOLDER / name / trained.CARD).read_text() == trained.card(name, about)
    origin = about["provenance"]
    recipe = RECIPES[origin["recipe"]]
    study = override(recipe.presets[origin["preset"]].study, tuple(origin["settings"]))
    assert origin["cell"] in [f"{each.name}-seed{seed}" for each in recipe.variants(study) for seed in study.seeds]


@pytest.mark.parametrize("name", [name for name in trained.names() if name.startswith("digits")])
def test_digits_are_recognised_as_often_as_the_card_says(name, tmp_path):
    exported = trained.load(name)
    data = load_images("digits", ImageRequest(exported.about["input"]["size"]), cache=tmp_path)
    with torch.no_grad():
        logits = exported.model(normalised(data.test_images, exported.about["input"]))
    right = int((logits.argmax(-1).numpy() == data.test_labels).sum())
    said = exported.about["provenance"]["accuracy"] * len(data.test_labels)
    assert abs(right - said) <= FLIPPED
    assert right > 0.95 * len(data.test_labels)


def test_a_sequence_is_repeated():
    exported = trained.load("copying-linear")
    length = exported.about["input"]["length"]
    windows = torch.tensor(generate(length).test[: 50 * length].reshape(50, length).astype("int64"))
    with torch.no_grad():
        logits = exported.model(windows)
    of_copy = slice(length // 2, length - 1)  # 0w0w: the symbols of the second w are known before they are read
    nats = F.cross_entropy(logits[:, of_copy].flatten(0, 1), windows[:, 1:][:, of_copy].flatten())
    assert float(nats) / math.log(2) == pytest.approx(exported.about["provenance"]["bits_per_byte"], abs=0.02)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="digits-relu"):
        trained.load("digit-relu")
