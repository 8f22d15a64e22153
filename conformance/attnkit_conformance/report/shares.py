"""What implementations serve, and what of that is right, counted from saved verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnkit_conformance.judge.verdicts import ENOUGH
from attnkit_conformance.model import grades
from attnkit_conformance.scenes.rows import PROBE

MILD = (grades.TAIL, grades.POLICY)
"""Grades of failures in which the definition and the implementation agree but in tails or special values."""


@dataclass(frozen=True)
class Count:
    """Verdicts: right, wrong (all failures, expected ones too), of these in tails or by a policy alone, and refused;
    and those, right or wrong, on what was found to be served beside a profile.
    """

    right: int = 0
    wrong: int = 0
    mild: int = 0
    refused: int = 0
    beside: int = 0

    @property
    def judged(self) -> int:
        """Verdicts on calls that were served."""
        return self.right + self.wrong

    @property
    def share(self) -> float:
        """The part of the verdicts of a profile that is on calls that were served."""
        met = self.judged - self.beside
        return met / max(met + self.refused, 1)

    @property
    def enough(self) -> bool:
        """Whether so much is served that one may speak of a pass."""
        return self.share >= ENOUGH

    @property
    def severe(self) -> int:
        """Failures that are more than tails and policies."""
        return self.wrong - self.mild


def count(results: Iterable[Mapping[str, Any]]) -> Count:
    """The count of some saved verdicts."""
    right = wrong = mild = refused = beside = 0
    for result in results:
        beside += f"/{PROBE}" in result["id"] and result["status"] != "unsupported"
        right += result["status"] == "pass"
        refused += result["status"] == "unsupported"
        if result["status"] in ("fail", "xfail"):
            wrong += 1
            mild += result.get("grade") in MILD
    return Count(right, wrong, mild, refused, beside)


def percent(share: float) -> str:
    """A share as text: 0 % and 100 % are nothing and all."""
    rounded = round(100 * share)
    return f"{min(max(rounded, 1), 99) if 0 < share < 1 else rounded} %"
