"""The table of comparisons: cells, each an op on arrays of one shape and dtype."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

FORWARD, BOTH = "forward", "forward+backward"
FIELDS = ("entropy", "sum_squares", "maximum")  # of row statistics
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Op(NamedTuple):
    """attnkit's function, its options, and its heading."""

    function: str
    options: dict[str, Any]
    title: str


OPS = {
    "softmax": Op("softmax_attention", {}, "Softmax attention"),
    "relu": Op("pointwise_attention", {}, "ReLU attention, relu(s)/n"),
    "sigmoid": Op("sigmoid_attention", {}, "Sigmoid attention"),
    "gelu": Op("pointwise_attention", {"activation": "gelu"}, "GELU attention, gelu(s)/n"),
    "sparsemax": Op("sparsemax_attention", {}, "Sparsemax attention"),
    "entmax15": Op("entmax_attention", {"alpha": 1.5}, "1.5-entmax attention"),
    "gaussian": Op("gaussian_attention", {}, "Gaussian attention"),
    "linear": Op("linear_attention", {}, "Linear attention, elu + 1"),
    "statistics": Op("row_statistics", {"fields": FIELDS}, "Row statistics of softmax: entropy, Σw², maximum"),
}
MAIN = ("softmax", "relu", "linear")
FIRST_LENGTHS = (197, 1024, 4096)
GPU_LENGTHS = (1024, 2048, 4096, 8192)
TOKENS = 16384


class Cell(NamedTuple):
    """One comparison: arrays (batch, heads, n, d)."""

    op: str
    n: int
    causal: bool = False
    d: int = 64
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The name matched by `-k`."""
        form = "causal" if self.causal else "full"
        return f"{self.op} {form} n={self.n} d={self.d} {self.dtype}"

    @property
    def modes(self) -> tuple[str, ...]:
        """The function to time."""
        return (FORWARD,) if self.op == "statistics" else (FORWARD, BOTH)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.n, self.d

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def flops(self, mode: str) -> float:
        """FLOPs of the unavoidable matrix products: 2 forward and 5 backward, 1 for row statistics."""
        rows = self.batch * self.heads * self.n
        if self.op == "linear":  # kᵀv, q S; backward recomputes S, then dS and the three gradients
            return 2 * rows * self.d**2 * (2 if mode == FORWARD else 7)
        products = 1 if self.op == "statistics" else 2 if mode == FORWARD else 7
        return 2 * rows * self.n * self.d * products * (0.5 if self.causal else 1.0)

    def bytes(self, mode: str) -> float:
        """Bytes of the arrays, each read or written once: q, k, v, o; backward q, k, v, do and three gradients."""
        arrays = 2 if self.op == "statistics" else 4 if mode == FORWARD else 11
        return math.prod(self.shape) * ITEM_BYTES[self.dtype] * arrays


def both_forms(op: str) -> tuple[bool, ...]:
    """Full, and causal for the main ops."""
    return (False, True) if op in MAIN else (False,)


def on_cpu() -> Iterator[Cell]:
    """Eight heads of 64 in float32; a few with d = 128 and in bfloat16."""
    for op in OPS:
        for causal in both_forms(op):
            for n in (256, 1024, 4096 if op in MAIN else 2048):
                yield Cell(op, n, causal)
    for op, causal in (("softmax", False), ("relu", False), ("linear", True)):
        yield Cell(op, 1024, causal, d=128)
        yield Cell(op, 1024, causal, dtype="bfloat16")


def on_cuda() -> Iterator[Cell]:
    """16k tokens of width 1024 in bfloat16, in heads of 64 and of 128; half and single precision; a vision
    transformer's 197 tokens."""
    for op in OPS:
        for d in (64, 128):
            for causal in both_forms(op):
                for n in (*GPU_LENGTHS, TOKENS) if op in MAIN else GPU_LENGTHS:
                    yield Cell(op, n, causal, d, "bfloat16", TOKENS // n, 1024 // d, "cuda")
            yield Cell(op, 197, False, d, "bfloat16", 128, 768 // d, "cuda")
    for op, causal in (("softmax", False), ("relu", False), ("relu", True), ("linear", True)):
        for dtype in ("float32", "float16"):
            yield Cell(op, 4096, causal, 64, dtype, 4, 16, "cuda")


def smoke(device: str) -> Iterator[Cell]:
    """Everything, small."""
    for op in OPS:
        for causal in both_forms(op):
            for n in (128, 512):
                yield Cell(op, n, causal, dtype="float32" if device == "cpu" else "bfloat16", device=device)


def cells(profile: str, device: str) -> list[Cell]:
    """The table."""
    if profile == "smoke":
        return list(smoke(device))
    return list(on_cpu()) if device == "cpu" else sorted(on_cuda(), key=turn)


def turn(cell: Cell) -> tuple[bool, int, int]:
    """The place of a cell among those of a GPU, whose time may end before the last."""
    return cell.n not in FIRST_LENGTHS or cell.dtype != "bfloat16", cell.d, cell.n
