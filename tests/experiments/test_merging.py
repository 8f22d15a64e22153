"""One report of several folders: as if one had been trained, and refused where they are not one study."""

import json
import shutil

import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report import summary
from attnkit_experiments.report.merging import read_studies

RECIPE = RECIPES["000-fig4"]


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    """A grid of three alphas and two seeds as a whole, and in parts that overlap and have its cells."""
    out = tmp_path_factory.mktemp("grid")
    whole = tiny(out / "whole", "alphas=0,0.5,1", seeds=(0, 1))
    tiny(out / "ends", "alphas=0,1", seeds=(0, 1), reuse=(whole,))
    tiny(out / "middle", "alphas=0.5,1", reuse=(whole,))
    tiny(out / "later", "alphas=0,0.5", seeds=(1,), reuse=(whole,))
    return out


@pytest.fixture
def grid(parts, tmp_path):
    """The same, to write to."""
    return shutil.copytree(parts, tmp_path / "grid")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_parts_of_a_grid_are_the_grid(grid, undrawn):
    assert main(["report", *(str(grid / name) for name in ("ends", "middle", "later"))]) == 0
    write_report(grid / "whole")
    merged, whole = (read_studies([grid / name for name in names], RECIPE) for names in (
        ("ends", "middle", "later"), ("whole",),
    ))  # fmt: skip
    assert [line.name for line in merged.lines] == [line.name for line in whole.lines]
    assert merged.about["study"] == whole.about["study"]
    assert not merged.missing
    for ours, one in zip(merged.lines, whole.lines, strict=True):
        assert ours.over_seeds("accuracy") == one.over_seeds("accuracy")
        assert merged.difference(ours, "accuracy") == whole.difference(one, "accuracy")
        assert ours.losses() == one.losses()
    page = (grid / "ends" / "report.html").read_text()
    assert page.count("<svg") == (grid / "whole" / "report.html").read_text().count("<svg")
    assert "alphas=0.0,0.5,1.0" in page
    assert f"{sum(len(line.results) for line in whole.lines)} runs of 6 steps" in page
    assert not (grid / "middle" / "report.html").exists()
    texts = [(grid / name / "summary.md").read_text() for name in ("ends", "whole")]
    (said, expected) = (text.split("\n\n")[1].partition("\n")[0] for text in texts)
    assert said == expected
    assert said.startswith("**Test loss beside ")
    assert [summary.renew(grid / name, RECIPE, "") for name in ("ends", "whole")] == texts


def test_what_a_folder_has_not_finished_is_missing_unless_another_has_it(grid):
    shutil.rmtree(grid / "ends" / "cells" / "relu-alpha0-gate-seed1")
    shutil.rmtree(grid / "later" / "cells" / "relu-alpha0.5-gate-seed1")
    merged = read_studies([grid / name for name in ("ends", "later", "middle")], RECIPE)
    assert merged.missing == ("relu-alpha0.5-gate-seed1",)
    line = merged.by_name("relu-alpha0-gate")
    assert [folder.parts[-3] for folder in line.folders.values()] == ["ends", "later"]


def test_times_of_different_machines_are_not_compared(grid, undrawn):
    about = json.loads((grid / "middle" / "study.json").read_text())
    edit(grid / "middle" / "study.json", environment=about["environment"] | {"device": "another", "threads": 4})
    page = write_report(grid / "ends", grid / "middle").read_text()
    assert "Trained on 2 different machines, so the times are not comparable." in page
    assert " / another" in page
    assert "1 / 4 threads of " in page
    assert summary.renew(grid / "ends", RECIPE, "") == (grid / "ends" / "summary.md").read_text()
    line = read_studies([grid / "ends", grid / "middle"], RECIPE).by_name("relu-alpha0.5-gate")
    assert line.core_hours() == pytest.approx(4 * line.first["steady_seconds"] / 3600)


def test_a_cell_with_two_results_is_refused_by_name(grid, refusal):
    path = grid / "middle" / "cells" / "relu-alpha1-seed0"
    edit(path / "result.json", accuracy=0.123)
    error = refusal("report", str(grid / "ends"), str(grid / "middle"))
    assert error.startswith("error: relu-alpha1-seed0: different results in ")
    assert f" and {path}; " in error


def test_different_studies_are_refused_in_a_sentence(grid, tiny, tmp_path, capsys):
    def refused(other, text):
        assert main(["report", str(grid / "ends"), str(other)]) == 2
        assert capsys.readouterr().err == f"error: {grid / 'ends'} and {other} hold different studies: {text}\n"

    refused(tiny(tmp_path / "longer", "steps=7"), "steps 6 and 7")
    refused(tiny(tmp_path / "shots", "shots=1,5"), "shots [1, 5, 10, 25] and [1, 5]")
    refused(tiny(tmp_path / "fig3", recipe="000-fig3"), "recipe '000-fig4' and '000-fig3'")
    about = json.loads((grid / "middle" / "study.json").read_text())
    edit(grid / "middle" / "study.json", data=about["data"] | {"checksum": "other"})
    refused(grid / "middle", f"data checksum {about['data']['checksum']!r} and 'other'")


def test_variants_that_do_not_fit_together_are_refused_by_name(grid, capsys):
    path = grid / "middle" / "study.json"
    about = json.loads(path.read_text())
    edit(path, study=about["study"] | {"points": ["d64/4"]})
    assert main(["report", str(grid / "ends"), str(grid / "middle")]) == 2
    assert "relu-alpha0: no variant of all folders' settings together" in capsys.readouterr().err
    edit(path, study=about["study"], variants=[variant | {"op": "other"} for variant in about["variants"]])
    assert main(["report", str(grid / "ends"), str(grid / "middle")]) == 2
    assert "relu-alpha1: its settings differ between the folders" in capsys.readouterr().err
