"""What the papers say without a table: temperature, LayerNorm behind attention, halving; and how rows are printed."""

import dataclasses

import pytest
import torch

import attnkit
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.comparison import _published
from attnkit_experiments.report.results import Line, StudyResults
from attnkit_experiments.soft.attention import Kernel
from attnkit_experiments.translation.model import Memory, NormedAttention
from tests.library.arrays import assert_close

from .translation_cases import translator

CPU = torch.device("cpu")


@torch.no_grad()
def test_a_temperature_divides_scores():
    torch.manual_seed(0)
    memory = Memory(6, 5, activation="softmax", temperature=4.0).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    weights = (x @ memory.keys.T / 4 + memory.key_bias).softmax(-1)
    assert_close(memory(x), weights @ memory.values + memory.value_bias)


@torch.no_grad()
def test_the_result_of_relu_norm_is_normalised_everywhere():
    model = translator("relu_norm")
    layers = model.attentions().values()
    assert all(isinstance(layer, NormedAttention) for layer in layers)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    for layer in layers:
        out, _ = layer(x, return_statistics=("total",))
        assert_close(out, layer(x))
        assert_close(out.mean(-1), torch.zeros(2, 7, dtype=torch.float64), magnitude=out)


@torch.no_grad()
def test_the_kernel_is_equation_5():
    torch.manual_seed(0)
    layer = Kernel(attnkit.nn.SoftAttention2d(8, 2)).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    q, v = (each(x).view(1, 9, 2, 4).transpose(1, 2) for each in (layer.attention.q_proj, layer.attention.v_proj))
    s = torch.exp(-(torch.cdist(q, q) ** 2) / (2 * 4**0.5))
    assert_close(layer.weights(x, 3, 3), s, 10)
    heads = (s @ v).transpose(1, 2).reshape(1, 9, 8)
    assert_close(layer(x, 3, 3), layer.attention.out_proj(heads), 10)


def test_halving_never_changes_the_start():
    measurement = MEASUREMENTS["002-halving"]
    study = dataclasses.replace(measurement.presets["smoke"].study, spreads=(0.3, 1.0, 3.0))
    rows = [{**item, **measurement.measure(item, study, CPU)} for item in measurement.items(study)]
    assert [row["n"] for row in rows] == [None, 0, 0]
    measurement.check(rows)
    with pytest.raises(ValueError, match=r"spread 1\.0: halving ends at n = 3"):
        measurement.check([rows[1] | {"n": 3}])


def page_of(recipe, tmp_path, **results):
    """The paper's table of a recipe beside results of one seed by variant."""
    lines = tuple(Line({"name": name, "label": name}, {0: result}, {}, {}) for name, result in results.items())
    about = {"preset": "paper", "settings": [], "study": {"full_scale": True}}
    return _published(StudyResults(about, lines, None, ()), list(RECIPES[recipe].published))


def test_costs_stand_as_ratios(tmp_path):
    costs = {"soft": {"full_memory": 2e9}, "transformer": {"full_memory": 5e9}}
    page = page_of("002-table1", tmp_path, **costs)
    assert "<td>2.50</td><td>4.81</td>" in page
    assert "<td>1.00</td><td>1.00</td>" in page
    assert "<td>2.50</td>" not in page_of("002-table1", tmp_path, transformer=costs["transformer"])
    speeds = {"vanilla": {"sentences_per_second": 125.0}, "entmax15": {"sentences_per_second": 100.0}}
    assert "<td>0.80</td><td>0.52</td>" in page_of("001-table4", tmp_path, **speeds)


def test_models_that_are_not_here_are_cited(tmp_path):
    page = page_of("002-table5", tmp_path, overlap={"accuracy": 0.5})
    assert "<td>DeiT-S (cited)</td><td></td><td>79.8</td>" in page
    assert "<td>overlap</td><td>50.0</td><td>79.3</td>" in page


@pytest.mark.parametrize("n", [1, 2, 4, 5, 6])
def test_bleu_of_the_paper_stands_beside_tokenised_bleu(n):
    keys = {column.key for column in RECIPES[f"001-table{n}"].published}
    assert "bleu_tokenised" in keys
    assert "bleu" not in keys


def test_random_and_pooled_landmarks_are_compared_at_every_number():
    recipe = RECIPES["002-sampling"]
    names = [variant.name for variant in recipe.variants(recipe.presets["paper"].study)]
    assert names == [f"{way}-m{m}" for m in (16, 36, 49, 64, 81) for way in ("average_pool", "random")]
