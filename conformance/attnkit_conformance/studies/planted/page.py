"""The table of bugs and rules in the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnkit_conformance.core import CaseResult
from attnkit_conformance.report.table import split_page
from attnkit_conformance.studies.planted import BY_NAME, rules

BEGIN, END = "<!-- planted: begin -->", "<!-- planted: end -->"
LIVES = "**lives**"
COLUMNS = ("bug", "what goes wrong", "quick", "full", "five draws", "with its options", "torch's samples")
KIT = ("quick", "full")

Row = dict[str, str]  # cells by column


def rows(names: Sequence[str], profiles: Sequence[str] = KIT) -> list[Row]:
    """The cells of these bugs; of the kit, in these profiles."""
    failed = {profile: rules.by_kit(names, profile) for profile in profiles}
    return [
        {"bug": f"`{name}`", "what goes wrong": BY_NAME[name].text}
        | {profile: of_kit(failed[profile][name]) for profile in profiles}
        | {
            "five draws": word(rules.by_draws(name, with_options=False)),
            "with its options": word(rules.by_draws(name, with_options=True)),
            "torch's samples": word(rules.by_opinfo(name)),
        }
        for name in names
    ]


def of_kit(failed: Sequence[CaseResult]) -> str:
    """How many verdicts fail, and the check that most of them fail."""
    checks = Counter(check for result in failed for check in sorted(result.checks))
    return f"{len(failed)}, {checks.most_common(1)[0][0]}" if failed else LIVES


def word(told: bool) -> str:
    return "dies" if told else LIVES


def markdown(table: Sequence[Row]) -> str:
    """The table between its markers, with how many die in its last row."""
    columns = [column for column in COLUMNS if column in table[0]]
    dead = {column: sum(row[column] != LIVES for row in table) for column in columns[2:]}
    last = ["", "die", *(f"{number} of {len(table)}" for number in dead.values())]
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in table), last]
    return "\n".join((BEGIN, *("| " + " | ".join(cells) + " |" for cells in lines), "", *reasons(table), END))


def reasons(table: Sequence[Row]) -> Iterator[str]:
    """Why bugs live in the kit: what it would take to meet them."""
    for row in table:
        if alive := [profile for profile in KIT if row.get(profile) == LIVES]:
            yield f"- {row['bug']} lives in {' and '.join(alive)}: it takes {BY_NAME[row['bug'].strip('`')].needs}."


def write(path: Path) -> None:
    """Replace the table in a file."""
    before, _, after = split_page(path, BEGIN, END)
    path.write_text(before + markdown(rows(tuple(BY_NAME))) + after)
