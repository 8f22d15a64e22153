"""The probe against least squares and the normal equations, what it is given, and its way through a study."""

import csv
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from attnkit_experiments.commands.report import write_report
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.decoders import Decoders
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.world import joined
from attnkit_experiments.images import fewshot, task
from attnkit_experiments.images.domain import ImageSets, probe_set
from attnkit_experiments.images.model import ViTConfig
from attnkit_experiments.images.task import AugmentConfig, ImageTask
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.recipes.relu_vit.big_vision import FEWSHOT
from attnkit_experiments.study.recipe import Source
from tests.library.arrays import assert_close

from .forks import forked


def features(count, width=6, classes=3):
    rng = np.random.default_rng(count)
    labels = rng.permutation(np.arange(count) % classes)
    return rng.standard_normal((count, width)) + 2 * np.eye(classes, width)[labels], labels


@pytest.mark.parametrize("count", [4, 7, 30])  # fewer rows than columns, as many, more
def test_the_probe_solves_the_ridge_problem(count):
    x, labels = features(count)
    x = fewshot.whitened(x, x)
    y = 2 * np.eye(3)[labels] - 1
    w = fewshot.ridge_probe(x, labels, 3, ridge=8.0)
    stacked = np.vstack([x, np.sqrt(8.0) * np.eye(7)])
    condition = np.linalg.cond(stacked) ** 2  # normal equations square it
    size = np.abs(x.T) @ (np.abs(x) @ np.abs(w) + np.abs(y)) + 8.0 * np.abs(w)
    assert_close(x.T @ (x @ w - y) + 8.0 * w, np.zeros_like(w), condition, magnitude=size)
    assert_close(w, np.linalg.lstsq(stacked, np.vstack([y, np.zeros((7, 3))]))[0], condition)


def test_features_are_whitened_by_those_of_training_and_get_a_constant():
    train, test = features(30)[0] * 5 + 3, features(8)[0]
    found = fewshot.whitened(test, train)
    assert_close(found[:, :-1], (test - train.mean(0)) / (train.std(0) + 1e-5))
    assert (found[:, -1] == 100).all()
    constant = fewshot.whitened(np.ones((4, 2)), np.ones((4, 2)))
    assert (constant[:, :-1] == 0).all()


def test_shots_are_of_every_class_nested_and_drawn_from_the_seed():
    labels = np.array([0] * 9 + [1] * 9 + [2] * 2)
    few, many, other = (fewshot.sample(labels, 3, n, seed) for n, seed in ((3, 0), (5, 0), (5, 1)))
    assert np.bincount(labels[few]).tolist() == [3, 3, 2]
    assert set(few) <= set(many)
    assert set(many) != set(other)


def test_accuracy_is_that_of_unseen_images():
    train, test = features(120), features(60)
    found = fewshot.accuracies(train, test, 3, shots=(1, 20), seeds=(0, 1))
    assert found.keys() == {"1", "20"}
    assert all(len(values) == 2 for values in found.values())
    assert min(found["20"]) > 0.8
    shuffled = np.random.default_rng(0).permutation(train[1])
    assert max(fewshot.accuracies((train[0], shuffled), test, 3, shots=(20,))["20"]) < 0.7
    means = fewshot.summary({"a": {"1": [0.2, 0.4], "5": [0.5]}, "b": {"1": [0.9, 0.7], "5": [1.0]}}, (1, 5))
    assert means == {"fewshot_accuracy": 0.75, "fewshot/a/1": pytest.approx(0.3), "fewshot/a/5": 0.5,
                     "fewshot/b/1": pytest.approx(0.8), "fewshot/b/5": 1.0}  # fmt: skip


def test_a_study_probes_its_models_and_reports_it(tiny, tmp_path, image_folder, undrawn):
    settings = (f"fewshot=digits,{image_folder}", "shots=1,2", "points=d64/4")
    with pytest.raises(UserError, match="images of 3 channels, the study's have 1"):
        tiny(tmp_path / "refused", *settings, recipe="000-fig1")
    settings = ("fewshot=digits", *settings[1:], "evaluate_every=3")
    out = tiny(tmp_path / "out", *settings, recipe="000-fig1")
    cell = out / "cells" / "d64-p4-softmax-seed0"
    rows = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    early, last = (row["evaluation"] for row in rows if "evaluation" in row)
    assert early["fewshot_accuracy"] != last["fewshot_accuracy"]
    result = json.loads((cell / "result.json").read_text())
    probes = {key: value for key, value in result.items() if key.startswith("fewshot/")}
    assert probes.keys() == {"fewshot/scikit-learn digits/1", "fewshot/scikit-learn digits/2"}
    assert all(0.02 < value < 1 for value in probes.values())
    assert result["fewshot_accuracy"] == last["fewshot_accuracy"] == probes["fewshot/scikit-learn digits/2"]
    page = write_report(out).read_text()
    assert "Few-shot probes" in page
    (row, *_) = csv.DictReader((out / "results.csv").read_text().splitlines())
    assert_close(float(row["core_hours"]), float(row["step_ms"]) * 6 / 3.6e6)
    assert float(row["fewshot_accuracy"]) > 0.02


