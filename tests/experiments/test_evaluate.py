"""`evaluate`: trained cells on more test samples give what trainings with these would have given, and nothing else."""

import json
import shutil

import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import runner
from attnkit_experiments.commands.repeat import TIMES
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report.results import read_csv, read_study

from .smallest import SMALLEST

STUDIES = {
    "000-fig4": ("test_images=24", ("alphas=1", "image_size=8", "ema=0.9", "evaluate_every=1", "steps=2")),
    "002-table1": ("test_images=24", ("methods=soft", "image_size=16", "stem_stride=1", "measured_batch=0")),
    "002-table6": ("test_samples=9", ("methods=transformer",)),
    "000-causal": ("tested=5", ("alphas=1", "tokens=64", "length=16")),
    "001-table4": ("test_pairs=6", ("methods=vanilla", "test_pairs=3")),
}
FIRST = "001-table4"


def train(recipe, data, out, *settings, seeds=(0,)):
    small = (*SMALLEST[RECIPES[recipe].domain.name], *STUDIES[recipe][1])
    return runner.run(runner.Request(recipe, "cpu", data, out, (*small, *settings), seeds, "cpu", 1))


def evaluate(folder, out, data, *settings):
    words = [word for setting in settings for word in ("--set", setting)]
    return ["evaluate", str(folder), "--out", str(out), "--data", data, *words]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    return train(FIRST, str(corpus / "pairs"), tmp_path_factory.mktemp("study") / "table4")


@pytest.fixture
def refused(trained, corpus, tmp_path, refusal):
    """What evaluate says of a study that it refuses, by default the trained one."""

    def said(*settings, folder=trained, data=str(corpus / "pairs"), out=tmp_path / "out"):
        return refusal(*evaluate(folder, out, data, *settings))

    return said


@pytest.fixture
def copied(trained, tmp_path):
    """The trained study, to write to, and its only cell."""
    folder = shutil.copytree(trained, tmp_path / "copied")
    return folder, folder / "cells" / "vanilla-seed0"


def numbers(cell):
    result = json.loads((cell / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in {*TIMES, "load"}}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == FIRST else pytest.mark.survival) for name in STUDIES]
)
def test_what_is_evaluated_is_what_a_training_on_these_samples_would_have_found(recipe, places, tmp_path, capsys):
    changed, data = STUDIES[recipe][0], places(recipe)
    few, more = train(recipe, data, tmp_path / "few"), train(recipe, data, tmp_path / "more", changed)
    before = {path: path.read_bytes() for path in (few / "cells").rglob("*") if path.is_file()}
    out = tmp_path / "out"
    assert main(evaluate(few, out, data, changed)) == 0
    assert {path: path.read_bytes() for path in before} == before
    cells = sorted(path.name for path in (out / "cells").iterdir())
    assert cells == sorted(path.name for path in (more / "cells").iterdir())
    for ours, theirs, old in ([folder / "cells" / name for folder in (out, more, few)] for name in cells):
        assert numbers(ours) == numbers(theirs) != numbers(old)
        for name in ("config.json", "weights.safetensors", "outcomes.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        times = [json.loads((cell / "result.json").read_text()) for cell in (ours, old)]
        assert {key: times[0][key] for key in TIMES & {*times[1]}} == {
            key: times[1][key] for key in TIMES & {*times[1]}
        }
    assert f"[1/{len(cells)}] {read_study(out).about['cells'][0]}: " in capsys.readouterr().out
    assert (out / "finished.json").exists()
    assert main(evaluate(few, out, data, changed)) == 0
    assert capsys.readouterr().out.count(": already there") == len(cells)


def test_the_report_says_that_the_evaluation_was_made_anew(trained, corpus, tmp_path, undrawn):
    out = tmp_path / "out"
    assert main(evaluate(trained, out, str(corpus / "pairs"), "test_pairs=6", "beam=1")) == 0
    write_report(out)
    about = json.loads((out / "study.json").read_text())
    assert about["environment"] == json.loads((trained / "study.json").read_text())["environment"]
    assert about["evaluated"]["training"] == {"beam": 2, "test_pairs": 3}
    text = (out / "summary.md").read_text()
    assert "- **evaluation** made anew with beam=1 for 2, test_pairs=6 for 3, by commit " in text
    assert "and 6 test pairs" in text
    assert read_csv(out / "results.csv")[0]["evaluated_by"] == about["evaluated"]["commit"]


def test_a_report_of_several_folders_says_which_cells_were_evaluated_anew(trained, corpus, tmp_path, undrawn):
    data, out = str(corpus / "pairs"), tmp_path / "out"
    assert main(evaluate(trained, out, data, "test_pairs=6")) == 0
    other = train(FIRST, data, tmp_path / "other", "test_pairs=6", seeds=(1,))
    for folders in ((out, other), (other, out)):
        write_report(*folders)
        text = (folders[0] / "summary.md").read_text()
        assert text.count("made anew") == 1
        assert "- **evaluation** made anew for vanilla-seed0 with test_pairs=6 for 3, by commit " in text
        assert read_csv(folders[0] / "results.csv")[0]["evaluated_by"]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("lr=0.1", "--set lr: training reads it; what evaluation alone reads: test_pairs, "),
        ("test_pair=6", "unknown --set key 'test_pair'; did you mean 'test_pairs'?"),
        ("test_pairs=many", "--set test_pairs: expected a whole number, got 'many'"),
    ],
)
def test_settings_that_are_not_of_the_evaluation_are_refused(setting, text, refused, tmp_path):
    assert text in refused(setting)
    assert not (tmp_path / "out" / "study.json").exists()


