"""The op database: one row per public op, collected from the families. Adding an op is one row in its family."""

from __future__ import annotations

from attnkit_conformance.families import (
    analysis,
    gaussian,
    linear,
    lowrank,
    packed,
    pointwise,
    softmax,
    sparse,
    statistics,
)
from attnkit_conformance.op import Op, weights_of

FAMILIES = (softmax, pointwise, sparse, gaussian, linear, lowrank, packed, statistics, analysis)

PUBLIC: tuple[Op, ...] = tuple(op for family in FAMILIES for op in family.OPS)  # with a row in the documentation
OPDB = tuple(row for op in PUBLIC for row in ((op, weights_of(op)) if op.weights else (op,)))
BY_NAME = {op.name: op for op in OPDB}
