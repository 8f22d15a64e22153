"""Bugs that other implementations had: the kit catches each where it shows, and passes the same code without it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core, properties
from attnkit_conformance.opdb import BY_NAME

from . import historical, historical_linear, historical_lowrank


@dataclass(frozen=True)
class Bug:
    """A wrong adapter, the cases that must catch it (some of those that do), and how: {(check, array)}."""

    wrong: type[historical.Minimal]
    op: str
    scenes: tuple[str, ...]
    caught: frozenset[tuple[str, str]] = frozenset({("bound", "o")})
    kept: Callable[[Any], bool] = lambda case: True  # of the cases of the full profile

    @property
    def right(self) -> type[historical.Minimal]:
        """The same adapter without the bug."""
        return self.wrong.__mro__[1]


BUGS = (
    Bug(historical.SumsCumulativeSums, "sparsemax_attention", ("cross", "causal-padded", "gqa-mask")),
    Bug(historical.AccumulatesInBfloat16, "entmax_attention", ("100x257",)),
    Bug(historical_lowrank.NormOverTheBatch, "nystrom_attention", ("cross",)),
    Bug(historical_lowrank.PaddingInMeans, "nystrom_attention", ("padded.batch_max", "padded")),
    Bug(historical_lowrank.AsPrinted, "soft_attention", ("large",)),
)


def verdicts(bug: Bug, adapter: Any) -> dict[str, core.CaseResult]:
    """{"<dtype>/<scene>": verdict} on the cases of the op in the full profile that the adapter serves."""
    found = {}
    for case in core.cases(bug.op, "full", adapter.dtypes):
        result = core.check(adapter, case)
        if result.status != "unsupported":
            found[case.id.partition("/")[2]] = result
    return found


def reasons(result: core.CaseResult) -> set[tuple[str, str]]:
    """{(check, array)} of the failures."""
    return {(check, text.partition(":")[0].partition(" ")[0]) for check, text in result.failures}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.wrong.__name__)
def test_bug_is_caught_and_its_repair_passes(bug: Bug) -> None:
    adapter = bug.wrong()
    found = verdicts(bug, adapter)
    failed = {name: reasons(result) for name, result in found.items() if result.status == "fail"}
    print({n: r.message for n,r in found.items() if r.status == "fail"})
    right = verdicts(bug, bug.right())
    bad = {name: result.message for name, result in right.items() if result.status == "fail"}
    print(len(right), "right fails:", bad)
    assert not bad
    assert {name.partition("/")[2] for name in failed} == set(bug.scenes)
    assert set().union(*failed.values()) == bug.caught
