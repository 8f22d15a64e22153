"""Memory of a training step, counted on tensors without data: what is alive at once, and the largest tensor made.

Kernels on a GPU are not run: what they are launched with is there, outputs and memory of their own included.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnkit
from attnkit.backends.torch.triton import launch, pointwise

ROOT = Path(__file__).parents[1]
TOKENS, HEADS, WIDTH = 16_384, 8, 64
GIB = 1 << 30


class Memory(NamedTuple):
    """Bytes."""

    peak: int
    largest: int


class Live(TorchDispatchMode):
    """Adds up the storages that are alive after every operation; attnkit's own are looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def note(self, made: Any) -> None:
        """Count the tensors among the results of an operation."""
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(function._schema.name) if function.namespace == "attnkit" else None
        if own is None:
            made = function(*args, **(kwargs or {}))
        else:
            with self:
                made = own._init_fn(*args, **(kwargs or {}))
        self.note(made)
        return made


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Triton's kernels serve tensors without data, and their launches are made and not run."""
    with (
        patch.object(pointwise, "unsupported_device", lambda q: None),
        patch.object(launch, "run", lambda q, launches: [*launches]),
    ):
        yield


def of_step(op: Callable[..., Any], impl: Any, dtype: torch.dtype, **options: Any) -> Memory:
    """A forward and backward pass of `TOKENS` tokens."""
    with without_a_gpu(), Live() as live:
        q, k, v = (
            torch.empty(1, HEADS, TOKENS, WIDTH, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)
        )
        o = op(q, k, v, impl=impl, **options)
        o.backward(torch.empty_like(o))
    return Memory(live.peak, live.largest)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "softmax, padded": (attnkit.softmax_attention, {"key_lengths": TOKENS - 1}),
    "relu": (attnkit.pointwise_attention, {}),
    "gelu": (attnkit.pointwise_attention, {"activation": "gelu"}),
    "sigmoid": (attnkit.sigmoid_attention, {}),
    "gaussian": (attnkit.gaussian_attention, {}),
    "sparsemax": (attnkit.sparsemax_attention, {}),
    "entmax": (attnkit.entmax_attention, {}),
    "linear, causal": (attnkit.linear_attention, {"causal": True}),
}


def table() -> list[list[str]]:
    """Rows of GiB in bfloat16: the generic body, the kernels, and the largest tensor of each."""
    rows = [["call", "generic", "kernels", "largest, generic", "largest, kernels"]]
    for name, (op, options) in CALLS.items():
        both = [of_step(op, impl, torch.bfloat16, **options) for impl in ("generic", "triton")]
        rows.append([name, *(f"{x.peak / GIB:.2f}" for x in both), *(f"{x.largest / GIB:.2f}" for x in both)])
    return rows


def in_a_fresh_process() -> list[list[str]]:
    """The same where nothing has run before: garbage of others would count, and what calls remember."""
    code = "import json; from benchmarks import kept; print(json.dumps(kept.table()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    table: list[list[str]] = json.loads(done.stdout)
    return table
