"""The floor of a study: with the method `zeros` attention returns nothing, and a model learns what it can without."""

from types import SimpleNamespace

import pytest
import torch

import attnkit
from attnkit_experiments.evidence.runs import FLOOR
from attnkit_experiments.language.methods import METHODS as OF_LANGUAGE
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.recipes.relu_vit import presets
from attnkit_experiments.sequences import methods as of_sequences
from attnkit_experiments.soft import methods as of_images
from attnkit_experiments.soft.attention import Place
from attnkit_experiments.soft.model import OFFICIAL
from attnkit_experiments.study.overrides import override
from attnkit_experiments.translation.methods import METHODS as OF_TRANSLATION

SIZES = SimpleNamespace(width=8, heads=2, length=16, weight_dropout=0.0)
OPS = {
    "grids": (presets.FLOOR.op, presets.FLOOR.options),
    "translation": (OF_TRANSLATION[FLOOR].op, OF_TRANSLATION[FLOOR].options),
    "language": OF_LANGUAGE[FLOOR],
}


@pytest.mark.parametrize(("op", "options"), OPS.values(), ids=OPS)
def test_attention_is_zero(op, options):
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    out = getattr(attnkit, op)(q, k, v, causal=True, **options)
    assert (out == 0).all()


def test_a_layer_forgets_its_tokens():
    x = torch.randn(1, 36, 8)
    layers = {
        "images": lambda: of_images.METHODS[FLOOR](Place(8, 2, 6, 9, 0, OFFICIAL))(x, 6, 6),
        "sequences": lambda: of_sequences.METHODS[FLOOR].build(SIZES)(x),
    }
    for layer in layers.values():
        out = layer()
        assert (out == out[:, :1]).all(), "the bias alone, the same for every token"


FLOORED = {
    "activations=relu,zeros": (
        *("000-fig1", "000-fig2", "000-fig3", "000-fig4", "000-learned", "000-causal", "000-lengths", "000-masked"),
    ),
    "methods=vanilla,zeros": ("001-table4",),
    "methods=transformer,zeros": ("002-table1", "002-table6", "003-sequences"),
    "methods=softmax,zeros": ("003-copying", "005-causal", "005-recall"),
}


@pytest.mark.parametrize(
    ("recipe", "setting"), [(recipe, setting) for setting, recipes in FLOORED.items() for recipe in recipes]
)
def test_a_study_takes_a_floor(recipe, setting):
    variants = RECIPES[recipe].variants(override(RECIPES[recipe].presets["cpu"].study, (setting,)))
    floors = [variant for variant in variants if variant.series == FLOOR]
    assert floors
    for floor in floors:
        assert floor.baseline in {"", *(variant.name for variant in variants if variant.series != FLOOR)}
    assert len({variant.point for variant in variants}) == len(floors), "one at each point"
    assert len({variant.name for variant in variants}) == len(variants)
