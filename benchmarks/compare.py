"""`python -m benchmarks run`: every cell of the table, all contenders in turns, as ratios to torch's own attention."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import ceilings, memory
from benchmarks.cells import BOTH, Cell
from benchmarks.check import Truth, draw, outputs
from benchmarks.contenders import Contender, contenders, supports
from benchmarks.timing import Call, ratio, repeats_for, rounds_of, seconds_per_call, summary

AT_LEAST = 0.02  # seconds of one timing
# Modules that a fresh process would import before or during its first call.
PRELOAD = ("benchmarks.compare", "attnkit.backends.torch", "torch._dynamo")


class Settings(NamedTuple):
    """How a run measures: calls longer than `limit` seconds are skipped; `without` names contenders to leave out."""

    rounds: int = 7
    limit: float = 5.0
    without: tuple[str, ...] = ()


class Ready(NamedTuple):
    """A contender with correct results; `call` is timed."""

    contender: Contender
    call: Call
    repeats: int


def waiting(device: str) -> Call:
    """The synchronisation before a clock is read."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def thunk(contender: Contender, cell: Cell, mode: str) -> Callable[[], tuple[Tensor, ...]]:
    """One call of a contender on its own arrays in its layout."""
    arrays = draw(cell, mode)
    if contender.time_first:
        turned = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in arrays)
        arrays = tuple(y.requires_grad_(x.requires_grad) for x, y in zip(arrays, turned, strict=True))
    attend = contender.make(cell)
    return lambda: outputs(attend, arrays, mode)


def make_ready(contender: Contender, cell: Cell, mode: str, truth: Truth, settings: Settings) -> Ready | str:
    """The contender after its first calls, or why it is not timed. A wrong answer is a reason that begins "wrong"."""
    if any(word in contender.name for word in settings.without):
        return "left out"
    reason = contender.unsupported(cell, mode)
    if reason is not None:
        return reason
    wait = waiting(cell.device)
    errors: tuple[type[Exception], ...] = (torch.cuda.OutOfMemoryError, *contender.refusals)
    try:
        with contender.context():
            call = thunk(contender, cell, mode)
            result = call()
    except errors as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    answers = not contender.baseline or cell.op == "softmax"
    fault = truth.fault(result) if answers else None
    if fault is not None:
        return f"wrong: {fault}"
    del result
    once = seconds_per_call(call, 1, wait, contender.context)
    if once > settings.limit:
        return f"one call takes {once:.1f} s, more than the limit of {settings.limit:g} s"
    repeats = 1 if once >= AT_LEAST else repeats_for(call, AT_LEAST, wait, contender.context)
    return Ready(contender, call, repeats)


def peak(cell: Cell, name: str, mode: str, threads: int) -> float:
    """MiB that a call of one contender needs beyond its arguments."""
    contender = next(x for x in contenders(cell) if x.name == name)
    torch.set_num_threads(threads)
    with contender.context(), torch.set_grad_enabled(mode == BOTH):
        call = thunk(contender, cell, mode)
        if cell.device == "cpu":
            return memory.growth(call)
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_mebibytes(cell: Cell, name: str, mode: str) -> float | None:
    """On the CPU in a separate process, because memory of a process is not attributable to a call."""
    threads = torch.get_num_threads()
    if cell.device == "cuda":
        return peak(cell, name, mode, threads)
    if not memory.MEASURED:
        return None
    return memory.in_a_process(peak, cell, name, mode, threads, preload=PRELOAD)


def compared(cell: Cell, mode: str, seconds: dict[str, list[float]], ceiling: ceilings.Ceiling) -> dict[str, Any]:
    """The rows of one table from the rounds of its contenders; the baseline is SDPA's fastest backend."""
    backends = [name for name in seconds if name.startswith("sdpa ")]
    baseline = min(backends, key=lambda name: statistics.median(seconds[name]))
    rows: dict[str, dict[str, Any]] = {}
    for name, x in seconds.items():
        rows[name] = {
            "seconds": summary(x)._asdict(),
            "ratio": ratio(seconds[baseline], x)._asdict(),
            "rounds": [float(f"{value:.5g}") for value in x],
        }
        if name not in backends or cell.op == "softmax":
            rows[name]["fraction"] = ceilings.fraction(cell, mode, ceiling, x)
    return {"ceiling": ceiling._asdict(), "baseline": baseline, "contenders": rows}


