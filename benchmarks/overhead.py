"""The overhead of a call: attnkit and the hand-written expression on tiny torch tensors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import attnkit
from benchmarks.timing import Timing, interleave


def calls(device: str) -> dict[str, dict[str, Callable[[], Any]]]:
    """Per case, the hand-written expression and the same calls of attnkit, on (2, 4, 5, 8) arrays."""
    q, k, v = (torch.randn(2, 4, 5, 8, device=device) for _ in range(3))
    leaf = q.clone().requires_grad_()
    scale = 1.0 / math.sqrt(8)
    lower = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    lengths = torch.arange(1.0, 6.0, device=device)[:, None]
    table: dict[str, dict[str, Callable[[], Any]]] = {
        "relu": {
            "hand-written": lambda: torch.relu(q * scale @ k.mT) / 5 @ v,
            "attnkit": lambda: attnkit.pointwise_attention(q, k, v),
        },
        "relu, causal": {
            "hand-written": lambda: torch.relu(q * scale @ k.mT).masked_fill(~lower, 0.0) / lengths @ v,
            "attnkit": lambda: attnkit.pointwise_attention(q, k, v, causal=True),
        },
        "relu, gradient": {
            "hand-written": differentiable(lambda: torch.relu(leaf * scale @ k.mT) / 5 @ v),
            "attnkit": differentiable(lambda: attnkit.pointwise_attention(leaf, k, v)),
        },
        "softmax": {
            "hand-written": lambda: torch.softmax(q * scale @ k.mT, -1) @ v,
            "torch's SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
            "attnkit generic": lambda: attnkit.softmax_attention(q, k, v, impl="generic"),
            "attnkit auto": lambda: attnkit.softmax_attention(q, k, v),
        },
    }
    if device == "cpu":
        a, b, c = (x.numpy() for x in (q, k, v))
        table["relu, NumPy"] = {
            "hand-written": lambda: np.maximum(a * scale @ b.swapaxes(-1, -2), 0) / 5 @ c,
            "attnkit": lambda: attnkit.pointwise_attention(a, b, c),
        }
    return table


def differentiable(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call where gradients are recorded."""

    def recorded() -> Any:
        with torch.enable_grad():
            return call()

    return recorded


def measure(device: str, *, rounds: int = 15, repeats: int = 300) -> dict[str, dict[str, Timing]]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return {
        case: interleave(alternatives, rounds=rounds, repeats=repeats, wait=wait)
        for case, alternatives in calls(device).items()
    }


def lines(measured: dict[str, dict[str, Timing]]) -> list[str]:
    """A table: microseconds per call (median, lowest to highest) and the overhead over the hand-written expression."""
    table = [f"{'case':14}{'alternative':18}{'median':>9}{'lowest':>9}{'highest':>9}{'added':>9}   microseconds a call"]
    for case, timings in measured.items():
        base = timings["hand-written"].median
        for name, t in timings.items():
            cells = (t.median, t.lowest, t.highest, t.median - base)
            table.append(f"{case:14}{name:18}" + "".join(f"{1e6 * x:9.1f}" for x in cells))
    return table