def test_what_is_probed_is_part_of_the_checksum(tmp_path):
    one, other = (load_images("digits", ImageRequest(size), cache=tmp_path) for size in (0, 16))
    assert ImageSets(one).checksum() == one.checksum()
    assert len({ImageSets(one, probes).checksum() for probes in ((), (one,), (other,), (one, other))}) == 4


def prober(folder: str, cache: Path, *, lazily: bool, workers: int = 0) -> tuple[ImageTask, ImageData | LazyImages]:
    """A task that probes on images of a folder, held in memory or decoded when they are needed, and those."""
    probe = main = load_images(folder, ImageRequest(12), cache=cache)
    if lazily:
        probe = probe_set(folder, 12, Decoders(workers), Source(folder, None, cache, workers=workers))
        assert isinstance(probe, LazyImages)
    model, cpu = ViTConfig("d64", 4, 12, 3, 2), torch.device("cpu")
    made = ImageTask(main, model, AugmentConfig(mixup=0.0), batch=4, precision="float32", seed=0, device=cpu,
                     probes=(probe,), shots=(1, 2))  # fmt: skip
    made.model.eval()
    return made, probe


@pytest.fixture
def seen_by(image_folder, tmp_path):
    return partial(prober, str(image_folder), tmp_path)


def process(folder: str, cache: str) -> None:
    """Write what this process finds together with the others."""
    task.EVALUATION_BATCH = 4
    with joined(torch.device("cpu"), "ddp") as world:
        made, data = prober(folder, Path(cache), lazily=True)
        features = made.features(data, "train", np.arange(len(data.train)), world)
        found = {"features": features.tolist(), "accuracies": made.probed(world)}
    (Path(cache) / f"{world.size}-{world.rank}.json").write_text(json.dumps(found))


@pytest.mark.survival
def test_two_processes_find_what_one_finds(image_folder, tmp_path):
    words = str(image_folder), str(tmp_path)
    forked(__name__, (1, words), (2, words))
    alone, *together = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert len(alone["features"]) == 12
    assert together == [alone, alone]


@pytest.mark.parametrize("workers", [0, 1])
def test_features_of_images_decoded_in_batches_are_those_of_images_in_memory(seen_by, monkeypatch, workers):
    """And no more images than a batch are there at once: two where processes decode."""
    monkeypatch.setattr(task, "EVALUATION_BATCH", 4)
    (whole, held), (streamed, lazy) = seen_by(lazily=False), seen_by(lazily=True, workers=workers)
    assert (lazy.classes, lazy.name, len(lazy.train)) == (held.classes, held.name, 12)
    asked = []
    decode = LazyImages.decode
    monkeypatch.setattr(
        LazyImages, "decode", lambda self, items, pixels: asked.append(pixels.nbytes) or decode(self, items, pixels)
    )
    for split in ("train", "test"):
        ids = np.arange(len(getattr(held, f"{split}_labels")))
        assert np.array_equal(streamed.features(lazy, split, ids), whole.features(held, split, ids))
    assert max(asked) == 4 * 12 * 12 * 3
    assert sum(asked) == held.train_images.nbytes + held.test_images.nbytes
    assert streamed.evaluate() == whole.evaluate()


def test_only_the_images_of_draws_are_read(seen_by, monkeypatch):
    made, lazy = seen_by(lazily=True)
    read = []
    decode = LazyImages.decode
    monkeypatch.setattr(
        LazyImages,
        "decode",
        lambda self, items, pixels: read.extend(i for i, _ in items) or decode(self, items, pixels),
    )
    made.shots = (1,)
    made.evaluate()
    drawn = {int(i) for seed in (0, 1, 2) for i in fewshot.sample(lazy.train_labels, 2, 1, seed)}
    assert {int(lazy.train[i]) for i in drawn} == {i for i in read if lazy.index.train[i]}
    assert len(drawn) < len(lazy.train)
    every, labels = train = features(120)
    known = fewshot.used(labels, 3, (1, 5))
    assert len(known) < 120
    found = fewshot.accuracies((every[known], labels), train, 3, shots=(1, 5), known=known)
    assert found == fewshot.accuracies(train, train, 3, shots=(1, 5))


def test_a_set_is_found_in_the_folder_of_data_and_its_absence_is_an_error(image_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKIT_DATA", str(image_folder.parent))
    source = Source("", None, tmp_path)
    assert probe_set(image_folder.name, 8, Decoders(0), source).name == image_folder.name
    with pytest.raises(UserError, match=r"--set fewshot: .*fewshot/birds.*--set fewshot= none"):
        probe_set(FEWSHOT[0], 8, Decoders(0), source)
    assert RECIPES["000-fig1"].presets["paper"].study.fewshot == FEWSHOT
    (image_folder / "train" / "cat" / "0000.png").write_bytes(b"none")
    damaged = probe_set(str(image_folder), 8, Decoders(0), source)
    with pytest.raises(UserError, match=r"--set fewshot: .*0000.png cannot be read as an image"):
        [*fewshot.read(damaged, "train", [np.arange(12)])]
