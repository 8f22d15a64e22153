"""Measurements without training: what is said of each row, and that they go on where they stopped."""

import json
from types import SimpleNamespace

import pytest
import torch

from attnkit_experiments.study.measurement import Column, carry_out

COLUMNS = (Column("n", "tokens"), Column("seconds", "ms", 1000, 1), Column("reason", "why not"), Column("far", "m"))


def measured(asked: list[int]) -> SimpleNamespace:
    def measure(item: dict, study: None, device: torch.device) -> dict:
        asked.append(item["n"])
        return {"seconds": item["n"] / 1000, "reason": "too long" * (item["n"] > 4096), "far": None}

    items = [{"n": n} for n in (64, 8192)]
    return SimpleNamespace(columns=COLUMNS, items=lambda study: items, measure=measure, check=lambda rows: None)


def test_rows_are_said_as_the_page_shows_them_and_columns_without_anything_are_left_out(tmp_path, capsys):
    carry_out(measured([]), None, tmp_path, torch.device("cpu"))
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] tokens 64, ms 64.0, m –",
        "[2/2] tokens 8,192, ms 8,192.0, why not too long, m –",
    ]
    assert json.loads((tmp_path / "finished.json").read_text()) == {"rows": 2}


def test_rows_that_are_there_are_not_measured_again(tmp_path, capsys):
    asked: list[int] = []
    carry_out(measured(asked), None, tmp_path, torch.device("cpu"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows[:1]}))
    carry_out(measured(asked), None, tmp_path, torch.device("cpu"))
    assert asked == [64, 8192, 8192]
    assert capsys.readouterr().out.count("[1/2]") == 1


def test_statements_are_checked_before_the_measurement_is_finished(tmp_path):
    def refuse(rows: list) -> None:
        raise ValueError(f"{len(rows)} rows do not agree")

    made = measured([])
    made.check = refuse
    with pytest.raises(ValueError, match="2 rows do not agree"):
        carry_out(made, None, tmp_path, torch.device("cpu"))
    assert not (tmp_path / "finished.json").exists()
