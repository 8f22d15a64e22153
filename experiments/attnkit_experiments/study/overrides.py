"""`--set key=value`: change fields of a frozen dataclass by name, with their types checked."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from attnkit_experiments.engine.errors import UserError, unknown

T = TypeVar("T")

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def override(study: T, assignments: Iterable[str]) -> T:
    """`study` with every ``key=value`` applied; tuples are comma-separated.

    An unknown key is an error with the closest one; a value of the wrong type is an error with the expected type.
    """
    kinds = typing.get_type_hints(type(study))
    names = [field.name for field in dataclasses.fields(study)]  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: expected key=value")
        if key not in names:
            raise unknown("--set key", key, names)
        changes[key] = parse(key, text, kinds[key])
    try:
        return dataclasses.replace(study, **changes)  # type: ignore[type-var]
    except ValueError as error:
        raise UserError(f"--set {' '.join(assignments)}: {error}") from None


def parse(key: str, text: str, kind: Any) -> Any:
    """`text` as a value of `kind`: bool, int, float, str, a Literal, or a tuple of one of them."""
    if typing.get_origin(kind) is tuple:
        (item, _) = typing.get_args(kind)
        return tuple(parse(key, part.strip(), item) for part in text.split(",") if part.strip())
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise UserError(f"--set {key}: expected one of {', '.join(choices)}, got {text!r}")
        return text
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        value = kind(text)
    except (KeyError, ValueError):
        expected = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind.__name__]
        raise UserError(f"--set {key}: expected {expected}, got {text!r}") from None
    if kind is float and not math.isfinite(value):
        raise UserError(f"--set {key}: expected a finite number, got {text!r}")
    return value
