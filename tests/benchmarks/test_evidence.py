"""Jobs that train on a GPU: their studies exist, what they leave is a report, and what is missing is trained later."""

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnkit_experiments.__main__ import main as experiments
from attnkit_experiments.commands import estimate
from attnkit_experiments.commands.opening import choose
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report import study_page
from benchmarks import training_time
from benchmarks.gpu import box, data, jobs, predict, queue, train, trained
from benchmarks.gpu.studies import DIGITS, EVIDENCE, IMAGES, RATES, TEXT, Study
from docs import costs

SMALL = ("points=d64/8", "image_size=16", "train_images=24", "test_images=12", "batch=4")
TINY = Study("tiny", "000-fig1", "cpu", SMALL, (0,), DIGITS, 2, ())


# ---------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("name", EVIDENCE)
def test_a_study_can_be_asked_for(name):
    """In full and shortened: its recipe, preset and settings exist, and it has the cells that were predicted."""
    predicted, asked = jobs.PREDICTED[name], train.parser().parse_args
    for study in (EVIDENCE[name], EVIDENCE[name].shortened()):
        recipe, settings = choose(predict.request(study, Path(), Path()))
        assert settings.steps == study.steps
        assert len(recipe.variants(settings)) * len(study.seeds) == predicted["cells"]
        if study == EVIDENCE[name]:
            assert estimate.digest(recipe, settings) == predicted["digest"], "python -m benchmarks.gpu.predict"
    (job,) = [job for job in jobs.JOBS if job.name == name]
    assert job.arguments[:2] == ("-m", "benchmarks.gpu.train")
    assert asked(job.arguments[2:]).seconds + train.GRACE < box.LIMIT
    assert predicted["minutes"] <= 8 or job.resumes
    assert not queue.keys_of(job)


def test_what_is_carried_fits():
    """The sets are no smaller than what is made of them; a checkout goes with them."""
    place = os.environ.get("ATTNKIT_DATA")
    if not place:
        pytest.skip("no ATTNKIT_DATA")
    sets = [Path(place, name).stat().st_size for name in ("cifar10-subset.zip", "imdb-subset.zip")]
    pairs = sum(path.stat().st_size for path in Path(place, "multi30k").iterdir())
    folders = ("attnkit", "reference", "conformance", "experiments", "benchmarks", "tests", "docs")
    files = [path for each in folders for path in (box.ROOT / each).rglob("*") if path.is_file()]
    checkout = sum(path.stat().st_size for path in files if path.suffix not in (".so", ".pyc"))
    assert sum(sets) + pairs + checkout < data.LARGEST


