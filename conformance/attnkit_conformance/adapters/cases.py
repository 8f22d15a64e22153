"""Ops and their special cases, for adapters that call kernels without attnkit's public functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from attnkit._core.check import is_learned
from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS, Family, special_cases
from attnkit._core.integers import in_range
from attnkit._core.learned import numbers
from attnkit.ops import pointwise
from attnkit_conformance.model.types import Keyword, Keywords

Arguments = Mapping[str, Keyword]


def cases(family: Family) -> tuple[str, ...]:
    """An op and its special cases."""
    return (family.name, *(op for op, base in special_cases().items() if base == family.name))


POINTWISE = cases(pointwise.POINTWISE)


def refuse_learned(op: str, arguments: Arguments, kernels: Mapping[str, Kernel] | None = None) -> str | None:
    """Why kernels that are called themselves refuse numbers that are arrays, or that they do not know."""
    given = (*numbers(op, arguments), *(name for name in ("gamma",) if is_learned(arguments.get(name))))
    known = kernels[op].learned if kernels and op in kernels else ()
    names = [name for name in given if name not in known]
    return f"{names[0]} as an array is served by the generic implementation" if names else None


def handed_on(arrays: Arguments, params: Arguments) -> tuple[Arguments, Arguments]:
    """Arrays and parameters as the public functions hand them on to kernels: integers in the range of positions."""
    if "q" not in arrays:
        return arrays, params
    q, k = arrays["q"], arrays.get("k", arrays["q"])  # of SOFT, queries are keys
    every = in_range({**arrays, **params}, q.shape[-2], k.shape[-2])
    return {name: every[name] for name in arrays}, {name: every[name] for name in params}


def base_arguments(op: str, arguments: Keywords) -> Keywords:
    """The arguments of a special case as those of the op that it calls; those of another op as they are."""
    translate = RECORDS[op].family.translate
    own = {name: arguments[name] for name in inspect.signature(translate).parameters if name in arguments}
    return {name: x for name, x in arguments.items() if name not in own} | translate(**own)
