"""Errors that users can act on, and the closest name to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
