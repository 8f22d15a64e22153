"""The page of peers: which implementations agree with which definition, and disagreements with programs that show them.

It is self-contained and needs no script.
"""

from __future__ import annotations

import html
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnkit_conformance.core import CaseResult
from attnkit_conformance.model.golden import golden
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.peers import REQUIRES
from attnkit_conformance.peers.disagreements import Disagreement, Example, collect, library
from attnkit_conformance.peers.further import Further
from attnkit_conformance.peers.further import of as further_of
from attnkit_conformance.peers.gpu_only import GPU_ONLY, OnGpu
from attnkit_conformance.report import files
from attnkit_conformance.report.files import Header
from attnkit_conformance.search.shrink import size

TEMPLATE = Path(__file__).parent / "peers.html"
WEIGHTS = "_weights"
COLUMNS = (
    "definition",
    "function",
    "verdict",
    "disagreements",
    "agree",
    "worst, of its bound",
    "differ",
    "by",
    "not served",
)
VISIBLE = 0.01  # what a disagreement beyond the cases is off by at least
LONGEST = 6000  # characters of a program on the page
PATIENCE = 1200  # seconds for all snippets of an environment, imports included
RUN = """
import contextlib, io, json, sys
printed = []
for text in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(text, {})
        except Exception as error:
            raise RuntimeError(text) from error
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def render(results: Sequence[CaseResult], adapters: Sequence[Any], profile: str) -> str:
    """The page of these verdicts; every disagreement is shrunk and its program run."""
    names = {result.adapter for result in results}
    members = [adapter for adapter in adapters if adapter.name in names]
    head = files.header(members, profile)
    needed = (module for adapter in members for module in REQUIRES.get(library(adapter.name), ()))
    head["versions"] |= {name: files.version(name) for name in dict.fromkeys(needed) if find_spec(name)}
    ordered = sorted(results, key=lambda result: [adapter.name for adapter in members].index(result.adapter))
    try:
        return page(ordered, members, head, collect(ordered, members))
    finally:
        for adapter in members:
            if hasattr(adapter, "close"):
                adapter.close()


def page(results: Sequence[CaseResult], adapters: Sequence[Any], head: Header, entries: Sequence[Disagreement]) -> str:
    """The whole page."""
    further = further_of({library(adapter.name) for adapter in adapters})
    programs = [(e.program, e.environment) for one in entries for e in one.examples if len(e.program) <= LONGEST]
    printed = run([*programs, *((one.program, ()) for one in further)])
    parts = {
        "facts": facts(results, adapters, entries),
        "meta": meta(head),
        "matrix": matrix(results, adapters, entries),
        "disagreements": "".join(card(n, one, printed) for n, one in enumerate(entries, 1)),
        "further": "".join(further_card(one, printed[one.program]) for one in further),
        "contents": "".join(f'<li><a href="#d{n}">{escape(one.reason)}</a></li>' for n, one in enumerate(entries, 1)),
        "gpu": gpu_rows(GPU_ONLY),
        "unsupported": unsupported(results),
    }
    text = TEMPLATE.read_text()
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text


def escape(text: object) -> str:
    return html.escape(str(text))


def facts(results: Sequence[CaseResult], adapters: Sequence[Any], entries: Sequence[Disagreement]) -> str:
    """Large numbers."""
    differing = {name for one in entries for name in one.adapters}
    libraries = {library(adapter.name) for adapter in adapters}
    rows = (
        (len(adapters), "functions"), (len(libraries), "libraries"),
        (len(adapters) - len(differing), "agree everywhere"),
        (len(entries), "disagreements"), (sum(r.status == "pass" for r in results), "verdicts agree"),
        (sum(r.status in ("xfail", "fail") for r in results), "differ"),
        (sum(r.status == "unsupported" for r in results), "not served"),
    )  # fmt: skip
    return "".join(f'<div class="fact"><b>{n:,}</b><span>{escape(text)}</span></div>' for n, text in rows)


def meta(head: Header) -> str:
    """Profile, machine, versions."""
    versions = [f"{name} <b>{escape(version)}</b>" for name, version in head["versions"].items()]
    parts = [
        f"profile <b>{escape(head['profile'])}</b>",
        escape(head["device"]),
        f"python <b>{escape(head['python'])}</b>",
    ]
    return " · ".join([*parts, *versions])


def matrix(results: Sequence[CaseResult], adapters: Sequence[Any], entries: Sequence[Disagreement]) -> str:
    """A block of rows per definition: the functions that compute it, verdicts, and numbers."""
    blocks = []
    for op in OPDB:
        rows = []
        for adapter in adapters:
            own = [r for r in results if r.adapter == adapter.name and r.op.removesuffix(WEIGHTS) == op.name]
            if any(result.status != "unsupported" for result in own):
                name = f"<td><code>{escape(adapter.name)}</code><small>{escape(adapter.description)}</small></td>"
                rows.append(name + verdict(own, entries))
        if rows:
            head = f"<th rowspan={len(rows)}>{escape(op.name)}<small>{escape(op.formula)}</small></th>"
            lines = "".join(f"<tr>{head if n == 0 else ''}{row}</tr>" for n, row in enumerate(rows))
            blocks.append(f"<tbody>{lines}</tbody>")
    return f"<thead><tr>{''.join(f'<th>{title}</th>' for title in COLUMNS)}</tr></thead>{''.join(blocks)}"


def verdict(own: Sequence[CaseResult], entries: Sequence[Disagreement]) -> str:
    """Cells of one function and one definition: agrees or differs, with links and numbers."""
    counts = Counter(result.status for result in own)
    differing = [result for result in own if result.status in ("xfail", "fail")]
    word = "differs" if differing else "agrees"
    worst = max((result.ratio for result in own if result.status == "pass"), default=0.0)
    pairs = {(result.adapter, result.op) for result in own}
    links = " ".join(
        f'<a href="#d{n}">{n}</a>' for n, one in enumerate(entries, 1)
        if any((result.adapter, result.op) in pairs for result in one.results)
    )  # fmt: skip
    cells = (
        f'<b class="{word}">{word}</b>',
        links,
        number(counts["pass"]),
        f"{100 * worst:.0f} %" if counts["pass"] else "",
        number(len(differing)),
        escape(most(differing)) if differing else "",
        number(counts["unsupported"]),
    )
    return "".join(f"<td>{text}</td>" for text in cells)


def number(count: int) -> str:
    return f"{count:,}" if count else ""


def most(results: Iterable[CaseResult]) -> str:
    """The largest error in units of the bound; NaN and exceptions in words."""
    own = list(results)
    finite = [m.ratio for r in own for m in r.measured if m.failures and math.isfinite(m.ratio)]
    kinds = []
    if finite:
        kinds.append(f"{times(max(finite))} the bound")
    if any(not math.isfinite(m.ratio) for r in own for m in r.measured if m.failures):
        kinds.append("NaN or infinity")
    if any("exception" in r.checks for r in own):
        kinds.append("an exception")
    return " or ".join(kinds) or "a property"


def times(x: float) -> str:
    """2.4, 37, 8·10⁵."""
    if x < 1000:
        return f"{x:.2g}" if x < 10 else f"{x:.0f}"
    power = math.floor(math.log10(x))
    return f"{x / 10**power:.0f}·10{str(power).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def card(number: int, one: Disagreement, printed: Mapping[str, str]) -> str:
    """One disagreement: the sentence, the functions and their errors, and the programs."""
    rows = []
    for adapter in one.adapters:
        for op in one.ops:
            own = [result for result in one.results if (result.adapter, result.op) == (adapter, op)]
            if own:
                dtypes = ", ".join(dict.fromkeys(result.dtype for result in own))
                cells = (
                    f"<code>{escape(adapter)}</code>",
                    f"<code>{escape(op)}</code>",
                    dtypes,
                    str(len(own)),
                    escape(most(own)),
                )
                rows.append("".join(f"<td>{text}</td>" for text in cells))
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    head = "<tr><th>function</th><th>op</th><th>dtypes</th><th>verdicts</th><th>off by</th></tr>"
    programs = "".join(
        program(example, printed.get(example.program), opened=n == 0) for n, example in enumerate(one.examples)
    )
    sentence = f'<h3 id="d{number}"><i>{number}</i>{escape(one.reason)}</h3>'
    who = f'<div class="wide"><table class="who">{head}{table}</table></div>'
    return f'<section class="card">{sentence}{who}{programs}</section>'


def program(example: Example, printed: str | None, opened: bool) -> str:
    """A snippet and its output here, or the size of the smallest input if it is too long."""
    if printed is None:
        hint = f"the smallest input found for <code>{escape(example.adapter)}</code> is {size(example.case):,} numbers"
        return f'<p class="hint">No short program: {hint}.</p>'
    text = f'<pre class="snippet" data-tolerance="{tolerated(example):.3g}">{escape(example.program)}</pre>'
    output = f'<pre class="printed">{escape(printed)}</pre>'
    label = f"<summary>smallest input for <code>{escape(example.adapter)}</code></summary>"
    return f"<details{' open' if opened else ''}>{label}{text}{output}</details>"


def tolerated(example: Example) -> float:
    """Half the error that was found; a snippet that reproduces exceeds it."""
    truth, sight = golden(example.case), example.sight
    if not sight.output or not math.isfinite(sight.relative):
        return 0.0
    limit = truth.outputs[sight.output] if sight.output in truth.outputs else truth.gradients[sight.output[1:]]
    return sight.relative * limit.largest / 2


def further_card(one: Further, printed: str) -> str:
    """A disagreement beyond the cases."""
    text = f'<pre class="snippet" data-tolerance="{VISIBLE}">{escape(one.program)}</pre>'
    output = f'<pre class="printed">{escape(printed)}</pre>'
    sentence = f"<h3><code>{escape(one.family)}</code>: {escape(one.reason)}</h3>"
    return f'<section class="card">{sentence}<details><summary>program</summary>{text}{output}</details></section>'


def run(programs: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> dict[str, str]:
    """The output of programs, in one process per environment; RuntimeError if one does not run."""
    printed: dict[str, str] = {}
    for environment in dict.fromkeys(environment for _, environment in programs):
        own = [text for text, where in programs if where == environment]
        command = [sys.executable, "-W", "ignore", "-c", RUN]
        done = subprocess.run(command, input=json.dumps(own), capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(f"a snippet does not run:\n{done.stderr}")
        printed |= zip(own, json.loads(done.stdout.splitlines()[-1]), strict=True)
    return printed


def gpu_rows(items: Sequence[OnGpu]) -> str:
    """The implementations that are not judged without a GPU."""
    return "".join(
        f"<tr><td><code>{escape(item.name)}</code></td><td>{escape(item.distribution)} ({escape(item.version)})</td>"
        f"<td><code>{escape(item.functions)}</code></td><td><code>{escape(item.op)}</code></td>"
        f"<td>{escape(item.reason)}</td></tr>"
        for item in items
    )


def unsupported(results: Sequence[CaseResult]) -> str:
    """What each function does not support, with the number of verdicts."""
    rows = []
    for adapter in dict.fromkeys(result.adapter for result in results):
        counts = Counter(r.reason for r in results if r.adapter == adapter and r.status == "unsupported")
        if counts:
            reasons = "; ".join(f"{escape(reason)} ({count})" for reason, count in counts.most_common())
            rows.append(f"<tr><td><code>{escape(adapter)}</code></td><td>{reasons}</td></tr>")
    return "".join(rows)
