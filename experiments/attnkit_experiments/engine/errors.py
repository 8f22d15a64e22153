"""Errors that users can act on: numbers out of their range, and the closest name to a mistyped one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable


class UserError(Exception):
    """A request that cannot be fulfilled; the text is one line and says what to do instead."""


class Diverged(Exception):
    """The loss is no longer finite; the text is the diagnosis."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist: the name, the closest one, and all known names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return UserError(f"unknown {kind} {name!r}{hint} known: {', '.join(names)}")


def require_names(setting: str, kind: str, names: Collection[str], known: Collection[str]) -> None:
    """UserError unless `setting` has one or more names, all of them known."""
    if not names:
        raise UserError(f"--set {setting}: expected one or more of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def require_in(interval: str, **settings: float | Collection[float]) -> None:
    """ValueError unless settings, one number or several, are in an interval such as "[0, 1)" or "(0, inf)", which has
    no upper end: inf is in it.
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    expected = f"lie in {interval}"
    if math.isinf(high):
        expected = f"be at least {low:g}" if interval.startswith("[") else f"be above {low:g}"
    for name, value in settings.items():
        numbers = value if isinstance(value, Collection) else (value,)
        if not numbers:
            raise ValueError(f"{name} must have one or more numbers, got none")
        for number in numbers:
            above = number >= low if interval.startswith("[") else number > low
            below = math.isinf(high) or (number <= high if interval.endswith("]") else number < high)
            if not (above and below):
                raise ValueError(f"{name} must {expected}, got {number:g}")
