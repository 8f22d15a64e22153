"""From how many pairs or tokens on the kernels of a GPU are not slower than the generic body.

What `attnkit.kernels.predicted` predicts, measured: training steps of `impl="triton"` and of `impl="generic"` take
turns, for kinds of calls, dtypes, head sizes and numbers of sequences, and the forward alone of the smallest; packed
sequences and the Newton inverse; and without gradients calls with one query, whose keys become more from call to call
as in decoding, and steps of linear attention.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
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
SEQUENCES = 4  # that are packed
NEWTON = 20  # steps
WIDTHS = (64, 128)
DTYPES = ("bfloat16", "float32")
AT_LEAST = 4e-3  # seconds of one timing
IMPLEMENTATIONS = ("triton", "generic")
Attend = Callable[..., Any]


def statistics(q: Tensor, k: Tensor, v: Tensor, *, impl: str) -> tuple[Any, ...]:
    """o and the entropies of relu."""
    o, rows = attnkit.attention_with_statistics(attnkit.pointwise_attention, q, k, v, fields=("entropy",), impl=impl)
    return o, rows.entropy


STEPS: dict[str, Attend] = {
    "pointwise": attnkit.pointwise_attention,
    "softmax": attnkit.softmax_attention,
    "softpick": attnkit.softpick_attention,
    "entmax": attnkit.entmax_attention,
    "gaussian": attnkit.gaussian_attention,
    "statistics": statistics,
    "linear": attnkit.linear_attention,
    "linear, causal": partial(attnkit.linear_attention, causal=True),
}
"""By kind of `predicted.STEPS`."""
PACKED: dict[str, Attend] = {
    "pointwise": attnkit.pointwise_attention_packed,
    "softmax": attnkit.softmax_attention_packed,
    "linear": attnkit.linear_attention_packed,
}
ONCE: dict[str, Attend] = {"pointwise": attnkit.pointwise_attention, "softmax": attnkit.softmax_attention}


class Problem(NamedTuple):
    """Calls on arrays of one shape; `units` as `predicted` counts them."""

    kind: str
    dtype: str
    width: int
    units: int
    calls: dict[str, Call]
    mode: str


def major() -> int | None:
    """Of the compute capability of the GPU, None without one."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def random(*shape: int, dtype: str, leaf: bool = False) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=leaf)


