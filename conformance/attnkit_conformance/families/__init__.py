"""Rows of the op database, one file per family, named as in the reference and in attnkit."""

from types import ModuleType

from attnkit_conformance.families import (
    forgetting,
    gated,
    gaussian,
    lsh,
    memory,
    pointwise,
    softmax,
    softpick,
    ssmax,
    stick_breaking,
)
from attnkit_conformance.families.entmax import row as entmax
from attnkit_conformance.families.linear import row as linear
from attnkit_conformance.families.lowrank import row as lowrank
from attnkit_conformance.families.packed import row as packed
from attnkit_conformance.families.recurrent import row as recurrent

FAMILIES: tuple[ModuleType, ...] = (
    softmax,
    pointwise,
    entmax,
    softpick,
    ssmax,
    stick_breaking,
    gaussian,
    linear,
    recurrent,
    lowrank,
    lsh,
    memory,
    gated,
    packed,
    forgetting,
)
"""The families of attention ops, which statistics cover."""
