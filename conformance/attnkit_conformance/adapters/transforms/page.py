"""The table of transformations in the documentation, and its cells read back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from attnkit_conformance.adapters.transforms import EITHER, ELSEWHERE, LIBRARIES, REFUSED, RIGHT, Row, Verdict, runner
from attnkit_conformance.report.table import split

BEGIN, END = "<!-- transforms: begin -->", "<!-- transforms: end -->"
MARKS = {RIGHT: "✓", REFUSED: "refused", EITHER: "✓ or refused", ELSEWHERE: "GPU"}
WORDS = {mark: word for word, mark in MARKS.items()}


def markdown(verdicts: Iterable[Verdict]) -> str:
    """A table per library between the markers: a row for an implementation of an op, a column for a transformation."""
    by_row = {row: list(several) for row, several in groupby(verdicts, key=lambda verdict: verdict.row)}
    lines = [BEGIN]
    for library in LIBRARIES:
        columns = ["op", "implementation", *runner(library)[1]]
        lines += ["", f"### {library}", "", line(columns), line(["---"] * len(columns))]
        for row, several in by_row.items():
            if row.library == library:
                lines.append(line([f"`{row.op}`", row.label, *(MARKS[verdict.word] for verdict in several)]))
    return "\n".join([*lines, "", END])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells(path: Path) -> dict[tuple[str, str, str, str], str]:
    """{(library, op, implementation, transformation): word} of the tables in a file."""
    found, library, columns = {}, "", []
    for text in split(path, BEGIN, END)[1].splitlines():
        fields = [field.strip() for field in text.strip("|").split("|")]
        if text.startswith("### "):
            library = text.removeprefix("### ")
        elif fields[0] == "op":
            columns = fields[2:]
        elif fields[0].startswith("`"):
            op, impl, *marks = fields
            for column, mark in zip(columns, marks, strict=True):
                found[library, op.strip("`"), impl, column] = WORDS[mark]
    return found


def key(row: Row, transform: str) -> tuple[str, str, str, str]:
    """Where a verdict stands in `cells`."""
    return row.library, row.op, row.label, transform


def write(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Replace the tables in a file."""
    before, _, after = split(path, BEGIN, END)
    path.write_text(before + markdown(verdicts) + after)
