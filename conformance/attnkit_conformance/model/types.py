"""What the kit hands on: options of ops, and arrays of any library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from attnkit_conformance.model.grammar import Level

Foreign: TypeAlias = Any
"""An array, function, module or adapter of a library that is judged: which one is known only when it runs."""
Arrays: TypeAlias = Mapping[str, Foreign]
"""Such arrays by name."""
Results: TypeAlias = dict[str, Foreign]
"""What a call returns: outputs or gradients by name."""

Plain: TypeAlias = Any
"""Numbers, texts and containers of them that a file or another process holds: what, is known after a look at them."""

Option: TypeAlias = Level
"""A parameter of an op."""
Params: TypeAlias = Mapping[str, Option]
"""Parameters of an op by name."""

Keyword: TypeAlias = Any
"""An argument that ** hands on to a function with types of its own: no checker follows it there by its name."""
Keywords: TypeAlias = dict[str, Keyword]
"""Such arguments by name."""

T = TypeVar("T", int, float, str)


def option(params: Params, name: str, default: T) -> T:
    """A parameter of the type of `default`, which is taken where there is none."""
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, tuple):
        raise TypeError(f"{name}: expected a {type(default).__name__}; got {value}")
    return type(default)(value)


def window_sides(params: Params) -> tuple[int | None, int | None]:
    """How many tokens a query sees before and after its own; None for all."""
    match params.get("window"):
        case None:
            return None, None
        case (int() | None as left, int() | None as right):
            return left, right
        case other:
            raise ValueError(f"window: expected two numbers; got {other}")
