"""A model leaves its study: the same logits, refusals by name, top classes and attention maps of an image."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from attnkit.nn import MultiHeadAttention
from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import classify, export, runner
from attnkit_experiments.data.images import augment
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.images.domain import DOMAIN
from attnkit_experiments.images.model import ViT, ViTConfig
from attnkit_experiments.images.task import ImageTask
from attnkit_experiments.soft.model import SoftConfig, SoftVisionTransformer
from attnkit_experiments.study.recipe import Source, expand
from tests.library.arrays import assert_close

SETTINGS = ("activations=relu", "alphas=1", "ema=0.5", "pool=tok", "evaluate_every=0", "steps=3")
SOFT = (
    "image_size=16", "stem_stride=1", "train_images=30", "test_images=20", "batch=6", "steps=2", "padding=1",
    "full_scale=false", "cutmix=1", "erase=0.5", "ema=0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of two cells, relu without and with a gate, trained once: its folder."""
    out = tmp_path_factory.mktemp("study") / "run"
    tiny = ("image_size=8", "patch=4", "train_images=60", "test_images=30", "batch=12", *SETTINGS)
    return runner.run(runner.Request("000-fig4", "cpu", "digits", out, tiny, (0,), "cpu", 1))


@pytest.fixture(scope="module")
def model(study, tmp_path_factory):
    return export.export(study / "relu-alpha1-seed0", tmp_path_factory.mktemp("export") / "model")


@pytest.fixture
def copied(model, tmp_path):
    """The exported model, to be spoilt."""
    return shutil.copytree(model, tmp_path / "copied")


@pytest.fixture
def pictures(tmp_path):
    """Two image files, grey and in colour, not square."""
    rng = np.random.default_rng(0)
    paths = []
    for name, shape in (("grey.png", (10, 14)), ("colour.png", (20, 9, 3))):
        Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(tmp_path / name)
        paths.append(tmp_path / name)
    return paths


def trained_task(study, cell_name, weights):
    """The task of a cell as its study has it, with the weights of a file."""
    given = tuple(json.loads((study / "study.json").read_text())["settings"])
    recipe, settings = runner.choose(runner.Request("000-fig4", "cpu", "digits", study, given))
    data = DOMAIN.load(Source("digits", settings, study / "cache"))
    cell = next(cell for cell in expand(recipe, settings, data) if cell.name == cell_name)
    task: ImageTask = DOMAIN.task(cell, data, torch.device("cpu"))
    task.model.load_state_dict(load_file(study / "cells" / cell_name / weights))
    return task


@pytest.mark.parametrize("average", [False, True])
def test_the_logits_are_those_of_the_study(study, tmp_path, average):
    folder = export.export(study / "cells" / "relu-alpha1-seed0", tmp_path / "model", average=average)
    found = export.load(folder)
    task = trained_task(study, "relu-alpha1-seed0", f"weights{'_ema' * average}.safetensors")
    pixels = task.pixels.test(range(8))
    inputs = classify.normalised(pixels.numpy(), found.about["input"])
    with torch.no_grad():
        wanted = task.model.eval()(augment.normalise(pixels))
        assert torch.equal(found.model(inputs), wanted)
    assert torch.equal(classify.predict(found, inputs), wanted.softmax(-1))
    stored = json.loads((study / "cells" / "relu-alpha1-seed0" / "result.json").read_text())
    provenance = found.about["provenance"]
    assert provenance["accuracy"] == stored["accuracy_ema" if average else "accuracy"]
    assert (provenance["recipe"], provenance["seed"], provenance["variant"]) == ("000-fig4", 0, "relu-alpha1")
    assert provenance["data"]["checksum"] == json.loads((study / "study.json").read_text())["data"]["checksum"]


