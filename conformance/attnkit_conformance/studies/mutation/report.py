"""What became of mutants: lines for the terminal, JSON, and the page of the documentation.

`survivors.txt` says of each mutant that survived what it is: `<area> <mutant> | equivalent | <why>`; `elsewhere` in
place of `equivalent` for one that a test outside the area sees, which is named; `open` for one that a case or a test
ought to see.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from attnkit_conformance.studies.mutation.areas import AREAS
from attnkit_conformance.studies.mutation.copies import Copies
from attnkit_conformance.studies.mutation.trials import Trials, Verdict

SURVIVORS = Path(__file__).with_name("survivors.txt")
KINDS = ("equivalent", "elsewhere", "open")


class Outcome(NamedTuple):
    """The mutants of an area that were judged, out of how many, and how many more are in lines that nothing runs."""

    area: str
    seed: int
    verdicts: tuple[Verdict, ...]
    mutants: int
    unexecuted: int

    @classmethod
    def of(cls, area: str, seed: int, verdicts: Iterable[Verdict], trials: Trials | Copies) -> Outcome:
        return cls(area, seed, tuple(verdicts), len(trials.of_mutant), trials.unexecuted)

    @property
    def survivors(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.by is None]


def line(verdict: Verdict) -> str:
    """A verdict for the terminal."""
    fate = "survives" if verdict.by is None else "dies"
    return f"{fate:9}{verdict.seconds:6.1f} s  {verdict.mutant}" + (f"  by {verdict.by}" if verdict.by else "")


def summary(outcome: Outcome) -> str:
    """An area in one line."""
    judged, died = len(outcome.verdicts), len(outcome.verdicts) - len(outcome.survivors)
    share = f"{died / judged:.0%}" if judged else "–"
    drawn = f"drawn by seed {outcome.seed} from {outcome.mutants}"
    unexecuted = f"; {outcome.unexecuted} more are in lines that nothing here runs" if outcome.unexecuted else ""
    return f"{outcome.area}: {died} of {judged} mutants die ({share}), {drawn}{unexecuted}"


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Everything, to be read again."""
    return json.dumps([_record(outcome) for outcome in outcomes], indent=1, ensure_ascii=False) + "\n"


def _record(outcome: Outcome) -> dict[str, object]:
    def verdict(v: Verdict) -> dict[str, object]:
        return {"mutant": v.mutant.identity, "line": v.mutant.line, "by": v.by, "seconds": round(v.seconds, 2)}

    return {**outcome._asdict(), "verdicts": [verdict(v) for v in outcome.verdicts]}


def known_survivors(path: Path = SURVIVORS) -> dict[tuple[str, str], tuple[str, str]]:
    """{(area, mutant): (kind, reason)}; ValueError for a line that says less."""
    known = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip() or text.startswith("#"):
            continue
        mutant, *rest = (part.strip() for part in text.rsplit(" | ", 2))
        area, _, mutant = mutant.partition(" ")
        if len(rest) != 2 or rest[0] not in KINDS or not rest[1] or area not in AREAS:
            raise ValueError(f"{path.name}:{number}: expected 'area mutant | {' or '.join(KINDS)} | why', got {text!r}")
        known[area, mutant] = rest[0], rest[1]
    return known
