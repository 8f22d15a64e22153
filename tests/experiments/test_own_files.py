"""Our own files, edited or damaged: one sentence that names the file, and never a traceback, another model, or a
cell that is called finished.
"""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import numpy as np
import pytest
from PIL import Image

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import export, runner
from attnkit_experiments.engine.schema import In, conform
from tests.shared import made_once

from .smallest import run
from .stopping import stopped_after

CELL = Path("cells", "relu-alpha1-seed0")
EDITS = json.loads((Path(__file__).parents[1] / "attacks" / "own" / "edits.json").read_text())
FILES = ("study.json", "result.json", "config.json", "metrics.jsonl", "weights.safetensors", "maps.safetensors",
         "outcomes.safetensors", "model/config.json", "model/model.safetensors",
         "checkpoints/step-00000004.json")  # fmt: skip


@pytest.fixture(scope="module")
def studies(tiny, tmp_path_factory):
    """One that was stopped after its fourth step and one that is finished, whose first cell is exported; a picture."""

    def make(place: Path) -> None:
        with stopped_after(4):
            tiny(place / "stopped", "checkpoint_every=2")
        for seal in (place / "stopped" / CELL / "checkpoints").glob("step-00000002*"):
            shutil.rmtree(seal) if seal.is_dir() else seal.unlink()
        tiny(place / "finished")
        export.export(place / "finished" / CELL, place / "finished" / "model")
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(place / "picture.png")

    return made_once(tmp_path_factory, "studies", make)


