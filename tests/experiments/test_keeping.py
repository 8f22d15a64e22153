"""003-memory and 003-future: formulas of what a layer keeps, and which methods hide later tokens."""

import csv

import pytest
import torch

import attnkit
from attnkit_experiments.__main__ import main
from attnkit_experiments.recipes.linear import future, keeping
from tests.library.arrays import assert_close

CPU = torch.device("cpu")
SHOWN = ("linear, running sums", "linear, chunks kept", "linear, recomputed")
FEW = keeping.Study(methods=SHOWN, lengths=(256,), head_dim=16, rounds=1)
SHORT = future.Study(tokens=12, head_dim=4, slots=3)


def rows_of(recipe, study):
    return [dict(item) | dict(recipe.measure(item, study, CPU)) for item in recipe.items(study)]


@pytest.fixture(scope="module")
def kept():
    return rows_of(keeping, FEW)


def test_what_a_layer_keeps(kept):
    """By the formulas: of recomputed states its output alone, to the byte."""
    n, d = 256, 16
    sizes = {row["method"]: row["layer_bytes"] for row in kept}
    assert sizes["linear, recomputed"] == 4 * n * d
    assert sizes["linear, running sums"] >= 4 * n * d * d
    assert sizes["linear, chunks kept"] > 2 * sizes["linear, recomputed"]
    keeping.check(kept)
    assert [row["took"] for row in kept] == ["torch", "generic", "generic and recomputed"]


def test_a_method_that_keeps_something_else_is_named(kept):
    recomputed, sums = (
        [row for row in kept if row["method"] == f"linear, {name}"] for name in ("recomputed", "running sums")
    )
    with pytest.raises(
        ValueError, match=r"linear, recomputed: a layer of 256 tokens keeps .* expected at most 1.25 times"
    ):
        keeping.check([recomputed[0] | {"layer_bytes": 2 * recomputed[0]["layer_bytes"]}])
    with pytest.raises(ValueError, match=r"linear, running sums: a layer of 256 tokens keeps .* expected at least"):
        keeping.check([sums[0] | {"layer_bytes": 1}])


def test_what_does_not_fit_is_not_begun():
    study = keeping.Study(methods=("softmax, weights kept",), lengths=(1024,), limit_gb=1e-3)
    (row,) = rows_of(keeping, study)
    assert (row["layer_bytes"], row["ms"], row["took"]) == (None, None, "not begun: 0.0 GB")
    keeping.check([row])


def test_the_methods_are_linear_and_softmax_attention():
    """Written out without attnkit's eps in the denominator."""
    x = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = keeping.METHODS["linear, running sums"].attend, keeping.METHODS["softmax, weights kept"].attend
    assert_close(ours[0](*x), attnkit.linear_attention(*x, causal=True, eps=0.0), 30)
    assert_close(ours[1](*x), attnkit.softmax_attention(*x, causal=True), 30)


@pytest.fixture(scope="module")
def seen():
    return rows_of(future, SHORT)


def test_linformer_cannot_be_causal(seen):
    row = next(row for row in seen if row["method"] == "linformer")
    assert row["change"] > 0.1
    assert row["causal_change"] is None
    assert row["refused"] == "linformer_attention: unexpected argument 'causal'"


def test_linear_attention_hides_later_tokens(seen):
    assert {row["method"]: row["causal_change"] for row in seen if not row["refused"]} == dict.fromkeys(
        future.CAUSAL, 0.0
    )
    assert all(row["change"] > 0.1 for row in seen)
    future.check(seen)


def test_a_method_that_sees_later_tokens_is_named(seen, monkeypatch):
    linear, linformer = (next(row for row in seen if row["method"] == name) for name in ("linear", "linformer"))
    op = attnkit.linear_attention
    monkeypatch.setattr(attnkit, "linear_attention", lambda *arrays, causal=False: op(*arrays))
    (row,) = rows_of(future, future.Study(methods=("linear",), tokens=12, head_dim=4))
    with pytest.raises(ValueError, match="linear, causal: earlier outputs change by 0"):
        future.check([row])
    with pytest.raises(ValueError, match="linformer: expected causal=True to be refused by name, got ''"):
        future.check([linformer | {"refused": ""}])
    with pytest.raises(ValueError, match="linear: without causality earlier outputs do not change"):
        future.check([linear | {"change": 0.0}])


@pytest.mark.parametrize(
    ("recipe", "words", "title"),
    [
        ("003-memory", ("lengths=16", "methods=linear", "rounds=1"), "What a layer keeps for its backward pass"),
        ("003-future", ("methods=linear,linformer", "tokens=8", "head_dim=4", "slots=2"), "All numbers"),
    ],
)
def test_from_settings_to_report(recipe, words, title, tmp_path, undrawn):
    out = tmp_path / "out"
    assert main(["run", recipe, *(part for word in words for part in ("--set", word)), "--out", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    assert f"<h2>{title}" in (out / "report.html").read_text()
    assert len([*csv.DictReader((out / "results.csv").read_text().splitlines())]) == 1 + ("," in words[0])
