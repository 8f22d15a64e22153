"""Rows of the op database: row statistics, which run over every op that has weights, and the regulariser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

import attnkit_reference
from attnkit_conformance.model.binding import FIELDS, REGULARISER, STATISTICS
from attnkit_conformance.model.case import Case, ErrorSample, compute_dtype
from attnkit_conformance.model.errors import L, S, wrong, zeros
from attnkit_conformance.model.op import OPTIONAL, QKV, Op, o_and_statistics, statistics_fields
from attnkit_conformance.model.tolerance import smallest_normal
from attnkit_conformance.scenes import attention, plain
from attnkit_conformance.scenes.options import NUMBERS

FAINT = 1024.0  # smallest normal numbers, of which a sum of weights is less
OWN_NUMBERS = (*(name for name in NUMBERS if name != "scale"), "log_forget", "log_decay")
"""Of subjects: arrays with a gradient."""


def statistics_errors(op: Op) -> Iterator[ErrorSample]:
    """An op without statistics, an argument that the op does not take, entropy of signed weights, an unknown field."""
    first, gained = op.subjects[0].name, next(subject.name for subject in op.subjects if "gain" in subject.own)
    signed = {"op": gained, "activation": "gelu"}
    yield wrong(op, "op-unknown", ValueError, "op", {"op": "no_such_attention"})
    yield wrong(op, "argument-of-another-op", ValueError, "alpha", {"op": first, "alpha": 1.0})
    yield wrong(op, "entropy-of-signed-weights", ValueError, "entropy.*fields|fields.*entropy", signed)
    yield wrong(op, "entropy-of-negative-gain", ValueError, "entropy", {"op": gained, "gain": -1.0})
    yield wrong(op, "field-unknown", ValueError, "variance", {"op": first, "fields": ("total", "variance")})
    yield wrong(op, "mask-float", TypeError, "mask", {"op": first}, mask=zeros(L, S))


def regulariser_errors(op: Op) -> Iterator[ErrorSample]:
    """A number that is none, for each number, and statistics of different rows."""
    rows = {name: zeros(2, L) for name in op.arguments}
    for name in op.own:
        yield ErrorSample(f"{name}-nan", rows, {name: float("nan")}, ValueError, name)
    yield ErrorSample("rows-differ", {**rows, "entropy": zeros(2, L + 1)}, {}, ValueError, "entropy")


OPS = (
    Op(
        name="attention_regulariser",
        formula="sum_weight · mean abs(log Z) + entropy_weight · mean max(H - entropy_cap · log n, 0)",
        arguments=("total", "entropy", "visible"),
        outputs=lambda params: ("loss", "sum_term", "entropy_term"),
        samples=plain.regulariser_samples,
        own=("entropy_cap", "sum_weight", "entropy_weight"),
        levels=plain.REGULARISER,
        row_case=plain.regulariser_row,
        sizes=plain.LONG_REGULARISER,
        optional=("query_mask",),
        errors=regulariser_errors,
        differentiable=("total", "entropy"),
        dtypes=("float64", "float32"),
        binding=REGULARISER,
        dropout=False,
    ),
)


def rows(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The rows of the statistics functions, which support those of `ops` that have weights."""
    subjects = tuple(op for op in ops if op.statistics)
    found = (
        Op(
            name="row_statistics",
            formula="Σw, entropy, Σw², max, count of w ≠ 0 and n of each query, without an (L, S) array",
            arguments=("q", "k"),
            outputs=statistics_fields,
            samples=attention.statistics_samples,
            own=("op", "fields"),
            optional=(*(name for name in OPTIONAL if name != "dropout_mask"), *OWN_NUMBERS, "projection"),
            differentiable=("q", "k", "bias", "scale", *OWN_NUMBERS),
            not_differentiable=("nonzero", "visible"),
            compute_outputs=FIELDS,
            binding=STATISTICS,
            subjects=subjects,
            errors=statistics_errors,
            dropout=False,
        ),
        Op(
            name="attention_with_statistics",
            formula="output and row statistics in one pass",
            arguments=QKV,
            outputs=o_and_statistics,
            samples=attention.statistics_samples,
            own=("op", "fields"),
            optional=(*OPTIONAL, *OWN_NUMBERS, "norm_weight", "gate_weight", "projection"),
            differentiable=(*QKV, "bias", "scale", *OWN_NUMBERS, "norm_weight", "gate_weight"),
            not_differentiable=("nonzero", "visible"),
            compute_outputs=FIELDS,
            binding=STATISTICS,
            subjects=subjects,
            errors=statistics_errors,
        ),
    )
    return tuple(replace(op, telling=partial(has_entropies, op)) for op in found)


def has_entropies(op: Op, case: Case) -> bool:
    """Whether no row of weights is so faint, though not 0, that they have no digits: its entropy then tells nothing."""
    if "entropy" not in op.outputs(case.params):
        return True
    params = {**case.params, "fields": ("total",)}
    total = op.binding.forward(attnkit_reference, op, case.arrays, params)["total"]
    return not np.any((total > 0) & (total < FAINT * smallest_normal(compute_dtype(case.dtype))))
