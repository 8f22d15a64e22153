"""Which tests of the kernels for GPUs `make test`, which has ten minutes on two cores, leaves to `make emulated`.

`make test` looks at each template of kernels: it is judged on a few scenes, and one configuration compiles without
spilling; a planted bug is found in each CUDA family and in Triton's point-wise and linear kernels. `make emulated` runs
all that is marked, packed sequences and statistics in the interpreter among it.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from attnkit_conformance.core import CaseResult

FEW = "(cross or causal-padded) and not property"
"""Which cases of the quick profile a family is judged on: lengths that differ, padding, causality."""


def later(*values: Any) -> Any:
    """Parameters that only `make emulated` runs."""
    return pytest.param(*values, marks=pytest.mark.emulated)


def first_now(cases: Iterable[Any]) -> list[Any]:
    """The first of the cases is run by both, the others later."""
    return [case if place == 0 else later(case) for place, case in enumerate(cases)]


def of_numbers(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Those that were not refused because a number is an array, which attnkit sees to before it calls a kernel."""
    return [x for x in results if "as an array is served by the generic implementation" not in x.message]
