"""What compiled kernels ask of a GPU does not grow, and the counting counts."""

import json
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.sass import clocks, compiling, fitted, report
from benchmarks.sass.clocks import MACHINES, Loop, tensor_work
from benchmarks.sass.compiling import Compiled
from benchmarks.sass.instructions import Instruction, blocks_of, counted_loops, dominators, longest_chain
from benchmarks.sass.workloads import WORKLOADS

from .selection import later
from .spills import MEMORY

QUICK = ("sigmoid", "statistics: sums, maximum", "linear, causal")


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
    now, _ = report.counts_of(call, capability)
    assert report.more_than(committed[str(capability)][call], now) == []
    assert all(kernel["shared"] <= MEMORY[capability] for kernel in now.values())


@pytest.mark.parametrize("capability", [80, 90])
def test_what_is_committed_was_counted_of_these_kernels(capability: int, committed: dict[str, Any]) -> None:
    """Code, constants, types and tiles; if not, `python -m benchmarks sass --changed` counts these calls again."""
    assert report.changed({"capabilities": committed}, capability) == []
    assert [*committed[str(capability)]] == [*WORKLOADS]


def test_a_kernel_that_changed_is_named(committed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a function that a kernel calls; a call that was never counted."""
    monkeypatch.setattr(report, "WORKLOADS", {call: WORKLOADS[call] for call in ("relu", "sigmoid", "softmax")})
    assert report.changed({"capabilities": committed}, 90) == []
    known = {call: kernels for call, kernels in committed["90"].items() if call != "relu"}
    assert report.changed({"capabilities": {"90": known}}, 90) == ["relu"]
    monkeypatch.setattr(compiling, "essence", lambda code: code.replace("1.0", "2.0"))
    assert "sigmoid" in report.changed({"capabilities": committed}, 90)


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


def test_a_loop_with_products_is_counted_with_what_it_repeats() -> None:
    """Blocks 1 to 4 multiply around a loop of block 3, which does not; 6 is a loop beside them."""
    outer, inner, beside = {1, 2, 3, 4}, {3}, {6}
    assert counted_loops([outer, inner, beside], {2}) == [outer, beside]
    assert counted_loops([outer, inner, beside], {2, 3}) == [inner, beside]
    assert counted_loops([outer, inner, beside], set()) == [inner, beside]


def test_products_that_are_not_counted_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "inner_loops", lambda cubin: [])
    kernel = Compiled(b"", "mma.sync.aligned.m16n8k16", 4, 128, 64, 0, 0, 0, 0.0)
    with pytest.raises(AssertionError, match="products are in the code"):
        clocks.counted(kernel, 90)
    assert clocks.counted(kernel._replace(ptx=""), 90).loops == []


def test_the_longest_chain_of_products_and_barriers() -> None:
    """Two products into the same sums are one step; one that reads them is another, and a barrier waits for both."""
    texts = [
        "HMMA.16816.F32.BF16 R4, R8, R2, R4",
        "HMMA.16816.F32.BF16 R4, R10, R3, R4",
        "FADD R20, R6, R1",
        "HMMA.16816.F32.BF16 R12, R20, R2, R12",
        "HMMA.16816.F32.BF16 R40, R44, R46, R40",
    ]
    code = [Instruction(text.split()[0], text) for text in texts]
    barrier = Instruction("BAR.SYNC", "BAR.SYNC 0x0")
    assert longest_chain(code) == (2, 0)
    assert longest_chain([*code, barrier]) == (2, 1)
    assert longest_chain([code[0], barrier, code[4]]) == (2, 1)


def test_the_fit_is_better_than_the_counts() -> None:
    calls, rows = fitted.counted(), fitted.timed()
    plain, found = fitted.Fit(1.0, 0.0), fitted.fit(calls)
    typical, most = fitted.off_by(rows, lambda call: found.clocks(calls[call]))
    assert typical < 1.35 < fitted.off_by(rows, lambda call: plain.clocks(calls[call]))[0]
    assert most < 1.75


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
