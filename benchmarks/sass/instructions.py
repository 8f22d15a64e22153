"""The machine instructions of a kernel and its inner loops."""

import itertools
import re
from typing import NamedTuple

from benchmarks.sass.compiling import disassembly

KINDS = {
    "tensor": r"[HQ]GMMA|[HI]MMA",
    "mufu": r"MUFU",
    "float": r"FMUL|FADD|FFMA|HFMA2|HADD2|HMUL2|FFMA2|FADD2|FMUL2",
    "integer product": r"IMAD",
    "conversion": r"(F2F|I2F|F2I|FRND|I2FP)\b",
    "alu": (
        r"F2FP|FMNMX|FSETP|FSEL|FSET|FCHK|IADD|LOP|ISETP|SEL|SHF|LEA|PRMT|IABS|VIADD|PLOP|IMNMX|VIMNMX|HMNMX|HSET"
        r"|ISCADD|BMSK|SGXT|FLO|POPC|VHMNMX"
    ),
    "bulk copy": r"UTMALDG|UTMASTG|UBLKCP|UTMAREDG",
    "move": r"MOV|CS2R|S2R\b|P2R|R2P",
    "uniform": r"U[A-Z]|R2UR|S2UR|ELECT|VOTEU|REDUX",
    "shuffle": r"SHFL",
    "shared load": r"LDS\b",
    "shared store": r"STS\b",
    "matrix load": r"LDSM",
    "matrix store": r"STSM",
    "copy": r"LDGSTS",
    "global load": r"LDG\b",
    "global store": r"STG\b",
    "barrier": r"BAR\b",
    "arrival": r"SYNCS",
    "wait": r"WARPGROUP|WARPSYNC|DEPBAR|LDGDEPBAR",
    "fence": r"FENCE|MEMBAR",
    "spill": r"LDL|STL",
    "atomic": r"RED\b|ATOM",
    "control": r"BRA|BSSY|BSYNC|NANOSLEEP|YIELD|EXIT|NOP|CALL|RET|WARPSYNC",
}
"""Kind of instruction -> its opcodes, as a pattern; the first that matches counts."""
SHORTEST = 7  # instructions of a loop that computes; shorter ones wait


class Instruction(NamedTuple):
    opcode: str
    text: str

    @property
    def kind(self) -> str:
        return next((kind for kind, pattern in KINDS.items() if re.match(pattern, self.opcode)), "other")

    @property
    def target(self) -> str | None:
        """The label that it branches to."""
        label = re.search(r"`\(\.(L_x_\d+)\)", self.text) if self.opcode.startswith("BRA") else None
        return label and label[1]

    @property
    def last(self) -> bool:
        """Whether what follows runs only if something branches there."""
        leaves = self.opcode.startswith(("BRA", "EXIT", "RET", "BRX"))
        return leaves and not re.match(r"@(?!PT)|BRA\.\w+\s+U?P|BRA\s+!?U?P\d", self.text)


Block = tuple[int, int]  # first instruction, and the one after the last


