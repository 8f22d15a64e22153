"""Rows of the op database: row statistics, which run over every op that has weights, and the regulariser."""

from __future__ import annotations

from collections.abc import Iterable

from attnkit_conformance.model import errors
from attnkit_conformance.model.binding import FIELDS, REGULARISER, STATISTICS
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, o_and_statistics, statistics_fields
from attnkit_conformance.scenes import attention, plain

OPS = (
    Op(
        name="attention_regulariser",
        formula="sum_weight · mean abs(log Z) + entropy_weight · mean max(H - entropy_cap · log n, 0)",
        arguments=("total", "entropy", "visible"),
        outputs=lambda params: ("loss", "sum_term", "entropy_term"),
        samples=plain.regulariser_samples,
        own=("entropy_cap", "sum_weight", "entropy_weight"),
        optional=("query_mask",),
        differentiable=("total", "entropy"),
        dtypes=("float64", "float32"),
        binding=REGULARISER,
        dropout=False,
    ),
)


def rows(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The rows of the statistics functions, which serve those of `ops` that have weights."""
    subjects = tuple(op for op in ops if op.statistics)
    return (
        Op(
            name="row_statistics",
            formula="Σw, entropy, Σw², max, count of w ≠ 0 and n of each query, without an (L, S) array",
            arguments=("q", "k"),
            outputs=statistics_fields,
            samples=attention.statistics_samples,
            own=("op", "fields"),
            optional=(*(name for name in OPTIONAL if name != "dropout_mask"), "alpha", "projection"),
            differentiable=("q", "k", "bias", "alpha"),
            not_differentiable=("nonzero", "visible"),
            compute_outputs=FIELDS,
            binding=STATISTICS,
            subjects=subjects,
            errors=errors.statistics_errors,
            dropout=False,
        ),
        Op(
            name="attention_with_statistics",
            formula="output and row statistics in one pass",
            arguments=QKV,
            outputs=o_and_statistics,
            samples=attention.statistics_samples,
            own=("op", "fields"),
            optional=(*OPTIONAL, "alpha", "norm_weight", "gate_weight", "projection"),
            differentiable=(*QKV, "bias", "alpha", "norm_weight", "gate_weight"),
            not_differentiable=("nonzero", "visible"),
            compute_outputs=FIELDS,
            binding=STATISTICS,
            subjects=subjects,
            errors=errors.statistics_errors,
        ),
    )
