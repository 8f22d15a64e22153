"""Axes on which arrays and calls vary beside their values: for each a table of verdicts by level and implementation.

A verdict says in `axes` which levels of an axis its call had. An axis is a row of a table of `Axis`: the page shows its
verdicts where some have another level than the plain one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge.verdicts import counts
from attnkit_conformance.model.layout import DENSE, MAKERS
from attnkit_conformance.report.pages import Markup, table


@dataclass(frozen=True)
class Axis:
    """The title of a table, the subject of its conclusion, a hint, its levels with what they are, and the plain one."""

    name: str
    title: str
    subject: str
    hint: str
    levels: Mapping[str, str]
    plain: str


def all_axes(surroundings: Mapping[str, str]) -> tuple[Axis, ...]:
    """The axes of a page; `surroundings` are those of its adapters, with what they are."""
    layouts = {name: (maker.__doc__ or "").partition("\n")[0] for name, maker in MAKERS.items()}
    return (
        Axis(
            "layout",
            "Memory layouts",
            "on arrays and cotangents that are not dense",
            "Cases by the layouts of their arrays, which hold the same values in each. A library that has no arrays of "
            "a layout is given dense ones, and has no verdict there.",
            layouts,
            DENSE,
        ),
        Axis(
            "surrounding",
            "Surroundings",
            "on calls in surroundings",
            "Calls as people make them, with their gradients, by the same bounds: under a mode of the library, inside "
            "its control flow, beside other threads and tasks. A call is right, or refused with a reason.",
            surroundings,
            "",
        ),
    )


def with_level(results: Iterable[CaseResult], axis: Axis, level: str) -> list[CaseResult]:
    """The verdicts on calls of a level; those that do not name the axis are of no level."""
    return [result for result in results if level in result.axes.get(axis.name, ())]


def apart(results: Iterable[CaseResult], axis: Axis) -> list[CaseResult]:
    """The verdicts on calls that are not plain on an axis."""
    return [result for result in results if set(result.axes.get(axis.name, ())) - {axis.plain}]


def conclusion(results: Sequence[CaseResult], axis: Axis) -> str:
    """What the verdicts on calls that are not plain say, in a sentence; "" without any."""
    special = apart(results, axis)
    if not special:
        return ""
    total = counts(special)
    failed = dict.fromkeys(level for r in special if r.status == "fail" for level in r.axes[axis.name])
    refused = f"; {total['unsupported']:,} calls were refused by name" if total["unsupported"] else ""
    judged = len(special) - total["unsupported"]
    if failed:
        where = ", ".join(name.replace("_", " ") for name in failed)
        return f"{total['fail']:,} of {judged:,} verdicts {axis.subject} failed ({where}){refused}."
    return f"{judged:,} verdicts {axis.subject}, none failed{refused}."


def axis_table(results: Sequence[CaseResult], axis: Axis, columns: Mapping[str, Sequence[str]]) -> Markup:
    """Passed, failed and refused calls of each level that was met, without a script; columns are names of adapters."""
    rows = []
    for level, text in axis.levels.items():
        if verdicts := with_level(results, axis, level):
            head = Markup("{}<small>{}</small>").format(level.replace("_", " "), text)
            rows.append([head, *(cell(r for r in verdicts if r.adapter in adapters) for adapters in columns.values())])
    return table(["", *columns], rows)


def cell(verdicts: Iterable[CaseResult]) -> str:
    """The counts of verdicts, – for none."""
    total = counts(verdicts)
    marks = {"pass": "✓", "fail": "✗", "xfail": "xfail", "unsupported": "⊘"}
    return " ".join(f"{mark} {total[status]:,}" for status, mark in marks.items() if total[status]) or "–"


def compact(results: Sequence[CaseResult], every: Iterable[Axis]) -> list[dict[str, object]]:
    """The axes of the page that some verdict is on, each with the indices of its verdicts by level."""
    found: list[dict[str, object]] = []
    for axis in every:
        lead = conclusion(results, axis)
        levels = [
            [level.replace("_", " "), text, [n for n, r in enumerate(results) if level in r.axes.get(axis.name, ())]]
            for level, text in axis.levels.items()
        ]
        if lead:
            found.append({"title": axis.title, "lead": lead, "hint": axis.hint, "levels": [x for x in levels if x[2]]})
    return found
