"""The tables in the documentation that are written from code and results, so that they cannot drift.

    python docs/facts.py     # writes them anew

A page says where a table belongs: `<!-- facts of softmax_attention -->`, the table, `<!-- end -->`. Tables of ops come
from the op database, the signatures and the kernels declared; an op lives on the page of docs/variants that has its
table, and `all` is the list of ops with links to them. What was measured is in `docs.measured`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("reference", "conformance", "experiments")
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in PACKAGES)]  # this checkout, installed or not

import attnkit  # noqa: E402
from attnkit._core.typing import DEFAULTS  # noqa: E402
from attnkit_conformance.adapters.base import kernels  # noqa: E402
from attnkit_conformance.model.op import Op  # noqa: E402
from attnkit_conformance.opdb import BY_NAME, PUBLIC  # noqa: E402
from attnkit_conformance.report import table  # noqa: E402
from docs import costs, drawing, measured  # noqa: E402

DOCS = ROOT / "docs"
FOLDER = DOCS / "variants"
BLOCK = re.compile(r"(<!-- facts of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def homes() -> dict[str, Path]:
    """The page of every op, by its table of facts; ValueError if an op has two."""
    pages: dict[str, Path] = {}
    for page in sorted(FOLDER.glob("*.md")):
        for _, name, _ in BLOCK.findall(page.read_text()):
            if name in pages:
                raise ValueError(f"{name} has a table of facts in {pages[name].name} and another in {page.name}")
            pages[name] = page
    return pages


def link(op: Op, pages: dict[str, Path]) -> str:
    """From docs/variants to an op: to its page, or to the heading of its name on another one's."""
    page = pages[op.name]
    anchor = "" if page.stem == op.name else f"#{op.name.replace('.', '')}"
    return f"[`{op.name}`]({page.name}{anchor})"


def code(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


kernels_of = cache(kernels)
FEW = 4  # ops
LETTERS = {"numpy": "N", "torch": "T", "jax": "J", "cupy": "C"}


def served(library: str, op: Op) -> str:
    """What implements an op on a library."""
    return ", ".join(("generic", *kernels_of(library).get(op.name, ())))


def own_parameters(op: Op) -> str:
    """Those that only this op has, with their defaults."""
    accepted = inspect.signature(attrgetter(op.name)(attnkit)).parameters
    shared = {*DEFAULTS, "impl", *op.arguments}
    own = [p for name, p in accepted.items() if name not in shared and p.kind is not p.VAR_KEYWORD]
    return ", ".join(f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default!r}`" for p in own)


def beside(op: Op) -> list[str]:
    """The functions that belong to an op."""
    names = [f"{op.name}{end}" for end, has in (("_weights", op.weights), ("_vjp", op.vjp)) if has]
    names += [name for name in (f"{op.name}_step", f"{op.name}_packed") if name in BY_NAME]
    return names + (["row_statistics", "attention_with_statistics"] if op.statistics else [])


def facts(op: Op) -> str:
    """The table of one op."""
    accepted = inspect.signature(attrgetter(op.name)(attnkit)).parameters
    rows = {
        "definition": op.formula,
        "arrays": code(op.arguments),
        "own parameters": own_parameters(op),
        "options of all ops": code([name for name in DEFAULTS if name in accepted]),
        "beside it": code(beside(op)),
        "gradients": code(op.differentiable) if op.vjp else "none",
        "implementations": " · ".join(f"{name}: {served(name, op)}" for name in table.LIBRARIES),
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items() if value)]
    return "\n".join(lines) + "\n"


def everything() -> str:
    """The list of ops."""
    pages = homes()
    missing = [op.name for op in PUBLIC if op.name not in pages]
    if missing:
        raise LookupError(f"write `<!-- facts of NAME -->` and `<!-- end -->` on a page of docs/variants: {missing}")
    lines = ["| variant | definition | own parameters | kernels |", "|---|---|---|---|"]
    for op in PUBLIC:
        own = pages[op.name].stem == op.name
        name = f"[{drawing.title(op)}]({op.name}.md)<br>{code([op.name])}" if own else link(op, pages)
        kernels = dict.fromkeys(name for library in table.LIBRARIES for name in kernels_of(library).get(op.name, ()))
        lines.append(f"| {name} | {op.formula} | {code(op.own)} | {', '.join(kernels)} |")
    return "\n".join(lines) + "\n"


def kernels_by_op() -> str:
    """Ops that have a kernel, and the initials of the libraries for which each kernel serves them; kernels of a few ops
    are left to the text.
    """
    pages = {name: f"variants/{page.name}" for name, page in homes().items()}
    served = {library: kernels_of(library) for library in table.LIBRARIES}
    counts = Counter(name for ops in served.values() for names in ops.values() for name in names)
    names = [name for name, count in counts.most_common() if count > FEW]
    lines = [f"| op | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for op in PUBLIC:
        cells = [
            " ".join(LETTERS[library] for library, ops in served.items() if name in ops.get(op.name, ()))
            for name in names
        ]
        if any(cells):
            lines.append(f"| [{op.name}]({pages[op.name]}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "all": everything,
    "kernels": kernels_by_op,
    **measured.TABLES,
    **costs.TABLES,
    **{op.name: partial(facts, op) for op in PUBLIC},
}


def current(text: str) -> str:
    """A page with its tables as they should be."""
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if (now := current(text)) != text:
            page.write_text(now)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
