"""Adapters by name: a single one, a family, or the path of a third party's; and any of them in a surrounding."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from attnkit_conformance import peers
from attnkit_conformance.adapter import Adapter, IllFormed, cut
from attnkit_conformance.adapters import families
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.adapters.isolated import LIMIT, Isolated, process_of
from attnkit_conformance.adapters.serving import METHOD, METHODS, NEEDED, load, traits_of
from attnkit_conformance.adapters.surroundings import surround
from attnkit_conformance.adapters.wire import Traits
from attnkit_conformance.adapters.worker import NotLoaded, Worker, WorkerDied
from attnkit_conformance.judge import declared
from attnkit_conformance.judge.properties import DECLINABLE
from attnkit_conformance.judge.surroundings import EXTENTS
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.layout import MAKERS
from attnkit_conformance.model.types import Plain
from attnkit_conformance.opdb import BY_NAME


@dataclass(frozen=True)
class Terms:
    """How adapters by path are judged: in this process (`here`) or in one of their own, for at most `limit` seconds a
    call; which functions they may not call there, and what the values of their repeats are drawn from.
    """

    here: bool = False
    limit: float = LIMIT
    calls: tuple[str, ...] = ()
    seed: int = 0


def find(names: list[str], terms: Terms = Terms()) -> list[Adapter]:
    """Adapters by name ("torch-sdpa"), family ("torch", all of it) or path ("package.module:ATTRIBUTE"); with
    "@autocast" behind it, in the surrounding of that name.

    ValueError for unknown names.
    """
    adapters: list[Adapter] = []
    for name in names:
        place, at, surrounding = name.partition("@")
        plain = [third_party(place, terms)] if ":" in place else adapters_named(place)
        adapters += [surround(adapter, surrounding) for adapter in plain] if at else plain
    return adapters


def adapters_named(name: str) -> list[Adapter]:
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


def third_party(path: str, terms: Terms) -> Adapter:
    """The adapter at "package.module:ATTRIBUTE", imported from the working directory as well."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise IllFormed(f"cannot load adapter {path!r}: expected package.module:ATTRIBUTE")
    worker: Worker | None = None
    try:
        if terms.here:
            adapter: Adapter = load(path)
            traits = traits_of(adapter)
        else:
            worker = process_of(path, terms.limit, terms.calls)
            traits = worker.traits
    except (NotLoaded, WorkerDied) as error:
        raise IllFormed(f"cannot load adapter {path!r}: {error}") from None
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise IllFormed(f"cannot load adapter {path!r}: {type(error).__name__}: {cut(str(error))}") from error
    if wrong := list(what_is_wrong_with(traits)):
        if worker is not None:
            worker.close()
        raise IllFormed(f"{path!r} is no adapter: {'; '.join(wrong)}; see attnkit_conformance.adapter")
    return adapter if worker is None else Isolated(worker, terms.seed)


def what_is_wrong(adapter: Adapter) -> Iterator[str]:
    """The missing attributes of an adapter, and those of a wrong type."""
    return what_is_wrong_with(traits_of(adapter))


def what_is_wrong_with(traits: Traits) -> Iterator[str]:
    """The same by what an adapter says of itself (`traits_of`), perhaps in its own process."""
    missing = [name for name in ("name", "dtypes", *NEEDED) if name not in traits]
    if missing:
        yield f"it lacks {', '.join(missing)}"
        return

    def wrong(name: str, holds: Callable[[Plain], bool], expected: str, default: object = None) -> Iterator[str]:
        plain, value = traits.get(name, (True, default))
        if not (plain and holds(value)):
            yield f"{name} must be {expected}; got {repr(value) if plain else value}"

    def subset(of: Iterable[str]) -> Callable[[Plain], bool]:
        return lambda value: texts(value) and set(value) <= set(of)

    yield from wrong("name", lambda value: isinstance(value, str) and bool(value), "a text")
    some = f"a tuple of some of {', '.join(DTYPES)}"
    yield from wrong("dtypes", lambda value: subset(DTYPES)(value) and bool(value), some)
    for name in (name for name in METHODS if name in traits):
        yield from wrong(name, lambda value: value == METHOD, "a method")
    ops = traits.get("ops", (True, None))[1]
    if ops is not None and not subset(BY_NAME)(ops):
        unknown = [name for name in ops if name not in BY_NAME] if texts(ops) else ops
        yield f"ops must be a tuple of names of ops (softmax_attention, ...); got {unknown!r}"
    yield from wrong("without", texts, "a tuple of names", ())
    yield from wrong("copied", subset(MAKERS), f"a tuple of some of the layouts {', '.join(MAKERS)}", ())
    yield from wrong(
        "declines",
        lambda value: value is None or subset(DECLINABLE)(value),
        f"a tuple of some of {', '.join(DECLINABLE)}",
    )
    yield from wrong("surroundings", lambda value: value in EXTENTS, f"one of {', '.join(map(repr, EXTENTS))}", "")
    yield from wrong("description", lambda value: isinstance(value, str), "a text", "")
    yield from what_is_declared(traits)


def what_is_declared(traits: Traits) -> Iterator[str]:
    """The errors in a declaration of supported calls."""
    plain, serves = traits.get("serves", (True, None))
    if serves is None:
        return
    if not plain or not isinstance(serves, Mapping) or not all(isinstance(of, Mapping) for of in serves.values()):
        got = repr(serves) if plain else serves
        yield f"serves must be a dict of dicts, {{op: {{factor: levels}}}}; got {got}"
        return
    adapter: Adapter = SimpleNamespace(**{name: value for name, (_, value) in traits.items()})
    for name in serves:
        if name not in BY_NAME:
            yield f"serves: {name!r} is not an op"
            continue
        try:
            declared.grammar(adapter, BY_NAME[name])
            declared.derivatives(adapter, BY_NAME[name])
        except ValueError as error:
            yield str(error)


def texts(x: object) -> bool:
    """Whether x is a collection of strings, not a string."""
    return isinstance(x, tuple | list | set | frozenset) and all(isinstance(name, str) for name in x)
