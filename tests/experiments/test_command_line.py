"""The command line: what list shows, what a mistyped name answers, when --out is refused, and each recipe's smoke."""

import dataclasses
import errno
import math
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import runner
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.engine.errors import Diverged, UserError
from attnkit_experiments.engine.files import PARTIAL
from attnkit_experiments.images.domain import ImageStudy, judged_classes
from attnkit_experiments.images.settings import image_source
from attnkit_experiments.recipes import FILES, MEASUREMENTS, RECIPES

from .conftest import FEW, TINY

OF_IMAGES = [name for name, recipe in RECIPES.items() if recipe.domain.name == "images"]


def test_list_names_every_recipe_with_presets_cost_and_source(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for recipe in (*RECIPES.values(), *MEASUREMENTS.values()):
        assert recipe.id in said
        assert recipe.source in said
        for preset in recipe.presets.values():
            assert f"; {preset.cost}" in said
    assert said.count("measured, nothing trained") == sum(len(each.presets) for each in MEASUREMENTS.values())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["000-fg2"], "unknown recipe '000-fg2'; did you mean '000-fig2'?"),
        (["000-fig2", "--preset", "smal"], "unknown preset of 000-fig2 'smal'; did you mean 'small'?"),
        (["000-fig2", "--set", "stepz=3"], "unknown --set key 'stepz'; did you mean 'steps'?"),
        (["000-fig2", "--set", "steps=many"], "--set steps: expected a whole number, got 'many'"),
        (["000-fig2", "--set", "lr=nan"], "--set lr: expected a finite number, got 'nan'"),
        (["000-fig2", "--set", "flip=maybe"], "--set flip: expected true or false, got 'maybe'"),
        (["000-fig2", "--set", "crop=middle"], "--set crop: expected one of none, pad, inception, got 'middle'"),
        (["000-fig2", "--set", "alphas=0,x"], "--set alphas: expected a number, got 'x'"),
        (["000-fig2", "--set", "steps"], "--set steps: expected key=value"),
        (["000-fig2", "--set", "activations=rellu"], "unknown activation 'rellu'; did you mean 'relu'?"),
        (["000-fig2", "--set", "activations="], "--set activations: expected one or more of relu, relu_squared, "),
        (["000-fig2", "--set", "model=S16"], "unknown model size 'S16'"),
        (["000-fig2", "--set", "patch=3"], "000-fig2: images of 16 pixels cannot be cut into patches of 3"),
        (["000-fig2", "--set", "batch=0"], "batch must be at least 1, got 0"),
        (["000-fig1", "--set", "points=d64"], "--set points: expected size/patch such as d64/4, got 'd64'"),
        (["000-fig2", "--device", "cuda:x"], "--device cuda:x: expected auto, cpu or cuda[:N]"),
        (["000-fig2", "--seeds", "1", "1"], "seeds: expected different whole numbers from 0"),
        (["000-fig2", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["002-table1", "--set", "methods=softt"], "unknown method 'softt'; did you mean 'soft'?"),
        (["002-fig1b", "--set", "unit=100"], "unit must be a multiple of 28, the height of a picture; got 100"),
        (["002-fig1b", "--preset", "small"], "unknown preset of 002-fig1b 'small'"),
        (["002-fig1c"], "unknown recipe '002-fig1c'; did you mean '002-fig1b'?"),
        (["002-table2", "--seeds", "1"], "002-table2: --seeds is for what is trained"),
        (["002-table4", "--set", "image_size=12"], "images of 12 pixels do not fit the strides of the stages"),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_status_2(words, text, tmp_path, refusal):
    assert text in refusal("run", *words, "--data", "digits", "--out", str(tmp_path / "out"))
    assert not list(tmp_path.rglob("study.json"))
    assert not list(tmp_path.rglob("leases"))


def test_a_setting_that_is_none_is_named_before_data_are_read(tmp_path, refusal):
    words = ("--set", "activations=rellu", "--data", str(tmp_path / "absent"), "--out", str(tmp_path / "out"))
    assert "unknown activation 'rellu'" in refusal("run", "000-fig2", *words)


def test_help_names_the_command_that_was_typed(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "usage: python -m experiments " in capsys.readouterr().out


def test_settings_may_be_repeated_or_listed():
    request = runner.Request("000-fig2", "cpu", "digits", out=None, settings=("activations=relu,gelu", "alphas=0,0.5"))
    _, study = runner.choose(request)
    assert study.activations == ("relu", "gelu")
    assert study.alphas == (0.0, 0.5)


def test_images_come_from_the_environment_or_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.delenv("ATTNKIT_DATA", raising=False)
    assert image_source() == "digits"
    monkeypatch.setenv("ATTNKIT_DATA", str(tmp_path))
    assert image_source() == str(tmp_path)
    (tmp_path / "cifar10-subset.zip").touch()
    assert image_source() == str(tmp_path / "cifar10-subset.zip")


def test_a_finished_study_is_kept_unless_told_otherwise(tiny, tmp_path):
    out = tiny(tmp_path / "out")
    weights = out / "cells" / "relu-alpha1-seed0" / "weights.safetensors"
    before = weights.stat().st_mtime_ns
    with pytest.raises(UserError, match="holds a finished study; --resume continues it, --overwrite deletes it"):
        tiny(out)
    tiny(out, resume=True)
    assert weights.stat().st_mtime_ns == before, "finished cells are not trained again"
    (out / "notes.txt").write_text("mine")
    tiny(out, overwrite=())
    assert weights.stat().st_mtime_ns > before
    assert (out / "notes.txt").exists(), "only our own files are deleted"


def test_a_directory_of_someone_else_is_never_touched(tiny, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match="holds files but no study of ours; choose another directory"):
            tiny(tmp_path, **flags)
    assert (tmp_path / "thesis.tex").exists()


def test_resuming_something_else_names_the_difference(tiny, tmp_path, image_folder):
    out = tiny(tmp_path / "out")
    with pytest.raises(UserError, match=r"it was started with lr 0.002, now it is 0.01; give the same, or --overwrite"):
        tiny(out, "lr=0.01", resume=True)
    with pytest.raises(UserError, match=r"it was started with recipe '000-fig4', now it is '000-fig3'"):
        tiny(out, recipe="000-fig3", resume=True)
    with pytest.raises(UserError, match=r"it was started with data checksum"):
        tiny(out, data=str(image_folder), resume=True)


@pytest.mark.parametrize("recipe", OF_IMAGES)
def test_every_recipe_trains_at_a_tiny_size(recipe, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("attnkit_experiments.report.claims.measure", dict)
    small = {"000-fig1": ("points=d64/4,d64/2",), "000-learned": ("kinds=alpha-head",)}.get(recipe, ())
    out = tiny(tmp_path / "out", *small, recipe=recipe)
    cells = sorted(path.name for path in (out / "cells").iterdir())
    expected = {
        "000-fig1": [f"d64-p{p}-{v}-seed0" for p in (2, 4) for v in ("relu-alpha1", "softmax")],
        "000-fig2": ["relu-alpha1-seed0", "softmax-seed0"],
        "000-fig3": ["relu-alpha1-nonorm-seed0", "relu-alpha1-norm-seed0"],
        "000-learned": ["relu-alpha1-alpha-head-seed0", "relu-alpha1-seed0", "softmax-seed0"],
        "000-fig4": ["relu-alpha1-gate-seed0", "relu-alpha1-seed0"],
    }
    assert cells == expected[recipe]


@pytest.mark.parametrize(("preset", "steps", "classes"), [("paper", 103_607, 21_843), ("i1k", 92_897, 1000)])
def test_the_published_settings_are_big_visions(preset, steps, classes):
    for recipe in (RECIPES[f"000-fig{n}"] for n in (1, 2, 3, 4)):
        study = recipe.presets[preset].study
        assert (study.steps, study.batch, study.lr, study.warmup) == (steps, 4096, 1e-3, 10_000)
        assert study.steps == int(study.train_images * (30 if preset == "paper" else 300) / 4096)
        assert (study.loss, study.smoothing, study.clip, study.accumulate) == ("sigmoid", 0, 1, 0)
        assert abs(study.head_bias + math.log(classes)) < 0.02
        assert (study.pool, study.pre_logits) == (("gap", False) if preset == "paper" else ("tok", True))
        variants = {variant.name: variant for variant in recipe.variants(study)}
        assert {"S/32", "S/16", "S/8"} <= {variant.point for variant in variants.values()}
        levels = {variant.changes["augreg"] for variant in variants.values() if variant.point == "S/16"}
        assert levels == {"light1" if preset == "paper" else "medium2"}
        assert all(variant.baseline in {"", *variants} for variant in variants.values())
    assert len(RECIPES["000-fig1"].variants(RECIPES["000-fig1"].presets[preset].study)) == 12


def test_the_gated_are_a_series_beside_those_without_a_gate():
    recipe, study = runner.choose(runner.Request("000-fig4", "cpu", "digits", out=None, settings=("alphas=1",)))
    plain, gated = recipe.variants(study)
    assert (plain.series, plain.gate, plain.baseline) == ("relu", "", "")
    assert (gated.series, gated.gate, gated.baseline) == ("relu, gated", "silu", plain.name)


def test_a_point_changes_model_and_patch_and_keeps_what_a_variant_changes():
    request = runner.Request("000-fig3", "cpu", "digits", out=None, settings=("points=w96/8,d64/4", "alphas=1"))
    recipe, study = runner.choose(request)
    found = {variant.name: variant for variant in recipe.variants(study)}
    assert found.keys() == {f"{p}-relu-alpha1-{n}norm" for p in ("w96-p8", "d64-p4") for n in ("", "no")}
    one = found["w96-p8-relu-alpha1-nonorm"]
    assert one.changes == {"model": "w96", "patch": 8, "qk_norm": False, "lr": 2e-3}
    assert one.baseline == "w96-p8-relu-alpha1-norm"


@pytest.mark.parametrize(
    ("judged", "text"),
    [
        ("cat\nmouse", "'mouse' is not among the 2 classes of images"),
        ("cat", "'dog' has test images but is not named"),
        (None, "judged.txt: no such file"),
    ],
)
def test_judged_classes_that_do_not_fit_are_named(judged, text, tiny, tmp_path, image_folder):
    names = tmp_path / "judged.txt"
    if judged:
        names.write_text(judged)
    with pytest.raises(UserError, match=text):
        tiny(tmp_path / "out", f"judged={names}", data=str(image_folder))


def test_judged_classes_are_those_of_the_test_images_or_of_a_file(image_folder, tmp_path):
    data = load_images(str(image_folder), ImageRequest(), cache=tmp_path / "cache")
    only_dogs = dataclasses.replace(data, test_labels=np.ones_like(data.test_labels))
    (tmp_path / "names.txt").write_text("dog\n")
    assert judged_classes("", only_dogs) is None
    assert judged_classes("test", only_dogs) == judged_classes(str(tmp_path / "names.txt"), only_dogs) == (1,)


@pytest.mark.parametrize("recipe", OF_IMAGES)
@pytest.mark.parametrize("preset", ["smoke", "small", "cpu"])
def test_presets_keep_their_promises(recipe, preset):
    study = RECIPES[recipe].presets[preset].study
    names = [variant.name for variant in RECIPES[recipe].variants(study)]
    assert len(set(names)) == len(names)
    if preset == "smoke":
        assert study.steps <= 40
    if preset == "cpu":
        sizes = (study.train_images, study.steps, study.batch, len(study.seeds))
        assert sizes == (25_000, 5000, 64, 3)
    if (recipe, preset) == ("000-fig2", "cpu"):
        assert {"softmax", "relu-alpha0", "relu-alpha0.5", "relu-alpha1"} <= set(names)


def test_the_preset_of_make_run_compares_softmax_with_relu_over_seeds():
    study = RECIPES["000-fig2"].presets["digits"].study
    assert [variant.name for variant in RECIPES["000-fig2"].variants(study)] == ["softmax", "relu-alpha1"]
    assert study.seeds == (0, 1, 2)
    assert (study.image_size, study.train_images, study.test_images) == (8, 0, 0), "the digits as they are, all of them"


def test_a_recipes_docstring_says_source_expectation_cost_and_command():
    for file in FILES:
        recipe = file.RECIPE if hasattr(file, "RECIPE") else file.MEASUREMENT
        for word in ("Source:", "Expected:", "Cost:", f"Command: python -m experiments run {recipe.id}"):
            assert word in file.__doc__


def test_smoke_checks_notice_a_loss_that_does_not_fall(tiny, tmp_path):
    with pytest.raises(Diverged, match=r"smoke check failed: relu-alpha1-seed0: the loss does not fall"):
        tiny(tmp_path / "out", "lr=1e-30", preset="smoke")


def test_every_setting_is_a_key():
    assert ImageStudy().steps == 300
    request = runner.Request("000-fig2", "smoke", "digits", out=None, settings=("steps=7", "qk_norm=no", "pool=tok"))
    _, study = runner.choose(request)
    assert (study.steps, study.qk_norm, study.pool) == (7, False, "tok")


WORDS = ("run", "000-fig4", "--preset", "cpu", "--data", "digits", "--seeds", "0", "--device", "cpu", "--threads", "1")


def test_a_full_disk_is_one_sentence_and_leaves_whole_files(tiny, tmp_path, monkeypatch, capsys):
    out, flush, calls = tmp_path / "out", os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > 6:  # amid the checkpoints of the first cell
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    words = [*WORDS, "--out", str(out), "--set", *TINY, *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(words) == 2
    assert capsys.readouterr().err == "error: No space left on device; what was written stays whole\n"
    assert (out / "study.json").exists()
    assert not list(out.rglob(PARTIAL))
    assert main([*words, "--resume"]) == 0
    weights = [
        load_file(path / "cells" / "relu-alpha1-seed0" / "weights.safetensors")
        for path in (out, tiny(tmp_path / "whole"))
    ]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path, refusal):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        assert str(tmp_path / "file") in refusal(*WORDS, "--out", str(out))


def test_a_cell_is_overwritten_alone(tiny, tmp_path):
    out = tiny(tmp_path / "out")
    files = [out / "cells" / cell / "weights.safetensors" for cell in ("relu-alpha1-seed0", "relu-alpha1-gate-seed0")]
    before = [file.stat().st_mtime_ns for file in files]
    with pytest.raises(UserError, match="did you mean 'relu-alpha1-seed0'"):
        tiny(out, overwrite=("relu-alpha1-seed",))
    tiny(out, overwrite=("relu-alpha1-seed0",))
    after = [file.stat().st_mtime_ns for file in files]
    assert after[0] > before[0]
    assert after[1] == before[1]
