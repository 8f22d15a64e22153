"""The table of surroundings in the documentation."""

from __future__ import annotations

from pathlib import Path

from attnkit_conformance.adapters.surroundings import LIBRARIES, surroundings_of
from attnkit_conformance.report.table import split_page

BEGIN, END = "<!-- surroundings: begin -->", "<!-- surroundings: end -->"


def markdown() -> str:
    """The table between its markers: a row for each surrounding of each library."""
    lines = [BEGIN, "| library | surrounding | what people do |", "|---|---|---|"]
    for library in dict.fromkeys(LIBRARIES.values()):
        lines += [f"| {library} | `{name}` | {one.text} |" for name, one in surroundings_of(library).items()]
    return "\n".join([*lines, END])


def is_current(path: Path) -> bool:
    """Whether the table in a file is what `markdown` writes."""
    return f"{BEGIN}{split_page(path, BEGIN, END)[1].rstrip()}\n{END}" == markdown()


def write(path: Path) -> None:
    """Replace the table in a file."""
    before, _, after = split_page(path, BEGIN, END)
    path.write_text(before + markdown() + after)
