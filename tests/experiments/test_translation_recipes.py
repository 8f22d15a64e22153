"""The recipes of translation through the runner: on sentences made here, with models of a moment."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnkit_experiments.commands import runner
from attnkit_experiments.commands.report import write_report
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report.results import read_csv
from attnkit_experiments.translation.domain import DOMAIN, TranslationStudy

from .translation_cases import TINY

TRANSLATED = [recipe for recipe in RECIPES.values() if recipe.domain is DOMAIN]


def run(recipe: str, out: Path, data: Path, *settings: str, **options) -> Path:
    options = {"preset": "cpu", "seeds": (0,), "device": "cpu", "threads": 1} | options
    return runner.run(runner.Request(recipe, data=str(data), out=out, settings=(*TINY, *settings), **options))


def result(out: Path, cell: str) -> dict:
    return json.loads((out / "cells" / cell / "result.json").read_text())


def test_a_table_is_made_from_raw_text(corpus, tmp_path, undrawn):
    out = run("001-table4", tmp_path / "out", corpus / "pairs", "methods=vanilla,reluformer")
    for name in ("vanilla", "reluformer"):
        found = result(out, f"{name}-seed0")
        assert found["translations"] == 6
        assert found["sentences_per_second"] > 0
        assert found["signatures"]["bleu"].startswith("nrefs:1")
        assert (out / "cells" / f"{name}-seed0" / "translations.txt").read_text().count("\n") == 6
    page = write_report(out).read_text()
    assert "Attention to one sentence" in page
    assert "--hide-samples" not in page
    page = write_report(out, show_images=False).read_text()
    assert "Attention to one sentence" not in page
    assert "Samples of the data, and attention to them: this page was made with --hide-samples." in page
    assert {row["samples"] for row in read_csv(out / "results.csv")} == {"hidden"}


def test_a_smoke_run_checks_itself(corpus, tmp_path, capsys, undrawn):
    data, settings = str(corpus / "pairs"), ("methods=reluformer",)
    request = runner.Request("001-table5", "smoke", data, tmp_path / "out", settings, device="cpu", threads=1)
    out = runner.run(request)
    assert "smoke checks: ok" in capsys.readouterr().out
    assert "SMOKE" in write_report(out).read_text()


def test_documents_are_joined_for_every_limit(corpus, tmp_path, undrawn):
    out = run(
        "001-table6", tmp_path / "out", corpus / "documents", "methods=vanilla", "limits=24,60", "direction=de-en"
    )
    checksums = [
        json.loads((out / "cells" / f"vanilla-{n}-seed0" / "config.json").read_text())["data"] for n in (24, 60)
    ]
    assert checksums[0] != checksums[1]
    page, told = write_report(out).read_text(), "<b>Too small to decide: documents of up to 128 tokens"
    assert "60 tokens" in page
    assert told not in page, "settings were changed"
    about = json.loads((out / "study.json").read_text())
    (out / "study.json").write_text(json.dumps(about | {"settings": []}))
    page = write_report(out).read_text()
    assert page.index(told) < page.index("<h2>")


def test_the_last_checkpoints_are_averaged(corpus, tmp_path):
    settings = ("memories=relu", "average=2", "checkpoint_every=2")
    out = run("001-table1", tmp_path / "out", corpus / "pairs", *settings)
    cell = out / "cells" / "relu-seed0"
    assert result(out, "relu-seed0")["averaged"] == 2
    weights = load_file(cell / "weights.safetensors")
    files = sorted((cell / "checkpoints").glob("step-*/*.safetensors"))
    assert len(files) == 2
    stored = [load_file(file) for file in files]
    for name, x in weights.items():
        mean = sum(each[f"model.{name}"].double() for each in stored) / 2
        assert torch.equal(x, mean.to(x.dtype)), name


def test_a_training_that_diverges_is_recorded_and_shown(corpus, tmp_path):
    settings = ("methods=relu_unscaled,vanilla", "lr=1e30", "clip=1e9")
    out = run("001-table2", tmp_path / "out", corpus / "pairs", *settings, keep_going=True)
    assert "the first output that is not finite" in result(out, "relu_unscaled-seed0")["diverged"]


def test_data_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("ATTNKIT_DATA", raising=False)
    with pytest.raises(UserError, match="translation needs sentence pairs: give --data FOLDER"):
        runner.run(runner.Request("001-table4", "smoke", DOMAIN.source(), tmp_path / "out", device="cpu"))
    with pytest.raises(UserError, match="no valid and no test files for de-en"):
        run("001-table4", tmp_path / "out", tmp_path)


@pytest.mark.parametrize("recipe", TRANSLATED, ids=lambda recipe: recipe.id)
def test_every_recipe_has_its_presets_and_published_rows(recipe):
    assert {"smoke", "cpu", "small", "paper", "fairseq"} <= recipe.presets.keys()
    assert all({*column.where.get("preset", ())} <= recipe.presets.keys() for column in recipe.published)
    names = [variant.name for variant in recipe.variants(recipe.presets["paper"].study)]
    assert len(set(names)) == len(names)
    for column in recipe.published:
        assert {*column.values} <= {*names}
    for preset in recipe.presets.values():
        fields = {field.name for field in dataclasses.fields(preset.study)}
        for variant in recipe.variants(preset.study):
            assert {*variant.changes} <= fields


def test_the_papers_settings_are_those_of_its_appendix():
    study = RECIPES["001-table4"].presets["paper"].study
    assert isinstance(study, TranslationStudy)
    assert (study.layers, study.heads, study.dim, study.slots) == (6, 4, 512, 1024)
    assert (study.dropout, study.attention_dropout, study.smoothing) == (0.1, 0.1, 0.1)
    assert (study.steps, study.tokens, study.warmup, study.beta2) == (100_000, 8192, 4000, 0.98)
    assert (study.beam, study.length_penalty, study.entropy_cap) == (5, 1.1, 0.7)
