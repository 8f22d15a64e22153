"""What the bounds do not see stays rare, or has a reason."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnkit_conformance.model import tolerance
from attnkit_conformance.opdb import OPDB
from attnkit_conformance.report import table, unnoticed
from attnkit_conformance.report.unnoticed import MOST, Unnoticed

PAGE = Path(__file__).parents[2] / "docs" / "judging-yours.md"


def excess(one: Unnoticed) -> bool:
    return one.zeroed > MOST[one.dtype] and one.reason is None


@pytest.mark.parametrize("op", OPDB, ids=lambda op: op.name)
def test_few_results_could_be_zero_unnoticed(op):
    assert [one for one in unnoticed.of_op(op) if excess(one)] == []


def test_wide_bounds_would_be_noticed():
    x = np.linspace(0.5, 1.0, 100)
    limit = tolerance.limit(x, "float32")
    assert unnoticed.percentages("op", "outputs", "float32", [unnoticed.relative(limit)]).off == 0.0
    wide = replace(limit, allowed=np.where(x < 0.75, x, limit.allowed))
    found = unnoticed.percentages("op", "outputs", "float32", [unnoticed.relative(wide)])
    assert (found.zeroed, found.off) == (50.0, 50.0)
    assert excess(found)
    assert excess(replace(found, dtype="bfloat16"))
    assert not excess(replace(found, dtype="bfloat16", zeroed=2.0))


def test_only_numbers_in_the_range_of_the_dtype_count():
    """Not 0, not what rounding leaves of 0, and none that arithmetic may flush."""
    limit = tolerance.limit(np.array([1.0, 0.0, 1e-17, 1e-40]), "float32", np.array([1.0, 1.0, 1.0, 0.0]))
    assert unnoticed.relative(limit).shape == (1,)


def test_the_page_has_every_op_with_results():
    inside = table.split_page(PAGE, unnoticed.BEGIN, unnoticed.END)[1]
    assert [op.name for op in OPDB if f"| `{op.name}` | outputs |" not in inside and not op.integer_outputs] == []
