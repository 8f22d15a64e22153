"""What the device can do at best: products of matrices and copies, measured in the dtype and threads of the run."""

import statistics
from typing import NamedTuple

import torch

from benchmarks.cells import Cell
from benchmarks.timing import Call, repeats_for, seconds_per_call

SIDE = {"cpu": 1024, "cuda": 8192}
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes


class Ceiling(NamedTuple):
    """Rates of the device in one dtype."""

    flops_per_second: float
    bytes_per_second: float


def best(call: Call, wait: Call, rounds: int = 5) -> float:
    """Seconds of the fastest round."""
    call()
    repeats = repeats_for(call, 0.02, wait)
    return min(seconds_per_call(call, repeats, wait) for _ in range(rounds))


def measure(device: str, dtype: torch.dtype, wait: Call) -> Ceiling:
    """A product of square matrices, and a copy of memory that no cache holds: a byte read and a byte written."""
    side = SIDE[device]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Ceiling(
        2 * side**3 / best(lambda: torch.mm(a, b, out=out), wait),
        2 * COPIED[device] / best(lambda: target.copy_(source), wait),
    )


def ideal_seconds(cell: Cell, mode: str, ceiling: Ceiling) -> float:
    """What arithmetic or memory, whichever takes longer, would need at the ceiling."""
    return max(cell.flops(mode) / ceiling.flops_per_second, cell.bytes(mode) / ceiling.bytes_per_second)


def fraction(cell: Cell, mode: str, ceiling: Ceiling, seconds: list[float]) -> float:
    """Share of the ceiling that a contender reaches."""
    return ideal_seconds(cell, mode, ceiling) / statistics.median(seconds)
