"""A sweep of tiles: times every kernel with its tile and with tiles like it, and writes better ones into the tables.

Each call of `benchmarks.sass.workloads` is launched with random arrays. A candidate differs from the entry of
`attnkit.kernels.triton.sizes` that a call uses in one number, or in warps and what they own. It is compiled in a
process of its own, must return what the tile of the table returns, and takes turns with it. Without a GPU clocks are
predicted.
"""

import ast
import json
import math
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton import TritonError

from attnkit.backends.torch.triton.launch import Launch
from attnkit.kernels.triton import sizes
from attnkit_conformance.model import tolerance
from benchmarks import stubbed
from benchmarks.sass.clocks import MACHINES, SYSTEM, counted
from benchmarks.sass.compiling import compiled, device_of
from benchmarks.sass.workloads import WORKLOADS, times_of
from benchmarks.timing import Ratio, ratio, repeats_for, rounds_of

ITEMS = 32  # sequences of a call: a kernel takes longer than its launch
SMALLEST, LARGEST = 16, 256  # of what a tile owns, but for a unit of segments
WARPS, STAGES = (4, 8), (1, 4)
OWNED, OTHERS = 16, (16, 32, 64)  # queries or keys of a warp, and the keys or queries that it meets at a time
BETTER = 1.03  # times as fast, over all calls of an entry
NO_WORSE = 0.98  # in any of them: the first quartile of its rounds
SECONDS = 1e-3  # of the calls that are timed in a row
STUB = "a stub for the driver"
NOT_TIMED, NOT_COMPILED = "not timed: time was up", "not compiled in time"
SHARED = {capability: machine.shared - SYSTEM for capability, machine in MACHINES.items()}
Key = tuple[Any, ...]


class Entry(NamedTuple):
    """The place of a tile in `sizes`: the name of a table, and a key of it."""

    table: str
    key: Key


class Trial(NamedTuple):
    """A tile in place of that of an entry, in a call of `WORKLOADS`; the tile of the table itself if it is None."""

    call: str
    entry: Entry
    tile: Any


# ---------------------------------------------------------------------------------------------- tiles


