"""Half the time of Triton's interpreter, for the process of an adapter: `install` changes it for all kernels.

The interpreter puts its own functions in the place of those of triton.language before a launch, and looks through all
of the language again for each call of a function of the kernel, which found them replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages_of(function: FunctionType) -> tuple[ModuleType, ...]:
    """The modules of the language among the globals of a function."""
    return tuple(x for x in function.__globals__.values() if x is tl or x is tl.core)


def once(replace: Callable[[FunctionType], object]) -> Callable[[FunctionType], object]:
    """The interpreter's replacement of the language, but for what is replaced already."""

    def replace_rest(function: FunctionType) -> object:
        languages = languages_of(function)
        samples = (tl.tensor.to, *(language.load for language in languages))  # are replaced with all others
        if not languages or any(map(tl.core.is_builtin, samples)):
            return replace(function)
        return interpreter._LangPatchScope()  # of nothing, since whoever launched restores it

    return replace_rest


def install() -> None:
    """Change the interpreter of this process, once."""
    if interpreter._patch_lang.__name__ != "replace_rest":
        interpreter._patch_lang = once(interpreter._patch_lang)
