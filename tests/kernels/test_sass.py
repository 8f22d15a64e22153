"""What compiled kernels ask of a GPU does not grow, and the counting counts."""

import json
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.sass import report
from benchmarks.sass.clocks import MACHINES, Loop, tensor_work
from benchmarks.sass.instructions import Instruction, blocks_of, dominators
from benchmarks.sass.workloads import WORKLOADS

from .selection import later
from .spills import MEMORY

QUICK = ("sigmoid", "statistics: sums, maximum", "linear, causal")


def counts(call: str, capability: int) -> dict[str, Any]:
    kernels = report.kernels_of(call, capability)
    return {name: report.record_of(kernel, units, capability) for name, kernel, units in kernels}


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    import triton

    record = report.committed()
    if triton.__version__ != record["triton"]:
        pytest.skip(f"counted with Triton {record['triton']}; this is {triton.__version__}")
    return record["capabilities"]


@pytest.mark.parametrize(
    ("call", "capability"),
    [(call, 90) if call in QUICK else later(call, 90) for call in WORKLOADS] + [later(call, 80) for call in WORKLOADS],
)
def test_nothing_spills_more_or_costs_more_than_what_is_committed(
    call: str, capability: int, committed: dict[str, Any]
) -> None:
    now = counts(call, capability)
    assert report.more_than(committed[str(capability)][call], now) == []
    assert all(kernel["shared"] <= MEMORY[capability] for kernel in now.values())


def test_budgets_are_met_or_say_why_not() -> None:
    calls = report.committed()["capabilities"]["90"]
    silent = [f"{budget.call}: {budget.unit} {cost}" for budget, cost in report.beyond(calls) if not budget.missed]
    assert silent == []
    excused = {budget for budget, _ in report.beyond(calls)}
    assert [budget for budget in report.BUDGETS if budget.missed and budget not in excused] == []


def test_more_is_noticed(committed: dict[str, Any]) -> None:
    before = committed["90"]["relu"]
    now = json.loads(json.dumps(before))
    assert report.more_than(before, now) == []
    now["forward"]["spills"] = 8
    now["forward"]["clocks"]["mufu"] = 100
    assert report.more_than(before, now) == ["forward spills 8 bytes", "mufu: 100 clocks, 0 before"]


def test_a_loop_is_not_what_waits_elsewhere() -> None:
    """A branch from code that stands behind the end of a loop is none of its own."""
    texts = ["MOV R1, 1", "@P0 BRA `(.L_x_3)", "FADD R1, R1, R1", "@P1 BRA `(.L_x_1)", "EXIT", "BRA `(.L_x_2)"]
    code = [Instruction(text.split()[1 if text[0] == "@" else 0], text) for text in texts]
    blocks, followers = blocks_of(code, {"L_x_1": 1, "L_x_2": 2, "L_x_3": 5})
    assert blocks == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    assert followers == [[1], [2, 4], [3, 1], [], [2]]
    assert [2 in passed for passed in dominators(followers)] == [False, False, True, True, False]


def test_clocks_of_tensor_cores() -> None:
    """A product of 64×64×16 takes 32 clocks of an H100; one of mma.sync is a quarter's, and slower than that."""
    wide = Instruction("HGMMA.64x64x16.F32.BF16", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24")
    assert tensor_work(wide, MACHINES[90]) == (32.0, 64 * 64 * 4, 64 * 16 * 2 // 2)
    narrow = Instruction("HMMA.16816.F32.BF16", "HMMA.16816.F32.BF16 R4, R8, R2, R4")
    assert tensor_work(narrow, MACHINES[80])[:2] == (8.0, 2048)
    assert tensor_work(narrow, MACHINES[90])[0] > 4.0


@pytest.mark.emulated
def test_published_kernels_are_predicted() -> None:
    for name, row in report.calibrated().items():
        low, high = row["published"]
        assert 0.9 * low <= row["predicted"] <= 1.1 * high, name


def test_the_main_loop_has_no_edges() -> None:
    _, kernel, _ = next(report.kernels_of("sigmoid", 90))
    assert len(kernel.loops) == 2
    assert isinstance(kernel.main, Loop)
    assert kernel.main.instructions == min(loop.instructions for loop in kernel.loops)
