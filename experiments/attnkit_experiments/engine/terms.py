"""On what terms data are read: how large a file may be, and what may be left out; and the count of what was."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, TypedDict

from attnkit_experiments.engine.errors import UserError, unknown
from attnkit_experiments.engine.schema import In

REFUSABLE = {
    "suffix": "their suffix is one of data, but of a format that is not read",
    "depth": "they are not where the layout has its files: too deep, or not deep enough",
    "split": "their folders name no split",
    "link": "they are links that lead nowhere, or back to a folder above",
    "mode": "their pixels have no range that is known",
    "unreadable": "they cannot be read",
}
"""Reasons to pass over what may be data."""


@dataclass(frozen=True)
class Limits:
    """The largest image in pixels; bytes of an unpacked file or member; bytes of a header that a tar has for one."""

    pixels: int = 178_956_970  # twice the number at which Pillow warns
    size: int = 1 << 30
    header: int = 1 << 20


LIMITS = Limits()


@dataclass(frozen=True)
class Terms:
    """What may be left out of the data: unreadable files, `dropped` for the reasons, all but `one_class`; and how large
    a file may be.
    """

    skip_unreadable: bool = False
    dropped: tuple[str, ...] = ()
    one_class: bool = False
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        for reason in self.dropped:
            if reason not in REFUSABLE:
                raise unknown("--allow-dropped", reason, REFUSABLE)


TERMS = Terms()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options of a command that reads data."""

    skip_unreadable: bool = False
    """Leave unreadable images and reviews out and count them; above 1 % only with --allow-dropped unreadable."""
    allow_dropped: tuple[str, ...] = ()
    """Go on where more than 1 % of the files that may be data, and more than one, are passed over for these reasons:
    suffix, depth, split, link, mode, unreadable. The first line of a run and study.json count all reasons."""
    allow_one_class: bool = False
    """Go on where all files are of one class."""
    max_pixels: int = LIMITS.pixels
    """An image with more pixels is unreadable."""
    max_bytes: int = LIMITS.size
    """A file, or a member of an archive, that has or unpacks to more bytes is unreadable."""
    max_header: int = LIMITS.header
    """A tar with a header of more bytes is unreadable, and so is a larger label of a sample."""

    def terms(self) -> Terms:
        """What they say. Errors: UserError for a limit that nothing keeps, or an unknown reason."""
        limits = {"--max-pixels": self.max_pixels, "--max-bytes": self.max_bytes, "--max-header": self.max_header}
        for flag, limit in limits.items():
            if limit < 1:
                raise UserError(f"{flag} must be at least 1, got {limit}")
        return Terms(self.skip_unreadable, self.allow_dropped, self.allow_one_class, Limits(*limits.values()))

    def said(self) -> dict[str, Any]:
        """The options by name, for study.json: whoever reads the data again needs the same."""
        return {option.name: getattr(self, option.name) for option in fields(Reading)}

    def asked(self) -> dict[str, Any]:
        """The options by name, None for one that has its default: there a study's own count."""
        return {
            option.name: found if (found := getattr(self, option.name)) != option.default else None
            for option in fields(Reading)
        }


READING = Reading()


class PassedOver(TypedDict):
    """The files of one reason."""

    files: Annotated[int, In("[0, inf)")]
    first: str


Counted = TypedDict(
    "Counted",
    {
        "seen": Annotated[int, In("[0, inf)")],
        "used": Annotated[int, In("[0, inf)")],
        "passed over": dict[str, PassedOver],
    },
)
"""A census in a file."""