def test_a_tenth_of_each_class_is_held_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "cifar10-subset.zip", "w") as file:
        for split, count in (("train", 20), ("test", 3)):
            for kind in ("cat", "dog"):
                for number in range(count):
                    file.writestr(f"{split}/{kind}/{number:04}.jpg", f"{split} {kind} {number}")
    with zipfile.ZipFile(tmp_path / "imdb-subset.zip", "w") as file:
        file.writestr("train/pos/2.txt", "second\nline")
        file.writestr("train/neg/1.txt", "first")
    (tmp_path / "multi30k").mkdir()
    for split, languages in data.SPLITS:
        for language in languages:
            (tmp_path / "multi30k" / f"{split}.{language}.gz").touch()
    assert data.main(["--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    with zipfile.ZipFile(tmp_path / "out" / IMAGES) as file:
        names = file.namelist()
        assert file.read("val/dog/0019.jpg") == b"train dog 19"
    assert [sum(name.startswith(split) for name in names) for split in ("train", "val", "test")] == [36, 4, 6]
    assert gzip.decompress((tmp_path / "out" / TEXT).read_bytes()) == b"first\nsecond line"
    assert data.main(["--from", str(tmp_path / "out")]) == 2


# ---------------------------------------------------------------------------------------------- learning rates


def test_rates_are_chosen_by_a_whole_grid(tmp_path):
    scores = {"rates-0": {"softmax-lr0.001": (0.5, 1.0), "relu-lr0.001": (0.7, 1.0)},
              "rates-1": {"softmax-lr0.002": (0.6, 1.2), "relu-lr0.002": (0.7, 0.9)}}  # fmt: skip
    for job, of in scores.items():
        folder = tmp_path / job / RATES
        for variant, (accuracy, loss) in of.items():
            place = folder / "cells" / f"{variant}-seed0"
            place.mkdir(parents=True)
            result = {"variant": variant, "accuracy": accuracy, "test_loss": loss}
            (place / "result.json").write_text(json.dumps(result))
        (folder / "study.json").write_text(json.dumps({"cells": [f"{variant}-seed0" for variant in of]}))
    asked = train.words(EVIDENCE["fig2-0"], tmp_path / "fig2-0")
    assert "own_rates=0.002,0.002" in asked  # of relu, by the loss: both are right as often
    (tmp_path / "rates-1" / RATES / "cells" / "relu-lr0.002-seed0" / "result.json").unlink()
    with pytest.raises(ValueError, match=r"relu-lr0\.002-seed0 is not trained"):
        train.chosen(tmp_path / "fig2-0")
    shutil.rmtree(tmp_path / "rates-1")
    with pytest.raises(ValueError, match="not there: rates-1"):
        train.chosen(tmp_path / "fig2-0")


# ---------------------------------------------------------------------------------------------- from job to report


@pytest.fixture
def lent(tmp_path, monkeypatch):
    """Runs the tiny study as a job in this process, on carried data and into a folder of a machine; its status."""
    monkeypatch.setattr(train, "EVIDENCE", {"tiny": TINY})
    monkeypatch.setattr(trained, "EVIDENCE", {"tiny": TINY})
    monkeypatch.setattr(train, "enqueue", lambda words: experiments(words[3:]))
    monkeypatch.setattr(study_page, "render", lambda *_, **__: "<main></main>")  # figures are other tests'

    def in_this_process(study, number, options):
        assert number
        assert experiments(["work", str(options.out / study.name), "--data", DIGITS, "--threads", "1"]) == 0
        return []

    def run(machine: str) -> int:
        if (tmp_path / machine / "tiny" / "tiny").exists():
            monkeypatch.setattr(train, "workers", lambda *_: [])
        else:
            monkeypatch.setattr(train, "workers", in_this_process)
        places = {"out": f"{machine}/tiny", "data": "data", "cache": "cache"}
        words = [word for name, place in places.items() for word in (f"--{name}", str(tmp_path / place))]
        return train.main(["tiny", *words, "--device", "cpu"])

    return run


def test_a_study_that_does_not_start_says_why_last(tmp_path, monkeypatch, capsys):
    """The line of a job is the last one that it wrote."""

    def refused(words):
        print("error: no CUDA device", file=sys.stderr)
        raise subprocess.CalledProcessError(2, words)

    monkeypatch.setattr(train, "EVIDENCE", {"tiny": TINY})
    monkeypatch.setattr(train, "enqueue", refused)
    places = [word for name in ("out", "data", "cache") for word in (f"--{name}", str(tmp_path / name))]
    assert train.main(["tiny", *places]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: no CUDA device"


def read(tmp_path: Path, machine: str) -> list[str]:
    places = (tmp_path / name for name in ("kept", "reports", "data"))
    return [*trained.read(box.archive(tmp_path / machine), *places)]


def test_a_job_is_read_and_what_is_missing_is_trained_the_next_time(lent, tmp_path, capsys, undrawn):
    assert lent("one") == 0
    assert capsys.readouterr().out.endswith("2 of 2 cells\n")
    cells = tmp_path / "one" / "tiny" / "tiny" / "cells"
    whole = (cells / "d64-p8-softmax-seed0" / "result.json").read_text()
    assert (cells / "d64-p8-softmax-seed0" / "weights.safetensors").exists()
    assert not (cells / "d64-p8-softmax-seed0" / "checkpoints").exists()
    (cells / "d64-p8-softmax-seed0" / "result.json").unlink()  # as if time had run out
    assert lent("one") == train.UNFINISHED
    assert capsys.readouterr().out.endswith("1 of 2 cells; missing: d64-p8-softmax-seed0\n")
    lines = read(tmp_path, "one")
    assert "tiny: 1 of 2 cells are missing, 0 have a checkpoint" in lines[0]
    assert "1 cells" in lines[1]
    assert lent("two") == 0  # on a machine that has what was carried
    assert read(tmp_path, "two") == [f"report: {tmp_path / 'reports' / 'tiny'}, 2 cells"]
    again = json.loads((tmp_path / "two/tiny/tiny/cells/d64-p8-softmax-seed0/result.json").read_text())
    for key in ("last_loss", "accuracy", "config_hash"):
        assert again[key] == json.loads(whole)[key]
    other = "tiny/tiny/cells/d64-p8-relu-alpha1-seed0/result.json"
    texts = [(tmp_path / machine / other).read_text() for machine in ("one", "two")]
    assert texts[0] == texts[1]  # times too: not trained anew
    with pytest.raises(ValueError, match="has d64-p8-softmax-seed0, which these archives have not"):
        read(tmp_path, "one")


# ---------------------------------------------------------------------------------------------- what presets cost


def test_what_presets_cost_is_of_the_presets_as_they_are():
    """The digest has all that the file was counted from; `python -m experiments cost --out FILE` counts anew."""
    file = {(row["recipe"], row["preset"]): row for row in json.loads(counted().read_text())}
    now = {
        (recipe.id, name): (estimate.digest(recipe, preset.study), preset.cost)
        for recipe in RECIPES.values()
        for name, preset in recipe.presets.items()
        if name not in estimate.MINUTES
    }
    assert {key: (row["digest"], row["says"]) for key, row in file.items()} == now
    recipe = RECIPES["002-table6"]
    study = recipe.presets["paper"].study
    cost = estimate.of_variant(recipe, study, recipe.variants(study)[0])
    assert cost in [estimate.of_row(cell) for cell in file["002-table6", "paper"]["cells"]]


def counted() -> Path:
    return box.ROOT / "benchmarks" / "results" / "cost-of-paper.json"


def test_the_picture_shows_the_hours_of_the_table():
    found, text = training_time.content(), costs.PICTURE.read_text()
    for bill in costs.bills():
        if bill.preset == "paper":
            assert f"{bill.recipe}, {bill.cells} cells" in text
            assert f">{costs.amount(bill.hours(found))}<" in text, "python docs/costs.py"


def test_operations_of_a_vision_transformer_are_those_of_its_formula():
    """The trace counts what `forward_flops` counts; the embedding of positions has no product."""
    recipe = RECIPES["000-fig1"]
    study = recipe.presets["cpu"].study
    variant = recipe.variants(study)[0]
    cost, cell = estimate.of_variant(recipe, study, variant), estimate.stand_in(recipe, study, variant)
    assert 2 * cost.traced.multiply_adds == recipe.domain.facts(cell)["flops_per_sample"]
    assert cost.flops == recipe.domain.facts(cell)["training_flops"]
    weights = 16 * cost.traced.parameters
    assert cost.memory == weights + cost.samples * cost.traced.kept_bytes
    assert dataclasses.replace(cost, parts=4).memory == weights + cost.samples // 4 * cost.traced.kept_bytes
    large = dataclasses.replace(cost, parts=0, samples=1 << 20)
    assert large.memory <= estimate.MEMORY < large.memory_in(large.passes // 2)
