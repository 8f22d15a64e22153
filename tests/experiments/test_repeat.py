"""`repeat`: a cell of a report is trained again, and what differs is said."""

import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands.repeat import Comparison, Published
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report.results import as_csv, read_csv

CELL = "relu-alpha1-gate-seed0"


@pytest.fixture(scope="module")
def report(tiny, tmp_path_factory):
    """The report of two variants and two seeds."""
    out = tiny(tmp_path_factory.mktemp("study") / "fig4", seeds=(0, 1))
    write_report(out)
    return out


def changed(report, tmp_path, key, change):
    """The CSVs of a report, in which a number was another in every cell."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "results.csv").write_bytes((report / "results.csv").read_bytes())
    cells = read_csv(report / "cells.csv")
    (folder / "cells.csv").write_text(as_csv([cell | {key: change(cell[key])} for cell in cells]))
    return folder


def repeat(folder, tmp_path, *options, cell=CELL, data="digits", out="again"):
    return main(["repeat", str(folder), "--cell", cell, "--data", data, "--out", str(tmp_path / out), *options])


def test_the_same_training_gives_the_same_numbers(report, tmp_path, capsys):
    record = tmp_path / "repeated.csv"
    assert repeat(report, tmp_path, "--record", str(record)) == 0
    assert "fig4: relu-alpha1-gate-seed0: all " in capsys.readouterr().out
    line = read_csv(record)[0]
    published = next(cell for cell in read_csv(report / "cells.csv") if cell["variant"] == "relu-alpha1-gate")
    assert (line["report"], line["cell"], line["measure"]) == ("fig4", CELL, "accuracy")
    assert line["published"] == line["repeated"] == published["accuracy"]
    assert line["equal"] == line["numbers"]
    assert int(line["numbers"]) > 10
    assert sorted(path.name for path in (tmp_path / "again" / "cells").iterdir()) == [CELL]


def test_a_bit_that_differs_is_named_and_within_the_seeds(report, tmp_path, capsys):
    folder = changed(report, tmp_path, "last_loss", lambda text: str(float(text) * (1 + 2**-52)))
    assert repeat(folder, tmp_path) == 0
    said = capsys.readouterr().out
    assert "last_loss: " in said
    assert "accuracy: within two standard deviations of the seeds" in said


def test_another_headline_fails(report, tmp_path, capsys):
    assert repeat(changed(report, tmp_path, "accuracy", lambda _: "2.0"), tmp_path) == 1
    assert "not within two standard deviations" in capsys.readouterr().out


def test_a_line_takes_the_place_of_an_earlier_one_of_its_report(report, tmp_path):
    record = tmp_path / "repeated.csv"
    for cell in (CELL, "relu-alpha1-seed1"):
        repeat(report, tmp_path, "--record", str(record), cell=cell, out=cell)
    assert [line["cell"] for line in read_csv(record)] == ["relu-alpha1-seed1"]


def test_other_data_are_refused(report, image_folder, tmp_path, capsys):
    assert repeat(report, tmp_path, data=str(image_folder)) == 2
    assert "fig4: was trained on data with checksum" in capsys.readouterr().err


def test_a_preset_that_has_changed_is_refused(report, tmp_path, capsys):
    assert repeat(changed(report, tmp_path, "steps", lambda _: "7"), tmp_path) == 2
    assert "7 steps were published, 6 are its settings now" in capsys.readouterr().err


def test_an_unknown_cell_is_named_with_the_nearest(report, tmp_path, capsys):
    assert repeat(report, tmp_path, cell="relu-alpha1-gat-seed0") == 2
    assert CELL in capsys.readouterr().err


def test_a_folder_without_a_report_is_refused(tmp_path, capsys):
    assert repeat(tmp_path, tmp_path) == 2
    assert "holds no report of trained cells" in capsys.readouterr().err


def test_a_recipe_that_does_not_exist_is_named(report, tmp_path, capsys):
    folder = changed(report, tmp_path, "steps", str)
    text = (folder / "results.csv").read_text()
    (folder / "results.csv").write_text(text.replace("000-fig4", "000-fig44"))
    assert repeat(folder, tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: unknown recipe '000-fig44'; did you mean '000-fig4'?")


def test_what_differs_is_listed_up_to_ten():
    study = {"recipe": "000-fig2", "device": "one CPU", "torch": "2.0"}
    cell = {"variant": "softmax", "seed": "0", "accuracy": "0.5"} | {f"x{n}": "1" for n in range(12)}
    again = cell | {f"x{n}": "2" for n in range(12)}
    published = Published("fig2", study, [cell], cell)
    elsewhere = Comparison(published, again, RECIPES["000-fig2"].domain.measure, study | {"torch": "2.1"})
    assert elsewhere.text().splitlines() == [
        "fig2: softmax-seed0: 3 of 15 numbers are equal, bit for bit; published from one CPU, torch 2.0, CPU "
        "library not recorded, repeated on one CPU, torch 2.1, CPU library not recorded",
        *(f"    x{n}: 1 published, 2" for n in range(10)),
        "    and 2 more",
        "    accuracy: within two standard deviations of the seeds, 50.0",
    ]
    native = Comparison(published, again, elsewhere.measure, study | {"native": "x86-64-v4"})
    assert native.record()["published_on"] == "one CPU, torch 2.0, CPU library not recorded"
    assert native.record()["repeated_on"] == "one CPU, torch 2.0, CPU library x86-64-v4"
    other = Comparison(published, again | {"accuracy": "0.4"}, elsewhere.measure, study)
    assert other.within is None
    assert (
        other.text().splitlines()[0]
        == "fig2: softmax-seed0: 2 of 15 numbers are equal, bit for bit; both on one CPU, torch 2.0, CPU "
        "library not recorded"
    )
    assert other.text().endswith("accuracy: one seed has no two standard deviations of the seeds, 50.0")
