"""A self-contained page of the results of `run`: ratios at a glance, a plot per op, every number."""

import json
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.cells import BOTH, FORWARD, OPS
from benchmarks.plot import Point, Series, limits, panel

Record = dict[str, Any]
TEMPLATE = Path(__file__).parent / "page.html"
GROUP = ("op", "causal", "d", "dtype")
KINDS = {"naive": "naive", "flex": "flex", "entmax": "entmax", "fla": "fla", "sdpa": "sdpa", "jax.nn": "sdpa"}
"""{prefix of a contender's name: its class in the style sheet}."""
AGAINST = "the fastest backend of torch's scaled_dot_product_attention (softmax beside every op)"
HEADINGS = {FORWARD: "forward", BOTH: "forward and backward"}


def write(path: Path) -> Path:
    """The page of a JSON file, beside it."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or not {"environment", "records"} <= data.keys():
        raise ValueError(f"{path}: not a file of `python -m benchmarks run`")
    target = path.with_suffix(".html")
    target.write_text(html(data["environment"], data["records"]))
    return target


def html(environment: dict[str, Any], records: Sequence[Record]) -> str:
    parts = {
        "device": escape(environment["device"]),
        "facts": facts(environment),
        "against": escape(environment.get("against", AGAINST), quote=False),
        "ceilings": ceilings(records),
        "glance": glance(records),
        "plots": "".join(map(figure, grouped(records, *GROUP))) or "<p>Nothing was measured at more than one n.</p>",
        "tables": "".join(map(numbers, grouped(records, *GROUP))),
    }
    text = TEMPLATE.read_text()
    for name, value in parts.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def grouped(records: Iterable[Record], *fields: str) -> list[list[Record]]:
    """Records whose cells agree in some fields, in order."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record["cell"][name] for name in fields), []).append(record)
    return list(groups.values())


def facts(environment: dict[str, Any]) -> str:
    """Versions, threads and load."""
    items = {
        name: value
        for name, value in environment.items()
        if name not in ("device", "against", "load_before", "load_after")
    }
    for name in ("load_before", "load_after"):
        if name in environment:
            items[name.replace("_", " ")] = " ".join(f"{x:.2f}" for x in environment[name])
    return ", ".join(f"{escape(name)} <b>{escape(str(value))}</b>" for name, value in items.items())


def ceilings(records: Iterable[Record]) -> str:
    """The measured rates in words: medians over the tables."""
    measured = [record for record in records if record["ceiling"]]
    if not measured:
        return "none"
    texts = []
    for dtype in dict.fromkeys(record["cell"]["dtype"] for record in measured):
        rates = [r["ceiling"]["flops_per_second"] for r in measured if r["cell"]["dtype"] == dtype]
        texts.append(f"{dtype} products <b>{statistics.median(rates) / 1e9:,.0f} GFLOP/s</b>")
    copied = statistics.median(record["ceiling"]["bytes_per_second"] for record in measured)
    return ", ".join([*texts, f"copies <b>{copied / 1e9:,.1f} GB/s</b>"])


def form(cell: dict[str, Any]) -> str:
    """What distinguishes a group from others of the same op."""
    return f"{'causal' if cell['causal'] else 'full'}, d = {cell['d']}, {cell['dtype']}"


def ratio_text(ratio: dict[str, float]) -> str:
    """Two digits after the point, fewer for large numbers and more for small ones."""
    x = ratio["median"]
    return f"{x:.0f}×" if x >= 100 else f"{x:.1f}×" if x >= 10 else f"{x:.2f}×" if x >= 0.1 else f"{x:.2g}×"


def verdict(ratio: dict[str, float]) -> str:
    """Say "faster" or "slower" only if both quartiles agree."""
    return "faster" if ratio["lower"] > 1 else "slower" if ratio["upper"] < 1 else "equal"


# ------------------------------------------------------------------------------------------------- at a glance


def glance(records: Sequence[Record]) -> str:
    """A row per op and form, a column per mode and n: attnkit's own choice, and below it the materialised one."""
    columns = {mode: sorted({r["cell"]["n"] for r in records if r["mode"] == mode}) for mode in HEADINGS}
    columns = {mode: ns for mode, ns in columns.items() if ns}
    over = "".join(f'<th colspan="{len(ns)}">{HEADINGS[mode]}</th>' for mode, ns in columns.items())
    under = "".join(f'<th class="num">{n}</th>' for ns in columns.values() for n in ns)
    rows = []
    for group in grouped(records, *GROUP):
        cell, by = group[0]["cell"], {(r["mode"], r["cell"]["n"]): r for r in group}
        cells = "".join(glance_cell(by.get((mode, n))) for mode, ns in columns.items() for n in ns)
        rows.append(f"<tr><th>{escape(cell['op'])} <small>{form(cell)}</small></th>{cells}</tr>")
    head = f"<tr><th></th>{over}</tr><tr><th>op, n =</th>{under}</tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def glance_cell(record: Record | None) -> str:
    """One ratio."""
    if record is None:
        return "<td></td>"
    auto = record["contenders"].get(record["auto"])
    rival = next(
        (name for name in ("naive torch", "naive NumPy", "naive jnp", "entmax") if name in record["contenders"]), None
    )
    small = f"<small>{rival.split()[0]} {ratio_text(record['contenders'][rival]['ratio'])}</small>" if rival else ""
    if auto is None:
        return f'<td class="num none" title="{escape(record["skipped"].get(record["auto"], ""))}">–{small}</td>'
    title = f"{record['auto']} against {record['baseline']}"
    text = f"<b>{ratio_text(auto['ratio'])}</b>{small}"
    return f'<td class="num {verdict(auto["ratio"])}" title="{escape(title)}">{text}</td>'


