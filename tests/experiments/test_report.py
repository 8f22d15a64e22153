"""The report: self-contained, labelled with its preset, honest about seeds, and made from the directory alone."""

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

import attnkit
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.outcomes import OUTCOMES_FILE
from attnkit_experiments.evidence import size
from attnkit_experiments.images import plots as image_plots
from attnkit_experiments.report import tables
from attnkit_experiments.report.results import read_study
from attnkit_experiments.report.statistics import Difference, Spread
from attnkit_experiments.study.recipe import Measure


def test_a_spread_over_one_seed_has_no_deviation():
    assert Spread.of([0.5]).text(1, 100) == "50.0"
    assert Spread.of([0.4, 0.6]).text(1, 100) == "50.0 ± 14.1"


def of(mean, width):
    """A difference of three seeds with an interval of mean ± width."""
    return Difference(mean, width / 4.302652729911275 * 3**0.5, 3)


def test_a_difference_is_undecided_while_its_interval_holds_zero():
    accuracy, bleu = Measure("accuracy", "accuracy", factor=100, unit="%"), Measure("bleu", "BLEU", digits=2)
    loss, score = (dataclasses.replace(bleu, better=better) for better in ("less", "more"))
    assert of(0.012, 0.03).text(accuracy) == "+1.2 ± 3.0 (undecided)"
    assert of(-0.05, 0.03).text(accuracy) == "-5.0 ± 3.0"
    assert Difference(-0.0001, None, 1).text(accuracy) == "+0.0 (one seed)"
    assert of(0.4, 0.3).text(bleu) == "+0.40 ± 0.30"
    assert [of(0.4, 0.3).word(each) for each in (bleu, loss, score)] == ["higher", "worse", "better"]
    assert [of(-0.4, 0.3).word(each) for each in (bleu, loss, score)] == ["lower", "better", "worse"]
    assert of(0.3, 0.4).word(loss) == "undecided"
    assert Difference(0.3, None, 1).word(loss) == "one seed"


@pytest.fixture(scope="module")
def light_claims():
    from attnkit_experiments.report import claims

    return {
        "lengths": list(claims.LENGTHS),
        "weights": claims.weight_scaling(pairs=1 << 18),
        "softmax": claims.softmax_scaling(pairs=1 << 18),
        "variance": (variance := claims.output_variance(pairs=1 << 18)),
        "variance_slope": claims.slope([row["n"] for row in variance], [row["relu"] for row in variance]),
    }


NAMES = {"softmax": "softmax_attention", "relu-alpha1": "pointwise_attention"}


