"""Files of verdicts: what is wrong with one is told with its place; badges and scoreboards say what they hold."""

import copy
import json
import re
import xml.etree.ElementTree as xml
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attnkit_conformance.__main__ import main
from attnkit_conformance.model.grades import GRADES
from attnkit_conformance.report import badge, saved, scoreboard
from attnkit_conformance.report.shares import Count, percent

FAILURE = {"check": "bound", "message": "o: off <by> 3", "grade": "wrong"}
ID = "softmax_attention/float32/pair.plain"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `run --json` wrote, beside a badge."""
    folder = tmp_path_factory.mktemp("ran")
    command = ["run", "numpy-generic", "-k", "qk_layernorm and float32 and pair", "--seed", "3"]
    command += ["--json", str(folder / "ran.json"), "--markdown", str(folder / "ran.md")]
    assert main([*command, "--badge", str(folder / "ran.svg")]) == 0
    assert "qk layernorm" in (folder / "ran.svg").read_text()
    held = json.loads((folder / "ran.json").read_text())
    told, count = (folder / "ran.md").read_text(), held["totals"]["pass"]
    assert f"float16 | {count} | 0 | 0 | {held['totals']['unsupported']} |" in told
    assert re.search(rf"\| `qk_layernorm` \| \d+% \({count}\) \|", told)
    return held


def verdict(status: str = "pass", number: int = 0, adapter: str = "mine", **others: Any) -> dict[str, Any]:
    failed = status in ("fail", "xfail")
    size = 3.0 if failed else 0.5
    errors = (
        []
        if status == "unsupported"
        else [{"output": "o", "dtype": "float32", "max": size, "rms": 0.1, "relative": 0.1}]
    )
    return {
        "id": f"{ID}{number}", "adapter": adapter, "op": ID.split("/")[0], "dtype": "float32", "status": status,
        "ratio": size if errors else 0.0, "errors": errors, "program": "", "seconds": 0.1,
        "failures": [dict(FAILURE)] * failed,
        "grade": "wrong" if failed else "", "policy": "",
        "reason": "takes no mask" if status == "unsupported" else "", **others,
    }  # fmt: skip


def file_of(counts: dict[str, int], adapter: str = "mine", **others: Any) -> dict[str, Any]:
    """The content of a file with so many verdicts of each status; a grade may stand behind a stroke."""
    results = []
    for name, count in counts.items():
        status, _, grade = name.partition("/")
        graded = {"grade": grade} if grade else {}
        results += [verdict(status, len(results) + n, adapter, **graded) for n in range(count)]
    grades = {x: sum(r["status"] == "fail" and r["grade"] == x for r in results) for x in GRADES}
    totals = {status: sum(r["status"] == status for r in results) for status in saved.STATUSES}
    return {
        "format": saved.FORMAT, "semantics": 1, "seed": None, "profile": "quick", "versions": {"numpy": "2.4"},
        "python": "3.12", "machine": "Linux", "device": "", "totals": totals, "grades": grades, "results": results,
        "adapters": {adapter: {"dtypes": ["float32"], "description": "a <kernel>"}}, **others,
    }  # fmt: skip


def test_what_run_writes_has_no_fault(ran: Any) -> None:
    assert list(saved.faults(ran)) == []
    assert ran["format"] == saved.FORMAT
    assert {"attnkit", "numpy"} <= ran["versions"].keys()
    assert (ran["semantics"], ran["seed"]) == (1, 3)
    assert len(ran["results"]) > 5
    every = {"pass": 2, "fail/wrong": 1, "unsupported": 1, "xfail": 1}
    assert list(saved.faults(file_of(every))) == []


def at(*keys: Any) -> Callable[[Any, Any], None]:
    """Sets a value at a place."""

    def put(data: Any, value: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        if value is ...:
            del data[keys[-1]]
        else:
            data[keys[-1]] = value

    return put


FAULTS = [
    (at("format"), "attnkit_conformance/2", "format is \"attnkit_conformance/2\"; expected 'attnkit_conformance/1'"),
    (at("format"), ..., "format is null; expected"),
    (at("semantics"), 2, "semantics is 2; expected a version up to 1"),
    (at("semantics"), True, "semantics is true; expected a version"),
    (at("seed"), "0", 'seed is "0"; expected a whole number, or null'),
    (at("profile"), "all", 'profile is "all"; expected one of small, quick, scenes, full'),
    (at("versions"), {"numpy": 2}, 'versions is {"numpy": 2}; expected an object of texts'),
    (at("python"), "", 'python is ""; expected a text that is not empty'),
    (at("results"), ..., "results is missing"),
    (at("totals", "pass"), 7, "totals.pass is 7; counted 2"),
    (at("adapters"), {}, 'results[0].adapter is "mine", which adapters does not name'),
    (at("adapters", "mine"), 3, "adapters['mine'] is 3; expected an object"),
    (at("adapters", "mine", "dtypes"), ["float8"], "adapters['mine'].dtypes is [\"float8\"]; expected a list of"),
    (at("results", 1), "x", 'results[1] is "x"; expected an object'),
    (at("results", 1, "ratio"), "1", 'results[1].ratio is "1"; expected a number from 0 on, or null'),
    (at("results", 1, "ratio"), -1, "results[1].ratio is -1; expected a number from 0 on"),
    (at("results", 1, "ratio"), 0.4, "results[1].ratio is 0.4; expected 0.5, the largest of its errors"),
    (at("results", 1, "status"), "passed", 'results[1].status is "passed"; expected one of pass, fail'),
    (at("results", 1, "dtype"), "float8", 'results[1].dtype is "float8"; expected one of'),
    (at("results", 1, "dtype"), "float64", "expected one that begins with softmax_attention/float64/"),
    (at("results", 1, "errors", 0, "max"), 1.5, "results[1] has status pass, but an error beyond what is allowed"),
    (at("results", 1, "errors", 0, "max"), None, "results[1] has status pass, but an error beyond what is allowed"),
    (at("results", 1, "errors", 0, "rms"), ..., "results[1].errors[0].rms is missing"),
    (at("results", 1, "failures"), [FAILURE], "results[1] has status pass, but failures"),
    (at("results", 2, "failures"), [], "results[2] has status fail, but no failures"),
    (at("results", 2, "failures", 0), {"check": ""}, 'results[2].failures[0].check is ""; expected a text that is not'),
    (at("grades", "wrong"), 0, "grades.wrong is 0; counted 1"),
    (at("results", 1, "grade"), "wrong", 'results[1] has status pass and grade "wrong"; failures have one'),
    (at("results", 2, "grade"), "", 'results[2] has status fail and grade ""; failures have one'),
    (at("results", 2, "grade"), "bad", 'results[2].grade is "bad"; expected one of wrong, inaccurate'),
    (at("results", 2, "failures", 0, "grade"), "", 'results[2].failures[0].grade is ""; expected one of wrong'),
    (at("results", 3, "reason"), "", "results[3] has status unsupported, but no reason"),
]  # fmt: skip


@pytest.mark.parametrize(("put", "value", "text"), FAULTS, ids=[text[:40] for _, _, text in FAULTS])
def test_a_fault_is_told_with_its_place(put: Any, value: Any, text: str) -> None:
    data = copy.deepcopy(file_of({"pass": 2, "fail/wrong": 1, "unsupported": 1}))
    put(data, value)
    told = list(saved.faults(data))
    assert any(text in fault for fault in told), told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1, column 1: no JSON (Expecting value)"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6: no JSON (Expecting ':' delimiter)"),
        ('{"a": NaN}', "NaN is no number of JSON; expected null"),
        ("[1]", "the file holds [1]; expected an object"),
    ],
)
def test_a_file_that_is_none(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert main(["validate", str(path)]) == 1
    assert capsys.readouterr().out == f"{path}: {told}\n"
    assert main(["badge", str(path), "--svg", str(tmp_path / "b.svg")]) == 2
    assert f"error: {path}: {told}" in capsys.readouterr().err


def test_validate_goes_through_all_files(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, bytes_ = (tmp_path / f"{name}.json" for name in ("good", "bad", "bytes"))
    good.write_text(json.dumps(ran))
    bad.write_text(json.dumps(file_of({"pass": 30}) | {"adapters": {}}))
    bytes_.write_bytes(b"\xff")
    assert main(["validate", str(good)]) == 0
    assert main(["validate", str(bad), str(good), str(bytes_), str(tmp_path / "nowhere.json")]) == 2
    told = capsys.readouterr()
    assert f"{good}: {len(ran['results'])} verdicts, no fault" in told.out
    assert f"{bad}: and 10 more faults" in told.out
    assert f"{bytes_}: byte 0: no text in UTF-8" in told.out
    assert "nowhere.json" in told.err


# ---------------------------------------------------------------------------------------------------- badges


@pytest.mark.parametrize(
    ("counts", "words", "colour"),
    [
        ({"pass": 1234}, "softmax 1,234 pass", badge.GREEN),
        ({"pass": 10, "unsupported": 20}, "softmax 10 pass", badge.GREEN),
        ({"pass": 10, "unsupported": 21}, "softmax 32 % served", badge.GREY),
        ({"pass": 1, "unsupported": 999}, "softmax 1 % served", badge.GREY),
        ({"pass": 9, "fail": 1}, "softmax 1 of 10 wrong", badge.RED),
        ({"pass": 9, "fail/inaccurate": 1}, "softmax 1 of 10 wrong", badge.RED),
        ({"pass": 9, "xfail/wrong": 1}, "softmax 1 of 10 wrong", badge.RED),
        ({"pass": 1, "fail/wrong": 1, "unsupported": 99}, "softmax 1 of 2 wrong", badge.RED),
        ({"pass": 9, "fail/policy": 1, "fail/tail": 1}, "softmax 9 pass, 2 mild", badge.AMBER),
        ({"pass": 1, "fail/policy": 1, "unsupported": 99}, "softmax 2 % served", badge.GREY),
    ],
)
def test_badges_say_what_files_hold(counts: dict[str, int], words: str, colour: str) -> None:
    drawn = badge.badge(file_of(counts))
    root = xml.fromstring(drawn)
    assert root.attrib["aria-label"] == f"attnkit: {words}"
    assert colour in drawn
    assert words in [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert not re.search("https?:", drawn.replace("http://www.w3.org/2000/svg", ""))


def test_a_badge_of_several_ops(ran: Any) -> None:
    data = file_of({"pass": 2})
    data["results"][1] |= {"op": "sima_attention", "id": "sima_attention/float32/x"}
    assert badge.message(data)[0] == "2 ops 2 pass"


def test_shares() -> None:
    assert Count(1, 1, 0, 2).share == 0.5
    assert Count().share == 0
    assert [percent(x) for x in (0, 0.001, 0.5, 0.999, 1)] == ["0 %", "1 %", "50 %", "99 %", "100 %"]


# ---------------------------------------------------------------------------------------------------- scoreboards


def page_of(folder: Path, **files: Any) -> str:
    paths = []
    for name, data in files.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(data))
    return scoreboard.page(paths)


class Words(HTMLParser):
    """The texts of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open += [] if tag in ("meta", "br") else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_scoreboard_concludes_first_and_counts(tmp_path: Path) -> None:
    files = {
        "one": file_of({"pass": 8, "unsupported": 2}, "right"),
        "two": file_of({"pass": 3, "fail/wrong": 2, "unsupported": 5}, "wrong"),
        "three": file_of({"pass": 1, "unsupported": 9}, "little"),
        "four": file_of({"pass": 9, "fail/policy": 1}, "mild"),
    }
    page = page_of(tmp_path, **files)
    words = Words(page)
    assert words.open == []
    text = re.sub(r"\s+", " ", " ".join(words.texts))
    assert (
        "4 implementations on softmax_attention, 24 verdicts on calls served: 1 is right in all that it serves, "
        "1 is wrong somewhere, 1 in tails or by a policy alone, of 1 too little is served to say. "
        "Most often wrong: wrong, in 2 of 5." in text
    )
    assert "o: off <by> 3" in text
    assert "a <kernel>" in text
    assert "{{" not in page
    assert not re.search(r"https?:", page)
    cells = "".join(rf'.*?data-of="{of}">([^<]+)</span>' for of in ("right", "wrong", "refused", "served"))
    numbers = re.findall(rf"<b>(\w+)<small>{cells}", page, flags=re.DOTALL)
    assert numbers == [
        ("right", "8", "0", "2", "80 %"), ("wrong", "3", "2", "5", "50 %"), ("little", "1", "0", "9", "10 %"),
        ("mild", "9", "1", "0", "100 %"),
    ]  # fmt: skip


def test_an_implementation_in_two_files_has_two_names(tmp_path: Path) -> None:
    page = page_of(tmp_path, before=file_of({"fail/wrong": 1}), after=file_of({"pass": 1}))
    assert "mine (before)" in page
    assert "mine (after)" in page


def test_files_that_do_not_go_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(saved.HEAD, "semantics", lambda x: "")  # type: ignore[index]
    with pytest.raises(ValueError, match=r"two.json is of semantics 2; .*one.json of 1: their verdicts are not about"):
        page_of(tmp_path, one=file_of({"pass": 1}), two=file_of({"pass": 1}, semantics=2))
    with pytest.raises(ValueError, match="the files hold no verdicts"):
        page_of(tmp_path, none=file_of({}))


def test_the_command_writes_a_scoreboard(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "ran.json", tmp_path / "new" / "board.html"
    path.write_text(json.dumps(ran))
    assert main(["scoreboard", str(path), "--html", str(page)]) == 0
    assert f"written: {page}" in capsys.readouterr().out
    assert "1 implementation on qk_layernorm" in page.read_text()
