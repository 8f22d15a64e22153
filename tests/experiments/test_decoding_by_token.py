"""003-decoding: steps are rows of the causal op, bytes are those of states and caches, and the page has its curves."""

import csv
import dataclasses

import pytest
import torch

import attnkit
from attnkit_experiments.__main__ import main
from attnkit_experiments.recipes.linear.decoding import CACHED, MEASUREMENT, METHODS, Study
from attnkit_experiments.report import plots
from tests.library.arrays import assert_close

STUDY = Study(heads=2, head_dim=4, features=6)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_the_last_row_of_the_causal_op(method):
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64, generator=rng)
    step, _ = METHODS[method](k[:, :, :-1], v[:, :, :-1], STUDY)
    found = [step(*(x[:, :, -1:] for x in (q, k, v))) for _ in range(2)]
    options = {"activation": "relu", "alpha": 1.0} if method == "relu" else {}
    op = attnkit.pointwise_attention if method == "relu" else getattr(attnkit, f"{method}_attention")
    operands = [torch.from_numpy(attnkit.orthogonal_features(6, 4, 0))] if method == "performer" else []
    expected = op(q, k, v, *operands, causal=True, **options)[:, :, -1:]
    assert_close(found[0], expected, 10)
    assert torch.equal(found[0], found[1]), "decoding a token again changes nothing"


def test_bytes_by_length():
    rows = [
        item | MEASUREMENT.measure(item, study, torch.device("cpu"))
        for study in [dataclasses.replace(STUDY, lengths=(3, 12), tokens=1)]
        for item in MEASUREMENT.items(study)
    ]
    sizes = {(row["method"], row["tokens"]): row["bytes"] for row in rows}
    for method in CACHED:
        assert [sizes[method, n] for n in (3, 12)] == [n * 2 * (4 + 4) * 4 for n in (3, 12)]
    # S (d, e) and z (d) of two heads
    assert sizes["linear", 3] == sizes["linear", 12] == 2 * (4 * 4 + 4) * 4
    MEASUREMENT.check(rows)
    grown = [row | {"bytes": row["bytes"] + row["tokens"]} for row in rows if row["method"] == "linear"]
    with pytest.raises(ValueError, match="linear: expected 163 bytes at 12 tokens, got 172"):
        MEASUREMENT.check(grown)


def test_all_scales_are_logarithmic(monkeypatch):
    scales = []
    monkeypatch.setattr(plots, "svg", lambda figure, text: scales.extend(x.get_xscale() for x in figure.axes) or "")
    MEASUREMENT.sections([{"method": "linear", "tokens": 4, "ms": 1.0, "bytes": 8}], {"preset": "cpu"})
    assert scales == ["log", "log"]


def test_from_settings_to_report(tmp_path, capsys):
    out = tmp_path / "out"
    words = ("lengths=4,8", "heads=1", "head_dim=4", "features=4", "tokens=2")
    given = [part for word in words for part in ("--set", word)]
    assert main(["run", "003-decoding", *given, "--out", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "ms per token and state or cache, MB against the number of tokens" in page
    assert "<h2>All numbers" in page
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [(row["method"], row["tokens"]) for row in rows[:3]] == [("softmax", "4"), ("softmax", "8"), ("relu", "4")]
    assert all(0 < float(row["fastest_ms"]) <= float(row["ms"]) <= float(row["slowest_ms"]) for row in rows)
    assert main(["report", str(out), str(out)]) == 2
    assert "003-decoding is measured, not trained: report expected one folder, got 2" in capsys.readouterr().err
    assert main(["run", "003-decoding", "--set", "methods=lienar", "--out", str(tmp_path / "x")]) == 2
    assert "unknown method 'lienar'" in capsys.readouterr().err
