"""Which tests of the kernels for GPUs `make test`, which has ten minutes on two cores, leaves to `make emulated`.

`make test` looks at each template of kernels: it is judged on a few cases, and one configuration compiles without
spilling. `make emulated` runs all that is marked, every planted bug among it.
"""

import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest

from attnkit_conformance import core
from attnkit_conformance.model.case import Case

FEW = "(cross or causal-padded) and not property"
"""Which cases of the quick profile a family is judged on: lengths that differ, padding, causality."""


def later(*values: Any) -> Any:
    """Parameters that only `make emulated` runs."""
    return pytest.param(*values, marks=pytest.mark.emulated)


def first_now(cases: Iterable[Any]) -> list[Any]:
    """The first of the cases is run by both, the others later."""
    return [case if place == 0 else later(case) for place, case in enumerate(cases)]


def case_of(adapter: Any, op: str, dtypes: Iterable[str], name: str) -> Case:
    """The first sample that the kernels serve and whose name begins so; others are not drawn."""
    beginning = re.compile(rf"{re.escape(name)}([.,]|$)")
    for profile, dtype in itertools.product(("scenes", "small"), dtypes):
        for sample in core.samples(op, profile, (dtype,)):
            if beginning.match(sample.id.split("/", 2)[2]):
                case = core.draw_case(sample)
                if not adapter.unsupported(op, core.typed_arrays(adapter, case), case.params):
                    return case
    raise AssertionError(f"{op} has no sample {name}")
