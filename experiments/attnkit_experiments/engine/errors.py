"""Errors that a person can act on, and the nearest name for one that was mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the caller asked for cannot be done; the text is one line and says what to do instead."""


class Diverged(Exception):
    """The loss stopped being finite; the text is the diagnosis."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist: what was asked, the nearest name, every name there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return UserError(f"unknown {kind} {name!r}{hint} known: {', '.join(names)}")