def step_of(attend: Attend, arrays: list[Tensor]) -> None:
    """Forward and gradients, of whatever needs some."""
    outputs = attend(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if outputs[0].requires_grad:
        torch.autograd.grad(outputs, arrays, [torch.ones_like(o) for o in outputs])


def of_pairs(kind: str) -> bool:
    """Whether `predicted` counts the pairs of a kind of call, and not its tokens."""
    return predicted.HALF[kind].tile == predicted.PAIRS


def taken(kind: str, dtype: str, width: int, units: int, capability: int | None) -> bool:
    """Whether `auto` takes the kernels for a problem."""
    size, (op, _, form) = getattr(torch, dtype).itemsize, kind.partition(", ")
    if form == "one query" or kind == "step":
        return predicted.takes_once(op, size, units)
    if kind == "inverse":
        return predicted.takes_inverses(units, NEWTON, capability)
    of, calls = (op, SEQUENCES) if form == "packed" else (kind, None)
    pairs = units if of_pairs(of) else 0
    return predicted.takes(of, size, pairs, width, units, calls, major=capability)


def both(attend: Attend, arrays: list[Tensor]) -> dict[str, Call]:
    """A step by each implementation."""
    return {impl: partial(step_of, partial(attend, impl=impl), arrays) for impl in IMPLEMENTATIONS}


def steps(kind: str, dtype: str, width: int) -> Iterator[Problem]:
    """Training steps of growing numbers of sequences; the first without gradients too."""
    for items in ITEMS:
        arrays = [random(items, HEADS, TOKENS, width, dtype=dtype, leaf=True) for _ in range(3)]
        tokens = items * HEADS * TOKENS
        units = tokens * TOKENS if of_pairs(kind) else tokens
        modes = ("forward", "forward+backward") if items == ITEMS[0] else ("forward+backward",)
        for mode in modes:
            yield Problem(kind, dtype, width, units, both(STEPS[kind], arrays), mode)


def packed(kind: str, dtype: str, width: int) -> Iterator[Problem]:
    """Some short sequences, for each of which the generic body calls the op."""
    edges = tuple(range(0, (SEQUENCES + 1) * TOKENS, TOKENS))
    arrays = [random(edges[-1], HEADS, width, dtype=dtype, leaf=True) for _ in range(3)]
    units = HEADS * edges[-1] * (TOKENS if of_pairs(kind) else 1)
    calls = both(partial(PACKED[kind], cu_seqlens_q=edges, cu_seqlens_k=edges), arrays)
    yield Problem(f"{kind}, packed", dtype, width, units, calls, "forward+backward")


def inverses(dtype: str, width: int) -> Iterator[Problem]:
    """Of Gaussian kernels between landmarks."""
    for items in ITEMS:
        x = random(items, width, 16, dtype="float32")
        a = torch.exp(-0.5 * torch.cdist(x, x).square()).to(getattr(torch, dtype)).requires_grad_()
        calls = both(partial(attnkit.newton_inverse, newton_steps=NEWTON), [a])
        yield Problem("inverse", dtype, width, items, calls, "forward+backward")


def decoding(attend: Attend, q: Tensor, k: Tensor, v: Tensor, keys: int) -> Call:
    """A call whose keys are one more each time."""
    lengths = itertools.cycle(range(keys, k.shape[-2]))

    def call() -> Any:
        n = next(lengths)
        return attend(q, k[..., :n, :], v[..., :n, :])

    return call


def once(kind: str, dtype: str, width: int) -> Iterator[Problem]:
    """One query for every sequence and head."""
    for keys in KEYS:
        q, k, v = (random(8, HEADS, n, width, dtype=dtype) for n in (1, keys + MORE, keys + MORE))
        calls = {impl: decoding(partial(ONCE[kind], impl=impl), q, k, v, keys) for impl in IMPLEMENTATIONS}
        yield Problem(f"{kind}, one query", dtype, width, 2 * 8 * HEADS * keys * width, calls, "forward")


def linear_steps(dtype: str, width: int) -> Iterator[Problem]:
    for items in STATES:
        q, k, v = (random(items, HEADS, width, dtype=dtype) for _ in range(3))
        state = attnkit.linear_attention_step(None, q, k, v, impl="generic")[1]
        step = attnkit.linear_attention_step
        calls: dict[str, Call] = {impl: partial(step, state, q, k, v, impl=impl) for impl in IMPLEMENTATIONS}
        yield Problem("step", dtype, width, math.prod(k.shape) * width, calls, "forward")


def problems() -> Iterator[Problem]:
    """All, small ones of a kind first."""
    for dtype in DTYPES:
        for width in WIDTHS:
            for kind in STEPS:
                yield from steps(kind, dtype, width)
            for kind in PACKED:
                yield from packed(kind, dtype, width)
            for kind in ONCE:
                yield from once(kind, dtype, width)
            yield from linear_steps(dtype, width)
    yield from inverses("float32", 64)


def identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a problem, or of its record."""
    return tuple(record[name] for name in ("kind", "dtype", "width", "units", "mode"))


def record_of(problem: Problem, rounds: int, wait: Call) -> dict[str, Any]:
    """Seconds of both, and how many times as fast the kernels are."""
    about = {"kind": problem.kind, "dtype": problem.dtype, "width": problem.width, "units": problem.units}
    about["mode"] = problem.mode
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
    chosen = taken(record["kind"], record["dtype"], record["width"], record["units"], major())
    return f"{name}: {times}, {record['ratio'][0]:.2f}×, auto: {'kernels' if chosen else 'generic body'}"
