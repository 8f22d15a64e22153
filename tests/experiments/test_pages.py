"""Whole reports, figures included, beside the texts in `pages`.

Every study is trained for a moment, then what it has measured is replaced by numbers that depend on their place alone,
so that its page is the same on every machine. If a page is meant to change:
`ATTNKIT_WRITE_PAGES=1 python -m pytest tests/experiments/test_pages.py`, read what has changed, and look at the page.
"""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from attnkit_experiments.commands import classify, runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.evidence.figures import with_figures
from attnkit_experiments.evidence.runs import read_run
from attnkit_experiments.evidence.size import too_small
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report import claims, summary
from attnkit_experiments.report.words import FIGURE

from . import pages
from .conftest import TINY as IMAGES
from .test_soft_recipes import TINY as PYRAMID
from .test_table6 import TINY as SEQUENCES
from .translation_cases import TINY as TRANSLATION

PAGES = Path(__file__).parent / "pages"


def result_of(out: Path, cell: str) -> Path:
    return out / "cells" / cell / "result.json"


def without_some(out: Path) -> None:
    """A cell is missing, and one was not inspected."""
    shutil.rmtree(out / "cells" / "relu-slots24-seed0")
    path = result_of(out, "softmax-slots32-seed0")
    numbers = json.loads(path.read_text())
    seen = {"slot_anisotropy", "initial_slot_anisotropy", "variance_ratio", "entropy", "zeros"}
    path.write_text(json.dumps({k: x for k, x in numbers.items() if k not in seen} | {"uninspected": "no <memory>"}))


def diverged(out: Path) -> None:
    about = {"config_hash": "", "variant": "linear", "seed": 0}
    result_of(out, "linear-seed0").write_text(json.dumps(about | {"diverged": "the loss of step 3 is not finite"}))


def as_smoke(out: Path) -> None:
    about = json.loads((out / "study.json").read_text())
    label = RECIPES[about["recipe"]].presets["smoke"].label
    (out / "study.json").write_text(json.dumps(about | {"preset": "smoke", "label": label}))


class Example(NamedTuple):
    """A study: where its data is, its settings, its seeds, and what is done to it before it is reported."""

    data: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    change: Callable[[Path], None] | None = None


LANGUAGE = ("steps=4", "tokens=64", "checkpoint_every=2", "evaluate_every=2", "tested=4", "alphas=0,1")
PROBES = ("fewshot=digits", "shots=1")
EXAMPLES = {
    "000-fig2": Example("digits", (*IMAGES, "activations=relu", "alphas=0,1"), (0, 1)),
    "000-learned": Example("digits", (*IMAGES, "alphas=1", "kinds=gain-head", "points=d64/4,d64/8", *PROBES)),
    "000-lengths": Example("text", (*LANGUAGE, "lengths=8,16", "exact_at=64")),
    "001-fig3": Example("pairs", (*TRANSLATION, "sizes=24,32", "memories=relu,softmax"), change=without_some),
    "001-table4": Example("pairs", (*TRANSLATION, "methods=vanilla,reluformer,linear"), change=diverged),
    "002-table1": Example("digits", (*PYRAMID, "methods=transformer,soft", "measured_batch=0")),
    "002-table6": Example("generated", (*SEQUENCES, "methods=transformer,linear,soft", "steps=4"), change=as_smoke),
}


@pytest.fixture(scope="module")
def places(corpus, tmp_path_factory):
    text = tmp_path_factory.mktemp("places") / "bytes"
    text.mkdir()
    (text / "a.en.gz").write_bytes(gzip.compress(b"sea and " * 250))
    return {"pairs": str(corpus / "pairs"), "text": str(text)}


@pytest.fixture
def in_words(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", pages.draw_in_words)


def compare(words: str, name: str) -> None:
    page = PAGES / f"{name}.txt"
    if "ATTNKIT_WRITE_PAGES" in os.environ:
        page.write_text(words)
    assert words.splitlines() == page.read_text().splitlines(), (
        f"if this is meant: see the head of {Path(__file__).name}"
    )


def check_what_is_kept(out: Path) -> None:
    """The summary has the words of the page, and its CSVs make the figures, but those of attention to samples; those of
    a study make the conclusions and comparisons too, as they were made from the run.
    """
    page, text = ((out / name).read_text() for name in ("report.html", "summary.md"))
    run = read_run(out)
    if run.recipe in RECIPES:
        assert summary.renew(out, RECIPES[run.recipe], too_small(run)) == text
    tail = f"## {text.partition(chr(10) + '## ')[2]}"
    back = MarkdownIt("commonmark", {"html": True}).enable("table").render(FIGURE.sub("", tail))
    page = re.sub(r"<(style|title)>.*?</\1>", "", page, flags=re.DOTALL)
    assert pages.words(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)) == pages.words(back)
    drawn = [each for each in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL) if "image of " not in each]
    assert re.findall(r"<svg.*?</svg>", with_figures(out / "summary.md"), flags=re.DOTALL) == drawn


NOW = ("000-lengths", "001-table4", "002-table6")
"""One of each domain, and in what may go wrong with cells; `make survival` has all."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in NOW else pytest.mark.survival) for name in EXAMPLES]
)
def test_a_study(recipe, places, tmp_path, monkeypatch, in_words):
    data, settings, seeds, change = EXAMPLES[recipe]
    monkeypatch.setattr(
        claims, "measure", lambda: {
            "lengths": list(claims.LENGTHS),
            "variance_slope": 1.0,
            "weights": claims.weight_scaling(pairs=1 << 12),
            "softmax": claims.softmax_scaling(pairs=1 << 12),
            "variance": claims.output_variance(pairs=1 << 12),
        },
    )  # fmt: skip
    data = places.get(data, data)
    request = runner.Request(recipe, "cpu", data, tmp_path / "out", settings, seeds=seeds, threads=1, device="cpu")
    out = pages.settle(runner.run(request))
    if change:
        change(out)
    write_report(out)
    compare(pages.as_text(out), recipe)
    check_what_is_kept(out)


ELSEWHERE = ("003-memory",)  # test_keeping runs it in small; collecting the garbage of a large process is slow


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.survival if name in ELSEWHERE else ()) for name in MEASUREMENTS]
)
def test_a_measurement(recipe, tmp_path, in_words):
    preset = next(iter(MEASUREMENTS[recipe].presets))
    out = runner.run(runner.Request(recipe, preset, None, tmp_path / "out", threads=1, device="cpu"))
    write_report(pages.settle(out))
    compare(pages.as_text(out), recipe)
    check_what_is_kept(out)


def test_maps_of_a_model_over_images(tmp_path, in_words):
    rng = np.random.default_rng(0)
    images = rng.integers(50, 200, (2, 8, 8, 1), dtype=np.uint8)
    weights = torch.from_numpy(rng.standard_normal((2, 7, 2, 2)))
    maps = [classify.LayerMap(f"layer {n}", weights[:, n]) for n in range(7)]
    classify.draw_maps(tmp_path / "maps.png", images, ["three", "four"], maps)
    compare((tmp_path / "maps.png").read_text(), "classify")


@pytest.mark.parametrize("plant", ["colour", "size", "title"])
def test_a_change_of_a_figure_is_seen(plant):
    figure = Figure()
    axes = figure.subplots()
    (line,) = axes.plot([0, 1], [1, 2], color="#3a7fd5", markersize=8, marker=".")
    before = pages.described(figure)
    {
        "colour": lambda: line.set_color("#3a7fd6"),
        "size": lambda: line.set_markersize(9),
        "title": lambda: axes.set_title("other"),
    }[plant]()
    assert pages.described(figure) != before