def records(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "results.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def study(tiny, light_claims):
    def run(out, *settings, preset="cpu", **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnkit_experiments.report.claims.measure", lambda: light_claims)
            return tiny(out, "alphas=0,1", *settings, recipe="000-fig2", preset=preset, **options)

    return run


@pytest.fixture(scope="module")
def of_two_seeds(study, tmp_path_factory):
    return study(tmp_path_factory.mktemp("study") / "out", seeds=(0, 1))


@pytest.fixture(scope="module")
def reported(of_two_seeds):
    """The same with its report, to read."""
    write_report(of_two_seeds)
    return of_two_seeds


@pytest.fixture
def out(of_two_seeds, tmp_path):
    """A study of two seeds, to write to."""
    return shutil.copytree(of_two_seeds, tmp_path / "out")


def test_a_report_of_several_seeds(reported):
    page = (out := reported).joinpath("report.html").read_text()
    assert page.count("preset cpu, changed: image_size=8") >= 5, "the head, the table, inside the figures"
    assert "not a result" not in page
    assert page.count("<svg") == 7
    assert "Speed: at this size" in page
    for words in ("What this does not show", "Where it departs from the paper", "data checksum", "Entropy per layer"):
        assert words in page
    assert "Theorem 4.1" in page
    assert "alphas=0.0,1.0" in page, "settings are written as --set takes them"
    outside = [link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith(("#", "data:"))]
    assert not outside
    assert "url(http" not in page
    assert "<script" not in page

    rows = records(out)
    assert [row["variant"] for row in rows] == ["softmax", "relu-alpha0", "relu-alpha1"]
    assert {row["preset"] for row in rows} == {"cpu"}
    assert {row["n"] for row in rows} == {"2"}
    assert all(float(row["accuracy_sd"]) >= 0 for row in rows)
    assert rows[0]["difference_mean"] == ""
    assert rows[1]["difference_mean"] != ""
    summary = (out / "summary.md").read_text()
    assert summary.startswith("# 000-fig2 · preset cpu, changed: image_size=8 ")


def test_every_cell_and_its_curve_are_written(reported):
    out = reported
    cells = list(csv.DictReader((out / "cells.csv").read_text().splitlines()))
    assert [(row["variant"], row["seed"]) for row in cells[:3]] == [
        ("softmax", "0"), ("softmax", "1"), ("relu-alpha0", "0"),
    ]  # fmt: skip
    result = json.loads((out / "cells" / "relu-alpha0-seed0" / "result.json").read_text())
    for key in ("accuracy", "test_loss", "step_ms", "parameters"):
        assert float(cells[2][key]) == result[key]
    entropies = [layer["entropy"] for layer in result["layers"]]
    assert float(cells[2]["entropy"]) == pytest.approx(sum(entropies) / len(entropies), rel=1e-12)
    curves = list(csv.DictReader((out / "curves.csv").read_text().splitlines()))
    assert {(row["variant"], row["seed"]) for row in curves} == {(row["variant"], row["seed"]) for row in cells}
    assert {row["step"] for row in curves} == {"1", "2", "3", "4", "5", "6"}
    exact = list(csv.DictReader((out / "exact.csv").read_text().splitlines()))
    assert {row["statement"] for row in exact} == {"weights", "variance"}
    assert all(abs(float(row["measured"]) - float(row["expected"])) < 0.05 for row in exact)


def test_a_report_says_which_implementations_ran(reported, out, undrawn):
    """Of the first step of every cell; results of before have none."""
    q = torch.zeros(2, 2, 16, 8)
    results = {name: json.loads((out / "cells" / f"{name}-seed0" / "result.json").read_text()) for name in NAMES}
    shown = []
    for name, op in NAMES.items():
        (ran,) = results[name]["implementations"].pop(op)
        assert attnkit.explain(getattr(attnkit, op), q, q, q)[ran] is None
        assert set(results[name]["implementations"]) == {"qk_layernorm"}
        shown.append(f"{op} by {ran}")
    page = (reported / "report.html").read_text()
    assert "<dt>implementations</dt>" in page
    assert all(text in page for text in shown)
    for path in out.glob("cells/*/result.json"):
        old = json.loads(path.read_text())
        del old["implementations"]
        path.write_text(json.dumps(old))
    assert "<dt>implementations</dt>" not in write_report(out).read_text()


def test_a_report_says_how_fast_cells_were_and_what_was_compiled(out, undrawn):
    """As a GPU's results say it; those of before say nothing."""
    paths = sorted(out.glob("cells/*/result.json"))
    results = [json.loads(path.read_text()) for path in paths]
    rates = {"input_share": 0.125, "tflops_per_s": 412.5, "mfu": 0.417, "peak_bytes": 12_340_000_000}
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps(result | rates | {"compiled": {"blocks": 4, "graphs": 2}}))
    page = write_report(out).read_text()
    texts = ("softmax", "412.500 ± 0.000", "41.7 ± 0.0", "12.5 ± 0.0", "12.34 ± 0.00", "4 in 2")
    assert "".join(f"<td>{text}</td>" for text in texts) in page
    assert {(each["mfu"], each["peak_bytes"]) for each in records(out)} == {("0.417", "12340000000.0")}
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps({key: value for key, value in result.items() if key not in rates}))
    assert "<h2>Speed</h2>" not in write_report(out).read_text()
    assert "mfu" not in records(out)[0]


def test_curves_are_thinned_to_their_ends():
    rows = [{"step": n + 1, "loss": float(n), "grad_norm": 1.0} for n in range(1000)]
    evaluations = [{"step": n, "evaluation": {"accuracy": n / 1000}} for n in (500, 1000)]
    thin = list(tables.thinned([*rows, *evaluations], 7))
    assert len(thin) == 7, "what evaluations leave of their half is of training"
    assert [row["step"] for row in thin[-3:]] == [1000, 500, 1000]
    many = [{"step": n, "evaluation": {"accuracy": n / 1000}} for n in range(10, 1001, 10)]
    assert sum("accuracy" in row for row in tables.thinned([*rows, *many], 7)) == 3
    assert thin[0]["loss"] == sum(range(thin[0]["step"])) / thin[0]["step"], "the mean of a whole stretch"
    assert thin[-1]["accuracy"] == 1.0


