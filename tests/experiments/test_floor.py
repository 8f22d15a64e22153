"""The floors of a study: what a model learns without attention, where that returns zeros, and without scores, where all
visible values have the same weight.
"""

from types import SimpleNamespace

import pytest
import torch

import attnkit
from attnkit_experiments.evidence.runs import FLOOR, WITHOUT_SCORES
from attnkit_experiments.language.methods import METHODS as OF_LANGUAGE
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.recipes.relu_vit import presets
from attnkit_experiments.sequences import methods as of_sequences
from attnkit_experiments.soft import methods as of_images
from attnkit_experiments.soft.attention import Place
from attnkit_experiments.soft.model import OFFICIAL
from attnkit_experiments.study.overrides import override
from attnkit_experiments.translation.methods import METHODS as OF_TRANSLATION
from tests.library.arrays import LAYER, assert_close

SIZES = SimpleNamespace(width=8, heads=2, length=16, weight_dropout=0.0)
OPS = {
    "grids": (presets.FLOORS[FLOOR].op, presets.FLOORS[FLOOR].options),
    "translation": (OF_TRANSLATION[FLOOR].op, OF_TRANSLATION[FLOOR].options),
    "language": OF_LANGUAGE[FLOOR],
}


@pytest.mark.parametrize(("op", "options"), OPS.values(), ids=OPS)
def test_attention_is_zero(op, options):
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    out = getattr(attnkit, op)(q, k, v, causal=True, **options)
    assert (out == 0).all()


AVERAGES = {
    "grids": (presets.FLOORS["average"].op, presets.FLOORS["average"].options),
    "language": OF_LANGUAGE["average"],
}


@pytest.mark.parametrize(("op", "options"), AVERAGES.values(), ids=AVERAGES)
def test_attention_is_the_mean_of_what_is_seen(op, options):
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    out = getattr(attnkit, op)(q, k, v, causal=True, **options)
    assert_close(out, v.cumsum(-2) / torch.arange(1, 6)[:, None])


def test_a_layer_of_sequences_averages_the_tokens_that_are_there():
    layer, x = of_sequences.METHODS["average"].build(SIZES).eval(), torch.randn(1, 5, 8)
    there = torch.tensor([[True, True, True, False, False]])
    out = layer(x, key_mask=there, query_mask=there)
    mean = layer.out_proj(layer.v_proj(x[:, :3]).mean(1, keepdim=True))
    assert_close(out[:, :3], mean.expand(1, 3, 8), LAYER)


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
    "activations=relu,zeros": ("000-fig1", "000-fig2", "000-fig3", "000-fig4", "000-learned"),
    "activations=relu,average,zeros": ("000-causal", "000-lengths", "000-masked"),
    "methods=vanilla,zeros": ("001-table4",),
    "methods=transformer,zeros": ("002-table1",),
    "methods=transformer,average,zeros": ("002-table6", "003-sequences"),
    "methods=softmax,average,zeros": ("003-copying", "005-causal", "005-recall"),
}


@pytest.mark.parametrize(
    ("recipe", "setting"), [(recipe, setting) for setting, recipes in FLOORED.items() for recipe in recipes]
)
def test_a_study_takes_a_floor(recipe, setting):
    variants = RECIPES[recipe].variants(override(RECIPES[recipe].presets["cpu"].study, (setting,)))
    points = len({variant.point for variant in variants})
    for series in {*setting.partition("=")[2].split(",")} & {*WITHOUT_SCORES}:
        floors = [variant for variant in variants if variant.series == series]
        assert len(floors) == points, "one at each point"
        for floor in floors:
            assert floor.baseline in {"", *(each.name for each in variants if each.series not in WITHOUT_SCORES)}
    assert len({variant.name for variant in variants}) == len(variants)
