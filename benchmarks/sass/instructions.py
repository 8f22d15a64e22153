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


def inner_loops(cubin: bytes) -> list[tuple[list[Instruction], bool]]:
    """The instructions of loops that compute and have no such loop within, and whether they are in one.

    A loop is a branch to a block that every way to the branch passes, with all that lies between: code that waits for
    a copy stands elsewhere and branches back too.
    """
    code, labels = instructions(cubin)
    blocks, followers = blocks_of(code, labels)
    passed = dominators(followers)
    before = {n: [other for other, after in enumerate(followers) if n in after] for n in range(len(blocks))}
    loops: dict[int, set[int]] = {}
    for n, after in enumerate(followers):
        for head in after:
            if head in passed[n]:
                body, open_ = loops.setdefault(head, {head}), [n]
                while open_:
                    if (block := open_.pop()) not in body:
                        body.add(block)
                        open_ += before[block]
    sizes = {head: sum(blocks[n][1] - blocks[n][0] for n in body) for head, body in loops.items()}
    computing = {head: body for head, body in loops.items() if sizes[head] >= SHORTEST}
    inner = [body for body in computing.values() if not any(other < body for other in computing.values())]
    return [
        (
            [step for n in sorted(body) for step in code[blocks[n][0] : blocks[n][1]]],
            any(body < other for other in computing.values()),
        )
        for body in inner
    ]
