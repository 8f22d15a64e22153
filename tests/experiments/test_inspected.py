"""A trained cell is finished whatever becomes of its inspection, which a report makes up for."""

import json

import pytest

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.speed import RATES
from attnkit_experiments.images import inspection
from attnkit_experiments.translation import inspection as of_translation

from .translation_cases import TINY as TRANSLATED

CELL = "relu-alpha1-seed0"
TIMED = ("seconds", "step_ms", "steady_seconds", "load", "decode_seconds", "sentences_per_second", *RATES)


def result(out, cell=CELL):
    return json.loads((out / "cells" / cell / "result.json").read_text())


def untimed(numbers):
    return {key: value for key, value in numbers.items() if key not in TIMED}


@pytest.fixture
def uninspected(tiny, tmp_path, monkeypatch):
    """A study whose inspections have failed, on a GPU perhaps."""
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "inspect", lambda *a, **k: 1 / 0)
        return tiny(tmp_path / "out")


def test_a_failing_inspection_costs_no_cell_and_is_made_up_for(uninspected, tiny, tmp_path, capsys, undrawn):
    assert result(uninspected)["uninspected"] == "ZeroDivisionError: division by zero"
    assert (uninspected / "cells" / CELL / "weights.safetensors").exists()
    assert (uninspected / "finished.json").exists()
    write_report(uninspected, data="digits")
    assert f"{CELL}: inspected" in capsys.readouterr().out
    assert untimed(result(uninspected)) == untimed(result(tiny(tmp_path / "whole")))
    assert "Attention maps" in (uninspected / "report.html").read_text()
    assert "not inspected" not in (uninspected / "report.html").read_text()


def test_a_report_without_the_data_names_what_was_not_inspected(uninspected, image_folder, capsys, undrawn):
    write_report(uninspected, data=str(image_folder))
    said = capsys.readouterr().out
    assert f"not inspected: {CELL}, relu-alpha1-gate-seed0: --resume" in said
    assert "it was started with data checksum" in said
    for file in ("report.html", "summary.md"):
        assert "trained, but not inspected (ZeroDivisionError: division by zero)" in (uninspected / file).read_text()
    assert "Attention maps" not in (uninspected / "report.html").read_text()


def test_an_interrupted_inspection_leaves_a_cell_that_is_inspected_on_resume(tiny, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inspection, "inspect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny(tmp_path / "out")
    assert result(tmp_path / "out")["uninspected"] == "it was interrupted"
    tiny(tmp_path / "out", resume=True)
    assert "already there, accuracy" in capsys.readouterr().out
    assert "uninspected" not in result(tmp_path / "out")


def test_translations_are_made_up_for_by_the_mean_of_the_checkpoints(corpus, tmp_path, monkeypatch, undrawn):
    def run(name):
        settings = (*TRANSLATED, "memories=relu", "average=2", "checkpoint_every=2")
        where = str(corpus / "pairs"), tmp_path / name
        return runner.run(runner.Request("001-table1", "cpu", *where, settings, (0,), device="cpu", threads=1))

    whole = run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(of_translation, "write_maps", lambda *a: 1 / 0)
        out = run("out")
    assert result(out, "relu-seed0")["averaged"] == 2
    write_report(out, data=str(corpus / "pairs"))
    assert untimed(result(out, "relu-seed0")) == untimed(result(whole, "relu-seed0"))


def test_smoke_does_not_pass_without_inspection(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "inspect", lambda *a, **k: 1 / 0)
    with pytest.raises(UserError, match="smoke check failed: relu-alpha1-seed0: not inspected: ZeroDivision"):
        tiny(tmp_path / "out", preset="smoke")