def test_attnkit_alone_builds_the_attention_from_the_file(model):
    config = json.loads((model / "config.json").read_text())["model"]
    inside = export.load(model).model.blocks[1].attention
    alone = MultiHeadAttention(64, 2, op=config["op"], options=config["options"], qk_norm=config["qk_norm"])
    prefix = "blocks.1.attention."
    weights = load_file(model / "model.safetensors")
    alone.load_state_dict({k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)})
    x = torch.randn(2, 5, 64)
    assert torch.equal(alone(x), inside(x))


def test_weights_are_laid_over_the_picture(tmp_path):
    pixels, pages = np.full((1, 8, 8, 3), 128, dtype=np.uint8), []
    for number in (0, 3):
        weights = torch.zeros(1, 4)
        weights[0, number] = 1.0
        path = tmp_path / f"{number}.png"
        classify.draw_maps(path, pixels, ["grey"], [classify.LayerMap("layer 1", weights.unflatten(-1, (2, 2)))])
        with Image.open(path) as page:
            pages.append(np.asarray(page.convert("L"), dtype=int))
    brighter = pages[0] - pages[1]
    upper, left = (np.flatnonzero((brighter > 50).any(axis)) for axis in (1, 0))
    lower, right = (np.flatnonzero((brighter < -50).any(axis)) for axis in (1, 0))
    assert (upper.max() < lower.min(), left.max() < right.min()) == (True, True)


def spoil(change):
    def apply(folder):
        about = json.loads((folder / "config.json").read_text())
        change(about)
        (folder / "config.json").write_text(json.dumps(about))

    return apply


def tear(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (spoil(lambda a: a.update(format="x")), "format must be 'attnkit-experiments-export-1', got 'x'"),
        (spoil(lambda a: a.update(kind="vitt")), "unknown kind of model in .* 'vitt'; did you mean 'vit'"),
        (spoil(lambda a: a["model"].update(size="Ti")), "make no model"),
        (spoil(lambda a: a["model"].update(colour=1)), "make no model .*colour"),
        (spoil(lambda a: a["classes"].pop()), "9 classes have names, the model has 10"),
        (tear, "is damaged: its SHA-256 differs"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "holds no exported model"),
    ],
)
def test_what_is_no_export_is_refused(copied, damage, text):
    damage(copied)
    with pytest.raises(UserError, match=text):
        export.load(copied)


def test_a_language_model_leaves_its_study(tmp_path, pictures, capsys):
    out = tmp_path / "copying"
    few = ("length=16", "tokens=64", "steps=2", "tested=4", "methods=linear", "evaluate_every=0")
    runner.run(runner.Request("003-copying", "smoke", "generated", out, few, (0,), "cpu", 1))
    exported = export.load(export.export(out / "linear-seed0", tmp_path / "model"))
    assert exported.about["input"] == {"task": "copying", "length": 16}
    result = json.loads((out / "cells" / "linear-seed0" / "result.json").read_text())
    assert exported.about["provenance"]["bits_per_byte"] == result["bits_per_byte"]
    weights = load_file(out / "cells" / "linear-seed0" / "weights.safetensors")
    assert all(torch.equal(x, weights[name]) for name, x in exported.model.state_dict().items())
    assert main(["classify", str(tmp_path / "model"), str(pictures[0])]) == 2
    assert "a model of kind 'language' reads no images" in capsys.readouterr().err


