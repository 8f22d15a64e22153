"""What one iteration of a loop asks of a multiprocessor, in clocks of each of its units, and a prediction from them.

Clocks are counted: instructions times what a unit takes for one. The prediction is a model with four constants, fitted
on kernels whose speed was published (`benchmarks.sass.calibration`): a unit that is busy half the time still costs the
others something, matrix products overlap with the rest as far as programs share a multiprocessor, a barrier costs what
its slowest warp waits, and the clock under load is below the nominal one.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.sass.compiling import Compiled
from benchmarks.sass.instructions import Instruction, inner_loops, longest_chain


class Machine(NamedTuple):
    """A multiprocessor; rates are per clock."""

    name: str
    tensor: int  # multiplications and additions of bfloat16
    floats: int  # lanes of float32 instructions
    shared: int  # bytes of shared memory
    mma_sync: float = 1.0  # share of `tensor` that mma.sync reaches
    mufu: int = 16
    alu: int = 64
    access: int = 32  # lanes that load and store
    warps: int = 64
    registers: int = 65536
    programs: int = 32


MACHINES = {80: Machine("A100", 1024, 64, 164 << 10), 90: Machine("H100", 2048, 128, 228 << 10, 0.62)}
SHARED_BYTES, L2_BYTES = 128, 40  # per clock; of the second-level cache, when all multiprocessors ask
SYSTEM = 1 << 10  # bytes of shared memory that the system takes of every program
SUSTAINED = 0.86  # clock under load, of the nominal one
BARRIER = 60  # clocks of a barrier of a program that is alone
OVERLAP = {"alone": 0.0, "shared": 0.2, "specialised": 0.05}  # share of the shorter of products and the rest that hides
NORM = 4  # units that are busy together: the root of the sum of the fourth powers of their clocks
UNITS = ("tensor", "issue", "mufu", "alu", "float", "shared", "access", "l2")


class Loop(NamedTuple):
    """One iteration of one program."""

    kinds: Counter[str]
    clocks: dict[str, float]  # of `UNITS`
    products: float  # multiplications and additions of tensor cores
    predicted: float  # clocks
    chain: tuple[int, int] = (0, 0)  # products and barriers that wait for one another

    @property
    def instructions(self) -> int:
        return self.kinds.total()


class Pass(NamedTuple):
    """A pass over the keys, or over what else a loop runs through."""

    times: int  # that an iteration is run for the units of work of a kernel
    loops: list[Loop]  # alternatives with the same products: tiles at edges have one of their own

    @property
    def main(self) -> Loop:
        """The one with the fewest instructions: the others also look at edges."""
        return min(self.loops, key=lambda loop: loop.instructions)


class Kernel(NamedTuple):
    """A compiled kernel as a multiprocessor sees it."""

    registers: int
    shared: int
    spills: int  # bytes of stack
    programs: int  # that fit on a multiprocessor
    passes: list[Pass]

    @property
    def work(self) -> Loop:
        """All passes, one after the other."""
        run = [each.main for each in self.passes for _ in range(each.times)]
        kinds = sum((loop.kinds for loop in run), Counter[str]())
        clocks = {unit: sum(loop.clocks[unit] for loop in run) for unit in UNITS}
        chain = sum(loop.chain[0] for loop in run), sum(loop.chain[1] for loop in run)
        return Loop(kinds, clocks, sum(x.products for x in run), sum(x.predicted for x in run), chain)


def passes_of(loops: list[Loop], times: Sequence[int]) -> list[Pass]:
    """The passes of a kernel, which are run so often: each has as many loops, one after the other, that multiply alike.

    AssertionError if that is not what the loops are: products are in a pass that is not declared.
    """
    multiplying = [loop for loop in loops if loop.products]
    each = len(multiplying) // len(times)
    passes = [Pass(n, multiplying[i * each : (i + 1) * each]) for i, n in enumerate(times)]
    products = ", ".join(f"{loop.products:g}" for loop in multiplying) or "no"
    fault = f"loops of {products} products are not {len(times)} passes"
    assert each * len(times) == len(multiplying) > 0, fault
    assert all(loop.products == one.loops[0].products for one in passes for loop in one.loops), fault
    return passes


def tensor_work(instruction: Instruction, machine: Machine) -> tuple[float, float, int]:
    """Clocks of a quarter of a multiprocessor for a warp, products, and bytes read from shared memory by a warp."""
    if shape := re.match(r"[HQ]GMMA\.64x(\d+)x(\d+)", instruction.opcode):  # of four warps together
        n, k = int(shape[1]), int(shape[2])
        width = 4 if "TF32" in instruction.opcode else 2
        both = re.search(r"GMMA\S*\s+R\d+, gdesc", instruction.text) is not None  # the left operand too
        products = 64 * n * k
        clocks = products / machine.tensor * width / 2
        return clocks, products / 4, (n * k + 64 * k * both) * width // 4
    shape = re.match(r"HMMA\.16(\d)(\d+)", instruction.opcode)
    assert shape is not None, instruction.opcode
    products = 16 * int(shape[1]) * int(shape[2])
    slow = 2 if "TF32" in instruction.opcode else 1
    return 4 * products * slow / (machine.tensor * machine.mma_sync), products, 0


def copied(instruction: Instruction, transfer: float) -> float:
    """Bytes that a warp brings from the second-level cache."""
    if instruction.kind in ("copy", "global load"):
        bits = re.search(r"\.(128|64)\b", instruction.opcode)
        return 32 * (int(bits[1]) // 8 if bits else 4)
    return transfer if instruction.opcode.startswith("UTMALDG") else 0.0


def loop_of(code: list[Instruction], kernel: Compiled, machine: Machine, programs: int) -> Loop:
    """The counts of a loop and the prediction."""
    warps, quarter = kernel.warps, kernel.warps / 4
    kinds = Counter(instruction.kind for instruction in code)
    tensor = products = fed = moved = 0.0
    for instruction in code:
        # a copy through a descriptor is issued by one thread
        share = 1 if instruction.kind == "bulk copy" else warps
        moved += copied(instruction, kernel.transfer) * share
        if instruction.kind == "tensor":
            busy, macs, read = tensor_work(instruction, machine)
            tensor, products, fed = tensor + busy * quarter, products + macs * warps, fed + read * warps

    def lanes(rate: int, *names: str) -> float:
        return sum(kinds[name] for name in names) * 32 * warps / rate

    matrices = 512 * (kinds["matrix load"] + kinds["matrix store"])
    words = 128 * (kinds["shared load"] + kinds["shared store"])
    clocks = {
        "tensor": tensor,
        "issue": kinds.total() * quarter,
        "mufu": lanes(machine.mufu, "mufu"),
        "alu": lanes(machine.alu, "alu", "conversion"),
        "float": lanes(machine.floats, "float") + lanes(machine.alu, "integer product"),
        "shared": (moved + fed + (matrices + words) * warps) / SHARED_BYTES,
        "access": lanes(machine.access, "shared load", "shared store", "shuffle") + matrices / 128 * warps,
        "l2": moved / L2_BYTES,
    }
    return Loop(kinds, clocks, products, predicted(clocks, kinds, kernel, programs), longest_chain(code))


def predicted(clocks: dict[str, float], kinds: Counter[str], kernel: Compiled, programs: int) -> float:
    """Clocks of an iteration of a program, when the multiprocessor is full."""
    vector = sum(clocks[unit] ** NORM for unit in ("issue", "mufu", "alu", "float", "access")) ** (1 / NORM)
    specialised = kernel.threads > 32 * kernel.warps
    form = "specialised" if specialised else "alone" if programs == 1 else "shared"
    long, short = max(vector, clocks["tensor"]), min(vector, clocks["tensor"])
    waiting = BARRIER * (kinds["barrier"] + kinds["arrival"] / 4) if form == "alone" else 0.0
    return max(clocks["l2"], clocks["shared"], long + short * (1 - OVERLAP[form]) + waiting)


def counted(kernel: Compiled, capability: int, times: Sequence[int] = (1,)) -> Kernel:
    """The counts of every pass of a kernel, which are run so often; partitions of warps run their loops beside one
    another.

    AssertionError if products are in no pass, or in one that is not declared.
    """
    machine, warps = MACHINES[capability], kernel.threads // 32
    by_registers = machine.registers // (-(-kernel.registers // 8) * 8 * kernel.threads)
    by_memory = machine.shared // (kernel.shared + SYSTEM)
    programs = max(1, min(by_registers, by_memory, machine.warps // warps, machine.programs))
    loops = [loop_of(code, kernel, machine, programs) for code in inner_loops(kernel.cubin)]
    if kernel.threads > 32 * kernel.warps:
        loops = [together(loops, kernel, programs)]
    return Kernel(kernel.registers, kernel.shared, kernel.stack, programs, passes_of(loops, times))


def together(loops: list[Loop], kernel: Compiled, programs: int) -> Loop:
    """The loops of partitions of warps, which run beside one another."""
    busy = [loop for loop in loops if loop.products or loop.kinds["bulk copy"] or loop.kinds["arrival"]]
    kinds = sum((loop.kinds for loop in busy), Counter[str]())
    clocks = {unit: sum(loop.clocks[unit] for loop in busy) for unit in UNITS}
    chain = max((loop.chain for loop in busy), key=sum)
    return Loop(kinds, clocks, sum(loop.products for loop in busy), predicted(clocks, kinds, kernel, programs), chain)


def of_peak(products: float, clocks: float, machine: Machine) -> float:
    """Share of what the tensor cores of a machine can, at its nominal clock."""
    return products / machine.tensor / clocks * SUSTAINED if clocks else 0.0