def instructions(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel in order, and the label -> the number of the instruction that it stands before."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in disassembly(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*(?:\{\s*)?/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            text = found[1].strip()
            code.append(Instruction(re.sub(r"^@!?U?P\w+\s+", "", text).split()[0], text))
    return code, labels


def blocks_of(code: list[Instruction], labels: dict[str, int]) -> tuple[list[Block], list[list[int]]]:
    """Blocks without branches within, in order, and the blocks that may follow each."""
    starts = {0, *labels.values(), *(n + 1 for n, step in enumerate(code) if step.target or step.last)} - {len(code)}
    edges = [*sorted(starts), len(code)]
    blocks = [*itertools.pairwise(edges)]
    number = {first: n for n, (first, _) in enumerate(blocks)}
    followers = []
    for n, (_, stop) in enumerate(blocks):
        end = code[stop - 1]
        after = [] if end.last or n + 1 == len(blocks) else [n + 1]
        followers.append(after + ([number[labels[end.target]]] if end.target else []))
    return blocks, followers


def dominators(followers: list[list[int]]) -> list[set[int]]:
    """The blocks that every way to a block passes."""
    before: list[list[int]] = [[] for _ in followers]
    for n, after in enumerate(followers):
        for other in after:
            before[other].append(n)
    everything = {*range(len(followers))}
    passed = [everything if before[n] and n else {n} for n in range(len(followers))]
    changed = True
    while changed:
        changed = False
        for n in range(1, len(followers)):
            if before[n]:
                now = {n} | set.intersection(*(passed[other] for other in before[n]))
                changed, passed[n] = changed or now != passed[n], now
    return passed


def loops_of(followers: list[list[int]]) -> dict[int, set[int]]:
    """The first block of every loop -> its blocks.

    A loop is a branch to a block that every way to the branch passes, with all that lies between: code that waits for
    a copy stands elsewhere and branches back too.
    """
    passed = dominators(followers)
    before = {n: [other for other, after in enumerate(followers) if n in after] for n in range(len(followers))}
    loops: dict[int, set[int]] = {}
    for n, after in enumerate(followers):
        for head in after:
            if head in passed[n]:
                body, open_ = loops.setdefault(head, {head}), [n]
                while open_:
                    if (block := open_.pop()) not in body:
                        body.add(block)
                        open_ += before[block]
    return loops


def counted_loops(bodies: list[set[int]], multiply: set[int]) -> list[set[int]]:
    """What is counted of loops: of each what no loop in it counts, if it has products, with what it repeats beside
    them; and innermost loops without products elsewhere. `multiply`: the blocks with products.
    """
    products = [body for body in bodies if body & multiply]
    own = [body.difference(*(other for other in products if other < body)) for body in products]
    own = [body for body in own if body & multiply]
    rest = [body for body in bodies if body not in products and not any(body <= other for other in own)]
    return own + [body for body in rest if not any(other < body for other in bodies)]


def inner_loops(cubin: bytes) -> list[list[Instruction]]:
    """The instructions of the loops that are counted, in order.

    If products are in none of them, the whole kernel is one: a program multiplies once. AssertionError if some are, and
    others are in none.
    """
    code, labels = instructions(cubin)
    blocks, followers = blocks_of(code, labels)
    multiply = {n for n, block in enumerate(blocks) if any(step.kind == "tensor" for step in code[slice(*block)])}
    loops = loops_of(followers).values()
    computing = [body for body in loops if sum(blocks[n][1] - blocks[n][0] for n in body) >= SHORTEST]
    if multiply and not any(body & multiply for body in computing):
        return [code]
    bodies = sorted(counted_loops(computing, multiply), key=min)
    assert multiply <= set[int]().union(*bodies), "products are outside of the loops that are counted"
    return [[step for n in sorted(body) for step in code[slice(*blocks[n])]] for body in bodies]


STORES = ("shared store", "matrix store", "global store", "atomic", "control", "spill")  # no register changes


def made_by(step: Instruction) -> tuple[list[str], list[str]]:
    """The registers that an instruction writes, those of a product all, and those that it reads."""
    operands = re.sub(r"^(@\S+\s+)?\S+\s*", "", step.text)
    names = re.findall(r"\bU?R\d+\b", operands)
    if step.kind in STORES or not re.match(r"U?R\d", operands):
        return [], names
    to, *sources = names
    shape = re.match(r"[HQ]GMMA\.64x(\d+)x", step.opcode)
    wide = int(shape[1]) // 2 if shape else 4 if step.kind == "tensor" else 1
    first = int(to.lstrip("UR"))
    return [to, *(f"R{first + n}" for n in range(1, wide))], sources


def longest_chain(code: list[Instruction]) -> tuple[int, int]:
    """The products and the barriers on the longest way of results that wait for one another in an iteration.

    A barrier waits for all before it. A product that adds to what the one before it made does not wait: tensor cores
    take both in a row. Memory is followed through barriers alone. Longest is the way with the most of both together.
    """
    depth: dict[str, tuple[int, int]] = {}
    floor = deepest = (0, 0)
    for step in code:
        if step.kind == "barrier":
            floor = deepest = (deepest[0], deepest[1] + 1)
            continue
        written, read = made_by(step)
        if not written:
            continue
        now = max((depth.get(name, floor) for name in read if name not in written), key=sum, default=floor)
        now = max(now, floor, key=sum)
        if step.kind == "tensor":
            now = max((now[0] + 1, now[1]), depth.get(written[0], floor), key=sum)
        depth |= dict.fromkeys(written, now)
        deepest = max(deepest, now, key=sum)
    return deepest
