"""Cells of another study: copied where they are the same training, and trained where anything differs."""

import json

import pytest

from attnkit_experiments.commands import cells
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.report.results import read_study

SOURCE, SAME, OTHER = "relu-alpha1-seed0", "relu-alpha1-norm-seed0", "relu-alpha1-nonorm-seed0"


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("trained") / "fig4")


@pytest.fixture
def begun(monkeypatch):
    """The names of the cells that are trained."""
    names = []
    train = cells.train

    def recorded(*arguments, label, **options):
        names.append(label.split()[-1])
        return train(*arguments, label=label, **options)

    monkeypatch.setattr(cells, "train", recorded)
    return names


def result_of(out, cell):
    return json.loads((out / "cells" / cell / "result.json").read_text())


def test_a_cell_of_another_recipe_is_copied_and_named_as_here(trained, tiny, tmp_path, begun, capsys):
    out = tiny(tmp_path / "fig3", recipe="000-fig3", reuse=(trained,))
    assert begun == [OTHER]
    assert f"{SAME}: trained in 000-fig4: {SOURCE}, accuracy" in capsys.readouterr().out
    ours, theirs = result_of(out, SAME), result_of(trained, SOURCE)
    assert ours == theirs | {"variant": "relu-alpha1-norm", "reused": f"000-fig4: {SOURCE}"}
    for name in ("metrics.jsonl", "weights.safetensors", "maps.safetensors", "outcomes.safetensors"):
        assert (out / "cells" / SAME / name).read_bytes() == (trained / "cells" / SOURCE / name).read_bytes()
    assert {line.name: list(line.results) for line in read_study(out).lines} == {
        "relu-alpha1-norm": [0], "relu-alpha1-nonorm": [0],
    }  # fmt: skip
    tiny(out, recipe="000-fig3", resume=True)
    assert begun == [OTHER]


@pytest.mark.parametrize(
    ("settings", "options"),
    [(("lr=0.003",), {}), ((), {"seeds": (1,)}), ((), {"threads": 2}), ((), {"fast": True})],
    ids=["settings", "seed", "threads", "deterministic"],
)
def test_any_other_training_is_not_copied(settings, options, trained, tiny, tmp_path, begun):
    tiny(tmp_path / "fig4", *settings, reuse=(trained,), **options)
    assert len(begun) == 2


@pytest.mark.parametrize("reason", ["diverged", "uninspected"])
def test_a_cell_without_all_its_numbers_is_not_copied(reason, trained, tiny, tmp_path, begun):
    source = tiny(tmp_path / "source", reuse=(trained,))
    path = source / "cells" / SOURCE / "result.json"
    path.write_text(json.dumps(result_of(source, SOURCE) | {reason: "why"}))
    tiny(tmp_path / "fig3", recipe="000-fig3", reuse=(source,))
    assert begun == [SAME, OTHER]


def test_a_folder_without_a_study_is_refused_by_name(tiny, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path / 'nothing'}: holds no study"):
        tiny(tmp_path / "fig4", reuse=(tmp_path / "nothing",))
