"""Recipe 002-table6: every method from settings to report, what follows the task, where data comes from, resume."""

import csv
import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.data.sequences.lra import TASKS
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.metrics import read_metrics
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.recipes.soft.table6 import PAPER, PUBLISHED, RECIPE
from attnkit_experiments.sequences import inspection
from attnkit_experiments.sequences.domain import DOMAIN, SequenceStudy, place_of
from attnkit_experiments.sequences.inspection import layer_statistics
from attnkit_experiments.sequences.methods import METHODS
from attnkit_experiments.sequences.page import near_chance
from attnkit_experiments.sequences.task import SequenceTask
from attnkit_experiments.study.recipe import Source, expand
from tests.library.arrays import assert_agrees

TINY = (
    "longer_than=3", "shorter_than=33", "tree_depth=3", "train_samples=48", "valid_samples=10", "test_samples=20",
    "batch=8", "checkpoint_every=2",
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Train a tiny study in this process: run("key=value", ..., preset=..., out=..., resume=True, ...)."""

    def train(*settings, out="out", preset="cpu", **options):
        options = {"data": "generated", "seeds": (0,), "threads": 1, "device": "cpu"} | options
        cache = tmp_path / "cache"
        return runner.run(
            runner.Request(RECIPE.id, preset, out=tmp_path / out, settings=(*TINY, *settings), cache=cache, **options)
        )

    return train


def write_reviews(path, train, test):
    """Reviews of 20 to 60 random bytes, so many of each sentiment, as aclImdb keeps them; returns the folder."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for sentiment in ("pos", "neg"):
            folder = path / split / sentiment
            folder.mkdir(parents=True)
            for index in range(count):
                (folder / f"{index}.txt").write_bytes(rng.integers(97, 123, rng.integers(20, 61)).astype(np.uint8))
    return path


@pytest.fixture
def reviews(tmp_path):
    """16 train and 8 test reviews."""
    return write_reviews(tmp_path / "reviews", 8, 4)


def results(out):
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("cells/*/result.json")}


def study_of(preset, *settings):
    return runner.choose(runner.Request(RECIPE.id, preset, "generated", out=None, settings=settings))[1]


# ---------------------------------------------------------------------------------------------- trained and shown


def test_every_method_trains_and_the_report_shows_it_beside_chance(run, undrawn):
    out = run(f"methods={','.join(METHODS)}", "steps=2")
    found = results(out)
    assert set(found) == {f"{method}-seed0" for method in METHODS}
    majority = {result["majority"] for result in found.values()}
    assert len(majority) == 1
    for name, result in found.items():
        assert {"accuracy", "valid_accuracy", "test_loss", "parameters", "step_ms"} <= set(result), name
        assert math.isfinite(result["test_loss"]), name
        assert result["tokens"] == 32
    with_rows = {name.removesuffix("-seed0") for name, result in found.items() if result["layers"]}
    assert with_rows == {
        *("transformer", "performer", "performer_relu", "linear", "cosine", "efficient", "relu", "average", "zeros")
    }
    assert all(len(result["layers"]) in (0, 2) for result in found.values())

    chance = f"{100 * majority.pop():.1f}"
    page = write_report(out).read_text()
    assert "Accuracy beside chance" in page
    for method in METHODS:
        number = r"<td>[+-]?\d+\.\d</td>"
        row = rf"<td>{method}</td>{number}{number}<td>{re.escape(chance)}</td>{number}<td>(near chance)?</td></tr>"
        assert len(re.findall(row, page)) == 1, method
    assert "Rows of the attention matrix" in page
    assert page.count("<svg") == 1
    summary = (out / "summary.md").read_text()
    assert f"always answering the commonest one is right for {chance} % of test" in summary
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["variant"] for row in rows] == list(METHODS)
    assert rows[0]["difference_mean"] == ""
    assert all(row["difference_mean"] for row in rows[1:])


def test_text_that_tells_nothing_is_learned_by_heart_in_the_smoke_preset(tmp_path):
    reviews = write_reviews(tmp_path / "reviews", 300, 4)
    settings = ("task=text", "methods=performer", "valid_samples=0", "test_samples=0")
    request = runner.Request(RECIPE.id, "smoke", str(reviews), out=tmp_path / "out", settings=settings)
    (result,) = results(runner.run(dataclasses.replace(request, device="cpu", threads=1))).values()
    assert result["last_loss"] < 0.5 * result["first_loss"]


def test_the_smoke_preset_checks_itself(tmp_path, undrawn):
    request = runner.Request(RECIPE.id, "smoke", "by-task", out=tmp_path / "out", settings=("methods=linear",))
    out = runner.run(dataclasses.replace(request, device="cpu", threads=1))
    assert (out / "finished.json").exists()
    (result,) = results(out).values()
    assert result["last_loss"] < result["first_loss"]
    assert "SMOKE, NOT A RESULT" in write_report(out).with_name("summary.md").read_text()