def copied(studies: Path, name: str, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the study that has a file, and the file."""
    out = tmp_path / "out"
    shutil.copytree(studies / ("stopped" if name.startswith("checkpoints") else "finished"), out)
    return out, out / name if (out / name).exists() else out / CELL / name


def words(command: str, out: Path, tmp_path: Path, studies: Path) -> list[str]:
    given = [f"--set={word}" for word in json.loads((studies / "finished" / "study.json").read_text())["settings"]]
    run = ["run", "000-fig4", "--preset", "cpu", "--data", "digits", "--seeds", "0", "--threads", "1", "--resume"]
    return {
        "run": [
            *run,
            "--out",
            str(out),
            *given,
            *(["--set=checkpoint_every=2"] if not (out / "finished.json").exists() else []),
        ],
        "report": ["report", str(out)],
        "export": ["export", str(out / CELL), str(tmp_path / "exported")],
        "classify": ["classify", str(out / "model"), str(studies / "picture.png")],
    }[command]


def edit(file: Path, given: dict) -> None:
    if "text" in given:
        file.write_text(given["text"])
        return
    content = json.loads(file.read_text())
    *path, last = given["set"][:-1] if "set" in given else given["remove"]
    place = content
    for key in path:
        place = place[key]
    if "set" in given:
        place[last] = given["set"][-1]
    else:
        del place[last]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("given", EDITS, ids=[f"{each['file']}-{n}" for n, each in enumerate(EDITS)])
def test_an_edited_file_is_refused_in_one_sentence(given, studies, tmp_path, capsys, undrawn):
    out, file = copied(studies, given["file"], tmp_path)
    edit(file, given)
    capsys.readouterr()
    assert main(words(given.get("command", "run"), out, tmp_path, studies)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert file.name in said
    assert re.search(given["says"], said), said


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.survival) for n in range(1, 40))])
def test_a_damaged_file_gives_a_sentence_or_is_not_needed(seed, studies, tmp_path, capsys, undrawn):
    """A byte flipped, the end cut off, or a value of another type, in each file in turn."""
    draw = random.Random(seed)
    name = FILES[seed % len(FILES)]
    out, file = copied(studies, name, tmp_path)
    content = bytearray(file.read_bytes())
    kind = draw.randrange(3)
    if kind == 0:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del content[draw.randrange(len(content)) :]
    else:
        at = draw.randrange(len(content))
        content[at:at] = draw.choice([b"null", b"-1", b"[]", b"1e999", b'"x"'])
    file.write_bytes(content)
    for command in ("run",) if name.startswith("checkpoints") else ("run", "report", "export", "classify"):
        capsys.readouterr()
        assert main(words(command, out, tmp_path, studies)) in (0, 2)
        assert capsys.readouterr().err.count("\n") <= 1


ODD = (None, True, -1, 0.5, 1e999, "x", [], {}, [[1]], {"a": 1})
"""Values that are wrong nearly everywhere."""
OF_DOMAINS = ("000-fig4", "000-causal", "001-table4", "002-table1", "002-table6")
"""A recipe of each domain."""
OF_STUDIES = ("study.json", "claims.json", f"{CELL.parent}/*/result.json", f"{CELL.parent}/*/analysis.json")


def places_in(value, path=()):
    """The paths of all values of a JSON value, of lists those of the first entry."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value[:1]):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places_in(item, (*path, key))


def wrong_reports(out: Path, count: int, capsys) -> list[str]:
    """What `count` reports on a study do wrong, each with a value of one of its files replaced or taken away."""
    draw, wrong = random.Random(0), []
    files = {path: json.loads(path.read_text()) for name in OF_STUDIES for path in sorted(out.glob(name))[:2]}
    edits = [(path, place, odd) for path, told in files.items() for place in places_in(told) for odd in (*ODD, ...)]
    for path, place, odd in draw.sample(edits, min(count, len(edits))):
        original = path.read_text()
        edit(path, {"remove": place} if odd is ... else {"set": [*place, odd]})
        capsys.readouterr()
        try:
            status = main(["report", str(out)])
        except Exception as error:
            status, said = -1, f"{type(error).__name__}: {error}"
        else:
            said = capsys.readouterr().err
        if not ((status == 0 and not said) or (status == 2 and said.count("\n") == 1 and path.name in said)):
            wrong.append(f"{path.relative_to(out)} {place} {odd!r}: {status} {said}")
        path.write_text(original)
    return wrong


def test_any_value_in_a_file_gives_a_page_or_a_sentence(studies, tmp_path, capsys, undrawn):
    out, _ = copied(studies, "study.json", tmp_path)
    assert wrong_reports(out, 12, capsys) == []


@pytest.mark.survival
@pytest.mark.parametrize("name", OF_DOMAINS)
def test_any_value_in_a_file_of_any_domain(name, places, tmp_path, monkeypatch, capsys, undrawn):
    monkeypatch.setattr(runner, "check_smoke", lambda *arguments: None)
    run(name, places(name), tmp_path / "out")
    assert wrong_reports(tmp_path / "out", 400, capsys) == []


class Kind(TypedDict):
    count: Annotated[int, In("[0, inf)")]
    share: Annotated[float, In("[0, 1]")]
    kind: Literal["a", 1]
    maybe: NotRequired[str | None]
    pairs: list[tuple[int, str]]


GOOD = {"count": 0, "share": 1, "kind": "a", "pairs": [[1, "x"]], "more": {}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"maybe": None, "kind": 1}, ""),
        ({"count": True}, "count must be a whole number, got True"),
        ({"count": 10**400}, "count must be a whole number of 64 bits"),
        ({"share": float("nan")}, r"share must lie in \[0, 1\], got nan"),
        ({"kind": True}, "kind must be one of 'a', 1, got True"),
        ({"maybe": 1}, "maybe must be a text, got 1"),
        ({"pairs": [[1]]}, r"pairs\[0\] must be a list of 2, got \[1\]"),
        ({"pairs": {}}, "pairs must be a list, got {}"),
    ],
)
def test_values_have_the_types_and_ranges_of_a_kind(change, text):
    if not text:
        conform(GOOD | change, Kind)
        return
    with pytest.raises(ValueError, match=text):
        conform(GOOD | change, Kind)
