"""From how many pairs or tokens on the kernels of a GPU are not slower than the generic body.

What `attnkit.kernels.predicted` predicts, measured: training steps of `impl="triton"` and of `impl="generic"` take
turns, for kinds of calls, dtypes, head sizes and numbers of sequences; of calls with one query, whose keys become more
from call to call as in decoding, and of steps of linear attention, the forward alone.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnkit
from attnkit.kernels import predicted
from benchmarks.timing import Call, ratio, repeats_for, rounds_of, summary

TOKENS, HEADS = 256, 2
ITEMS = (1, 4, 16, 64)
KEYS = (256, 1024, 4096, 16384)  # of the first query
MORE = 1024  # at most
STATES = (16, 64, 256)  # sequences that take a step
WIDTHS = (64, 128)
DTYPES = ("bfloat16", "float32")
AT_LEAST = 4e-3  # seconds of one timing
IMPLEMENTATIONS = ("triton", "generic")
Attend = Callable[..., Any]


def statistics(q: Tensor, k: Tensor, v: Tensor, *, impl: str) -> tuple[Any, ...]:
    """o and the entropies."""
    o, rows = attnkit.attention_with_statistics(attnkit.softmax_attention, q, k, v, fields=("entropy",), impl=impl)
    return o, rows.entropy


def rela(q: Tensor, k: Tensor, v: Tensor, *, impl: str) -> Tensor:
    gamma = torch.ones(q.shape[-3] * v.shape[-1], dtype=q.dtype, device=q.device)
    return attnkit.rela_attention(q, k, v, gamma, impl=impl)


STEPS: dict[str, Attend] = {
    "pointwise": attnkit.pointwise_attention,
    "softmax": attnkit.softmax_attention,
    "entmax": attnkit.entmax_attention,
    "gaussian": attnkit.gaussian_attention,
    "statistics": statistics,
    "rela": rela,
    "linear": attnkit.linear_attention,
    "linear, causal": partial(attnkit.linear_attention, causal=True),
}
"""By kind of `predicted.STEPS`."""
ONCE: dict[str, Attend] = {"pointwise": attnkit.pointwise_attention, "softmax": attnkit.softmax_attention}


class Problem(NamedTuple):
    """Calls on arrays of one shape; `units` as `predicted` counts them, and whether `auto` takes the kernels."""

    kind: str
    dtype: str
    width: int
    units: int
    calls: dict[str, Call]
    taken: bool
    mode: str


def random(*shape: int, dtype: str, leaf: bool = False) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=leaf)


def step_of(attend: Attend, arrays: list[Tensor]) -> None:
    """Forward and gradients."""
    outputs = attend(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, arrays, [torch.ones_like(o) for o in outputs])


def steps(kind: str, dtype: str, width: int) -> Iterator[Problem]:
    """Training steps of growing numbers of sequences."""
    for items in ITEMS:
        arrays = [random(items, HEADS, TOKENS, width, dtype=dtype, leaf=True) for _ in range(3)]
        calls: dict[str, Call] = {
            impl: partial(step_of, partial(STEPS[kind], impl=impl), arrays) for impl in IMPLEMENTATIONS
        }
        tokens = items * HEADS * TOKENS
        pairs = 0 if kind.startswith("linear") else tokens * TOKENS
        size = getattr(torch, dtype).itemsize
        taken = predicted.takes(kind, size, pairs, width, pairs or tokens)
        yield Problem(kind, dtype, width, pairs or tokens, calls, taken, "forward+backward")


def decoding(attend: Attend, q: Tensor, k: Tensor, v: Tensor, keys: int) -> Call:
    """A call whose keys are one more each time."""
    lengths = itertools.cycle(range(keys, k.shape[-2]))

    def call() -> Any:
        n = next(lengths)
        return attend(q, k[..., :n, :], v[..., :n, :])

    return call


def once(kind: str, dtype: str, width: int) -> Iterator[Problem]:
    """One query for every sequence and head."""
    size = getattr(torch, dtype).itemsize
    for keys in KEYS:
        q, k, v = (random(8, HEADS, n, width, dtype=dtype) for n in (1, keys + MORE, keys + MORE))
        calls = {impl: decoding(partial(ONCE[kind], impl=impl), q, k, v, keys) for impl in IMPLEMENTATIONS}
        numbers = 2 * 8 * HEADS * keys * width
        taken = predicted.takes_once(kind, size, numbers, 1)
        yield Problem(f"{kind}, one query", dtype, width, numbers, calls, taken, "forward")


def linear_steps(dtype: str, width: int) -> Iterator[Problem]:
    size = getattr(torch, dtype).itemsize
    for items in STATES:
        q, k, v = (random(items, HEADS, width, dtype=dtype) for _ in range(3))
        state = attnkit.linear_attention_step(None, q, k, v, impl="generic")[1]
        step = attnkit.linear_attention_step
        calls: dict[str, Call] = {impl: partial(step, state, q, k, v, impl=impl) for impl in IMPLEMENTATIONS}
        numbers = math.prod(k.shape) * width
        yield Problem("step", dtype, width, numbers, calls, predicted.takes_once("step", size, numbers), "forward")


def problems() -> Iterator[Problem]:
    """All, small ones of a kind first."""
    for dtype in DTYPES:
        for width in WIDTHS:
            for kind in STEPS:
                yield from steps(kind, dtype, width)
            for kind in ONCE:
                yield from once(kind, dtype, width)
            yield from linear_steps(dtype, width)


def record_of(problem: Problem, rounds: int, wait: Call) -> dict[str, Any]:
    """Seconds of both, and how many times as fast the kernels are."""
    about = {"kind": problem.kind, "dtype": problem.dtype, "width": problem.width, "units": problem.units}
    about |= {"mode": problem.mode, "taken": problem.taken}
    with torch.set_grad_enabled(problem.mode != "forward"):
        try:
            for call in problem.calls.values():
                call()
        except NotImplementedError as error:
            return about | {"refused": str(error)}
        repeats = {name: repeats_for(call, AT_LEAST, wait) for name, call in problem.calls.items()}
        seconds = rounds_of(problem.calls, rounds, repeats, wait)
    times = {name: summary(x)._asdict() for name, x in seconds.items()}
    return about | {"seconds": times, "ratio": list(ratio(seconds["generic"], seconds["triton"]))}


def line(record: dict[str, Any]) -> str:
    name = f"{record['kind']}, {record['dtype']}, {record['width']}: {record['units']:>11,}"
    if "refused" in record:
        return f"{name}: {record['refused']}"
    micro = {impl: 1e6 * t["median"] for impl, t in record["seconds"].items()}
    times = f"triton {micro['triton']:,.0f} µs, generic {micro['generic']:,.0f} µs"
    chosen = "kernels" if record["taken"] else "generic body"
    return f"{name}: {times}, {record['ratio'][0]:.2f}×, auto: {chosen}"
