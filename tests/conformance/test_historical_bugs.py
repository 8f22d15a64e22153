"""Bugs that other implementations had: the kit catches each where it shows, and passes the same code without it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from attnkit_conformance import core
from attnkit_conformance.golden import draw_case
from attnkit_conformance.model.case import Case
from tests.library.arrays import assert_agrees

from . import historical, historical_linear, historical_lowrank
from .planting import verdict

O_BOUND = frozenset({("bound", "o")})
PADDED_STATE = "causal-padded.initial_state=<array>,return_state=True,chunk_size=32"


@dataclass(frozen=True)
class Bug:
    """A wrong adapter, the smallest profile that catches it, cases among those that do, and how: {(check, array)}."""

    wrong: type[historical.Minimal]
    op: str
    profile: str
    scenes: frozenset[str]
    caught: frozenset[tuple[str, str]] = O_BOUND

    @property
    def right(self) -> type[historical.Minimal]:
        """The same adapter without the bug."""
        return self.wrong.__mro__[1]


def bound(*arrays: str) -> frozenset[tuple[str, str]]:
    """The bound of D on each of these arrays."""
    return frozenset(("bound", name) for name in arrays)


BUGS = (
    Bug(historical.SumsCumulativeSums, "sparsemax_attention", "small",
        frozenset({"cross", "causal-padded", "gqa-mask"})),
    Bug(historical.AccumulatesInBfloat16, "entmax_attention", "scenes", frozenset({"many-keys"}),
        bound("o")),
    Bug(historical_linear.SumsOverHeads, "linear_attention", "small", frozenset({PADDED_STATE}),
        bound("o", "z", "dq", "dk", "dv", "dinitial_S", "dinitial_z")),
    Bug(historical_linear.MasksValuesOnly, "linear_attention", "small", frozenset({PADDED_STATE}),
        bound("o", "z", "dq", "dk", "dv", "dinitial_S", "dinitial_z")),
    Bug(historical_linear.ForgetsKeySum, "linear_attention", "small", frozenset({PADDED_STATE}),
        bound("o", "z", "dq", "dk", "dv", "dinitial_S", "dinitial_z")),
    Bug(historical_linear.CutsDenominator, "linear_attention", "small", frozenset({PADDED_STATE}),
        bound("dk", "dinitial_z")),
    Bug(historical_linear.DividesByRootOfLength, "linear_attention", "scenes",
        frozenset({"63x63-causal.normalize=False,return_state=True,scale=0.05"}),
        bound("o", "dq", "dk", "dv", "dinitial_S", "dinitial_z")),
    Bug(historical_linear.DividesTwice, "performer_attention", "small", frozenset({"cross", "gqa-mask"})),
    Bug(historical_linear.SumsOverFeatures, "performer_attention", "scenes", frozenset({"causal-padded"})),
    Bug(historical_lowrank.NormOverTheBatch, "nystrom_attention", "small", frozenset({"cross", "gqa-mask"})),
    Bug(historical_lowrank.PaddingInMeans, "nystrom_attention", "small", frozenset({"padded.batch_max", "gqa-mask"})),
    Bug(historical_lowrank.AsPrinted, "soft_attention", "scenes", frozenset({"apart", "one-token"})),
)  # fmt: skip


def judged(bug: Bug) -> Iterator[tuple[Case, core.CaseResult, core.CaseResult]]:
    """Every scene that the adapter serves, with the verdicts on the wrong and on the right one."""
    wrong, right = bug.wrong(), bug.right()
    for case in map(draw_case, core.scenes(bug.op, bug.profile, wrong.dtypes)):
        first, second = core.check(wrong, case), core.check(right, case)
        if "unsupported" not in (first.status, second.status):
            yield case, first, second


def reasons(result: core.CaseResult) -> set[tuple[str, str]]:
    """{(check, array)} of the failures."""
    return {(check, text.split(":")[0].split()[0]) for check, text in result.failures}


ON_SCENES = [pytest.param(bug, marks=pytest.mark.referee if bug.profile == "scenes" else ()) for bug in BUGS]


@pytest.mark.parametrize("bug", ON_SCENES, ids=lambda bug: bug.wrong.__name__)
def test_bug_is_caught_and_the_same_code_without_it_passes(bug: Bug) -> None:
    failed: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for case, wrong, right in judged(bug):
        assert right.status == "pass", f"{case.id}: {right.message}"
        if wrong.status == "fail":
            failed[case.dtype, case.id.split("/", 2)[2]] = reasons(wrong)
    assert set().union(*failed.values()) == bug.caught
    for dtype in bug.wrong.dtypes:
        assert bug.scenes <= {scene for of, scene in failed if of == dtype}, dtype


def test_a_level_of_the_future_is_caught_by_nothing_but_bits() -> None:
    bug = Bug(historical_linear.LevelOfTheFuture, "performer_attention", "scenes", frozenset())
    for case, wrong, right in judged(bug):
        assert (wrong.status, right.status) == ("pass", "pass"), f"{case.id}: {wrong.message}{right.message}"
    assert verdict(bug.wrong(), "performer_attention", "float32", "causal_prefix").checks == {"causal_prefix"}
    assert verdict(bug.right(), "performer_attention", "float32", "causal_prefix").status == "pass"


def test_the_printed_algorithm_gives_nothing_for_landmarks_far_apart() -> None:
    """A = I to rounding, which each of the 20 steps doubles in what falls to 0; the output is Pᵀ P v."""
    case = next(case for case in core.cases("soft_attention", "scenes", ("float64",)) if case.id.endswith("/apart"))
    golden = core.golden(case).outputs["o"].golden
    assert_agrees(core.outputs(historical_lowrank.AsPrinted(), case)["o"], 0 * golden, 2.0**20, magnitude=golden)
    p = historical_lowrank.gauss(case.arrays["landmarks"], case.arrays["q"])
    assert_agrees(golden, np.swapaxes(p, -1, -2) @ p @ case.arrays["v"])