# ------------------------------------------------------------------------------------------------- pictures


def point(record: Record, name: str) -> Point:
    ratio = record["contenders"][name]["ratio"]
    return Point(record["cell"]["n"], ratio["median"], ratio["lower"], ratio["upper"])


def series(records: Sequence[Record]) -> list[Series]:
    """attnkit's own choice first, then every contender; SDPA's backends only where the op is theirs."""
    ordered = sorted(records, key=lambda record: record["cell"]["n"])
    points = tuple(point(r, r["auto"]) for r in ordered if r["auto"] in r["contenders"])
    lines = [Series("attnkit, its own choice", "auto", 0, points)] if points else []
    used: dict[str, int] = {}
    for name in dict.fromkeys(name for record in ordered for name in record["contenders"]):
        serving = [r for r in ordered if name in r["contenders"]]
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "attnkit")
        if all(r["auto"] == name for r in serving) or (kind == "sdpa" and records[0]["cell"]["op"] != "softmax"):
            continue
        lines.append(Series(name, kind, used.get(kind, 0), tuple(point(r, name) for r in serving)))
        used[kind] = used.get(kind, 0) + 1
    return lines


def figure(records: Sequence[Record]) -> str:
    """Both modes of an op and form side by side; nothing for a single n."""
    cell = records[0]["cell"]
    if len({record["cell"]["n"] for record in records}) < 2:
        return ""
    by_mode = {mode: series([r for r in records if r["mode"] == mode]) for mode in HEADINGS}
    bounds = limits([one for lines in by_mode.values() for one in lines])
    panels = "".join(panel(HEADINGS[mode], lines, bounds) for mode, lines in by_mode.items() if lines)
    legend = {(one.name, one.kind, one.dash): None for lines in by_mode.values() for one in lines}
    key = "".join(
        f'<span class="{kind}"><svg viewBox="0 0 30 8"><polyline class="dash{dash}" points="0,4 30,4"/></svg>'
        f"{escape(name)}</span>"
        for name, kind, dash in legend
    )
    title = f"{escape(OPS[cell['op']].title)} <small>{form(cell)}</small>"
    return f'<figure><h3>{title}</h3><div class="key">{key}</div><div class="panels">{panels}</div></figure>'


# ------------------------------------------------------------------------------------------------- every number


def duration(seconds: float) -> str:
    """With a unit that fits."""
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * factor:.3g} {unit}"


def numbers(records: Sequence[Record]) -> str:
    """A foldable table of all contenders of an op and form."""
    cell = records[0]["cell"]
    rows = "".join(row for record in records for row in numbers_of(record))
    names = ("n, mode", "contender", "median", "quartiles", "ratio", "quartiles", "of the ceiling", "peak memory")
    head = "".join(f'<th class="{"num" if i > 1 else ""}">{name}</th>' for i, name in enumerate(names))
    title = f"{escape(OPS[cell['op']].title)} <small>{form(cell)}</small>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<details><summary>{title}</summary>{table}</details>"


def numbers_of(record: Record) -> Iterable[str]:
    """The rows of one record, fastest first, and reasons for missing ones."""
    cell = record["cell"]
    place = f"{cell['n']} <small>× {cell['batch'] * cell['heads']} heads, {HEADINGS[record['mode']]}</small>"
    ranked = sorted(record["contenders"], key=lambda name: record["contenders"][name]["seconds"]["median"])
    rows = [(*contender(record, name), "") for name in ranked]
    rows += [(escape(x), f'<td colspan="6">{escape(reason)}</td>', "none") for x, reason in record["skipped"].items()]
    for i, (name, values, kind) in enumerate(rows):
        yield f'<tr class="{kind}{"" if i else " first"}"><td>{"" if i else place}</td><td>{name}</td>{values}</tr>'


def contender(record: Record, name: str) -> tuple[str, str]:
    """Name and numbers of one row."""
    row = record["contenders"][name]
    t, r, peak = row["seconds"], row["ratio"], row.get("peak_mebibytes")
    marks = [word for word, which in (("auto", record["auto"]), ("baseline", record["baseline"])) if name == which]
    values = (
        duration(t["median"]),
        f"{duration(t['lower'])} – {duration(t['upper'])}",
        f'<b class="{verdict(r)}">{ratio_text(r)}</b>',
        f"{r['lower']:.2g} – {r['upper']:.2g}",
        f"{100 * row['fraction']:.0f} %" if "fraction" in row else "",
        "" if peak is None else f"{peak:,.1f} MiB",
    )
    label = escape(name) + "".join(f" <small>{word}</small>" for word in marks)
    return label, "".join(f'<td class="num">{value}</td>' for value in values)
