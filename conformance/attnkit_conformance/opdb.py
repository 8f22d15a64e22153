"""The op database: one row per public op, collected from the families. A new op is one more row in its family."""

from __future__ import annotations

from attnkit_conformance.families import FAMILIES, statistics
from attnkit_conformance.families.analysis import row as analysis
from attnkit_conformance.model.op import Op, weights_of

ATTENTION = tuple(op for family in FAMILIES for op in family.OPS)
PUBLIC: tuple[Op, ...] = (*ATTENTION, *statistics.OPS, *statistics.rows(ATTENTION), *analysis.OPS)
"""The ops with a row in the documentation."""
OPDB = tuple(row for op in PUBLIC for row in ((op, weights_of(op)) if op.weights else (op,)))
BY_NAME = {op.name: op for op in OPDB}
