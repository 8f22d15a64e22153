"""The words of the project: the vocabulary of CONTRIBUTING.md, what it forbids, and names of functions.

    python -m tests.repository.words [room ...]     counts by room; of the rooms named, each place

A name of a function is a verb or a noun of the field. A bare participle (`served`, `pulled`) says that something was
done and neither what nor to what; `unsupported` and the like are adjectives of the field and listed in `ADJECTIVES`.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.repository.trees import statements

ROOT = Path(__file__).parents[2]
ROOMS = (
    *(f"attnkit/{name}" for name in ("_core", "analysis", "backends", "integrations", "kernels", "nn", "ops")),
    *("reference", "conformance", "experiments", "benchmarks", "docs"),
)
ADJECTIVES = frozenset(("unsupported", "signed", "unsigned"))
IRREGULAR = re.compile(
    "asked|built|chosen|drawn|forgotten|given|held|hidden|kept|known|laid|led|lost|made|meant|met|paid|said|seen|sent|shown|"
    "spent|sung|sunk|taken|taught|thought|thrown|told|torn|worn|written"
)
NOUNS = frozenset(("seed", "speed", "need", "feed", "embed"))


class Place(NamedTuple):
    """Where a word stands that has a better one."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def is_bare_participle(name: str) -> bool:
    """Whether a function's name is one participle: `_taken`, not `taken_from` and not `unsupported`."""
    word = name.strip("_")
    if "_" in word or word in NOUNS or word in ADJECTIVES:
        return False
    return bool(IRREGULAR.fullmatch(word) or re.fullmatch(r"[a-z]+ed", word))


@cache
def forbidden() -> dict[str, str]:
    """{phrase: what to write instead}, from the table of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| not \"([^\"]+)\" \| (.+?) \|$", text, flags=re.MULTILINE))


def sources(room: str) -> Iterator[Path]:
    """The files of a room that people write: Python, and the pages of docs that no program makes."""
    yield from sorted((ROOT / room).rglob("*.py"))
    if room == "docs":
        yield from sorted((ROOT / room).glob("*.md"))


def participles(room: str) -> list[Place]:
    """Functions named by a bare participle; properties are adjectives of their object, and may be."""
    found = []
    for path in sources(room):
        if path.suffix != ".py":
            continue
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_bare_participle(node.name):
                decorators = {getattr(x, "id", getattr(x, "attr", "")) for x in node.decorator_list}
                if not decorators & {"property", "cached_property"}:
                    found.append(Place(str(path.relative_to(ROOT)), node.lineno, node.name))
    return found


def phrases(room: str) -> list[Place]:
    """Where a forbidden phrase stands, on one line."""
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, forbidden()))})\b", flags=re.IGNORECASE)
    return [
        Place(str(path.relative_to(ROOT)), number, f'"{match}": {forbidden()[match.lower()]}')
        for path in sources(room)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.findall(line)
    ]


def main(rooms: list[str]) -> None:
    for room in ROOMS:
        print(f"{room:22}{len(participles(room)):5} bare participles{len(phrases(room)):5} forbidden words")
    for room in rooms:
        print("\n".join(map(str, (*participles(room), *phrases(room)))))


if __name__ == "__main__":
    main(sys.argv[1:])