def test_numbers_of_a_result_are_in_short():
    result = {
        "seed": 3,
        "accuracy": 0.5,
        "entropy": None,
        "signatures": {"bleu": "nrefs:1"},
        "loss_by_length": {"1 to 10": 2.0},
        "layers": [{"name": "a", "total": 1.0, "nonzero": None}, {"name": "b", "total": 3.0, "nonzero": 0.5}],
        "learned": [[0.25, 0.5], [0.5, 0.75]],
        "residuals": [{"median": [1.0, 0.1], "largest": [1.0, 0.2]}, {"median": [1.0, 0.3], "largest": [1.0, 0.1]}],
        "exact": [
            {"row_sum_errors": -2.0, "variance_errors": 0.5}, {"row_sum_errors": 1.0, "variance_errors": 1.0}
        ],
    }  # fmt: skip
    assert tables.numbers(result) == {
        "accuracy": 0.5,
        "entropy": None,
        "loss_by_length_1 to 10": 2.0,
        "total": 2.0,
        "nonzero": None,
        "learned": 0.5,
        "learned_lowest": 0.25,
        "learned_highest": 0.75,
        "residuals_median": 0.3,
        "residuals_largest": 0.2,
        "row_sum_errors": 2.0,
        "variance_errors": 1.0,
    }


def test_a_report_opens_with_what_decides(out, undrawn):
    """The loss, with the accuracy beside it, which may say something else."""
    for name, values in {"softmax": (0.5, 0.6), "relu-alpha0": (0.3, 0.4), "relu-alpha1": (0.9, 0.2)}.items():
        for seed, value in enumerate(values):
            path = out / "cells" / f"{name}-seed{seed}" / "result.json"
            loss = {"test_loss": 3 * seed - (name == "relu-alpha1")}
            path.write_text(json.dumps(json.loads(path.read_text()) | loss | {"accuracy": value}))
            path.with_name(OUTCOMES_FILE).unlink()
    loss = (
        "Test loss beside softmax (1.500 ± 2.121 nats), uncorrected: better for relu, α = 1; undecided for relu, α = 0 "
        "(would see 0.000)."
    )
    accuracy = (
        "Beside it accuracy (55.0 ± 7.1 %), uncorrected: worse for relu, α = 0; undecided for relu, α = 1 "
        "(would see 653.4)."
    )
    page = write_report(out).read_text()
    assert page.partition("<h2>")[0].count(f"<p><b>{loss}<br>{accuracy}</b></p>") == 1
    assert (out / "summary.md").read_text().split("\n\n")[1].startswith(f"**{loss} {accuracy}**\n")
    limits = [f"A difference to the baseline in {each} for: relu" for each in ("test loss", "accuracy")]
    assert page.index(f"{limits[0]}, α = 0: ") < page.index(f"{limits[1]}, α = 1: ")


def test_a_study_that_is_too_small_says_so_first_and_nothing_of_its_variants(out, undrawn, monkeypatch):
    """By the rule of the results."""
    monkeypatch.setitem(size.PASS, json.loads((out / "study.json").read_text())["data"]["checksum"][:12], 60)
    page, why = write_report(out).read_text(), "1.2 passes over its training data"
    head = page.partition("<h2>")[0]
    assert f"<p><b>Too small to decide: {why}.</b></p>" in head
    assert "beside softmax" not in head
    assert (out / "summary.md").read_text().split("\n\n")[1].startswith(f"**Too small to decide: {why}.**\n")
    assert f"<li>Which variant is better: the study is too small to decide ({why}).</li>" in page


def test_a_smoke_report_is_labelled_everywhere(study, tmp_path):
    out = study(tmp_path / "out", "steps=30", "lr=0.003", preset="smoke")
    page = write_report(out).read_text()
    assert "This is a smoke run, not a result." in page
    assert "beside softmax" not in page.partition("<h2>")[0], "and no conclusion is drawn from it"
    assert page.count("SMOKE · not a result") >= 4, "head, table, and inside every figure with an accuracy"
    assert "SMOKE, NOT A RESULT" in (out / "summary.md").read_text()
    assert {row["is_result"] for row in records(out)} == {"False"}


def test_an_unfinished_study_says_so_and_a_signed_activation_has_no_entropy(study, tmp_path, undrawn):
    out = study(tmp_path / "out", "activations=gelu")
    shutil.rmtree(out / "cells" / "gelu-alpha1-seed0")
    page = write_report(out).read_text()
    assert "1 of 3 cells have no result yet" in page
    assert "Not defined where weights can be negative: gelu, α = 0." in page
    (line,) = (line for line in read_study(out).lines if line.name == "gelu-alpha0")
    assert line.layers("entropy") is None
    assert all(spread.mean > 0 for spread in line.layers("nonzero"))


