"""Adapters by name: a single one, a family, or the path of a third party's; and any of them in a surrounding."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from attnkit_conformance import peers
from attnkit_conformance.adapter import DERIVATIVES, Adapter, IllFormed
from attnkit_conformance.adapters import families
from attnkit_conformance.adapters.base import Absent
from attnkit_conformance.adapters.surroundings import surrounded
from attnkit_conformance.adapters.worker import load
from attnkit_conformance.judge import declared
from attnkit_conformance.judge.properties import DECLINABLE
from attnkit_conformance.judge.surroundings import EXTENTS
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.layout import MAKERS
from attnkit_conformance.opdb import BY_NAME

METHODS = ("array", "numpy", "call", "vjp")


def find(names: list[str]) -> list[Adapter]:
    """Adapters by name ("torch-sdpa"), family ("torch", all of it) or path ("package.module:ATTRIBUTE"); with
    "@autocast" behind it, in the surrounding of that name.

    ValueError for unknown names.
    """
    adapters: list[Adapter] = []
    for name in names:
        place, at, surrounding = name.partition("@")
        plain = [third_party(place)] if ":" in place else named(place)
        adapters += [surrounded(adapter, surrounding) for adapter in plain] if at else plain
    return adapters


def named(name: str) -> list[Adapter]:
    """One adapter, or all of a family."""
    head = name.partition("-")[0]
    others = (*peers.FAMILIES, peers.ALL)
    if head not in families.REQUIRES and head not in others:
        names = ", ".join((*families.REQUIRES, *others))
        raise ValueError(f"unknown adapter {name!r}; families are {names}, yours is package.module:NAME")
    members = peers.family(head) if head in others else families.family(head)
    selection = members if name == head else [adapter for adapter in members if adapter.name == name]
    if not selection and members and isinstance(members[0], Absent):
        raise ValueError(f"adapter {name!r} is not on this machine: {members[0].reason}")
    if not selection:
        raise ValueError(f"unknown adapter {name!r}; {head} has {', '.join(a.name for a in members) or 'none'}")
    for adapter in members:
        if adapter not in selection and hasattr(adapter, "close"):
            adapter.close()
    return selection


def third_party(path: str) -> Adapter:
    """The adapter at "package.module:ATTRIBUTE", imported from the working directory as well."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise IllFormed(f"cannot load adapter {path!r}: expected package.module:ATTRIBUTE")
    try:
        adapter: Adapter = load(path)
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise IllFormed(f"cannot load adapter {path!r}: {type(error).__name__}: {error}") from error
    if wrong := list(what_is_wrong(adapter)):
        raise IllFormed(f"{path!r} is no adapter: {'; '.join(wrong)}; see attnkit_conformance.adapter")
    return adapter


def what_is_wrong(adapter: Any) -> Iterator[str]:
    """The missing attributes of an adapter, and those of a wrong type."""
    missing = [name for name in ("name", "dtypes", *METHODS) if not hasattr(adapter, name)]
    if missing:
        yield f"it lacks {', '.join(missing)}"
        return
    if not isinstance(adapter.name, str) or not adapter.name:
        yield f"name must be a text; got {adapter.name!r}"
    if not texts(adapter.dtypes) or not adapter.dtypes or set(adapter.dtypes) - set(DTYPES):
        yield f"dtypes must be a tuple of some of {', '.join(DTYPES)}; got {adapter.dtypes!r}"
    for name in METHODS:
        if not callable(getattr(adapter, name)):
            yield f"{name} must be a method; got {getattr(adapter, name)!r}"
    ops = getattr(adapter, "ops", None)
    if ops is not None and (not texts(ops) or set(ops) - set(BY_NAME)):
        unknown = [name for name in ops if name not in BY_NAME] if texts(ops) else ops
        yield f"ops must be a tuple of names of ops (softmax_attention, ...); got {unknown!r}"
    if not texts(getattr(adapter, "without", ())):
        yield f"without must be a tuple of names; got {adapter.without!r}"
    declines = getattr(adapter, "declines", None)
    if declines is not None and (not texts(declines) or set(declines) - set(DECLINABLE)):
        unknown = [name for name in declines if name not in DECLINABLE] if texts(declines) else declines
        yield f"declines must be a tuple of some of {', '.join(DECLINABLE)}; got {unknown!r}"
    copied = getattr(adapter, "copied", ())
    if not texts(copied) or set(copied) - set(MAKERS):
        yield f"copied must be a tuple of some of the layouts {', '.join(MAKERS)}; got {copied!r}"
    if getattr(adapter, "surroundings", "") not in EXTENTS:
        yield f"surroundings must be one of {', '.join(map(repr, EXTENTS))}; got {adapter.surroundings!r}"
    yield from what_is_declared(adapter)
    for name in ("unsupported", *DERIVATIVES):
        if not callable(getattr(adapter, name, None) or str):
            yield f"{name} must be a method; got {getattr(adapter, name)!r}"
    if not isinstance(getattr(adapter, "description", ""), str):
        yield f"description must be a text; got {adapter.description!r}"


def what_is_declared(adapter: Any) -> Iterator[str]:
    """The errors in a declaration of supported calls."""
    serves = getattr(adapter, "serves", None)
    if serves is None:
        return
    if not isinstance(serves, Mapping) or not all(isinstance(of, Mapping) for of in serves.values()):
        yield f"serves must be a dict of dicts, {{op: {{factor: levels}}}}; got {serves!r}"
        return
    for name in serves:
        if name not in BY_NAME:
            yield f"serves: {name!r} is not an op"
            continue
        try:
            declared.grammar(adapter, BY_NAME[name])
            declared.derivatives(adapter, BY_NAME[name])
        except ValueError as error:
            yield str(error)


def texts(x: Any) -> bool:
    """Whether x is a collection of strings, not a string."""
    return isinstance(x, tuple | list | set | frozenset) and all(isinstance(name, str) for name in x)
