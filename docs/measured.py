"""Tables of the documentation from the results committed: choice, speed, memory, predictions, and what is run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

from attnkit_experiments.recipes import MEASUREMENTS, RECIPES
from attnkit_experiments.report.results import read_csv
from attnkit_experiments.study.measurement import Measurement
from attnkit_experiments.study.recipe import Recipe
from benchmarks.cells import FORWARD, Cell
from benchmarks.sass.budgets import BUDGETS, cost
from docs import choosing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REPORTS = ROOT / "docs" / "reports"
DEVICE = "intel-xeon-processor"
FILES = {"NumPy": f"{DEVICE}-numpy.json", "torch": f"{DEVICE}.json", "JAX": f"{DEVICE}-jax.json"}
SOFTMAX = {"torch": "sdpa flash"}  # torch's own attention, timed beside each op
TRAINED = ("000-fig2-cpu", "001-table2-cpu")
LENGTHS = (1024, 4096)
TRITON, PEAK = "attnkit triton", 989e12  # dense products of bfloat16 on an H100
ONE = Cell("relu", 4096, False, 64, "bfloat16", 4, 16, "cuda")
GPU_LENGTHS = (1024, 4096, 16384)

Times = dict[tuple[str, int, str], tuple[float, float]]  # (row, tokens, mode) -> milliseconds, MiB


def taken(record: dict[str, Any], name: str) -> tuple[float, float]:
    contender = record["contenders"][name]
    return contender["seconds"]["median"] * 1e3, contender["peak_mebibytes"]


def times(library: str) -> Times:
    """What `impl="auto"` takes, and in torch its own softmax where it was the rival."""
    rows: Times = {}
    for record in json.loads((RESULTS / FILES[library]).read_text())["records"]:
        cell, rival = record["cell"], SOFTMAX.get(library)
        if cell["op"] == "statistics":
            continue
        causal = ", causal" if cell["causal"] else ""
        rows[cell["op"] + causal, cell["n"], record["mode"]] = taken(record, record["auto"])
        if rival is not None and cell["op"] == "relu":
            rows["softmax" + causal, cell["n"], record["mode"]] = taken(record, rival)
    return rows


def speed() -> str:
    """Milliseconds of a call and its memory, by library and op."""
    lines = [["library", "op"]]
    for n in LENGTHS:
        lines[0] += [f"n = {n}: forward", "with gradients", "MiB"]
    for library in FILES:
        by_cell = times(library)
        for op in dict.fromkeys(row for row, _, _ in by_cell):
            cells = [library, op]
            for n in LENGTHS:
                forward, both = (by_cell.get((op, n, mode)) for mode in ("forward", "forward+backward"))
                cells += [f"{x[0]:.0f} ms" if x else "–" for x in (forward, both)]
                largest = both or forward
                cells.append(f"{largest[1]:.0f}" if largest else "–")
            lines.append(cells)
    return choosing.table(lines)


def variants() -> str:
    """Every variant at two lengths: times and how many times as fast as torch's softmax of the same form."""
    groups: dict[tuple[str, bool, str], dict[tuple[int, str], dict[str, Any]]] = {}
    found = json.loads((RESULTS / "variants-cpu.json").read_text())
    for row in found["rows"]:
        groups.setdefault((row["op"], row["causal"], row["options"]), {})[row["n"], row["mode"]] = row
    lengths = sorted({n for by in groups.values() for n, _ in by})
    lines = [["op", *(f"n = {n}: {head}" for n in lengths for head in ("forward", "with gradients", "MiB"))]]
    for (op, causal, options), by in groups.items():
        about = ", ".join(word for word in (options, "causal" if causal else "") if word)
        cells = [f"`{op}`" + (f" ({about})" if about else "")]
        for n in lengths:
            both = [by[n, mode] for mode in ("forward", "forward+backward")]
            cells += [f"{row['seconds']['median'] * 1e3:.0f} ms, {row['ratio']['median']:.2g}×" for row in both]
            cells.append(f"{both[1]['peak_mebibytes']:.0f}")
        lines.append(cells)
    return f"{origin(**found)}\n{choosing.table(lines)}"


