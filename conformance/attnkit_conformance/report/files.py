"""Reports for machines and people: JSON, JUnit XML, and one self-contained HTML page."""

from __future__ import annotations

import functools
import json
import math
import platform
import re
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnkit_conformance.adapter import Adapter, cut
from attnkit_conformance.adapters.families import device as machine_device
from attnkit_conformance.adapters.surroundings import library_of as library_of_arrays
from attnkit_conformance.adapters.surroundings import surroundings_of
from attnkit_conformance.core import STATUSES, CaseResult
from attnkit_conformance.judge.declared import share_of_profile
from attnkit_conformance.judge.surroundings import extent
from attnkit_conformance.judge.verdicts import (
    counts,
    describe_failure,
    grade_counts,
    percent,
    share,
    shares,
    told_by_grade,
    too_few,
    worst,
)
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import axes
from attnkit_conformance.report.pages import Markup, render, section, table

FORMAT = "attnkit_conformance/1"  # of --json; raised when older readers cannot read it
SEMANTICS = 1  # of docs/semantics.md; raised when the result of a valid call changes
LIBRARIES = ("attnkit", "numpy", "torch", "jax", "cupy", "array_api_strict")
TEMPLATE = Path(__file__).parent / "report.html"
ROOM = 300_000  # characters of texts of adapters on a page
BRIEF = 100  # of each text behind that
Header = dict[str, Any]


def header(adapters: Iterable[Adapter], profile: str, seed: int | None = None) -> Header:
    """Versions, machine, and the extent of the run; the seed of one that draws."""
    return {
        "format": FORMAT,
        "semantics": SEMANTICS,
        "seed": seed,
        "profile": profile,
        "versions": {name: version(name) for name in LIBRARIES if find_spec(name)},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": machine_device(),
        "adapters": {a.name: about(a, profile) for a in adapters},
        "surroundings": texts(adapters),
    }


def about(adapter: Adapter, profile: str) -> dict[str, Any]:
    """An adapter as plain data; what it declines is None if it does not say. `declared` is the part of a profile that
    lies within what it declares, of the ops of which it declares something; `shares` are of what was asked.
    """
    declines = getattr(adapter, "declines", None)
    return {
        "dtypes": list(adapter.dtypes),
        "description": describe(adapter),
        "declines": None if declines is None else list(declines),
        "declared": finite(share_of_profile(adapter, profile)),
    }


def texts(adapters: Iterable[Adapter]) -> dict[str, str]:
    """What people do in each surrounding in which adapters are judged, by library."""
    by_name: dict[str, list[str]] = {}
    libraries = dict.fromkeys(library_of_arrays(adapter) for adapter in adapters if extent(adapter))
    for library in libraries:
        for name, surrounding in surroundings_of(library).items():
            by_name.setdefault(name, []).append(f"{library}: {surrounding.text}")
    return {name: "; ".join(several) for name, several in by_name.items()}


def describe(adapter: Adapter) -> str:
    return str(getattr(adapter, "description", ""))


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Names of distributions by the packages that they install; half a second to find out."""
    return metadata.packages_distributions()


def version(library: str) -> str:
    """Version of the installed distribution that provides `library`, or that of a checkout which is not installed."""
    try:
        return metadata.version(library)  # most are called as what they install
    except metadata.PackageNotFoundError:
        providers = distributions().get(library)
    return metadata.version(providers[0]) if providers else str(getattr(sys.modules.get(library), "__version__", "?"))


def finite(x: float | None) -> float | None:
    """Numbers for JSON: four digits, None for infinity and NaN."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.4g}")


def record(result: CaseResult) -> dict[str, object]:
    """One verdict as plain data."""
    return {
        "id": result.id,
        "adapter": result.adapter,
        "op": result.op,
        "dtype": result.dtype,
        "status": result.status,
        "grade": result.grade,
        "policy": result.policy,
        "ratio": finite(result.ratio),
        "errors": [
            {
                "output": m.output, "dtype": m.dtype, "max": finite(m.ratio), "rms": finite(m.rms),
                "relative": finite(m.relative),
            }
            for m in result.measured
        ],
        "failures": [{"check": check, "message": text, "grade": grade} for check, text, grade in result.graded],
        "program": result.program,
        "reason": result.reason,
        "seconds": finite(result.seconds),
    }  # fmt: skip


def as_json(results: list[CaseResult], head: Header) -> str:
    """Everything, one record per verdict."""
    totals = {status: sum(result.status == status for result in results) for status in STATUSES}
    met = {name: finite(part) for name, part in shares(results).items()}
    extent = {"totals": totals, "grades": grade_counts(results), "shares": met}
    return json.dumps({**head, **extent, "results": [record(r) for r in results]}, indent=1) + "\n"


def as_junit(results: list[CaseResult], head: Header) -> str:
    """One suite per adapter; unsupported and expected failures are skipped with their reason."""
    root = xml.Element("testsuites", name="attnkit_conformance")
    for adapter in dict.fromkeys(result.adapter for result in results):
        own = [result for result in results if result.adapter == adapter]
        skipped = sum(result.status in ("unsupported", "xfail") for result in own)
        failed = sum(result.status == "fail" for result in own)
        counts = {"tests": str(len(own)), "failures": str(failed), "skipped": str(skipped), "errors": "0"}
        suite = xml.SubElement(root, "testsuite", {"name": adapter, **counts})
        properties = xml.SubElement(suite, "properties")
        xml.SubElement(properties, "property", {"name": "share", "value": f"{share(own):.4f}"})
        part = head.get("adapters", {}).get(adapter, {}).get("declared")
        if part is not None:
            xml.SubElement(properties, "property", {"name": "declared_share_of_profile", "value": f"{part:.4f}"})
        for result in own:
            attributes = {"classname": adapter, "name": result.id, "time": f"{result.seconds:.4f}"}
            case = xml.SubElement(suite, "testcase", attributes)
            if result.status == "fail":
                checks = ", ".join(sorted(result.checks))
                failure = {"type": result.grade, "message": f"{describe_failure(result)} ({checks})"}
                xml.SubElement(case, "failure", failure).text = result.message
            elif result.status != "pass":
                xml.SubElement(case, "skipped", message=f"{result.status}: {result.reason}")
    return xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


