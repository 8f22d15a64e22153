"""Ops and their special cases, for adapters that call kernels without attnkit's public functions."""

from __future__ import annotations

import inspect
from typing import Any

from attnkit._core.family import RECORDS, Family, special_cases
from attnkit.ops import pointwise


def cases(family: Family) -> tuple[str, ...]:
    """An op and its special cases."""
    return (family.name, *(op for op, base in special_cases().items() if base == family.name))


POINTWISE = cases(pointwise.POINTWISE)


def base_arguments(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a special case as those of the op that it calls; those of another op as they are."""
    translate = RECORDS[op].family.translate
    own = {name: arguments[name] for name in inspect.signature(translate).parameters if name in arguments}
    return {name: x for name, x in arguments.items() if name not in own} | translate(**own)
