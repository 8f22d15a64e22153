"""`python -m benchmarks run` and `page`: small cells, wrong contenders, ratios, mistakes on the command line."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import compare, contenders, timing
from benchmarks.__main__ import main, slug
from benchmarks.cells import BOTH, FORWARD, OPS, Cell, both_forms, cells
from benchmarks.check import Truth, draw, outputs
from benchmarks.contenders import Contender, naive
from benchmarks.memory import MEASURED
from benchmarks.timing import ratio, repeats_for, rounds_of, summary

SMALL = Cell("relu", 64, d=16)


def record(name: str, n: int, mode: str, seconds: dict[str, list[float]], skipped: dict[str, str]) -> dict:
    cell = Cell(name, n)
    ceiling = compare.ceilings.Ceiling(1e11, 1e10)
    about = {"cell": cell._asdict(), "name": cell.name, "mode": mode, "auto": "attnkit blocked", "skipped": skipped}
    return about | compare.compared(cell, mode, seconds, ceiling)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """A timing is of a few calls: how many is decided in test_short_calls_are_repeated_until_they_take_long_enough."""
    monkeypatch.setattr(compare, "AT_LEAST", 1e-4)


@pytest.fixture
def measured(tmp_path):
    """A file as `run` writes it, from made-up rounds."""
    records = []
    for n in (128, 512):
        for mode in (FORWARD, BOTH):
            seconds = {"attnkit blocked": [n * 1e-6, n * 2e-6], "sdpa flash": [n * 2e-6] * 2, "naive torch": [1e-2] * 2}
            records.append(record("relu", n, mode, seconds, {"sdpa cudnn": "for <GPUs>"}))
    path = tmp_path / "machine.json"
    environment = {"device": "A <machine>", "torch": "2", "load_before": (0.5, 1, 2), "load_after": (1, 1, 2)}
    compare.write(path, environment, records)
    return path


def test_two_cells_are_compared_and_written(tmp_path, capsys, monkeypatch):
    """The memory of one contender is measured, in a process of its own: with gradients, and of statistics."""
    measure, path = compare.peak_mebibytes, tmp_path / "found.json"

    def of_one(cell, name, mode):
        wanted = name == "attnkit generic" and (cell.op, mode) != ("relu", FORWARD)
        return measure(cell, name, mode) if wanted else None

    monkeypatch.setattr(compare, "peak_mebibytes", of_one)
    words = ["run", "-k", "n=128 and (relu and causal or statistics)", "--rounds", "2", "--out", str(path)]
    assert main(words) == 0
    found = json.loads(path.read_text())
    assert found["environment"]["torch"] == torch.__version__
    assert found["environment"]["threads"] == torch.get_num_threads()
    assert [r["cell"]["op"] for r in found["records"]] == ["relu", "relu", "statistics"]
    for one in found["records"]:
        rows = one["contenders"]
        assert one["baseline"].startswith("sdpa ")
        assert rows[one["baseline"]]["ratio"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}
        assert {one["auto"], "attnkit generic", "naive torch", "sdpa math"} <= rows.keys()
        assert one["skipped"]["sdpa cudnn"] == "for GPUs"
        for row in rows.values():
            assert len(row["rounds"]) == 2
            assert row["seconds"]["lowest"] > 0
    assert [one["mode"] for one in found["records"][:2]] == [FORWARD, BOTH]
    for one in found["records"][1:]:
        assert not MEASURED or one["contenders"]["attnkit generic"]["peak_mebibytes"] >= 0
    assert "relu causal n=128" in capsys.readouterr().out
    assert "relu" in path.with_suffix(".html").read_text()


def test_the_page_is_self_contained_and_shows_every_ratio(measured, capsys):
    assert main(["page", str(measured)]) == 0
    text = measured.with_suffix(".html").read_text()
    assert str(measured.with_suffix(".html")) in capsys.readouterr().out
    elsewhere = re.findall(r"""(?:src|href)="[^#][^"]*"|url\([^#]|@import|https?://(?!www\.w3\.org)|\{\{""", text)
    assert not elsewhere
    assert "A &lt;machine&gt;" in text
    assert "for &lt;GPUs&gt;" in text
    assert text.count("<svg ") == 1  # of an op, with both modes
    assert all(word in text for word in (">forward</text>", ">forward and backward</text>", ">naive torch</text>"))
    assert not re.search("#22262b|#d5dae1", text), "colours of a file, not of the page"
    assert "1.50×" in text  # rounds of 2 and 1


def test_a_file_of_another_suite_is_refused(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    path.write_text('{"environment": {}, "seconds": {}}')
    assert main(["page", str(path)]) == 2
    assert "not a file of `python -m benchmarks run`" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_single_rounds_and_its_spread_their_quartiles():
    ours, baseline = [1.0, 2.0, 4.0, 2.0, 2.0], [2.0, 4.0, 8.0, 2.0, 8.0]
    found = ratio(baseline, ours)
    assert (found.median, found.lower, found.upper) == (2.0, 2.0, 2.0)
    assert ratio([3.0, 4.0, 1.0], [1.0, 4.0, 2.0]).median == 1.0  # the ratio of the medians is 1.5
    spread = ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert (spread.median, spread.lower, spread.upper) == (3.0, 2.0, 4.0)
    assert summary([3.0, 1.0, 2.0])[:3] == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_contenders_take_turns_and_another_one_begins_each_round():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = rounds_of(calls, 3, {"a": 1, "b": 2, "c": 1}, lambda: None)
    assert "".join(order) == "abbc" + "bbca" + "cabb"
    assert [len(x) for x in seconds.values()] == [3, 3, 3]


def test_short_calls_are_repeated_until_they_take_long_enough(monkeypatch):
    """By a clock that only the calls move on."""
    calls = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: len(calls) / 1024))
    assert repeats_for(lambda: calls.append(1), 5 / 1024, lambda: None) == 8
    assert len(calls) == 1 + 2 + 4 + 8


