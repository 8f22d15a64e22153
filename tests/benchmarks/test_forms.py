"""`python -m benchmarks forms`: every form is called right in size, timed beside its baseline, and written."""

import json

import pytest
import torch

from benchmarks import forms
from benchmarks.__main__ import main
from tests.library.arrays import close


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(forms, "LENGTHS", (16, 32))
    monkeypatch.setattr(forms, "CACHES", (16, 32))
    monkeypatch.setattr(forms, "VIT", (2, 2, 17, 8))
    monkeypatch.setattr(forms, "LAYERS", 2)
    monkeypatch.setattr(forms, "AT_LEAST", 1e-5)


def size(result):
    """Of an output, alone or with its statistics, or of gradients."""
    parts = [result] if hasattr(result, "shape") else result
    return None if parts is None else parts[0].numel() if hasattr(parts[0], "numel") else parts[0].size


def test_forms_give_what_their_baselines_give():
    titles = []
    for group in forms.groups():
        titles.append((group.title, group.against, *group.forms))
        golden = size(group.baseline())
        for name, form in group.forms.items():
            assert "sums" in group.against or size(form.call()) == golden, (group.title, name)
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("mode", [forms.FORWARD, forms.BOTH])
def test_loops_and_chunks_of_others_compute_what_recurrent_ops_do(mode):
    found = [group for group in forms.beside_others(32, mode) if group.against != "linear_attention"]
    assert len(found) == 7
    for group in found:
        (form,) = group.forms.values()
        for golden, ours in zip(results(group.baseline()), results(form.call()), strict=True):
            close(ours, golden)


def results(found):
    return [found] if isinstance(found, torch.Tensor) else found


def test_forms_are_timed_beside_their_baseline(tmp_path, capsys, monkeypatch):
    path = tmp_path / "forms.json"
    monkeypatch.setattr(forms, "groups", lambda: [forms.plain(32, True, forms.BOTH), forms.small()])
    arguments = ["forms", "--rounds", "2", "--threads", "1", "--out", str(path)]
    assert main([*arguments, "-k", "causal and backward"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["title"] for row in rows} == {"n = 32, causal, forward+backward"}
    assert {"linear_attention", "pointwise_attention"} < {row["form"] for row in rows}
    assert all(row["ratio"]["lower"] <= row["ratio"]["median"] for row in rows)
    assert "aim 1.50" in capsys.readouterr().out
    assert main([*arguments, "-k", "nothing"]) == 2
    assert "matches no form" in capsys.readouterr().err