def test_a_killed_study_ends_as_if_it_had_not_been(run, monkeypatch):
    settings = ("methods=transformer,reformer", "steps=6", "weight_dropout=0.1")
    whole = run(*settings, out="whole")
    sample_ids = SequenceTask.sample_ids

    def killed(task, step):
        if step == 4 and task.model.config.method == "reformer":
            raise KeyboardInterrupt
        return sample_ids(task, step)

    with monkeypatch.context() as patched:
        patched.setattr(SequenceTask, "sample_ids", killed)
        with pytest.raises(KeyboardInterrupt):
            run(*settings, out="parts")
    parts = run(*settings, out="parts", resume=True)
    for name in ("transformer-seed0", "reformer-seed0"):
        one, other = (read_metrics(out / "cells" / name / "metrics.jsonl") for out in (whole, parts))
        assert [(row.get("loss"), row.get("ids")) for row in one] == [
            (row.get("loss"), row.get("ids")) for row in other
        ]
        one, other = (load_file(out / "cells" / name / "weights.safetensors") for out in (whole, parts))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("task", ["text", "imdb-halves"])
def test_texts_are_trained_on_too(task, run, reviews):
    settings = (f"task={task}", "methods=relu", "train_samples=0", "valid_samples=0", "test_samples=0", "hold_out=4")
    out = run(*settings, "text_length=30", "steps=2", data=str(reviews))
    about = json.loads((out / "study.json").read_text())["data"]
    # every fourth of the 8 train samples of each class
    assert (about["train"], about["valid"], about["test"]) == (12, 4, 8)
    assert ("pairs of sequences" in about["text"]) == (task == "imdb-halves")
    assert ("were cut to their longest length" in about["text"]) == (about["truncated"] > 0)
    assert results(out)["relu-seed0"]["tokens"] == 32 * (2 if task == "imdb-halves" else 1)


def test_without_holding_out_all_is_trained_on(reviews, tmp_path):
    every = ("train_samples=0", "valid_samples=0", "test_samples=0")
    data = DOMAIN.load(Source(str(reviews), study_of("cpu", "task=text", "hold_out=0", *every), tmp_path))
    assert (len(data.train), len(data.valid), len(data.test)) == (16, 0, 8)


def test_pictures_are_trained_on_too(run, image_folder):
    everything = ("train_samples=0", "valid_samples=0", "test_samples=0")
    out = run(
        "task=image", "methods=soft", *everything, "hold_out=3", "image_side=8", "steps=2", data=str(image_folder)
    )
    assert "8 train, 4 valid, 6 test sequences of 64 tokens, 2 classes" in (out / "study.json").read_text()
    assert results(out)["soft-seed0"]["majority"] == 0.5


# ---------------------------------------------------------------------------------------------- settings


def test_the_paper_preset_follows_the_task():
    for task, row in PAPER.items():
        study = study_of("paper", f"task={task}")
        assert {name: getattr(study, name) for name in row} == row
        assert (study.lr, study.eps, study.weight_decay, study.clip) == (1e-4, 1e-6, 0, 0)
    assert set(PAPER) == set(TASKS)


def test_what_is_set_does_not_follow_the_task():
    study = study_of("paper", "steps=5000", "task=text")
    assert (study.steps, study.warmup, study.length) == (5000, 8000, 4096)
    other = dataclasses.replace(study, task="image", seeds=(7,))
    assert (other.steps, other.warmup, other.batch) == (5000, 175, 256)
    small = study_of("small", "task=image")
    assert (small.steps, small.warmup, small.length, small.batch) == (1200, 240, 1024, 256)
    assert json.loads(json.dumps(dataclasses.asdict(other)))["warmup"] == 175


def test_published_numbers_belong_to_rows_and_tasks():
    assert PUBLISHED.keys() == {"listops", "text", "retrieval", "image"}
    for task, row in PUBLISHED.items():
        assert set(row) == set(SequenceStudy().methods) - {"linear", "relu"}, task
    # the paper's last column: means over the four tasks
    means = {method: sum(row[method] for row in PUBLISHED.values()) / 4 for method in PUBLISHED["text"]}
    averages = {"transformer": 54.92, "reformer": 51.47, "linformer": 52.59, "performer": 49.58, "soft": 57.39}
    assert means == pytest.approx(averages | {"nystromformer": 55.95}, abs=0.0051)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["task=lisstops"], "unknown task 'lisstops'; did you mean 'listops'?"),
        (["methods=transformer,reformr"], "unknown method 'reformr'; did you mean 'reformer'?"),
        (["pool=mean"], "unknown pooling 'mean'; did you mean 'mean_padded'?"),
        (["methods="], "--set methods: expected one or more of transformer, reformer, "),
        (["methods=relu,relu"], "002-table6: the settings name one cell twice"),
        (["hold_out=1"], "hold_out must be 0 or at least 2"),
        (["steps=0"], "002-table6: steps must be at least 1, got 0"),
        (["tree_depth=0"], "listops: depth must be at least 1"),
        (["length=8"], "002-table6: length must hold 12 tokens for listops, got 8"),
        (["methods=reformer", "pad_to_multiple=8"], "002-table6: pad_to_multiple must be 0 for reformer"),
        (["task=text"], "the task text needs data: give --data PATH, or set ATTNKIT_DATA"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, text, tmp_path, refusal, monkeypatch):
    monkeypatch.delenv("ATTNKIT_DATA", raising=False)
    settings = [part for word in ("train_samples=50", *words) for part in ("--set", word)]
    assert text in refusal("run", RECIPE.id, *settings, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "study.json").exists(), "the next try needs no --overwrite"


