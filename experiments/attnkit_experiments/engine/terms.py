"""On what terms data are read: how large a file may be, and what may be left out."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit_experiments.engine.errors import unknown

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