def test_a_diverged_cell_is_shown(tiny, tmp_path):
    out = tiny(tmp_path / "out", "lr=1e30", "warmup=0", "checkpoint_every=0", keep_going=True)
    with pytest.raises(UserError, match="no cell has finished"):
        write_report(out)


@pytest.mark.parametrize("recipe", ["000-fig1", "000-fig4"])
def test_other_figures_have_reports_too(recipe, tiny, tmp_path, undrawn):
    small = ("points=d64/4,d64/2",) if recipe == "000-fig1" else ()
    out = tiny(tmp_path / "out", *small, recipe=recipe)
    page = write_report(out).read_text()
    assert "Accuracy against compute" in page
    assert ("Accuracy against α" in page) == (recipe == "000-fig4")
    line = read_study(out).lines[0]
    rows = zip(*(line.layers(key) for key in ("total", "nonzero", "dead")), strict=True)
    each = [(f"{total.mean:.3f}", f"{100 * some.mean:.1f}", f"{100 * dead.mean:.1f}") for total, some, dead in rows]
    assert f"<td>{'</td><td>'.join(map(' · '.join, zip(*each, strict=True)))}</td>" in page, "means over seeds by layer"
    if recipe == "000-fig1":
        row = re.search(r"<td>softmax, d64/4</td><td>4</td><td>(.*?)</td><td>.*?</td><td>(.*?)</td></tr>", page)
        result = line.results[0]
        assert row[1] == f"{result['training_flops']:.3g}"
        assert row[2] == f"{100 * result['accuracy']:.1f}"
    assert re.search(r"<small>×\d+\.\d\d</small>", page), "the step-time ratio to the baseline"


def test_reporting_nothing_is_an_error(tmp_path, refusal):
    assert "holds no study; give the --out of python -m experiments run" in refusal("report", str(tmp_path))


def test_images_can_be_left_out(reported, out):
    shown = (reported / "report.html").read_text()
    hidden = write_report(out, show_images=False).read_text()
    assert "Attention maps" in shown
    assert "Attention maps" not in hidden
    assert hidden.count("<svg") == shown.count("<svg") - 2
    assert hidden.count("image/png") == 0


def test_times_on_a_busy_machine_are_marked(out, undrawn):
    for path in out.glob("cells/*/result.json"):
        path.write_text(re.sub(r'"load": [0-9.]+', '"load": 99.0', path.read_text()))
    assert "the times are not comparable" in write_report(out).read_text()
    assert "the times are not comparable" in (out / "summary.md").read_text()
    for path in out.glob("cells/*/result.json"):
        path.write_text(path.read_text().replace('"load": 99.0', '"load": 0.5'))
    assert "not comparable" not in write_report(out).read_text()


def test_pictures_have_room_for_seven_variants(of_two_seeds, monkeypatch):
    study, axes = read_study(of_two_seeds), []
    nine = dataclasses.replace(study, lines=study.lines * 3)
    monkeypatch.setattr(image_plots, "svg", lambda figure, _: axes.append(len(figure.axes)) or plt.close(figure) or "")
    image_plots.attention_maps(nine)
    image_plots.layer_maps(nine)
    depth = len(study.lines[0].first["layers"])
    assert axes == [4 * (1 + 7), 7 * (1 + depth)]


def test_models_of_other_depths_have_all_their_layers_and_softmax_several_shades(of_two_seeds):
    study = read_study(of_two_seeds)
    (softmax,) = (line for line in study.lines if line.name == "softmax")
    deeper = {
        seed: result | {key: 2 * result[key] for key in ("layers", "initial_layers")}
        for seed, result in softmax.results.items()
    }
    other = dataclasses.replace(softmax, variant=softmax.variant | {"name": "deeper"}, results=deeper)
    both = dataclasses.replace(study, lines=[*study.lines, other])
    bars = image_plots.entropy_bars(both)
    depth = len(softmax.first["layers"])
    assert f"layer {2 * depth}<" in bars
    assert f"layer {2 * depth + 1}<" not in bars
    assert {"opacity: 0.85", "opacity: 0.6"} <= {*re.findall(r"opacity: [0-9.]+", bars)}
