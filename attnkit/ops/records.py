"""Every op whose weights are made of scores or features of pairs, by its record: statistics and blocks ask these."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from attnkit._core.family import Family
from attnkit.ops import entmax, gaussian, pointwise, rela, softmax
from attnkit.ops.linear import attention, cosine, efficient, performer
from attnkit.ops.linear.record import family_of


class Record(NamedTuple):
    """A public op and what makes it what it is."""

    op: Callable[..., Any]
    family: Family


RECORDS = {
    family.name: Record(op, family)
    for op, family in (
        (softmax.softmax_attention, softmax.SOFTMAX),
        (pointwise.pointwise_attention, pointwise.POINTWISE),
        (pointwise.reluformer_attention, pointwise.RELUFORMER),
        (pointwise.sigmoid_attention, pointwise.SIGMOID),
        (entmax.sparsemax_attention, entmax.SPARSEMAX),
        (entmax.entmax_attention, entmax.ENTMAX),
        (rela.rela_attention, rela.RELA),
        (gaussian.gaussian_attention, gaussian.GAUSSIAN),
        (attention.linear_attention, family_of(attention.LINEAR)),
        (cosine.cosine_attention, family_of(cosine.COSINE)),
        (performer.performer_attention, family_of(performer.PERFORMER)),
        (efficient.efficient_attention, family_of(efficient.EFFICIENT)),
    )
}
SPECIAL_CASES = {name: record.family.of for name, record in RECORDS.items() if record.family.of}
"""{op: the op that it calls with fixed parameters}."""


def joins_heads(op: Callable[..., Any]) -> bool:
    """Whether an op gives (..., L, H·e) for heads (..., H, L, e)."""
    record = RECORDS.get(op.__name__)
    return record is not None and record.family.apart is not None and record.family.apart.joins_heads


def scales_scores(op: Callable[..., Any]) -> bool:
    """Whether an op takes a scale of q·k, 1/√d by default; that of features is an option of the op's own."""
    record = RECORDS.get(op.__name__)
    return "scale" in inspect.signature(op).parameters and (record is None or "scale" in record.family.common)