@pytest.mark.parametrize("mode", [FORWARD, BOTH])
@pytest.mark.parametrize("op", OPS)
def test_every_contender_of_an_op_is_right(op, mode):
    for causal in both_forms(op):
        cell = Cell(op, 64, causal, d=16)
        if mode not in cell.modes:
            continue
        truth, settings = Truth(cell, mode), compare.Settings(without=("flex",))
        with torch.set_grad_enabled(mode == BOTH):
            rows = [x for x in contenders.contenders(cell) if contenders.supports(cell, x)]
            found = {x.name: compare.make_ready(x, cell, mode, truth, settings) for x in rows}
        faults = [text for text in found.values() if isinstance(text, str) and text.startswith("wrong")]
        assert not faults
        timed = {name for name, x in found.items() if not isinstance(x, str)}
        assert {"attnkit generic", "sdpa flash", "sdpa math"} <= timed
        assert timed & {"naive torch", "entmax"}


@pytest.mark.parametrize(
    ("name", "attend"),
    [
        ("another op", lambda q, k, v: torch.softmax(q @ k.mT / 4, -1) @ v),
        ("no division", lambda q, k, v: torch.relu(q @ k.mT / 4) @ v),
        ("not a number", lambda q, k, v: naive(SMALL)(q, k, v) * torch.nan),
        ("no gradient of k", lambda q, k, v: naive(SMALL)(q, 0 * k + k.detach(), v)),
    ],
)
def test_a_contender_that_computes_something_else_is_refused(name, attend):
    row = Contender(name, lambda cell: attend, lambda cell, mode: None)
    found = compare.make_ready(row, SMALL, BOTH, Truth(SMALL, BOTH), compare.Settings())
    assert isinstance(found, str)
    assert found.startswith("wrong: ")
    assert compare.wrong({"skipped": {name: found, "other": "for GPUs"}}) == [f"{name}: {found}"]


def test_a_wrong_contender_makes_the_run_fail(tmp_path, monkeypatch, capsys):
    wrong = Contender("naive torch", lambda cell: lambda q, k, v: v + 0 * (q + k), lambda cell, mode: None)
    rows = [*contenders.attnkit_rows(SMALL), contenders.sdpa("flash"), wrong]
    monkeypatch.setattr(compare, "contenders", lambda cell: rows)
    monkeypatch.setattr(compare, "peak_mebibytes", lambda *arguments: None)
    path = tmp_path / "found.json"
    assert main(["run", "-k", "relu and full and n=128", "--rounds", "2", "--out", str(path)]) == 1
    assert "naive torch: wrong: o: off by" in capsys.readouterr().out
    assert "wrong" in json.loads(path.read_text())["records"][0]["skipped"]["naive torch"]


def test_a_contender_that_takes_too_long_is_named():
    row = Contender("naive torch", naive, lambda cell, mode: None)
    found = compare.make_ready(row, SMALL, FORWARD, Truth(SMALL, FORWARD), compare.Settings(limit=0.0))
    assert isinstance(found, str)
    assert "more than the limit of 0 s" in found


def test_golden_outputs_are_those_of_the_first_head():
    arrays = draw(SMALL, FORWARD)
    assert Truth(SMALL, FORWARD).fault(outputs(naive(SMALL), arrays, FORWARD)) is None
    assert Truth(SMALL, FORWARD).fault(outputs(naive(SMALL), tuple(x.flip(1) for x in arrays), FORWARD))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_cells_have_names_of_their_own_and_every_op_is_there(profile, device):
    table = cells(profile, device)
    assert len({cell.name for cell in table}) == len(table)
    assert {cell.op for cell in table} == set(OPS)
    assert {cell.device for cell in table} == {device}


def test_work_of_a_cell():
    cell = Cell("relu", 10, d=4, heads=3)
    assert cell.flops(FORWARD) == 2 * 2 * 3 * 10 * 10 * 4
    assert cell._replace(causal=True).flops(BOTH) == 3.5 * cell.flops(FORWARD) / 2
    assert cell.bytes(FORWARD) == 4 * 3 * 10 * 4 * 4


def test_names_of_files():
    assert slug("Intel(R) Xeon(R) Processor @ 2.80GHz") == "intel-xeon-processor-2-80ghz"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-k", "rellu"], "no cell of --profile smoke matches -k 'rellu'; a cell is called e.g. 'softmax full n=128"),
        (["-k", "relu and"], "cannot read -k 'relu and'"),
        (["--rounds", "1"], "--rounds must be at least 2, got 1"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU"),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_status_2(words, text, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", *words]) == 2
    assert text in capsys.readouterr().err
