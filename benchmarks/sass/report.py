"""Count the kernels of calls, print them, and compare them with what was committed and with their budgets."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sass import calibration, workloads
from benchmarks.sass.budgets import BUDGETS, Budget, Record, cost
from benchmarks.sass.clocks import MACHINES, UNITS, Kernel, Loop, counted, of_peak
from benchmarks.sass.compiling import compiled, device_of, digest_of
from benchmarks.sass.workloads import COUNTED, Launch

RESULTS = Path(__file__).parents[1] / "results" / "predicted.json"
SLACK = 1.03  # of clocks, before they count as more
BEYOND = 1.05  # of a budget


def launches_of(call: str) -> Iterator[tuple[str, Launch]]:
    """The names of the kernels that a call spends its time in, from the second launch on with a number, and these."""
    seen = Counter[str]()
    for launch in COUNTED[call].launches():
        if (name := launch.kernel.fn.__name__) not in workloads.BESIDE:
            seen[name] += 1
            yield f"{name} {seen[name]}" if seen[name] > 1 else name, launch


def kernels_of(call: str, capability: int) -> Iterator[tuple[str, Kernel, float]]:
    """These names, the counts of the kernels, and the units of work of an iteration."""
    with device_of(capability):
        for name, launch in launches_of(call):
            kernel = counted(compiled(launch, capability), capability, workloads.times_of(launch))
            yield name, kernel, COUNTED[call].units(launch)


def digests_of(call: str, capability: int) -> dict[str, str]:
    """Of what each kernel of a call is compiled from, by name."""
    with device_of(capability):
        return {name: digest_of(launch) for name, launch in launches_of(call)}


def changed(record: Record, capability: int) -> list[str]:
    """The calls whose kernels are not those that were counted for a record, or were never counted."""
    known = record["capabilities"].get(str(capability), {})
    return [
        call
        for call in COUNTED
        if digests_of(call, capability) != {name: x.get("source") for name, x in known.get(call, {}).items()}
    ]


def counts_of(call: str, capability: int) -> tuple[dict[str, Record], list[str]]:
    """What is committed of the kernels of a call, by name, and lines for people."""
    digests, counts, lines = digests_of(call, capability), dict[str, Record](), list[str]()
    for name, kernel, units in kernels_of(call, capability):
        counts[name] = record_of(kernel, units, capability) | {"source": digests[name]}
        lines += lines_of(name, kernel, units, capability)
    return counts, lines


def still_true(record: Record, version: str) -> Record:
    """The counts of a record that are of a call that there is; none if another version of Triton counted."""
    capabilities = record["capabilities"] if record.get("triton") == version else {}
    kept = {name: {call: x for call, x in calls.items() if call in COUNTED} for name, calls in capabilities.items()}
    return record | {"triton": version, "capabilities": kept}


def record_of(kernel: Kernel, units: float, capability: int) -> Record:
    """The resources of a kernel and of its passes, per unit of work; the chain is that of an iteration. If there are
    several passes, also what is predicted for one of each."""
    work, each = kernel.work, [round(one.main.predicted / units) for one in kernel.passes]
    clocks = {unit: round(work.clocks[unit] / units) for unit in UNITS}
    return {
        "registers": kernel.registers, "shared": kernel.shared, "spills": kernel.spills, "programs": kernel.programs,
        "barriers": work.kinds["barrier"], "chain": work.chain, "units": units, "clocks": clocks,
        "predicted": round(work.predicted / units),
        "peak": round(100 * of_peak(work.products, work.predicted, MACHINES[capability])),
        **({"passes": each} if len(each) > 1 else {}),
    }  # fmt: skip


def lines_of(name: str, kernel: Kernel, units: float, capability: int) -> Iterator[str]:
    """A line for the resources of a kernel and one for each loop of its passes, with how often those are run that are
    counted."""
    stack = f", {kernel.spills} bytes of stack" if kernel.spills else ""
    yield f"  {name}: {kernel.registers} registers, {kernel.shared} bytes shared, {kernel.programs} per SM{stack}"
    for each in kernel.passes:
        for loop in each.loops:
            yield (f"  {each.times}×" if loop is each.main else "    ") + line_of(loop, units, capability)


def line_of(loop: Loop, units: float, capability: int) -> str:
    clocks = "  ".join(f"{unit} {loop.clocks[unit] / units:.0f}" for unit in UNITS)
    share = of_peak(loop.products, loop.predicted, MACHINES[capability])
    barriers = loop.kinds["barrier"]
    return f"{clocks}  barriers {barriers}  -> {loop.predicted / units:.0f} clocks, {share:.0%} of peak (predicted)"


def calibrated() -> dict[str, Record]:
    """The published kernels: predicted beside published shares of the peak."""
    records = {}
    for name, (launch, low, high) in calibration.PUBLISHED.items():
        work = counted(compiled(launch, 90), 90).work
        share = of_peak(work.products, work.predicted, MACHINES[90])
        records[name] = {"predicted": round(100 * share), "published": [low, high]}
    return records


def more_than(before: dict[str, Record], now: dict[str, Record]) -> list[str]:
    """What the kernels of a call ask for beyond what they did: spills, room on a multiprocessor, and clocks beyond the
    slack."""
    pairs = [(name, before.get(name, {"spills": 0, "programs": 0}), x) for name, x in now.items()]
    worse = [f"{name} spills {x['spills']} bytes" for name, old, x in pairs if x["spills"] > old["spills"]]
    worse += [
        f"{name}: {x['programs']} programs on a multiprocessor, {old['programs']} before"
        for name, old, x in pairs
        if x["programs"] < old["programs"]
    ]
    for unit in (*UNITS, "predicted"):
        clocks, most = cost(now, unit), cost(before, unit)
        if clocks > most * SLACK + 8:
            worse.append(f"{unit}: {clocks} clocks, {most} before")
    return worse


def beyond(calls: dict[str, dict[str, Record]]) -> list[tuple[Budget, int]]:
    """The budgets that are exceeded, of the calls that were counted, with the clocks."""
    costs = [(budget, cost(calls[budget.call], budget.unit)) for budget in BUDGETS if budget.call in calls]
    return [(budget, clocks) for budget, clocks in costs if clocks > budget.aim * BEYOND]


def committed() -> Record:
    """The counts of the repository."""
    record: Record = json.loads(RESULTS.read_text())
    return record


def write(record: Record, path: Path = RESULTS) -> Path:
    """Calls in the order of `COUNTED`."""
    ordered = {
        capability: {call: calls[call] for call in COUNTED if call in calls}
        for capability, calls in record["capabilities"].items()
    }
    path.write_text(json.dumps(record | {"capabilities": ordered}, indent=1) + "\n")
    return path
