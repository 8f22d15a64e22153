"""`python -m benchmarks arrays`: NumPy and JAX."""

import json
from functools import partial

import numpy as np
import pytest

from benchmarks import arrays
from benchmarks.__main__ import main
from benchmarks.cells import BOTH, FORWARD, Cell

SMALL = Cell("relu", 48, causal=True, d=16, heads=2)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """A timing is of a few calls."""
    monkeypatch.setattr(arrays, "AT_LEAST", 1e-4)


def test_both_libraries_are_measured_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arrays, "cells", lambda profile: [SMALL])
    monkeypatch.setattr(arrays, "numpy_peak", lambda *arguments: 1.0)
    assert main(["arrays", "--rounds", "2", "--out", str(tmp_path)]) == 0
    files = sorted(tmp_path.glob("*.json"))
    assert ["jax" in path.name for path in files] == [True, False]
    for path, baseline, modes in zip(files, ("jax.nn", "naive NumPy"), ([FORWARD, BOTH], [FORWARD]), strict=True):
        found = json.loads(path.read_text())
        assert [record["mode"] for record in found["records"]] == modes
        for record in found["records"]:
            assert record["baseline"] == baseline
            assert {"attnkit generic", "attnkit blocked", baseline} <= record["contenders"].keys()
            assert not record["skipped"]
            assert all(row["peak_mebibytes"] >= 0 for row in record["contenders"].values())
        text = path.with_suffix(".html").read_text()
        assert f"ratio to {found['environment']['against']}" in text
        assert "{{" not in text
    assert "of jax.nn" in capsys.readouterr().out


def test_a_wrong_contender_makes_the_run_fail(tmp_path, monkeypatch, capsys):
    def wrong(cell):
        return {"attnkit wrong": lambda q, k, v: v, "naive NumPy": partial(arrays.naive, cell, np)}

    monkeypatch.setattr(arrays, "cells", lambda profile: [SMALL])
    monkeypatch.setattr(arrays, "numpy_functions", wrong)
    monkeypatch.setattr(arrays, "numpy_peak", lambda *arguments: None)
    assert main(["arrays", "--library", "numpy", "--rounds", "2", "--out", str(tmp_path)]) == 1
    assert "attnkit wrong: wrong: o: off by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"), [(["-k", "rellu"], "no cell of --profile smoke matches"), (["--rounds", "1"], "at least 2")]
)
def test_a_mistake_is_answered_in_one_line_with_status_2(words, text, capsys):
    assert main(["arrays", *words]) == 2
    assert text in capsys.readouterr().err
