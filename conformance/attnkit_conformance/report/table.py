"""The table of ops in the documentation, written from the op database and the kernels that attnkit declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import PUBLIC

BEGIN, END = "<!-- ops: begin -->", "<!-- ops: end -->"
LIBRARIES = ("numpy", "torch", "jax", "cupy")
COLUMNS = ("op", "definition", "own parameters", "kernels")


def row(op: Op, kernels_of: Iterable[Mapping[str, tuple[str, ...]]]) -> list[str]:
    """Cells of one op: formula, arguments, and the kernels of all libraries."""
    names = dict.fromkeys(name for kernels in kernels_of for name in kernels.get(op.name, ()))
    own = ", ".join(f"`{name}`" for name in op.own)
    return [f"`{op.name}`", op.formula, own, ", ".join(names)]


def markdown() -> str:
    """The table between its markers."""
    from attnkit_conformance.adapters.base import kernels  # of attnkit, which a kit for kernels of others does without

    by_library = [kernels(library) for library in LIBRARIES]
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row(op, by_library) for op in PUBLIC)]
    return "\n".join((BEGIN, *("| " + " | ".join(cells) + " |" for cells in lines), END))


def split(path: Path, begin: str = BEGIN, end: str = END) -> tuple[str, str, str]:
    """The text before, between and after two markers in a file; ValueError unless each occurs once."""
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path}: expected one {begin} and one {end}")
    before, _, rest = text.partition(begin)
    inside, _, after = rest.partition(end)
    return before, inside, after


def is_current(path: Path) -> bool:
    """Whether the table in a file is what `markdown` writes."""
    return f"{BEGIN}{split(path)[1].rstrip()}\n{END}" == markdown()


def write(path: Path) -> None:
    """Replace the table in a file."""
    before, _, after = split(path)
    path.write_text(before + markdown() + after)
