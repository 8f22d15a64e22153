"""Where an op is named by a string: its own record and row, recipes, benchmark cells, adapters of peers; nowhere else.

    python -m tests.repository.op_names     counts per file, and what is out of place

A name is that of a public op, or of its `_vjp`, `_weights`, `_step` or `_packed`. Docstrings and `__all__` do not
count; a name put together from pieces, and a test for how a name begins, do.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attnkit_conformance.families import FAMILIES, statistics
from attnkit_conformance.families.analysis import row as analysis
from attnkit_conformance.opdb import ATTENTION, OPDB

ROOT = Path(__file__).parents[2]
ROOTS = ("attnkit", "reference", "conformance", "experiments", "benchmarks")
NAMES = frozenset(f"{op.name}{ending}" for op in OPDB for ending in ("", "_vjp"))
ENDING = "_attention"
STEMS = frozenset(op.name.removesuffix(ENDING) for op in OPDB if op.name.endswith(ENDING))
ASKED = ("startswith", "removeprefix", "endswith", "removesuffix")
# Patterns of files, and why ops are named there. Records and rows name their own alone.
OWN = {
    "attnkit/ops/*": "the record of the op",
    "reference/attnkit_reference/*": "its definition",
    "conformance/attnkit_conformance/families/*": "its row",
}
ANY = {
    "attnkit/_core/typing.py": "what type checkers know",
    "conformance/attnkit_conformance/peers/*": "an adapter says which ops a peer has",
    "experiments/attnkit_experiments/recipes/*": "recipes say what they compare",
    "experiments/attnkit_experiments/*/methods.py": "what the recipes of a domain compare",
    "benchmarks/cells.py": "what is timed",
}
INSTEAD = {
    "attnkit": "its record (SOFTMAX.name), its function, or what attnkit/_core/family.py answers",
    "reference": "its function",
    "conformance": "a fact of its row (model/op.py), or in adapters its function or record",
    "experiments": "its function, or methods.py of the domain",
    "benchmarks": "its function, attnkit._core.family.RECORDS, or benchmarks/cells.py",
}


# What says a name, and the statements whose constants do not count.
NAMING = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Call, ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)


class Named(NamedTuple):
    """An op named by a string."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        instead = INSTEAD[self.path.partition("/")[0]]
        return f'{self.path}:{self.line}: "{self.name}" names an op by a string; use {instead}'


# ---------------------------------------------------------------------------------------------- what a file names


def passed_over(nodes: Iterable[ast.AST]) -> set[int]:
    """Constants that are docstrings or stand in `__all__`, by id."""
    found: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            found |= {id(part) for part in ast.walk(node)}
    return found


def text_of(node: ast.AST) -> str | None:
    """A string in quotes, or one put together with `{}` for what is known when it runs; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else f"{left or '{}'}{right or '{}'}"
    return None


def put_together(text: str) -> bool:
    """Whether a text with `{}` can be nothing but an op's name: softmax{}, {}_softmax_attention."""
    if "{}" not in text or not re.fullmatch(r"[\w.{}]+", text):
        return False
    pieces = {piece.strip("_") for piece in text.split("{}")} - {""}
    return any(piece in NAMES or piece in STEMS for piece in pieces)


def named_in(source: str, path: str) -> Iterator[Named]:
    """Every op that a source names."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, NAMING)]
    left_out = passed_over(nodes)
    for node in nodes:
        if id(node) in left_out:
            continue
        text = text_of(node)
        if text is not None and (text in NAMES or put_together(text)):
            yield Named(path, node.lineno, text)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKED:
            parts = (part for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Constant))
            stems = [part.value for part in parts if str(part.value).strip("_") in STEMS]
            yield from (Named(path, node.lineno, stem) for stem in stems)


# ---------------------------------------------------------------------------------------------- what is out of place


@cache
def rows() -> dict[str, set[str]]:
    """The ops whose rows a file of the kit has."""
    made = {module: module.OPS for module in (*FAMILIES, analysis)}
    made[statistics] = (*statistics.OPS, *statistics.rows(ATTENTION))
    path = {module: f"conformance/{module.__name__.replace('.', '/')}.py" for module in made}
    return {path[module]: {op.name for op in ops} for module, ops in made.items()}


@cache
def defined(source: str) -> set[str]:
    """Functions that a module makes."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        for target in [*getattr(node, "targets", []), getattr(node, "target", None)]:
            names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)} if target else set()
    return names


def is_own(found: Named, source: str) -> bool:
    """Whether a record or a row names its own op."""
    own = defined(source) | rows().get(found.path, set())
    return any(found.name in (name, f"{name}_vjp") or found.name.startswith(f"{name}{{}}") for name in own)


def in_place(found: Named, source: str) -> bool:
    """Whether an op may be named where it is."""
    if any(fnmatch(found.path, pattern) for pattern in ANY):
        return True
    return any(fnmatch(found.path, pattern) for pattern in OWN) and is_own(found, source)


@cache
def everything() -> tuple[tuple[Named, bool], ...]:
    """Each op that is named by a string, and whether it is in place."""
    files = [path for root in ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    return tuple(
        (found, in_place(found, source)) for path, source in sources.items() for found in named_in(source, path)
    )


def main() -> None:
    found = everything()
    for title, wanted in (("in place", True), ("out of place", False)):
        counts = Counter(one.path for one, good in found if good is wanted)
        print(f"{title}: {counts.total()}", *(f"{count:5} {path}" for path, count in counts.items()), sep="\n")
    print(*(one for one, good in found if not good), sep="\n")


if __name__ == "__main__":
    main()
