"""The page of peers: which implementations agree with which definition, and disagreements with programs that show them.

`record` is what it shows, as data that a repository can keep; `page` makes the page of it, which is self-contained and
needs no script.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from attnkit_conformance.core import CaseResult
from attnkit_conformance.golden import golden
from attnkit_conformance.model.case import compute_dtype
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.peers import REQUIRES
from attnkit_conformance.peers.further import of as further_of
from attnkit_conformance.peers.gpu_only import GPU_ONLY
from attnkit_conformance.report import files
from attnkit_conformance.report.disagreements import Disagreement, Example, collect, library
from attnkit_conformance.report.files import Header
from attnkit_conformance.report.pages import render
from attnkit_conformance.search.shrink import size

TEMPLATE = Path(__file__).parent / "peers.html"
WEIGHTS = "_weights"
VISIBLE = 0.01  # what a disagreement beyond the cases is off by at least
STOPPED = "does not run: "  # what stands for the output of a program that raised an error
LONGEST = 6000  # characters of a program on the page
ROUNDINGS = 16
Record = dict[str, Any]  # plain data, as JSON has it
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
            print(f"does not run: {type(error).__name__}: {error}")
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def record(results: Sequence[CaseResult], adapters: Sequence[Any], profile: str) -> Record:
    """All that the page shows of these verdicts, as plain data; every disagreement is shrunk and its program run."""
    names = {result.adapter for result in results}
    members = [adapter for adapter in adapters if adapter.name in names]
    head = files.header(members, profile)
    needed = (module for adapter in members for module in REQUIRES.get(library(adapter.name), ()))
    head["versions"] |= {name: files.version(name) for name in dict.fromkeys(needed) if find_spec(name)}
    ordered = sorted(results, key=lambda result: [adapter.name for adapter in members].index(result.adapter))
    try:
        return gather(ordered, members, head, collect(ordered, members))
    finally:
        for adapter in members:
            if hasattr(adapter, "close"):
                adapter.close()


def gather(
    results: Sequence[CaseResult], adapters: Sequence[Any], head: Header, entries: Sequence[Disagreement]
) -> Record:
    further = further_of({library(adapter.name) for adapter in adapters})
    programs = [(e.program, e.environment) for one in entries for e in one.examples if len(e.program) <= LONGEST]
    printed = run([*programs, *((one.program, ()) for one in further)])
    return {
        "head": {key: head[key] for key in ("profile", "device", "python", "versions")},
        "facts": facts(results, adapters, entries),
        "definitions": definitions(results, adapters, entries),
        "disagreements": [disagreement(one, printed) for one in entries],
        "further": [
            {"family": one.family, "reason": one.reason, "program": one.program, "printed": printed[one.program]}
            for one in further
        ],
        "unsupported": unsupported(results),
    }


def page(held: Record) -> str:
    """The whole page."""
    head, large = held["head"], {name: f"{n:,}" for n, name in held["facts"]}
    machine = {"profile": head["profile"], "": head["device"], "python": head["python"], **head["versions"]}
    return render(TEMPLATE, **held | {"facts": large}, machine=machine, gpu_only=GPU_ONLY, visible=VISIBLE)


def facts(
    results: Sequence[CaseResult], adapters: Sequence[Any], entries: Sequence[Disagreement]
) -> list[tuple[int, str]]:
    """Large numbers."""
    differing = {name for one in entries for name in one.adapters}
    libraries = {library(adapter.name) for adapter in adapters}
    return [
        (len(adapters), "functions"), (len(libraries), "libraries"),
        (len(adapters) - len(differing), "agree everywhere"),
        (len(entries), "disagreements"), (sum(r.status == "pass" for r in results), "verdicts agree"),
        (sum(r.status in ("xfail", "fail") for r in results), "differ"),
        (sum(r.status == "unsupported" for r in results), "not served"),
    ]  # fmt: skip


def definitions(
    results: Sequence[CaseResult], adapters: Sequence[Any], entries: Sequence[Disagreement]
) -> list[Record]:
    """Each definition with the functions that compute it, their verdicts, and numbers."""
    held = []
    for op in OPDB:
        functions = []
        for adapter in adapters:
            own = [r for r in results if r.adapter == adapter.name and r.op.removesuffix(WEIGHTS) == op.name]
            if any(result.status != "unsupported" for result in own):
                said = {"name": adapter.name, "description": adapter.description}
                functions.append(said | verdict(own, entries))
        if functions:
            held.append({"op": op.name, "formula": op.formula, "functions": functions})
    return held


def verdict(own: Sequence[CaseResult], entries: Sequence[Disagreement]) -> Record:
    """Of one function and one definition: its disagreements by number, and counts."""
    counts = Counter(result.status for result in own)
    differing = [result for result in own if result.status in ("xfail", "fail")]
    pairs = {(result.adapter, result.op) for result in own}
    return {
        "disagreements": [
            n for n, one in enumerate(entries, 1) if any((each.adapter, each.op) in pairs for each in one.results)
        ],
        "agree": counts["pass"],
        "worst": max((result.ratio for result in own if result.status == "pass"), default=0.0),
        "differ": len(differing),
        "by": most(differing) if differing else "",
        "not_served": counts["unsupported"],
    }


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


def disagreement(one: Disagreement, printed: Mapping[str, str]) -> Record:
    """The sentence, the functions and their errors, and the programs."""
    who = []
    for adapter in one.adapters:
        for op in one.ops:
            own = [result for result in one.results if (result.adapter, result.op) == (adapter, op)]
            if own:
                dtypes = ", ".join(dict.fromkeys(result.dtype for result in own))
                who.append((adapter, op, dtypes, len(own), most(own)))
    return {"reason": one.reason, "who": who, "programs": [program(example, printed) for example in one.examples]}


def program(example: Example, printed: Mapping[str, str]) -> Record:
    """A snippet and its output here, or the size of the smallest input if it is too long."""
    if example.program not in printed:
        return {"adapter": example.adapter, "size": size(example.case)}
    tolerance = float(f"{tolerance_of(example):.3g}")
    said = {"program": example.program, "printed": printed[example.program], "tolerance": tolerance}
    return {"adapter": example.adapter} | said


def tolerance_of(example: Example) -> float:
    """Half the error that was found; a snippet that reproduces exceeds it. Of a few roundings, which another build of a
    library makes otherwise, any difference tells."""
    truth, sight, unit = golden(example.case), example.sight, np.finfo(compute_dtype(example.case.dtype)).eps
    if not sight.output or not math.isfinite(sight.relative) or sight.relative < ROUNDINGS * unit:
        return 0.0
    limit = truth.outputs[sight.output] if sight.output in truth.outputs else truth.gradients[sight.output[1:]]
    return sight.relative * limit.largest / 2


def failures(held: Record) -> list[tuple[str, str]]:
    """Who has a program that does not run, and what it says."""
    programs = [(one["adapter"], one) for each in held["disagreements"] for one in each["programs"]]
    programs += [(one["family"], one) for one in held["further"]]
    said = [(name, one["printed"].splitlines()) for name, one in programs if "printed" in one]
    return [(name, line) for name, lines in said for line in lines if line.startswith(STOPPED)]


def run(programs: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> dict[str, str]:
    """The output of programs, in one process per environment; it says so of one that does not run, for it must not take
    the verdicts with it. RuntimeError if the process ends early.
    """
    printed: dict[str, str] = {}
    for environment in dict.fromkeys(environment for _, environment in programs):
        own = [text for text, where in programs if where == environment]
        command = [sys.executable, "-W", "ignore", "-c", RUN]
        done = subprocess.run(command, input=json.dumps(own), capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(f"the process of the programs ended:\n{done.stderr}")
        printed |= zip(own, json.loads(done.stdout.splitlines()[-1]), strict=True)
    return printed


def unsupported(results: Sequence[CaseResult]) -> list[tuple[str, list[tuple[str, int]]]]:
    """What each function does not support, with the number of verdicts."""
    held = []
    for adapter in dict.fromkeys(result.adapter for result in results):
        counts = Counter(r.reason for r in results if r.adapter == adapter and r.status == "unsupported")
        if counts:
            held.append((adapter, counts.most_common()))
    return held