def test_what_cannot_be_exported_is_refused(study, model, tmp_path):
    with pytest.raises(UserError, match=r"unknown cell of .* 'relu-alpha3-seed0'; did you mean 'relu-alpha1-seed0'"):
        export.export(study / "relu-alpha3-seed0", tmp_path / "a")
    with pytest.raises(UserError, match="holds no study"):
        export.export(tmp_path / "softmax-seed0", tmp_path / "a")
    with pytest.raises(UserError, match="holds something already"):
        export.export(study / "relu-alpha1-gate-seed0", model)
    with pytest.raises(UserError, match="001-table4 trains a model of translation, which has no export"):
        export.kind_of("001-table4")
    with pytest.raises(UserError, match="002-fig1b trains no model"):
        export.kind_of("002-fig1b")
    other = shutil.copytree(study, tmp_path / "other")
    cell = other / "cells" / "relu-alpha1-gate-seed0"
    (cell / "weights_ema.safetensors").unlink()
    with pytest.raises(UserError, match="no moving average of its weights; train with --set ema"):
        export.export(other / "relu-alpha1-gate-seed0", tmp_path / "a", average=True)
    kept = ("config_hash", "variant", "seed")
    result = {key: json.loads((cell / "result.json").read_text())[key] for key in kept}
    (cell / "result.json").write_text(json.dumps(result | {"diverged": "at step 3"}))
    with pytest.raises(UserError, match="it diverged"):
        export.export(other / "relu-alpha1-gate-seed0", tmp_path / "a")
    (cell / "result.json").unlink()
    with pytest.raises(UserError, match="it has not finished"):
        export.export(other / "relu-alpha1-gate-seed0", tmp_path / "a")


def test_soft_from_training_to_maps(tmp_path, pictures, capsys):
    """With the augmentation of its published recipe; batch normalisation's statistics travel along."""
    out = runner.run(
        runner.Request("002-table1", "cpu", "digits", tmp_path / "out", (*SOFT, "methods=soft"), (0,), "cpu", 1)
    )
    assert main(["export", str(out / "soft-seed0"), str(tmp_path / "model"), "--average"]) == 0
    found = export.load(tmp_path / "model")
    assert isinstance(found.model.config, SoftConfig)
    stored = load_file(out / "cells" / "soft-seed0" / "weights_ema.safetensors")
    assert all(torch.equal(x, stored[name]) for name, x in found.model.state_dict().items())
    maps = tmp_path / "maps.png"
    assert main(["classify", str(tmp_path / "model"), *map(str, pictures), "--top", "2", "--maps", str(maps)]) == 0
    said = capsys.readouterr().out
    assert said.count(" %  ") == 4
    with Image.open(maps) as drawn:
        assert drawn.width > 500


def test_classes_are_ranked_among_those_that_were_judged(model):
    found = export.load(model)
    probabilities = torch.tensor([[0.5, 0.1, 0.2, 0.05, 0.15, 0, 0, 0, 0, 0]])
    assert classify.ranked(found, probabilities, 2) == [[("0", 0.5), ("2", probabilities[0, 2].item())]]
    found.about["judged"] = [1, 3, 4]
    assert [name for name, _ in classify.ranked(found, probabilities, 9)[0]] == ["4", "1", "3"]


def test_maps_are_the_weights_of_the_class_token_or_the_mean_over_queries():
    torch.manual_seed(0)
    inputs = torch.randn(2, 1, 8, 8)
    for pool in ("tok", "gap"):
        vit = ViT(ViTConfig("d64", patch=4, image=8, channels=1, classes=3, pool=pool)).eval()
        maps = classify.attention_maps(vit, inputs)
        weights = vit.inspect(inputs)[1][2].weights.mean(1)
        wanted = weights[:, 0, 1:] if pool == "tok" else weights.mean(1)
        assert [each.name for each in maps] == [f"layer {n}" for n in (1, 2, 3, 4)]
        assert_close(maps[2].weights, wanted.reshape(2, 2, 2))
    linformer = SoftVisionTransformer(SoftConfig("mini", 16, 1, 3, method="linformer", landmarks=4, stem_stride=1))
    with pytest.raises(UserError, match="linformer mixes tokens"):
        classify.attention_maps(linformer, torch.randn(1, 1, 16, 16))


def test_images_that_cannot_be_read_are_refused(model, tmp_path, refusal):
    (tmp_path / "note.png").write_text("no image")
    for name, text in (("note.png", "unknown format"), ("gone.png", "no such file")):
        assert text in refusal("classify", str(model), str(tmp_path / name))