def timed(cell: Cell, ready: Mapping[str, Ready], rounds: int) -> tuple[dict[str, list[float]], ceilings.Ceiling]:
    """Seconds of all rounds, and the ceiling measured in the same rounds."""
    wait = waiting(cell.device)
    best = ceilings.calls(cell.device, cell.torch_dtype)
    calls = best | {name: x.call for name, x in ready.items()}
    repeats = {name: repeats_for(call, AT_LEAST, wait) for name, call in best.items()}
    repeats |= {name: x.repeats for name, x in ready.items()}
    seconds = rounds_of(calls, rounds, repeats, wait, {name: x.contender.context for name, x in ready.items()})
    return {name: seconds[name] for name in ready}, ceilings.rates(cell.device, seconds)


def measure(cell: Cell, mode: str, rows: Sequence[Contender], settings: Settings) -> dict[str, Any]:
    """One table: check, time in turns, and measure memory of all contenders."""
    skipped: dict[str, str] = {}
    ready: dict[str, Ready] = {}
    with torch.set_grad_enabled(mode == BOTH):
        truth = Truth(cell, mode)
        for contender in rows:
            outcome = make_ready(contender, cell, mode, truth, settings)
            if isinstance(outcome, str):
                skipped[contender.name] = outcome
            else:
                ready[contender.name] = outcome
        if not any(x.contender.baseline for x in ready.values()):
            return {"ceiling": None, "baseline": None, "contenders": {}, "skipped": skipped}
        seconds, ceiling = timed(cell, ready, settings.rounds)
    ready.clear()
    table = compared(cell, mode, seconds, ceiling)
    for name, row in table["contenders"].items():
        row["peak_mebibytes"] = peak_mebibytes(cell, name, mode)
    return {**table, "skipped": skipped}


def run(
    table: Sequence[tuple[Cell, str]], settings: Settings, say: Callable[[str], Any] = lambda text: None
) -> Iterator[dict[str, Any]]:
    """A record per cell and mode; `say` reports progress."""
    for cell, of in groupby(table, key=itemgetter(0)):
        rows = [x for x in contenders(cell) if supports(cell, x)]
        for _, mode in of:
            say(f"{cell.name}, {mode}")
            about = {"cell": cell._asdict(), "name": cell.name, "mode": mode, "auto": rows[0].name}
            yield about | measure(cell, mode, rows, settings)


def wrong(record: dict[str, Any]) -> list[str]:
    """Contenders of a record with wrong results."""
    return [f"{name}: {reason}" for name, reason in record["skipped"].items() if reason.startswith("wrong")]


def line(record: dict[str, Any]) -> str:
    """One record in the terminal: attnkit's own choice and the naive expression beside the baseline."""
    cells = []
    for name in dict.fromkeys((record["auto"], "naive torch", "naive jnp")):
        if name in record["contenders"]:
            r = record["contenders"][name]["ratio"]
            cells.append(f"{name} {r['median']:.2f}× [{r['lower']:.2f}, {r['upper']:.2f}]")
    return f"{record['name']:40} {record['mode']:17} {', '.join(cells)} of {record['baseline']}"


def write(path: Path, environment: dict[str, Any], records: list[dict[str, Any]], left: int = 0) -> None:
    """Write JSON of the measurements so far, one record per line; `left` are still to be made."""
    body = ",\n".join(json.dumps(record) for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'{{"environment": {json.dumps(environment, indent=1)},\n' + f'"left": {left},\n' * bool(left)
    path.write_text(f'{head}"records": [\n{body}\n]}}\n')
