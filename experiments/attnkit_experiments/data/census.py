"""How many files a reader saw, used and passed over, by reason; too many that may be data are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from attnkit_experiments.data.unpacking import printable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.progress import many
from attnkit_experiments.engine.terms import REFUSABLE, Counted, PassedOver, Terms

COUNTED = {
    "hidden": "names that begin with a dot, and __MACOSX",
    "other": "suffixes that are none of data",
    "labels": "the labels of samples",
    "second": "further images of a sample",
    "unlabelled": "reviews without a label",
    "settings": "not asked for by the settings",
}
"""Reasons that are counted and never refused."""
SHARE = 0.01  # of the files that may be data


@dataclass
class Census:
    """Files used, and passed over by reason; `first` is the first name of each reason."""

    used: int = 0
    passed: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def pass_over(self, reason: str, name: str, count: int = 1) -> None:
        if count:
            self.passed[reason] = self.passed.get(reason, 0) + count
            self.first[reason] = min(self.first.get(reason, name), name)

    def leave_out(self, reasons: Iterable[tuple[str, str]]) -> None:
        """Files (reason, name) that were counted as used, and are not."""
        for reason, name in reasons:
            self.used -= 1
            self.pass_over(reason, name)

    def keep(self, count: int) -> None:
        """Use no more than `count` of the used files: the settings ask for no more."""
        self.pass_over("settings", "", self.used - count)
        self.used = count

    @property
    def seen(self) -> int:
        return self.used + sum(self.passed.values())

    def record(self) -> Counted:
        """For study.json."""
        passed: dict[str, PassedOver] = {
            reason: {"files": self.passed[reason], "first": printable(self.first[reason]) if self.first[reason] else ""}
            for reason in sorted(self.passed)
        }
        return {"seen": self.seen, "used": self.used, "passed over": passed}

    @classmethod
    def of(cls, record: Counted) -> Census:
        """The census that `record` says; ValueError if its numbers do not add up."""
        passed = record["passed over"]
        counts = {reason: each["files"] for reason, each in passed.items()}
        census = cls(record["used"], counts, {reason: each["first"] for reason, each in passed.items()})
        if census.seen != record["seen"]:
            raise ValueError(f"census.seen must be {census.seen}, the sum of the rest, got {record['seen']}")
        return census

    def text(self) -> str:
        """ "40 files seen, 36 used; passed over: 3 hidden, 1 depth"."""
        said = f"{many(self.seen, 'file')} seen, {self.used:,} used"
        counts = [f"{count:,} {reason}" for reason, count in sorted(self.passed.items())]
        return said + (f"; passed over: {', '.join(counts)}" if counts else "")

    def require(self, place: str, terms: Terms) -> None:
        """UserError if more than one file and more than 1 % were passed over for a reason that is not allowed."""
        for reason, why in REFUSABLE.items():
            count = self.passed.get(reason, 0)
            candidates = self.used + self.passed.get("settings", 0) + count
            if count > 1 and count > SHARE * candidates and reason not in terms.dropped:
                raise UserError(
                    f"--data {place}: {count:,} of {candidates:,} files that may be data would be passed over, as "
                    f"{why} (the first: {printable(self.first[reason])}); --allow-dropped {reason} goes on without them"
                )


def require_classes(place: str, classes: Iterable[str], terms: Terms) -> None:
    """UserError for a single class, with which every answer is right."""
    names = list(classes)
    if len(names) == 1 and not terms.one_class:
        raise UserError(
            f"--data {place}: all files are of one class, {printable(names[0])}, and every answer would be right; "
            "--allow-one-class goes on"
        )
