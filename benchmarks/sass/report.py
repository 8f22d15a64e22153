"""Count the kernels of calls, print them, and compare them with what was committed and with their budgets."""

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sass import calibration, workloads
from benchmarks.sass.budgets import BUDGETS, Budget, Record, cost
from benchmarks.sass.clocks import MACHINES, UNITS, Kernel, Loop, counted, of_peak
from benchmarks.sass.compiling import compiled, device_of
from benchmarks.sass.workloads import WORKLOADS

RESULTS = Path(__file__).parents[1] / "results" / "predicted.json"
SLACK = 1.03  # of clocks, before they count as more


def kernels_of(call: str, capability: int) -> Iterator[tuple[str, Kernel, float]]:
    """The names of the kernels that a call spends its time in, their counts, and the units of work of an iteration."""
    workload = WORKLOADS[call]
    with device_of(capability):
        for launch in workload.launches():
            name = launch.kernel.fn.__name__
            if name not in workloads.BESIDE:
                yield name, counted(compiled(launch, capability), capability), workload.units(launch)


def record_of(kernel: Kernel, units: float, capability: int) -> Record:
    """The resources of a kernel and its main loop, per unit of work."""
    main = kernel.main
    clocks = {unit: round(main.clocks[unit] / units) for unit in UNITS}
    return {
        "registers": kernel.registers, "shared": kernel.shared, "spills": kernel.spills, "programs": kernel.programs,
        "barriers": main.kinds["barrier"], "clocks": clocks,
        "predicted": round(main.predicted / units),
        "peak": round(100 * of_peak(main.products, main.predicted, MACHINES[capability])),
    }  # fmt: skip


def lines_of(name: str, kernel: Kernel, units: float, capability: int) -> Iterator[str]:
    """A line for the resources of a kernel and one for each of its loops."""
    stack = f", {kernel.spills} bytes of stack" if kernel.spills else ""
    yield f"  {name}: {kernel.registers} registers, {kernel.shared} bytes shared, {kernel.programs} per SM{stack}"
    for loop in kernel.loops:
        yield ("   *" if loop is kernel.main else "    ") + line_of(loop, units, capability)


def line_of(loop: Loop, units: float, capability: int) -> str:
    clocks = "  ".join(f"{unit} {loop.clocks[unit] / units:.0f}" for unit in UNITS)
    share = of_peak(loop.products, loop.predicted, MACHINES[capability])
    barriers = loop.kinds["barrier"]
    return f"{clocks}  barriers {barriers}  -> {loop.predicted / units:.0f} clocks, {share:.0%} of peak (predicted)"


def calibrated() -> dict[str, Record]:
    """The published kernels: predicted beside published shares of the peak."""
    records = {}
    for name, (launch, low, high) in calibration.PUBLISHED.items():
        main = counted(compiled(launch, 90), 90).main
        share = of_peak(main.products, main.predicted, MACHINES[90])
        records[name] = {"predicted": round(100 * share), "published": [low, high]}
    return records


def more_than(before: dict[str, Record], now: dict[str, Record]) -> list[str]:
    """What the kernels of a call ask for beyond what they did: spills, and clocks beyond the slack."""
    worse = [f"{name} spills {x['spills']} bytes" for name, x in now.items() if x["spills"] > spills(before, name)]
    for unit in (*UNITS, "predicted"):
        old, new = cost(before, unit), cost(now, unit)
        if new > old * SLACK + 8:
            worse.append(f"{unit}: {new} clocks, {old} before")
    return worse


def spills(kernels: dict[str, Record], name: str) -> int:
    return kernels[name]["spills"] if name in kernels else 0


def beyond(calls: dict[str, dict[str, Record]]) -> list[tuple[Budget, int]]:
    """The budgets that are exceeded, of the calls that were counted, with the clocks."""
    costs = [(budget, cost(calls[budget.call], budget.unit)) for budget in BUDGETS if budget.call in calls]
    return [(budget, clocks) for budget, clocks in costs if clocks > budget.aim]


def committed() -> Record:
    """The counts of the repository."""
    record: Record = json.loads(RESULTS.read_text())
    return record
