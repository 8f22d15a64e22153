"""Changes of C++ and CUDA sources: one operator, number or name of a line at a time. Operators of two operands have
spaces around them there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attnkit_conformance.studies.mutation.operators import Mutant

OPERATORS = {
    **{" + ": " - ", " - ": " + ", " * ": " / ", " / ": " * ", " % ": " / ", " += ": " -= ", " -= ": " += "},
    **{" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "},
    **{" && ": " || ", " || ": " && "},
}
WORDS = {"true": "false", "false": "true", "min": "max", "max": "min", "0": "1", "1": "2", "2": "3", "0.5": "1.0"}
CHANGE = re.compile(
    "|".join(
        (
            *(rf"(?<=\S){re.escape(operator)}(?=\S)" for operator in sorted(OPERATORS, key=len, reverse=True)),
            *(rf"(?<![\w.]){re.escape(word)}(?![\w.])" for word in sorted(WORDS, key=len, reverse=True)),
            r"!(?=\w)",
        )
    )
)
LEFT_ALONE = re.compile(
    r"\s*(//|#|\*|template|using|static_assert|struct|class|extern|namespace|asm)|.*\b(throw|refuse)\b"
)


def mutants(file: Path) -> list[Mutant]:
    """Every change of a file."""
    several, equal = list[Mutant](), Counter[tuple[str, ...]]()
    for line, text in enumerate(file.read_text().splitlines(), 1):
        for _, old, new in changes_of(text):
            key = old.strip(), new.strip() or "nothing", text.strip()
            several.append(Mutant(file, "", line, *key, equal[key], len(several)))
            equal[key] += 1
    return several


def changes_of(line: str) -> Iterator[tuple[int, str, str]]:
    """Where a line may be changed, what stands there and what stands there then."""
    if LEFT_ALONE.match(line):
        return
    code = re.sub(r'"[^"]*"', lambda text: '"' * len(text[0]), line.partition("//")[0])
    for match in CHANGE.finditer(code):
        old = match[0]
        yield match.start(), old, "" if old == "!" else OPERATORS.get(old) or WORDS[old]


def changed(mutant: Mutant) -> str:
    """The text of a file with one change."""
    lines = mutant.file.read_text().splitlines()
    number = 0
    for n, line in enumerate(lines):
        for start, old, new in changes_of(line):
            if number == mutant.number:
                lines[n] = line[:start] + new + line[start + len(old) :]
                return "\n".join(lines) + "\n"
            number += 1
    raise ValueError(f"{mutant.file.name} has no change {mutant.number}")
