"""What compiled kernels ask of a GPU does not grow, and the counting counts."""

import json
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.sass import clocks, compiling, fitted, report, workloads
from benchmarks.sass import instructions as machine_code
from benchmarks.sass.clocks import MACHINES, Loop, Pass, tensor_work
from benchmarks.sass.instructions import Instruction, blocks_of, counted_loops, dominators, longest_chain
from benchmarks.sass.workloads import COUNTED

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
    [(call, 90) if call in QUICK else later(call, 90) for call in COUNTED] + [later(call, 80) for call in COUNTED],
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
    assert [*committed[str(capability)]] == [*COUNTED]


def test_a_kernel_that_changed_is_named(committed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a function that a kernel calls; a call that was never counted."""
    monkeypatch.setattr(report, "COUNTED", {call: COUNTED[call] for call in ("relu", "sigmoid", "softmax")})
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
    now["forward"]["programs"] = 1
    assert report.more_than(before, now) == [
        "forward spills 8 bytes",
        "forward: 1 programs on a multiprocessor, 2 before",
        "mufu: 100 clocks, 0 before",
    ]


def test_a_loop_is_not_what_waits_elsewhere() -> None:
    """A branch from code that stands behind the end of a loop is none of its own."""
    texts = ["MOV R1, 1", "@P0 BRA `(.L_x_3)", "FADD R1, R1, R1", "@P1 BRA `(.L_x_1)", "EXIT", "BRA `(.L_x_2)"]
    code = [Instruction(text.split()[1 if text[0] == "@" else 0], text) for text in texts]
    blocks, followers = blocks_of(code, {"L_x_1": 1, "L_x_2": 2, "L_x_3": 5})
    assert blocks == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    assert followers == [[1], [2, 4], [3, 1], [], [2]]
    assert [2 in passed for passed in dominators(followers)] == [False, False, True, True, False]


def test_a_loop_with_products_is_counted_with_what_it_repeats() -> None:
    """Blocks 1 to 4 multiply around a loop of block 3, which may too; 6 is a loop beside them."""
    outer, inner, beside = {1, 2, 3, 4}, {3}, {6}
    assert counted_loops([outer, inner, beside], {2}) == [outer, beside]
    assert counted_loops([outer, inner, beside], {3}) == [inner, beside]
    assert counted_loops([outer, inner, beside], {2, 3}) == [outer - inner, inner, beside]
    assert counted_loops([outer, inner, beside], set()) == [inner, beside]


def test_products_outside_of_the_loops_that_are_counted_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no loop multiplies, the kernel is counted from its start to its end."""
    product = Instruction("HMMA.16816.F32", "HMMA.16816.F32 R4, R8, R2, R4")
    add, back = Instruction("FADD", "FADD R1, R1, R1"), Instruction("BRA", "@P0 BRA `(.L_x_1)")
    codes = {b"outside": [product, *[add] * 6, product, back], b"once": [product, *[add] * 7, back]}
    monkeypatch.setattr(machine_code, "instructions", lambda cubin: (codes[cubin], {"L_x_1": 1}))
    with pytest.raises(AssertionError, match="outside of the loops"):
        machine_code.inner_loops(b"outside")
    assert machine_code.inner_loops(b"once") == [codes[b"once"]]


def test_passes_are_those_declared() -> None:
    """Loops with as many products are alternatives, of which one is counted; passes with others are added."""

    def loop(products: int, instructions: int = 9) -> Loop:
        return Loop(Counter(float=instructions), dict.fromkeys(clocks.UNITS, 1.0), products, 10.0 * products, (1, 2))

    edges, sweeps = [loop(2, 5), loop(2)], [loop(2), loop(3)]
    assert clocks.passes_of(edges, (1,)) == [Pass(1, edges)]
    assert [each.main for each in clocks.passes_of([*edges, loop(3), loop(3, 7)], (1, 1))] == [edges[0], loop(3, 7)]
    assert clocks.passes_of(edges, (1, 4)) == [Pass(1, edges[:1]), Pass(4, edges[1:])]
    work = clocks.Kernel(32, 0, 0, 1, clocks.passes_of([loop(0), *sweeps], (1, 2))).work
    assert (work.products, work.predicted, work.chain, work.instructions) == (8, 80.0, (3, 6), 27)
    for loops, times in ((sweeps, (1,)), (edges, (1, 1, 1)), ([*edges, loop(3)], (1, 1)), ([loop(0)], (1,))):
        with pytest.raises(AssertionError, match=f"are not {len(times)} passes"):
            clocks.passes_of(loops, times)


@pytest.mark.parametrize(
    ("call", "name", "products"),
    [
        ("softmax, gradients", "backward_tiled", 5 * workloads.PAIRS * 64),
        later("softpick, gradients", "backward_tiled", 5 * workloads.PAIRS * 64),
        later("linear, decay, gradients", "gradient_gates", 4 * 5 * 64**3),
    ],
)
def test_every_product_of_a_kernel_of_several_passes_is_counted(call: str, name: str, products: int) -> None:
    """Two for δ and three for dq; those of gates are of float32, five of TF32 for each."""
    launch = next(launch for own, launch in report.launches_of(call) if own == name)
    with compiling.device_of(90):
        kernel = compiling.compiled(launch, 90)
    counts = clocks.counted(kernel, 90, workloads.times_of(launch))
    assert counts.work.products == products * COUNTED[call].units(launch)
    with pytest.raises(AssertionError, match="are not 1 passes"):
        clocks.counted(kernel, 90)


def test_kernels_that_are_launched_twice_are_counted_twice(committed: dict[str, Any]) -> None:
    names = [name for name, _ in report.launches_of("linear, decay, gradients")]
    assert names[:6] == ["key_sums", "sweep_queries", "query_sums", "sweep_keys", "key_sums 2", "query_sums 2"]
    assert [*committed["90"]["linear, decay, gradients"]] == names


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
    typical, most = fitted.off_by(rows, lambda call: found.clocks(calls[call].values()))
    assert typical < 1.25 < 1.35 < fitted.off_by(rows, lambda call: plain.clocks(calls[call].values()))[0]
    assert most < 1.4


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


def test_the_loop_that_is_counted_has_no_edges() -> None:
    _, kernel, _ = next(report.kernels_of("sigmoid", 90))
    (only,) = kernel.passes
    assert len(only.loops) == 2
    assert kernel.work.instructions == only.main.instructions == min(loop.instructions for loop in only.loops)
