"""The limits of the device: matrix products and copies, in the dtype and with the threads of the run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from benchmarks.cells import Cell
from benchmarks.timing import Call

SIDE = {"cpu": 1024, "cuda": 8192}
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes


class Ceiling(NamedTuple):
    """Rates of the device in one dtype."""

    flops_per_second: float
    bytes_per_second: float


def calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    """A product of square matrices, and a copy of memory that no cache holds. They take turns with the contenders."""
    side = SIDE[device]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}


def rates(device: str, seconds: Mapping[str, Sequence[float]]) -> Ceiling:
    """From the rounds of `calls`; a copied byte is read and written."""
    product, copy = (statistics.median(seconds[name]) for name in ("product", "copy"))
    return Ceiling(2 * SIDE[device] ** 3 / product, 2 * COPIED[device] / copy)


def ideal_seconds(cell: Cell, mode: str, ceiling: Ceiling) -> float:
    """The time at the ceiling of arithmetic or memory, whichever is longer."""
    return max(cell.flops(mode) / ceiling.flops_per_second, cell.bytes(mode) / ceiling.bytes_per_second)


def fraction(cell: Cell, mode: str, ceiling: Ceiling, seconds: list[float]) -> float:
    """The share of the ceiling reached by a contender."""
    return ideal_seconds(cell, mode, ceiling) / statistics.median(seconds)