def origin(environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The machine and the programs of a run, and how far its rounds lay apart."""
    e = environment
    times = [row["seconds"] for row in rows if row["rounds"] > 1]
    spreads = [100 * (x["upper"] - x["lower"]) / x["median"] for x in times]
    machine = (
        f"{e['device']}, {e['threads']} threads, CPU library {e.get('native', 'not recorded')}, torch {e['torch']}"
    )
    middle, most = statistics.median(spreads), max(spreads)
    spread = f"interquartile range {middle:.1f} % of the median for the median row, {most:.0f} % at most"
    return f"{machine}; medians of {e['rounds']} rounds, {spread}.\n"


def forms(file: str) -> str:
    """The CPU library in every form of a file: milliseconds, speed relative to the baseline, and what was aimed at."""
    groups: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / file).read_text())["rows"]:
        groups.setdefault((row["title"], row["against"], row["form"]), {})[row["threads"]] = row
    threads = sorted({n for by in groups.values() for n in by})
    lines = [["form", "op", "beside", *(f"{n} thread{'s' if n > 1 else ''}" for n in threads), "aim"]]
    for (title, against, form), by in groups.items():
        aim = next(iter(by.values()))["aim"]
        cells = [cell(by[n], aim) if n in by else "–" for n in threads]
        lines.append([title, f"`{form}`" if "_attention" in form else form, against, *cells, number(aim)])
    return choosing.table(lines)


def cell(row: dict[str, Any], aim: float | None) -> str:
    """Time and ratio; bold where the ratio is below the aim."""
    found = row["ratio"]["median"]
    ratio = f"{number(found)}×"
    return f"{number(row['seconds']['median'] * 1e3)} ms, " + (f"**{ratio}**" if aim and found < aim else ratio)


def number(x: float | None) -> str:
    """Three digits, or two below 10."""
    return "" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def gpu() -> str:
    """Times as fast as torch's fastest softmax on a GPU, forward and with gradients, by op and number of tokens."""
    found: dict[str, dict[int, list[str]]] = {}
    for record in json.loads((RESULTS / choosing.GPU).read_text())["records"]:
        cell = record["cell"]
        if (cell["d"], cell["dtype"]) == (64, "bfloat16") and cell["n"] in GPU_LENGTHS:
            name, row = cell["op"] + ", causal" * cell["causal"], record["contenders"].get(record["auto"])
            times = [] if row is None else [f"{row['ratio']['median']:.2f}"]
            found.setdefault(name, {}).setdefault(cell["n"], []).extend(times)
    head = ["op", *(f"{n:,} tokens" for n in GPU_LENGTHS)]
    return choosing.table(
        [head, *([name, *(" / ".join(by.get(n, ["—"])) for n in GPU_LENGTHS)] for name, by in found.items())]
    )


def verdicts() -> str:
    """What the kit says of kernels on a GPU, by implementation and dtype."""
    lines = [["kernels", "dtype", "right", "wrong", "not served", "largest error, of its bound"]]
    found = json.loads((RESULTS / f"verdicts-{choosing.GPU}").read_text())["rows"]
    of_kernels = itemgetter("adapter", "dtype")
    for (adapter, dtype), group in groupby(sorted(found, key=of_kernels), key=of_kernels):
        of = [*group]
        counts = [f"{sum(row[status] for row in of):,}" for status in ("pass", "fail", "unsupported")]
        lines.append([f"`{adapter}`", dtype, *counts, f"{max(row['worst'] for row in of):.2f}"])
    return choosing.table(lines)


def unjudged() -> str:
    """Whose kernels a GPU has found right as this commit has them, in which dtypes, and whose not."""
    from attnkit.kernels.verdicts import SOURCES, as_they_are, record

    lines = [["kernels", "judged as they are, in", "changed since they were judged", "never judged"]]
    for kernels, ops in SOURCES.items():
        by_dtypes: dict[str, list[str]] = {}
        changed, never = list[str](), list[str]()
        for op in ops:
            key = f"{kernels}, {op}"
            if found := as_they_are(key):
                dtypes = dict.fromkeys(dtype for one in found.values() for dtype in one["cases"])
                by_dtypes.setdefault(", ".join(dtypes), []).append(op)
            else:
                (changed if any(key in of for of in record().values()) else never).append(op)
        right = "; ".join(f"{dtypes}: {', '.join(of)}" for dtypes, of in by_dtypes.items())
        lines.append([kernels, *(text or "—" for text in (right, ", ".join(changed), ", ".join(never)))])
    return choosing.table(lines)


def long_sequences() -> str:
    """Seconds and memory of one head at lengths where only some ops can be called."""
    lines = [["op", "tokens", "NumPy", "torch", "peak, NumPy", "peak, torch"]]
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for row in json.loads((RESULTS / "long-sequences-cpu.json").read_text())["rows"]:
        name = f"`{row['op']}`" + (", causal" if row["causal"] else "")
        groups.setdefault((name, row["tokens"]), {})[row["library"]] = row
    for (name, tokens), by in groups.items():
        both = [by["numpy"], by["torch"]]
        seconds = [f"{row['seconds']:.1f} s" for row in both]
        lines.append([name, f"{tokens:,}", *seconds, *(f"{row['peak_mebibytes']:.0f} MiB" for row in both)])
    return choosing.table(lines)


def trained() -> str:
    """The tables of the summaries of what was trained, each with its setting."""
    parts = []
    for name in TRAINED:
        title, setting, table, *_ = (REPORTS / name / "summary.md").read_text().split("\n\n")  # then its page in words
        parts.append(f"[{title.removeprefix('# ')}](reports/{name}/summary.md): {setting}\n\n{table}\n")
    return "\n".join(parts)


def repeated() -> str:
    """Cells that were trained again, as published and as they came out, in the units of their pages."""
    lines = [["report", "cell", "", "published", "again", "equal numbers", "processors, CPU library"]]
    for row in read_csv(REPORTS / "repeated.csv"):
        recipe = RECIPES[read_csv(REPORTS / row["report"] / "results.csv")[0]["recipe"]]
        measure = recipe.domain.measure
        old, new = (f"{measure.factor * float(row[key]):.{measure.digits}f}" for key in ("published", "repeated"))
        link = f"[{row['report']}](reports/{row['report']}/summary.md)"
        places = " / ".join(dict.fromkeys(_place(row[key]) for key in ("published_on", "repeated_on")))
        equal = f"{row['equal']} of {row['numbers']}"
        lines.append([link, row["cell"], measure.head, old, new, equal, places.replace("(R)", "")])
    return choosing.table(lines)


def _place(text: str) -> str:
    """The processor and the level of attnkit's library, without torch, of a line of repeated.csv."""
    processor, _, rest = text.partition(", torch ")
    return f"{processor}, {rest.partition(', CPU library ')[2]}"


def predicted() -> str:
    """Per unit of work: what the kernels of a call ask of an A100 and of an H100."""
    record = json.loads((RESULTS / "predicted.json").read_text())["capabilities"]
    units = list(next(iter(record["90"]["relu"].values()))["clocks"])
    lines = [["call", "kernel", "GPU", *units, "barriers", "registers", "per SM", "all", "% of peak"]]
    for call in record["90"]:
        for capability, name in (("80", "A100"), ("90", "H100")):
            for kernel, row in record[capability][call].items():
                registers = f"{row['registers']}" + (f", {row['spills']} B spilled" if row["spills"] else "")
                counts = [row["clocks"][unit] for unit in units]
                cells = [*counts, row["barriers"], registers, row["programs"], row["predicted"], row["peak"]]
                lines.append([call, f"`{kernel}`", name, *map(str, cells)])
    return choosing.table(lines)


def predicted_and_measured() -> str:
    """Shares of the peak of an H100, of kernels without gradients."""
    counts = json.loads((RESULTS / "predicted.json").read_text())["capabilities"]["90"]
    lines = [["op", "predicted, % of peak", "measured, % of peak"]]
    for record in json.loads((RESULTS / choosing.GPU).read_text())["records"]:
        cell = Cell(**record["cell"])
        if cell == ONE._replace(op=cell.op) and record["mode"] == FORWARD and cell.op in counts and cell.op != "linear":
            (kernel,) = counts[cell.op].values()
            own = cell.flops(FORWARD) / (PEAK * record["contenders"][TRITON]["seconds"]["median"])
            products = 2 if cell.op != "gaussian" else 3  # its norms are one more, which are no FLOPs of the op
            lines.append([cell.op, f"{kernel['peak'] * 2 / products:.0f}", f"{100 * own:.0f}"])
    return choosing.table(lines)


def kept() -> str:
    """Memory of training steps on a GPU, counted when the page is written."""
    from benchmarks import kept

    return choosing.table(kept.in_a_fresh_process())


def taken_at() -> str:
    """For how many tokens `auto` takes kernels on a GPU, by the model of attnkit itself."""
    from attnkit.kernels import predicted

    heads, width = 8, 64
    tokens = [*range(1, 1500), *(1 << n for n in range(11, 21))]

    def taken(kind: str, itemsize: int, major: int, n: int) -> bool:
        pairs, units = (0, heads * n) if "linear" in kind else (heads * n**2, None)
        return predicted.takes(kind, itemsize, pairs, width, units, major=major)

    def spans(kind: str, itemsize: int, major: int) -> str:
        texts = []
        for chosen, group in groupby(tokens, key=partial(taken, kind, itemsize, major)):
            n = [*group]
            if chosen:
                parts = (f"from {n[0]:,}" * (n[0] > 1), f"to {n[-1]:,}" * (n[-1] < tokens[-1]))
                texts.append(" ".join(filter(None, parts)) or "all")
        return ", ".join(texts)

    columns = [(name, bits, major) for name, major in (("H100", 9), ("A100", 8)) for bits in (16, 32)]
    lines = [["calls", *(f"{name}, {bits} bits" for name, bits, _ in columns)]]
    lines += [[kind, *(spans(kind, bits // 8, major) for _, bits, major in columns)] for kind in predicted.HALF]
    return choosing.table(lines)


def budgets() -> str:
    """What was aimed at: before, budget and now, on compute capability 9.0."""
    lines = [["call", "clocks of", "before", "budget", "now", ""]]
    calls = json.loads((RESULTS / "predicted.json").read_text())["capabilities"]["90"]
    for call, unit, before, aim, missed in BUDGETS:
        now = cost(calls[call], unit)
        name = "all (predicted)" if unit == "predicted" else unit
        lines.append([call, name, str(before), str(aim), str(now), "met" if now <= aim else missed or "met within 5 %"])
    return choosing.table(lines)


def calibration() -> str:
    """What the model says of kernels whose speed was published."""
    lines = [["Triton's flash attention, forward, float16", "published, % of peak", "predicted, % of peak"]]
    for name, row in json.loads((RESULTS / "predicted.json").read_text())["calibration"].items():
        lines.append([name, " to ".join(map(str, dict.fromkeys(row["published"]))), str(row["predicted"])])
    return choosing.table(lines)


def fitted() -> str:
    """What an H100 took beside what was counted, and the model of both constants that is off least."""
    from benchmarks.sass import fitted

    return choosing.table(fitted.lines())


def goals() -> str:
    """Calls beside cuDNN's softmax: aimed at, timed before they changed, and predicted; and which miss their goal."""
    from benchmarks.sass import goals

    calls = json.loads((RESULTS / "predicted.json").read_text())["capabilities"]["90"]
    return f"{choosing.table(goals.lines(calls))}\n{goals.describe_missed(calls)}\n"


def plan() -> str:
    """What preset `cpu` of every recipe is expected to take, and the reports of its runs, with changed settings too."""
    items: dict[str, Callable[[Any], Sequence[Any]]] = {each.id: partial(cells_of, each) for each in RECIPES.values()}
    items |= {each.id: each.items for each in MEASUREMENTS.values()}
    links: dict[str, list[str]] = {}
    for path in sorted(REPORTS.glob("*/results.csv")):
        name, first = path.parent.name, read_csv(path)[0]
        if first["preset"] != "cpu":
            continue
        link = f"[{name.removesuffix('-cpu')}](reports/{name}/summary.md)"
        links.setdefault(first["recipe"], []).append(link + (" (other settings)" if first.get("changed") else ""))
    lines = [["recipe", "cells", "expected", "run"]]
    studies: list[Recipe | Measurement] = [*RECIPES.values(), *MEASUREMENTS.values()]
    for each in studies:
        if preset := each.presets.get("cpu"):
            reports = ", ".join(links.get(each.id, ["not yet"]))
            lines.append([f"`{each.id}`", str(len(items[each.id](preset.study))), preset.cost, reports])
    return choosing.table(lines)


def cells_of(recipe: Recipe, study: Any) -> list[Any]:
    return [*product(recipe.variants(study), study.seeds)]


def launches() -> str:
    """What a repeated call costs the CPU before its launches: µs, and how many times as long as the plain call."""
    found = json.loads((RESULTS / "stubbed-launches.json").read_text())
    by_call = {row["call"]: row for row in found["rows"]}
    lines = [["call", "beside", "forward", "with gradients"]]
    for name, row in by_call.items():
        cells = [name, row["beside"]]
        for mode in ("forward", "gradients"):
            cell = f"{1e6 * row[mode]['median']:.0f} µs"
            if row["beside"]:
                cell += f", {row[mode]['median'] / by_call[row['beside']][mode]['median']:.2f}×"
            cells.append(cell)
        lines.append(cells)
    return choosing.table(lines)


TABLES: dict[str, Callable[[], str]] = {
    "quality": choosing.trained, "choice": choosing.choice, "plan": plan, "repeated": repeated,
    "gpu": gpu, "verdicts": verdicts, "unjudged": unjudged, "launches": launches,
    "speed": speed, "variants": variants, "forms": partial(forms, "forms-cpu.json"),
    "since_2023": partial(forms, "forms-since-2023-cpu.json"), "long_sequences": long_sequences, "trained": trained,
    "predicted": predicted, "predicted_and_measured": predicted_and_measured, "kept": kept, "taken": taken_at,
    "budgets": budgets, "calibration": calibration, "fitted": fitted, "goals": goals,
}  # fmt: skip