# ---------------------------------------------------------------------------------------------- data and cells


def test_data_is_what_the_task_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKIT_DATA", str(tmp_path))
    assert place_of("listops") == "generated"
    assert place_of("text") == place_of("image") == place_of("retrieval") == str(tmp_path)
    (tmp_path / "imdb-subset.zip").touch()
    assert place_of("text") == place_of("imdb-halves") == str(tmp_path / "imdb-subset.zip")
    assert place_of("image") == str(tmp_path)
    with pytest.raises(UserError, match=r"expected one file \*_train.tsv"):
        DOMAIN.load(Source(str(tmp_path), study_of("smoke"), tmp_path))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return DOMAIN.load(Source("by-task", study_of("smoke", *TINY), tmp_path_factory.mktemp("cache")))


def test_cells_hold_what_decides_their_numbers(data):
    cells = expand(RECIPE, study_of("smoke", *TINY, "length=70", "clip=0.5", "eps=1e-7"), data)
    assert [cell.variant.name for cell in cells] == list(SequenceStudy().methods)
    assert {cell.settings["model"].length for cell in cells} == {70}
    assert {(cell.train.clip, cell.train.eps, cell.train.schedule) for cell in cells} == {(0.5, 1e-7, "onecycle")}
    assert len({cell.config_hash() for cell in cells}) == len(cells)
    longest = expand(RECIPE, study_of("smoke", *TINY), data)[0]
    assert longest.settings["model"].length == 32
    json.dumps(longest.config(), allow_nan=False)


def test_every_method_is_built_at_the_published_length(data):
    cells = expand(RECIPE, study_of("paper", f"methods={','.join(METHODS)}", "seeds=0"), data)
    assert [cell.settings["model"].method for cell in cells] == list(METHODS)
    for cell in cells:
        assert cell.train == TrainConfig(
            steps=5000, lr=1e-4, schedule="onecycle", warmup=1000, weight_decay=0, eps=1e-6, clip=1e30,
            checkpoint_every=500, compile=True,
        )  # fmt: skip
        task = DOMAIN.task(cell, data, torch.device("cpu"))
        assert task.model.position.weight.shape == (2048, 64)


def test_a_clip_of_zero_clips_nothing(data):
    train = expand(RECIPE, study_of("smoke", *TINY), data)[0].train
    gradient = torch.tensor([3e20, -4e-20, 0.0])
    for clip, same in ((train.clip, True), (TrainConfig(steps=1).clip, False)):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grads_with_norm_([parameter], clip, torch.nn.utils.get_total_norm([gradient.double()]))
        assert torch.equal(parameter.grad, gradient) == same


def test_rows_of_attention_are_those_of_tokens(data, monkeypatch):
    """With q = 0 softmax is uniform over the tokens of a sequence, so a row of n tokens has entropy log n."""

    def uniform():
        cell = expand(RECIPE, study_of("smoke", *TINY, "methods=transformer"), data)[0]
        task = DOMAIN.task(cell, data, torch.device("cpu"))
        for block in task.model.blocks:
            torch.nn.init.zeros_(block.attention.q_proj.weight)
            torch.nn.init.zeros_(block.attention.q_proj.bias)
        return layer_statistics(task.model, task)

    sizes = data.lengths[data.test.rows[: inspection.INSPECTED, 0]]
    wanted = (sizes * np.log(sizes)).sum() / sizes.sum()
    found = uniform()
    assert len(found) == 2
    for layer in found:
        assert_agrees(layer["entropy"], wanted, dtype="float32")
        assert_agrees(layer["total"], 1.0, dtype="float32")
        assert (layer["nonzero"], layer["dead"]) == (1, 0)
    monkeypatch.setitem(METHODS, "transformer", METHODS["transformer"]._replace(masks=("key_mask",)))
    assert uniform()[0]["entropy"] != pytest.approx(wanted, rel=1e-3), "rows of padding would be noticed"


def test_near_chance():
    """One standard error of 100 samples at one half is 5 points."""
    assert near_chance(0.59, 0.5, 100)
    assert not near_chance(0.61, 0.5, 100)
    assert near_chance(0.3, 0.5, 10_000)
    assert not near_chance(0.52, 0.5, 10_000)
