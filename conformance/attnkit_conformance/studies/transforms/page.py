"""The table of transformations in the documentation, and its cells read back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from attnkit_conformance.report.table import split_page
from attnkit_conformance.studies.transforms import (
    EITHER,
    ELSEWHERE,
    LIBRARIES,
    REFUSED,
    RIGHT,
    Row,
    Verdict,
    rows,
    runner,
)

BEGIN, END = "<!-- transforms: begin -->", "<!-- transforms: end -->"
MARKS = {RIGHT: "right", REFUSED: "refused", EITHER: "right or refused", ELSEWHERE: "needs a GPU"}
WORDS = {mark: word for word, mark in MARKS.items()}


def markdown(verdicts: Iterable[Verdict]) -> str:
    """A table per library between the markers: a row for the ops of an implementation with the same results under every
    transformation, a column for each verdict."""
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for row, several in groupby(verdicts, key=lambda verdict: verdict.row):
        marks = tuple(MARKS[verdict.word] for verdict in several)
        alike.setdefault((row.library, row.label, marks), []).append(f"`{row.op}`")
    lines = [BEGIN]
    for library in LIBRARIES:
        transforms = runner(library)[1]
        lines += ["", f"### {library}", "", line(["implementation", *WORDS, "ops"]), line(["---"] * (len(WORDS) + 2))]
        for (place, label, marks), ops in sorted(alike.items(), key=lambda item: item[0][1]):
            if place == library:
                names = [[name for name, mark in zip(transforms, marks, strict=True) if mark == word] for word in WORDS]
                columns = ("all" if len(some) == len(marks) else ", ".join(some) or "–" for some in names)
                lines.append(line([label, *columns, " ".join(ops)]))
    return "\n".join([*lines, "", END])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells(path: Path) -> dict[tuple[str, str, str, str], str]:
    """{(library, op, implementation, transformation): word} of the tables in a file."""
    words: dict[tuple[str, str, str, str], str] = {}
    library = ""
    for text in split_page(path, BEGIN, END)[1].splitlines():
        if text.startswith("### "):
            library = text.removeprefix("### ")
        fields = [field.strip() for field in text.strip("|").split("|")]
        if not text.startswith("|") or fields[0] in ("implementation", "---"):
            continue
        label, *columns, ops = fields
        for word, names in zip(WORDS.values(), columns, strict=True):
            transforms = runner(library)[1] if names == "all" else [name for name in names.split(", ") if name != "–"]
            words |= {(library, op.strip("`"), label, name): word for op in ops.split() for name in transforms}
    return words


def key(row: Row, transform: str) -> tuple[str, str, str, str]:
    """The key of a verdict in `cells`."""
    return row.library, row.op, row.label, transform


def write(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Replace the tables in a file. Rows of which there are no verdicts keep what the file says."""
    words = cells(path) | {key(verdict.row, verdict.transform): verdict.word for verdict in verdicts}
    every = [
        Verdict(row, transform, words[key(row, transform)])
        for library in LIBRARIES
        for row in rows(library)
        for transform in runner(library)[1]
        if key(row, transform) in words
    ]
    before, _, after = split_page(path, BEGIN, END)
    path.write_text(before + markdown(every) + after)
