"""Functions that exist already take the code of a changed module: whoever has imported them runs it."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import _lru_cache_wrapper as Remembering
from pathlib import Path
from types import CodeType, FunctionType

Place = tuple[str, int]  # qualified name and first line of a function


def place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno


def modules_of(files: set[Path]) -> list[str]:
    """The names of the modules in memory that were read from some files."""
    names = {str(file) for file in files}
    return [name for name, module in sys.modules.items() if getattr(module, "__file__", None) in names]


def objects() -> list[object]:
    """All that garbage collection knows, `gc.freeze()`d or not."""
    gc.unfreeze()
    return gc.get_objects()


def functions_of(files: set[Path]) -> dict[Path, dict[Place, list[FunctionType]]]:
    """By file and place, the functions in memory."""
    names = {str(file): file for file in files}
    found = defaultdict[Path, dict[Place, list[FunctionType]]](dict)
    for x in objects():
        if type(x) is FunctionType and x.__code__.co_filename in names:
            found[names[x.__code__.co_filename]].setdefault(place(x.__code__), []).append(x)
    return found


def codes(module: CodeType) -> Iterator[CodeType]:
    """All code inside a module's."""
    for constant in module.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def replace(functions: dict[Place, list[FunctionType]], module: CodeType) -> int:
    """Give functions the code of a module where it differs; how many did. ValueError where they cannot have it."""
    count = 0
    for code in codes(module):
        for function in functions.get(place(code), ()):
            if function.__code__ != code:
                function.__code__ = code
                count += 1
    return count


def forget(files: set[Path]) -> None:
    """Clear the caches of functions of some files: what they hold was computed without a change."""
    names = {str(file) for file in files}
    for x in objects():
        if type(x) is Remembering and getattr(x.__wrapped__, "__code__", place.__code__).co_filename in names:
            x.cache_clear()