def test_what_changes_must_be_said(refused):
    assert "--set says what changes: test_pairs, test_set, beam, length_penalty, analysed" in refused()


def test_other_data_are_refused_by_their_checksum(refused, corpus, tmp_path):
    other = shutil.copytree(corpus / "pairs", tmp_path / "other")
    (other / "train.en.gz").write_bytes((other / "train.de.gz").read_bytes())
    assert "it was started with data checksum" in refused("test_pairs=6", data=str(other))


def test_a_cell_without_weights_is_refused_by_name(copied, refused):
    folder, cell = copied
    (cell / "weights.safetensors").unlink()
    assert f"{cell}: holds no weights.safetensors" in refused("test_pairs=6", folder=folder)


def test_weights_of_another_training_are_refused(copied, refused, corpus, tmp_path):
    folder, cell = copied
    other = train(FIRST, str(corpus / "pairs"), tmp_path / "other", "lr=0.03")
    shutil.copyfile(other / "cells" / cell.name / "weights.safetensors", cell / "weights.safetensors")
    assert "these are not the weights of that result" in refused("test_pairs=6", folder=folder)


def test_a_directory_with_another_study_is_refused(trained, refused, corpus, tmp_path):
    assert "holds another study" in refused("test_pairs=6", out=trained)
    assert main(evaluate(trained, tmp_path / "out", str(corpus / "pairs"), "test_pairs=6")) == 0
    assert "holds another study" in refused("test_pairs=5")


def test_cells_that_have_not_finished_are_left_out_and_those_that_diverged_stay(
    copied, refused, corpus, tmp_path, capsys
):
    folder, cell = copied
    result = json.loads((cell / "result.json").read_text())
    lost = {key: result[key] for key in ("config_hash", "variant", "seed")} | {"diverged": "at step 1"}
    (cell / "result.json").write_text(json.dumps(lost))
    assert main(evaluate(folder, tmp_path / "out", str(corpus / "pairs"), "test_pairs=6")) == 0
    assert "vanilla-seed0: diverged in training" in capsys.readouterr().out
    (cell / "result.json").unlink()
    assert "no cell has finished yet" in refused("test_pairs=6", folder=folder, out=tmp_path / "none")