def candidates(tile: Any, table: str) -> list[Any]:
    """Tiles like this one; where warps share what a tile owns, also those of 16 queries or keys for each."""
    outer, inner = tile._fields[:2]
    sizes_of = {name: getattr(tile, name) for name in (outer, inner)}
    other = WARPS[tile.num_warps == WARPS[0]]
    changes: list[dict[str, int]] = [{name: n} for name, size in sizes_of.items() for n in (size // 2, size * 2)]
    changes += [{"num_warps": other}, {"num_warps": other, outer: sizes_of[outer] * other // tile.num_warps}]
    changes += [{"num_stages": tile.num_stages + step} for step in (-1, 1)]
    if table != "linear" and OWNED * tile.num_warps not in tile[:2]:
        owners = ((outer, inner), (inner, outer))
        changes += [{"num_warps": w, a: OWNED * w, b: n} for a, b in owners for w in WARPS for n in OTHERS]
    if table == "resident":  # the keys of a row
        changes = [change for change in changes if inner not in change]
    largest = sizes.UNIT if table == "linear" else LARGEST
    tiles = [tile._replace(**change) for change in changes]
    return [x for x in tiles if all(SMALLEST <= n <= largest for n in x[:2]) and STAGES[0] <= x.num_stages <= STAGES[1]]


@contextmanager
def replaced(tiles: Mapping[Entry, Any]) -> Iterator[list[tuple[Entry, Any]]]:
    """Calls take these tiles in place of the tables'; the entries that they ask for, and what they get, are noted."""
    asked: list[tuple[Entry, Any]] = []

    def entry(key: Key, capability: int, *tables: str) -> Any:
        own = Entry(sizes.table_of(key, *tables), key)
        tile = tiles.get(own, sizes.TABLES[own.table][key][sizes.column(capability)])
        asked.append((own, tile))
        return tile

    with mock.patch.object(sizes, "entry", entry):
        yield asked


def entries(call: str, items: int = 1) -> dict[Entry, Any]:
    """The entries that decide about a launch of a call, and their tiles: other kernels may take more sequences."""
    with replaced({}) as asked:
        WORKLOADS[call].launches(items)
    return {entry: tile for entry, tile in dict(asked).items() if deciding(call, entry, items)}


def deciding(call: str, entry: Entry, items: int = 1) -> list[int]:
    """The places of the launches for whose tile a call asks an entry."""
    marks = range(1000, 1004)  # no tile of any table has them
    tile = sizes.TABLES[entry.table][entry.key][0]._make(marks)
    with replaced({entry: tile}):
        made = WORKLOADS[call].launches(items)
    return [n for n, launch in enumerate(made) if any(x in marks for x in launch.constants.values())]


def launches(trial: Trial, items: int) -> list[Launch]:
    """The launches of a call for which the tile is decisive."""
    tiles = {trial.entry: trial.tile} if trial.tile else {}
    with replaced(tiles):
        made = WORKLOADS[trial.call].launches(items)
    return [made[n] for n in deciding(trial.call, trial.entry, items)]


def trials(calls: Iterable[str], items: int = 1) -> list[Trial]:
    """What is tried, call by call and entry by entry; the tile of the table comes first."""
    return [
        Trial(call, entry, other)
        for call in calls
        for entry, tile in entries(call, items).items()
        for other in (None, *candidates(tile, entry.table))
    ]


# ---------------------------------------------------------------------------------------------- compiling


def compile_trial(trial: Trial, items: int) -> None:
    """Leaves what Triton makes of a trial in its cache, for a launch on a device of the stub's capability."""
    with stubbed.stubbed(), torch.device("cpu"):
        for launch in launches(trial, items):
            launch()


def compile_all(every: Sequence[Trial], items: int, workers: int, end: float) -> dict[Trial, str]:
    """Compile in forks, since a tile may end the compiler; what is wrong with those that do not compile in time."""
    context, faults = multiprocessing.get_context("fork"), dict[Trial, str]()
    waiting, running = list(reversed(every)), dict[Trial, Any]()
    while waiting or running:
        while waiting and len(running) < workers and time.monotonic() < end:
            trial = waiting.pop()
            running[trial] = context.Process(target=compile_trial, args=(trial, items))
            running[trial].start()
        if not running:
            return faults | dict.fromkeys(waiting, NOT_COMPILED)
        multiprocessing.connection.wait([process.sentinel for process in running.values()])
        for trial, process in list(running.items()):
            if process.exitcode is not None:
                del running[trial]
                if process.exitcode:
                    faults[trial] = f"does not compile: exit status {process.exitcode}"
                process.close()
    return faults


# ---------------------------------------------------------------------------------------------- timing


def tensors(x: Any) -> Iterator[Tensor]:
    """Those among the arguments of a kernel, which may be tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from tensors(part)


def results(made: Sequence[Launch]) -> list[Tensor]:
    """All arrays after one run on random numbers, the same for the same arguments."""
    arrays = list({x.data_ptr(): x for launch in made for x in tensors(launch.arguments)}.values())
    for seed, x in enumerate(arrays):
        x.normal_(generator=torch.Generator(x.device).manual_seed(seed))
    for launch in made:
        launch()
    return arrays


def fault_of(answers: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """What a tile changes, beyond rounding."""
    for n, (x, y) in enumerate(zip(answers, expected, strict=True)):
        eps = tolerance.eps(str(y.dtype).removeprefix("torch."))
        gap, size = (float(torch.nan_to_num(z.double()).norm()) for z in (x.double() - y.double(), y))
        if not gap <= eps ** (1 / 3) * size or bool((x.isnan() != y.isnan()).any()):
            return f"array {n} is off by {gap / size if size else gap:.2g} of its norm"
    return None


class Bench(NamedTuple):
    """How a trial is timed."""

    items: int
    rounds: int
    wait: Callable[[], Any]

    def ratio(self, trial: Trial) -> Ratio:
        """How many times as fast as the tile of the table it is; ValueError if it is wrong."""
        own, other = (launches(each, self.items) for each in (trial._replace(tile=None), trial))
        if fault := fault_of(results(other), results(own)):
            raise ValueError(fault)
        calls = {"own": lambda: [launch() for launch in own], "other": lambda: [launch() for launch in other]}
        repeats = {name: repeats_for(call, SECONDS, self.wait) for name, call in calls.items()}
        seconds = rounds_of(calls, self.rounds, repeats, self.wait)
        return ratio(seconds["own"], seconds["other"])

    def record(self, trial: Trial) -> dict[str, Any]:
        """Of a trial: its ratio, or what is wrong."""
        record = record_of(trial)
        try:
            return record | {"ratio": [round(x, 4) for x in self.ratio(trial)]}
        except (TritonError, RuntimeError, ValueError) as error:
            return record | {"fault": f"{type(error).__name__}: {first_line(error)}"}


class Prediction(NamedTuple):
    """Trials judged by what `benchmarks.sass` counts, for 10 times a compute capability."""

    capability: int

    def record(self, trial: Trial) -> dict[str, Any]:
        """The ratio of predicted clocks; what spills more in its loops than the tile of the table is none."""
        try:
            (own, spilled), (clocks, spills) = (
                clocks_of(each, self.capability) for each in (trial._replace(tile=None), trial)
            )
        except (TritonError, RuntimeError) as error:
            return record_of(trial) | {"fault": f"{type(error).__name__}: {first_line(error)}"}
        if spills > spilled:
            return record_of(trial) | {"fault": f"spills {spills} times in its loops"}
        return record_of(trial) | {"ratio": [round(own / clocks, 4)] * 3}


@lru_cache
def clocks_of(trial: Trial, capability: int) -> tuple[float, int]:
    """Predicted clocks for a unit of work, and instructions of their loops that spill, of the launches of a trial."""
    with device_of(capability):
        made = launches(trial, 1)
    kernels = [counted(compiled(launch, capability), capability, times_of(launch)) for launch in made]
    units = [WORKLOADS[trial.call].units(launch) for launch in made]
    clocks = sum(kernel.work.predicted / n for kernel, n in zip(kernels, units, strict=True))
    if any(kernel.shared > SHARED[capability] for kernel in kernels):
        raise RuntimeError("more shared memory than a multiprocessor has")
    return clocks, max(kernel.work.kinds["spill"] for kernel in kernels)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def record_of(trial: Trial) -> dict[str, Any]:
    entry = trial.entry
    return {"call": trial.call, "table": entry.table, "key": entry.key, "tile": trial.tile}


def identity(record: Mapping[str, Any]) -> str:
    return json.dumps([record[name] for name in ("call", "table", "key", "tile")])


def is_untimed(record: Mapping[str, Any]) -> bool:
    """Whether time was up before a tile's turn."""
    return record.get("fault") in (NOT_TIMED, NOT_COMPILED)


def sweep(
    calls: Sequence[str], bench: Bench | Prediction, workers: int, seconds: float, known: Iterable[Any] = ()
) -> Iterator[dict[str, Any]]:
    """Records of all trials that end in time, but those that are `known`; half of it may go to compiling if there are
    `workers` for it.
    """
    items, before = bench.items if isinstance(bench, Bench) else 1, {*map(identity, known)}
    start, faults = time.monotonic(), dict[Trial, str]()
    every = [trial for trial in trials(calls, items) if identity(record_of(trial)) not in before]
    if isinstance(bench, Bench) and workers:
        faults = compile_all(every, items, workers, start + seconds / 2)
    for trial in every:
        if trial.tile is None:
            continue
        if trial in faults:
            yield record_of(trial) | {"fault": faults[trial]}
        elif time.monotonic() - start > seconds:
            yield record_of(trial) | {"fault": NOT_TIMED}
        else:
            yield bench.record(trial)


def line(record: Mapping[str, Any]) -> str:
    """A record as a line."""
    tile, key = ", ".join(map(str, record["tile"])), ", ".join(map(str, record["key"]))
    outcome = "{:.3f} ({:.3f} to {:.3f})".format(*record["ratio"]) if "ratio" in record else record["fault"]
    return f"{record['call']}: {record['table']}, {key}: {tile}: {outcome}"


# ---------------------------------------------------------------------------------------------- back into the tables


def better(records: Iterable[Mapping[str, Any]]) -> dict[Entry, Any]:
    """The fastest tile of each entry that is faster than its own over all its calls, and wrong or slower in none."""
    ratios: dict[Entry, dict[tuple[int, ...], list[Sequence[float]]]] = {}
    for record in records:
        by_tile = ratios.setdefault(Entry(record["table"], tuple(record["key"])), {})
        by_tile.setdefault(tuple(record["tile"]), []).append(record.get("ratio", (0.0, 0.0, 0.0)))
    tiles = {}
    for entry, by_tile in ratios.items():
        fit = {tile: mean(x[0] for x in all_) for tile, all_ in by_tile.items() if min(x[1] for x in all_) >= NO_WORSE}
        if fit and max(fit.values()) >= BETTER:
            tiles[entry] = max(fit, key=fit.__getitem__)
    return tiles


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(x) for x in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def rewritten(text: str, tiles: Mapping[Entry, tuple[int, ...]], capability: int) -> str:
    """The source of `sizes` with other tiles for the devices of a capability; an entry is a line."""
    dicts = {
        ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]): node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }
    tables = {ast.literal_eval(name): dicts[ast.unparse(value)] for name, value in items_of(dicts["TABLES"])}
    lines = text.splitlines(keepends=True)
    for entry, tile in tiles.items():
        pair = next(value for key, value in items_of(tables[entry.table]) if ast.literal_eval(key) == entry.key)
        old: Any = pair.elts[sizes.column(capability)]
        line = lines[old.lineno - 1]
        new = f"{ast.unparse(old.func)}({', '.join(map(str, tile))})"
        lines[old.lineno - 1] = f"{line[: old.col_offset]}{new}{line[old.end_col_offset :]}"
    return "".join(lines)


def items_of(node: ast.Dict) -> Iterator[tuple[Any, Any]]:
    return zip(node.keys, node.values, strict=True)


def write(path: Path, source: Path = Path(sizes.__file__)) -> dict[Entry, Any]:
    """Write the better tiles of a file of records into the tables; which they are."""
    content = json.loads(path.read_text())
    if content["environment"]["device"] == STUB:
        raise ValueError(f"{path}: times of a rehearsal, which say nothing about tiles")
    tiles = better(content["records"])
    source.write_text(rewritten(source.read_text(), tiles, content["capability"]))
    return tiles
