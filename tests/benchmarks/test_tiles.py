"""The sweep of tiles: what it tries, how it judges, and what it writes into the tables."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from attnkit.kernels.triton import sizes
from attnkit.kernels.triton.sizes import Chunk, Tile
from benchmarks import __main__ as measuring
from benchmarks import tiles
from benchmarks.sass import report
from benchmarks.stubbed import stubbed
from benchmarks.tiles import Bench, Entry, Trial, better, candidates, deciding, entries, fault_of, rewritten, write

QUERIES = Entry("pointwise", ("backward_queries", 16, 64))
KEYS = Entry("pointwise", ("backward_keys", 16, 64))
LEAN = Entry("lean", ("forward", 16, 64))
RELU = Trial("relu", LEAN, Tile(64, 64, 4, 3))
SOURCE = Path(sizes.__file__).read_text()


# ---------------------------------------------------------------------------------------------- what is tried


def test_candidates_are_like_a_tile() -> None:
    near = candidates(Tile(128, 64, 8, 3), "pointwise")
    assert {(64, 64, 8, 3), (256, 64, 8, 3), (128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)} <= {
        *near
    }
    assert (128, 64, 8, 3) not in near
    assert len({*near}) == len(near)


def test_candidates_stay_within_what_a_kernel_can_do() -> None:
    assert all(tile.ROWS >= 16 for tile in candidates(Tile(16, 16, 8, 1), "pointwise"))
    assert {tile.num_stages for tile in candidates(Tile(16, 16, 8, 1), "pointwise")} == {1, 2}
    assert {tile.KEYS for tile in candidates(Tile(32, 256, 8, 1), "resident")} == {256}
    assert all(chunk.CHUNK <= sizes.UNIT for chunk in candidates(Chunk(64, 64, 4, 2), "linear"))


def test_where_warps_share_a_tile_those_of_their_own_are_tried() -> None:
    near = candidates(Tile(32, 32, 8, 1), "pointwise")
    assert {(128, 16, 8, 1), (64, 64, 4, 1), (16, 64, 4, 1), (64, 128, 8, 1)} <= {*near}
    assert (16, 64, 4, 1) not in candidates(Tile(128, 64, 8, 1), "pointwise")


def test_an_entry_decides_about_its_kernel() -> None:
    call = "gelu, gradients"
    assert [*entries(call)] == [QUERIES, KEYS]
    names = [launch.kernel.fn.__name__ for launch in tiles.WORKLOADS[call].launches()]
    assert [names[n] for n in deciding(call, QUERIES)] == ["backward_queries"]
    assert [names[n] for n in deciding(call, KEYS)] == ["backward_keys"]
    (launch,) = tiles.launches(Trial(call, KEYS, Tile(64, 32, 4, 1)), 1)
    assert (launch.constants["ROWS"], launch.constants["num_warps"]) == (64, 4)


def test_an_entry_that_decides_about_nothing_is_not_tried() -> None:
    """Rows of 1,024 keys do not fit into registers, whatever the tile."""
    assert "resident" not in {entry.table for entry in entries("entmax, a pass")}
    assert "resident" in {entry.table for entry in entries("entmax, 256 keys")}


def test_every_call_has_something_to_try() -> None:
    assert {trial.call for trial in tiles.trials(tiles.WORKLOADS)} == {*tiles.WORKLOADS}


def test_tiles_are_those_of_the_launches_of_so_many_sequences() -> None:
    call = "linear, causal, 16 heads"  # in parts if there are few
    for items in (1, tiles.ITEMS):
        for trial in tiles.trials([call], items):
            assert tiles.launches(trial, items), (items, trial)
    assert entries(call) != entries(call, tiles.ITEMS)


# ---------------------------------------------------------------------------------------------- how it is judged


def test_a_trial_is_timed_beside_the_tile_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with stubbed():
        record = Bench(1, 2, lambda: None).record(RELU)
        assert record | {"ratio": None} == {**tiles.record_of(RELU), "ratio": None}
        wrong = iter([[torch.zeros(3)], [torch.ones(3)]])
        monkeypatch.setattr(tiles, "results", lambda made: next(wrong))
        assert Bench(1, 2, lambda: None).record(RELU)["fault"] == "ValueError: array 0 is off by 1 of its norm"


def test_a_trial_is_predicted_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {None: (600.0, 0), RELU.tile: (500.0, 0)}
    monkeypatch.setattr(tiles, "clocks_of", lambda trial, capability: clocks[trial.tile])
    assert tiles.Prediction(90).record(RELU)["ratio"] == [1.2, 1.2, 1.2]
    clocks[RELU.tile] = (500.0, 16)
    assert tiles.Prediction(90).record(RELU)["fault"] == "spills 16 times in its loops"


def test_predicted_clocks_are_those_that_are_counted() -> None:
    own = RELU._replace(tile=None)
    clocks, spills = tiles.clocks_of(own, 90)
    (kernel,) = report.committed()["capabilities"]["90"]["relu"].values()
    assert (round(clocks), spills) == (kernel["predicted"], 0)


@pytest.mark.parametrize(
    ("other", "right"), [([1.0, 1.0], True), ([1.0, 1.001], True), ([1.0, 1.1], False), ([1.0, float("nan")], False)]
)
def test_a_tile_must_return_the_same(other: list[float], right: bool) -> None:
    assert (fault_of([torch.tensor(other)], [torch.ones(2)]) is None) is right


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX, where another test has loaded it
def test_a_tile_that_ends_the_compiler_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_trial(trial: Trial, items: int) -> None:
        if trial.tile is None:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tiles, "compile_trial", compile_trial)
    own = RELU._replace(tile=None)
    assert tiles.compile_all([own, RELU], 1, 2, end=float("inf")) == {own: "does not compile: exit status -9"}
    assert tiles.compile_all([RELU], 1, 2, end=0.0) == {RELU: "not compiled in time"}


# ---------------------------------------------------------------------------------------------- what is written


def record(tile: Tile, ratio: tuple[float, float, float] | None, call: str = "relu") -> dict[str, object]:
    outcome = {"fault": "it is wrong"} if ratio is None else {"ratio": ratio}
    return {"call": call, "table": LEAN.table, "key": [*LEAN.key], "tile": [*tile], **outcome}


FAST, FASTER = Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)


@pytest.mark.parametrize(
    ("records", "tile"),
    [
        ([record(FAST, (1.1, 1.0, 1.2)), record(FASTER, (1.2, 1.1, 1.3))], FASTER),
        ([record(FAST, (1.1, 1.0, 1.2)), record(FASTER, (1.2, 0.9, 1.3))], FAST),
        ([record(FAST, (1.1, 1.0, 1.2)), record(FASTER, None)], FAST),
        ([record(FAST, (1.02, 1.0, 1.1))], None),
        ([record(FAST, (1.2, 1.1, 1.3)), record(FAST, (0.9, 0.9, 0.9), "gelu")], None),
        ([record(FAST, (1.2, 1.1, 1.3)), record(FAST, None, "gelu")], None),
    ],
)
def test_the_best_tile_is_better_in_every_call(records: list[dict[str, object]], tile: Tile | None) -> None:
    assert better(records) == ({} if tile is None else {LEAN: tuple(tile)})


@pytest.mark.parametrize("name", sizes.TABLES)
@pytest.mark.parametrize("capability", [8, 9])
def test_one_tile_is_written_and_nothing_else(name: str, capability: int) -> None:
    key = next(iter(sizes.TABLES[name]))
    module: dict[str, object] = {"__name__": "sizes"}
    exec(rewritten(SOURCE, {Entry(name, key): (1, 2, 3, 4)}, capability), module)
    tables = module["TABLES"]
    for table, entries_ in sizes.TABLES.items():
        for other, pair in entries_.items():
            expected = [tuple(tile) for tile in pair]
            if (table, other) == (name, key):
                expected[sizes.column(capability)] = (1, 2, 3, 4)
            assert [tuple(tile) for tile in tables[table][other]] == expected


def test_several_tiles_of_a_line_and_others_are_written() -> None:
    changed = {LEAN: (1, 2, 3, 4), QUERIES: (5, 6, 7, 8)}
    text = rewritten(rewritten(SOURCE, changed, 9), {LEAN: (9, 9, 9, 9)}, 8)
    assert 'LEAN = {("forward", 16, 64): (Tile(9, 9, 9, 9), Tile(1, 2, 3, 4))}' in text
    assert "Tile(5, 6, 7, 8)" in text
    assert rewritten(SOURCE, {}, 9) == SOURCE


def test_a_file_is_read_back(tmp_path: Path) -> None:
    path, source = tmp_path / "tiles.json", tmp_path / "sizes.py"
    content = {"environment": {"device": "a GPU"}, "capability": 9, "records": [record(FASTER, (1.2, 1.1, 1.3))]}
    path.write_text(json.dumps(content))
    source.write_text(SOURCE)
    assert write(path, source) == {LEAN: tuple(FASTER)}
    assert source.read_text() == rewritten(SOURCE, {LEAN: tuple(FASTER)}, 9)
    path.write_text(json.dumps(content | {"environment": {"device": tiles.STUB}}))
    with pytest.raises(ValueError, match="rehearsal"):
        write(path, source)


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert measuring.main(["tiles"]) == 2
    assert "--stub rehearses without one" in capsys.readouterr().err
    assert measuring.main(["tiles", "--stub", "-k", "nothing"]) == 2
    assert "matches no call" in capsys.readouterr().err
