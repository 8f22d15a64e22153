"""Recipes 002 on images and in memory: from settings to report, what is measured, and checks that can fail."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.memory import peak_bytes
from attnkit_experiments.images.task import AugmentConfig
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.recipes.soft.table3 import stages
from attnkit_experiments.soft.domain import DOMAIN, SoftStudy
from attnkit_experiments.soft.inspection import heat_maps, inspect, residuals
from attnkit_experiments.soft.model import SIZES, SoftConfig, SoftVisionTransformer
from attnkit_experiments.study.recipe import Source, expand
from tests.library.arrays import assert_close

CPU = torch.device("cpu")
TINY = (
    "image_size=16", "stem_stride=1", "train_images=30", "test_images=20", "batch=6", "steps=2", "padding=1",
    "checkpoint_every=1", "full_scale=false",
)  # fmt: skip
TRAINED = [recipe for recipe in RECIPES.values() if recipe.domain is DOMAIN]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    study = SoftStudy(image_size=16, train_images=30, test_images=20)
    return DOMAIN.load(Source("digits", study, tmp_path_factory.mktemp("cache")))


def run(recipe, out, *settings, preset="cpu", **options):
    options = {"data": "digits", "threads": 1, "device": "cpu"} | options
    return runner.run(runner.Request(recipe, preset, out=out, settings=settings, **options))


# ---------------------------------------------------------------------------------------------- trained


def test_a_study_from_settings_to_report(tmp_path, undrawn):
    out = run("002-table1", tmp_path / "out", *TINY, "methods=transformer,soft", "seeds=0", "measured_batch=0")
    found = json.loads((out / "cells" / "soft-seed0" / "result.json").read_text())
    assert [len(stage["median"]) for stage in found["residuals"]] == [21, 21, 21]
    assert found["residuals"] != found["initial_residuals"]
    assert all(low <= high for s in found["residuals"] for low, high in zip(s["median"], s["largest"], strict=True))
    maps = load_file(out / "cells" / "transformer-seed0" / "maps.safetensors")["maps"]
    assert maps.shape == (4, 1, 16, 16)
    assert_close(maps.sum((-2, -1)), torch.ones(4, 1))
    shutil.rmtree(out / "cells" / "transformer-seed0")  # a study of which one method is trained has a report
    page = write_report(out).read_text()
    for title in ("Heat maps", "How the inverse converges", "Beside the paper"):
        assert (f"<h2>{title}" in page) == (title != "Beside the paper")
    assert page.count("<svg") == 3


def test_costs_at_full_scale_stand_beside_the_papers(data, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", SIZES["mini"])
    recipe = RECIPES["002-table4"]
    study = dataclasses.replace(recipe.presets["cpu"].study, stem_stride=1, landmark_counts=(9,), seeds=(0,))
    cells = expand(recipe, study, data)
    assert [cell.variant.name for cell in cells] == ["average_pool", "convolution", "random", "biased", "m9"]
    assert cells[-1].settings["full"].landmarks == 9
    full = cells[0].settings["full"]
    assert (full.image, full.channels, full.classes, full.landmarks) == (224, 3, 1000, 49)
    pooled = DOMAIN.facts(cells[0])
    inverse = pooled["full_multiply_adds"] - pooled["full_multiply_adds_without_inverse"]
    assert inverse == 44 * 49**3 * (1 + 2 + 2 * 2)
    assert {"full_parameters", "flops_per_sample"} <= set(pooled)


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda recipe: recipe.id)
def test_published_numbers_belong_to_rows(recipe):
    rows = {variant.name for variant in recipe.variants(recipe.presets["paper"].study)}
    for column in recipe.published:
        assert set(column.values) <= rows
    study = recipe.presets["paper"].study
    assert (study.image_size, study.batch, study.landmarks, study.steps) == (224, 1024, 49, -(-300 * 1_281_167 // 1024))
    for preset in recipe.presets.values():
        for variant in recipe.variants(preset.study):
            assert all(hasattr(preset.study, name) for name in variant.changes)
            assert not variant.baseline or variant.baseline in {v.name for v in recipe.variants(preset.study)}


def test_the_paper_preset_trains_as_the_authors_configuration_says(data):
    """rand-m9-mstd0.5-inc1, erasing 0.25, mixup 0.8, CutMix 1, smoothing 0.1, an average of decay 0.99996."""
    recipe = RECIPES["002-table1"]
    small = {"image_size": 16, "stem_stride": 1, "landmarks": 4, "full_scale": False}
    coloured = dataclasses.replace(data, train_images=data.train_images.repeat(3, axis=-1))
    cell = expand(recipe, dataclasses.replace(recipe.presets["paper"].study, **small), coloured)[0]
    assert cell.settings["augmentation"] == AugmentConfig(
        crop="inception", smallest_crop=0.08, flip=True, randaug="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0,
        erase=0.25, smoothing=0.1,
    )  # fmt: skip
    assert (cell.train.ema, cell.train.weight_decay, cell.train.clip, cell.train.lr) == (0.99996, 0.05, 1.0, 1e-3)
    others = [preset.study for name, preset in recipe.presets.items() if name != "paper"]
    assert all((study.ema, study.randaug, study.cutmix, study.erase) == (0, "", 0, 0) for study in others)


def test_what_is_dropped_depends_on_the_step_alone(data):
    study = SoftStudy(image_size=16, stem_stride=1, drop_path=0.5, batch=6, crop="none", mixup=0, full_scale=False)
    (cell,) = expand(
        dataclasses.replace(RECIPES["002-fig4"], variants=lambda s: RECIPES["002-fig4"].variants(s)[:1]), study, data
    )
    trained = DOMAIN.task(cell, data, CPU)
    ids = np.arange(6)
    with torch.no_grad():
        first, again, later = (trained.loss(ids, step, slice(0, 6)) for step in (3, 3, 4))
    assert first == again != later


def test_linformer_has_no_heat_maps(data, tmp_path):
    recipe = RECIPES["002-table1"]
    study = dataclasses.replace(recipe.presets["cpu"].study, image_size=16, stem_stride=1, full_scale=False)
    cell = next(cell for cell in expand(recipe, study, data) if cell.variant.op == "linformer")
    trained = DOMAIN.task(cell, data, CPU)
    assert inspect(trained, trained, cell, tmp_path) == {}
    assert not list(tmp_path.iterdir())


def test_looking_leaves_the_model_alone(data):
    study = SoftStudy(image_size=16, stem_stride=1, full_scale=False)
    cell = expand(RECIPES["002-fig4"], study, data)[0]
    model = SoftVisionTransformer(cell.settings["model"])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    images = torch.randn(2, 1, 16, 16)
    assert len(residuals(model, images)) == 3
    assert heat_maps(model, images).shape == (2, 1, 16, 16)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------------------------------------- measured


def test_peak_bytes_of_known_computations():
    def three_at_once():
        a = torch.zeros(1000, 1000)
        b = a + 1
        del a
        c, d = b + 1, b + 2
        return c, d

    assert 12e6 <= peak_bytes(three_at_once, CPU) < 12.01e6
    weight = torch.zeros(1000, 1000, requires_grad=True)
    # both exponentials are kept for the backward pass, and with them live two gradients at most
    assert 12e6 <= peak_bytes(lambda: weight.exp().exp().sum().backward(), CPU) <= 16.01e6


MEMORY = ("multiples=1,2", "unit=784", "layers=1", "methods=transformer,linformer")


def test_memory_from_settings_to_report_and_back_after_a_kill(tmp_path, monkeypatch, undrawn):
    recipe, calls = MEASUREMENTS["002-fig1b"], []

    def counted(item, study, device):
        calls.append(item)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return recipe.measure(item, study, device)

    monkeypatch.setitem(MEASUREMENTS, "002-fig1b", dataclasses.replace(recipe, measure=counted))
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run("002-fig1b", out, *MEMORY, preset="smoke")
    with pytest.raises(UserError, match="is not finished"):
        write_report(out)
    with pytest.raises(UserError, match="layers 1, now it is 2"):
        run("002-fig1b", out, *MEMORY, "layers=2", preset="smoke", resume=True)
    run("002-fig1b", out, *MEMORY, preset="smoke", resume=True)
    assert len(calls) == 9
    environment = json.loads((out / "study.json").read_text())["environment"]
    assert (environment["threads"], environment["processes"]) == (1, 1)
    page = write_report(out).read_text()
    assert page.count("<svg") == 1
    assert "peak memory, GB" in page
    assert "SMOKE · not a result" in page
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    found = {(row["method"], row["mode"], int(row["tokens"])): int(row["bytes"]) for row in rows}
    # the weights and what their softmax is made from, 12 heads
    quadratic = found["transformer", "predicting", 1568] - found["transformer", "predicting", 784]
    assert quadratic > 2 * 12 * 4 * (1568**2 - 784**2)
    assert found["linformer", "training", 1568] < 2.2 * found["linformer", "training", 784]


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("002-table3", {"model": "x", "counted": "ours", "parameters": 39_000_000, "paper_parameters": 24}, "24 M"),
        ("002-fig1b", {"method": "soft", "mode": "training", "tokens": 200, "bytes": 250}, "2.50 times"),
        ("002-fig1b", {"method": "transformer", "mode": "training", "tokens": 6272, "bytes": 400}, "only 2.00 times"),
    ],
)
def test_checks_can_fail(name, row, text):
    half = row | {"tokens": row.get("tokens", 0) // 2, "bytes": 100 if row.get("bytes") == 250 else 200}
    with pytest.raises(ValueError, match=text):
        MEASUREMENTS[name].check([half, row] if "tokens" in row else [row])


def test_a_training_that_cannot_fit_has_no_number():
    recipe = MEASUREMENTS["002-fig1b"]
    study = dataclasses.replace(recipe.presets["paper"].study, limit_gb=1.0)
    found = recipe.measure({"method": "transformer", "mode": "training", "tokens": 6272}, study, CPU)
    assert found == {"bytes": None, "note": "not begun: the weights alone take 22.7 GB"}


def test_sizes_stand_in_their_groups():
    recipe = MEASUREMENTS["002-table3"]
    items = recipe.items(recipe.presets["paper"].study)
    assert len(items) == 25
    assert [item["model"] for item in items if item["counted"] == "ours"][:2] == ["SOFT-Tiny", "SOFT-Small"]
    tiny = recipe.measure(items[4], recipe.presets["paper"].study, CPU)
    assert (items[4]["model"], tiny["parameters"], tiny["multiply_adds"]) == ("SOFT-Tiny", 13_069_056, 2_134_743_008)
    assert stages(SoftConfig("tiny", 224, 3, 1000)).startswith("56×56, 64-d, 2-h ×1; 28×28, 128-d, 4-h ×2; 14×14")