class Texts:
    """Texts of adapters on a page: the first ones as they are, the beginnings of others, so that a page stays small."""

    def __init__(self) -> None:
        self.room = ROOM

    def fitting(self, text: str) -> str:
        """A text, or its beginning."""
        shown = text if self.room > 0 else cut(text, BRIEF)
        self.room -= len(shown)
        return shown


def compact(results: list[CaseResult], every: Sequence[axes.Axis]) -> dict[str, Any]:
    """Verdicts as short rows for the page: names are indices into lists."""
    adapters = list(dict.fromkeys(r.adapter for r in results))
    ops = [name for name in BY_NAME if any(r.op == name for r in results)]
    reasons, texts, rows = list(dict.fromkeys(r.reason for r in results)), Texts(), []
    for r in results:
        place = [adapters.index(r.adapter), ops.index(r.op), r.id.partition("/")[2], STATUSES.index(r.status)]
        errors = [[m.output, finite(m.ratio), finite(m.rms), finite(m.relative)] for m in r.measured]
        failures = [[check, texts.fitting(text)] for check, text in r.failures]
        rows.append([*place, reasons.index(r.reason), errors, failures, describe_failure(r) if failures else ""])
    formulas = [BY_NAME[name].formula for name in ops]
    tables = axes.compact(results, every)
    return {
        "adapters": adapters,
        "ops": ops,
        "formulas": formulas,
        "reasons": list(map(texts.fitting, reasons)),
        "rows": rows,
        "axes": tables,
    }


def as_html(results: list[CaseResult], head: Header) -> str:
    """The page: the template filled with the data."""
    every = axes.all_axes(head["surroundings"])
    data = json.dumps({"head": head, **compact(results, every)}, separators=(",", ":"), ensure_ascii=False)
    left = f" {head['left']:,} cases are not judged: the run was stopped." if head.get("left") else ""
    return render(
        TEMPLATE,
        failed=counts(results)["fail"],
        lead=conclusion(results) + left,
        facts=facts(results),
        machine=machine(head),
        errors=table_of_errors(results),
        axes=tables_of_axes(results, every),
        data=Markup(data.replace("</", "<\\/")),
    )


def facts(results: list[CaseResult]) -> dict[str, str]:
    """Large numbers."""
    total = counts(results)
    numbers = {
        "verdicts": len(results), "passed": total["pass"], "failed": total["fail"],
        "unsupported": total["unsupported"], "expected failures": total["xfail"],
        "ops": len({r.op for r in results}), "implementations": len({r.adapter for r in results}),
    }  # fmt: skip
    return {name: f"{n:,}" for name, n in numbers.items()}


def machine(head: Header) -> dict[str, str]:
    """What adapters decline, profile, machine and versions."""
    declines = {name: one["declines"] for name, one in head["adapters"].items() if one["declines"]}
    return {
        **{f"{name} does not promise": ", ".join(several) for name, several in declines.items()},
        "profile": head["profile"],
        "": head["device"],
        f"{head['machine']}, python": head["python"],
        **head["versions"],
    }


def library_of(adapter: str) -> str:
    """The library of an adapter: numpy of numpy-native and numpy_readonly."""
    return re.split("[-_]", adapter)[0]


def conclusion(results: list[CaseResult]) -> str:
    """What a run says, in a sentence."""
    judged = [result for result in results if result.status != "unsupported"]
    ops, failed = len({r.op for r in judged}), [result for result in judged if result.status == "fail"]
    names = ", ".join(dict.fromkeys(library_of(r.adapter) for r in judged)) or "nothing"
    if failed:
        where = ", ".join(dict.fromkeys(r.adapter for r in failed))
        grades = told_by_grade(failed)
        return f"{len(failed):,} of {len(judged):,} verdicts on {ops} ops failed, on {where}: {grades}."
    few = "".join(f" {name} answered {part:.0%} of what it was asked." for name, part in too_few(results).items())
    return f"{ops} ops on {names} agree with the float64 reference: {len(judged):,} verdicts, none failed.{few}"


def table_of_errors(results: list[CaseResult]) -> Markup:
    """The worst error of every op on every library, without a script."""
    libraries = list(dict.fromkeys(library_of(r.adapter) for r in results))
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.op, library_of(result.adapter)), []).append(result)
    ops = dict.fromkeys(result.op for result in results)
    return table(["", *libraries], ([op, *(worst_error(groups.get((op, x), [])) for x in libraries)] for op in ops))


def tables_of_axes(results: list[CaseResult], every: Iterable[axes.Axis]) -> Markup:
    """The tables of axes by library, without a script."""
    libraries: dict[str, list[str]] = {}
    for adapter in dict.fromkeys(r.adapter for r in results):
        libraries.setdefault(library_of(adapter), []).append(adapter)
    leads = ((axis, axes.conclusion(results, axis)) for axis in every)
    parts = (section(axis.title, x, axes.axis_table(results, axis, libraries)) for axis, x in leads if x)
    return Markup("").join(parts)


def worst_error(verdicts: list[CaseResult]) -> str:
    """Of some verdicts on an op, behind the number of its failures."""
    failed = counts(verdicts)["fail"]
    return (f"{failed} failed, " if failed else "") + percent(worst(verdicts))
