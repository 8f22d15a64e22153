"""One reader for our own files: what is read has the types and ranges of a kind, a TypedDict or a dataclass, else one
sentence says what is wrong where.

    class Seal(TypedDict):
        step: Annotated[int, In("[1, inf)")]

    seal = read_as(path, Seal, relate)    # UserError: PATH: step must be at least 1, got -3

A TypedDict may have further keys, a dataclass may not. Relations between values are `relate`'s, or those of the
dataclass's own __post_init__; both raise ValueError.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from attnkit_experiments.engine.errors import UserError, require_in, unknown
from attnkit_experiments.engine.files import read_json

T = TypeVar("T")
NAMES: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", None: "null", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class In:
    """The range of a number, such as "[0, inf)", in which infinity is not: it must be finite."""

    interval: str

    def require(self, value: Any, where: str) -> None:
        require_in(self.interval, **{where: value})
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"{where} must be finite, got {value}")


class Filled:
    """Of a list that must not be empty."""

    def require(self, value: Any, where: str) -> None:
        if not value:
            raise _mismatch(where, "a list that is not empty", value)


def read_as(path: Path, kind: type[T], relate: Callable[[T], None] | None = None) -> T:
    """The JSON in `path` as a TypedDict; UserError in one sentence if it is none of this kind."""
    value: Any = read_json(path)
    try:
        conform(value, kind)
        if relate:
            relate(value)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return typing.cast(T, value)


def build(value: Any, kind: type[T], where: str = "") -> T:
    """The dataclass `kind` of a JSON object, whose lists are its tuples; ValueError if it is none."""
    conform(value, kind, where)
    return typing.cast(T, _built(value, kind))


def conform(value: Any, kind: Any, where: str = "") -> None:
    """ValueError, with the place in the file, unless a JSON value has the types and ranges of `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is typing.NotRequired:
        conform(value, arguments[0], where)
    elif origin is Annotated:
        conform(value, arguments[0], where)
        arguments[1].require(value, where)
    elif origin is Literal:
        if value not in arguments or isinstance(value, bool) not in {isinstance(x, bool) for x in arguments}:
            raise _mismatch(where, f"one of {', '.join(map(repr, arguments))}", value)
    elif origin in (Union, types.UnionType):
        _conform_to_one(value, arguments, where)
    elif origin in (list, tuple, Sequence):
        _conform_items(value, origin, arguments, where)
    elif origin in (dict, Mapping):
        for key, item in _require(value, dict, "an object", where).items():
            conform(item, arguments[1], _inside(where, key))
    elif typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        _conform_record(value, kind, where)
    elif kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            raise _mismatch(where, NAMES[kind], value)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise _mismatch(where, f"{NAMES[kind]} of 64 bits", value)
    elif type(value) is not (type(None) if kind is None else kind):
        raise _mismatch(where, NAMES[kind], value)


def _conform_to_one(value: Any, kinds: Sequence[Any], where: str) -> None:
    """To the first kind of a union that the value has; the error is that of its last."""
    for number, kind in enumerate(kinds, 1):
        try:
            conform(value, kind, where)
        except ValueError:
            if number == len(kinds) or (kinds[-1] is type(None) and value is not None):
                raise
        else:
            return


def _conform_items(value: Any, origin: Any, arguments: Sequence[Any], where: str) -> None:
    items = _require(value, list, "a list", where)
    kinds = arguments
    if origin is not tuple or arguments[-1] is Ellipsis:
        kinds = [arguments[0]] * len(items)
    if len(items) != len(kinds):
        raise _mismatch(where, f"a list of {len(kinds)}", value)
    for number, (item, kind) in enumerate(zip(items, kinds, strict=True)):
        conform(item, kind, f"{where}[{number}]")


def _conform_record(value: Any, kind: Any, where: str) -> None:
    record, hints = _require(value, dict, "an object", where), _hints(kind)
    optional = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.NotRequired}
    if dataclasses.is_dataclass(kind):
        optional = {x.name for x in dataclasses.fields(kind) if (x.default, x.default_factory) != (MISSING, MISSING)}
        for name in record.keys() - hints.keys():
            raise ValueError(str(unknown(f"key of {where or 'the object'}", name, hints)))
    for name, hint in hints.items():
        if name in record:
            conform(record[name], hint, _inside(where, name))
        elif name not in optional:
            raise ValueError(f"{_inside(where, name)} is missing")


def _built(value: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        return kind(**{name: _built(item, hints[name]) for name, item in value.items()})  # type: ignore[operator]
    return tuple(value) if typing.get_origin(kind) is tuple else value


def keys_of(*kinds: Any) -> set[str]:
    """The names of the keys that these records have."""
    return {name for kind in kinds for name in _hints(kind)}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The kinds of a record's keys."""
    return typing.get_type_hints(kind, include_extras=True)


def _require(value: Any, kind: type[T], expected: str, where: str) -> T:
    if not isinstance(value, kind):
        raise _mismatch(where, expected, value)
    return value


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _mismatch(where: str, expected: str, value: Any) -> ValueError:
    text = repr(value)
    return ValueError(f"{where or 'it'} must be {expected}, got {text[:80]}{'…' * (len(text) > 80)}")
