"""Memory of training causal linear attention: states kept for the backward pass, or computed again in it.

Source: the text "Transformers are RNNs" (after Su 2020), on training: the sums S_i of all tokens at once, a cumulative
    sum of n outer products, have n·d·e numbers, and automatic differentiation keeps them, where q, k and v have
    n·(2d + e). Only dq needs the S_i, dq_i = S_i do_i: the backward pass sums them again, and nothing of them is kept.
Expected: nothing is printed. By the formulas a layer whose input is q, k and v adds its output to what is kept, n·e
    numbers; running sums add n·d·e at least, weights of softmax n² at least. Both are checked; times are not.
Settings: `methods` × `lengths`; one sequence, `heads` of `head_dim` features; `limit_gb`: what would keep more in a
    layer by its formula is not begun; `rounds` are timed.
Cost: smoke seconds, cpu a few minutes on one CPU core.
Command: python -m experiments run 003-memory --preset cpu --threads 1 --out runs/memory
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu

import attnkit
from attnkit_experiments.engine.errors import require_in, require_names
from attnkit_experiments.engine.memory import bytes_per_sample, peak_bytes
from attnkit_experiments.study.measurement import Column, Measurement, Row
from attnkit_experiments.study.recipe import Preset, Section

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Method(NamedTuple):
    """Causal attention (1, H, n, d), and the numbers that a layer adds to what is kept, of a head: (n, d) to them."""

    attend: Attend
    formula: str
    numbers: Callable[[int, int], int]


def running_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as it is written: S_i and z_i of all tokens as cumulative sums, φ(x) = elu(x) + 1."""
    q, k = elu(q) + 1, elu(k) + 1
    sums = (k[..., :, None] * v[..., None, :]).cumsum(-3)
    return (q[..., None, :] @ sums)[..., 0, :] / (q * k.cumsum(-2)).sum(-1, keepdim=True)


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(qkᵀ/√d + mask) v with the weights as a matrix in memory."""
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v


def op(name: str, **options: Any) -> Attend:
    return partial(getattr(attnkit, f"{name}_attention"), causal=True, **options)


def output(tokens: int, head_dim: int) -> int:
    return tokens * head_dim


METHODS: dict[str, Method] = {
    "linear, running sums": Method(running_sums, "n·d·e", lambda n, d: n * d * d),
    "linear, chunks kept": Method(op("linear", impl="generic"), "n·e and chunks", output),
    "linear, recomputed": Method(op("linear", impl="recomputed"), "n·e", output),
    "linear": Method(op("linear"), "n·e", output),
    "softmax, weights kept": Method(textbook, "n²", lambda n, d: n * n),
    "softmax": Method(op("softmax"), "n·e", output),
}
"""Those without a word for it are what impl="auto" takes."""
KEPT = ("linear, running sums", "softmax, weights kept")
RECOMPUTED = ("linear, recomputed", "linear", "softmax")
SPARE = 1.25
"""The factor of its formula that a recomputed method may keep: a number or two for each row, besides."""


@dataclass(frozen=True)
class Study:
    """`methods` at `lengths`; times are medians of `rounds`."""

    methods: tuple[str, ...] = tuple(METHODS)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    heads: int = 1
    head_dim: int = 64
    rounds: int = 3
    limit_gb: float = 0.5

    def __post_init__(self) -> None:
        require_names("methods", "method", self.methods, METHODS)
        require_in("[1, inf)", lengths=self.lengths, heads=self.heads, head_dim=self.head_dim, rounds=self.rounds)
        require_in("(0, inf)", limit_gb=self.limit_gb)


def items(study: Study) -> list[Row]:
    return [{"method": method, "tokens": n} for method in study.methods for n in study.lengths]


def measure(item: Row, study: Study, device: torch.device) -> Row:
    """Bytes and milliseconds of a forward and a backward pass, the bytes that one more layer adds, and its formula."""
    method = METHODS[item["method"]]
    expected = 4 * study.heads * method.numbers(item["tokens"], study.head_dim)
    row = {"formula": method.formula, "expected_bytes": expected, "took": ""}
    if expected > study.limit_gb * 1e9:
        return row | {"layer_bytes": None, "bytes": None, "ms": None, "took": f"not begun: {expected / 1e9:.1f} GB"}
    rng = torch.Generator().manual_seed(0)
    shape = 1, study.heads, item["tokens"], study.head_dim
    x = torch.randn(shape, generator=rng).to(device).requires_grad_()

    def passes(layers: int) -> None:
        out = x
        for _ in range(layers):
            out = method.attend(out, out, out)
        out.sum().backward()
        x.grad = None

    with attnkit.implementations() as ran:
        layer = bytes_per_sample(passes, 2, device)
    names = sorted({name for each in ran.values() for name in each})
    ms = [_milliseconds(partial(passes, 1), device) for _ in range(study.rounds)]
    return row | {
        "layer_bytes": int(layer),
        "bytes": peak_bytes(partial(passes, 1), device),
        "ms": statistics.median(ms),
        "took": " and ".join(names) or "torch",
    }


def _milliseconds(compute: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)


def check(rows: Sequence[Row]) -> None:
    """ValueError for a method that keeps less than its states or weights, or one that keeps more than its output."""
    for row in (row for row in rows if row["layer_bytes"] is not None):
        name, share = row["method"], row["layer_bytes"] / row["expected_bytes"]
        if (name in KEPT and share < 1) or (name in RECOMPUTED and share > SPARE):
            raise ValueError(
                f"{name}: a layer of {row['tokens']} tokens keeps {row['layer_bytes']:,} bytes, expected "
                f"{'at least' if name in KEPT else f'at most {SPARE:g} times'} {row['expected_bytes']:,}"
            )


def sections(rows: Sequence[Row], about: Mapping[str, Any]) -> list[Section]:
    from attnkit_conformance.report.pages.figures import DASHES  # draws: nothing that measuring needs to load
    from attnkit_experiments.report import plots

    def of(key: str, factor: float) -> Callable[[Row], float | None]:
        return lambda row: None if row[key] is None else factor * row[key]

    figure = plots.against_tokens(
        rows,
        {"a layer keeps, MB": of("layer_bytes", 1e-6), "ms of both passes": of("ms", 1.0)},
        {"softmax, weights kept": "-", "softmax": DASHES[1]},
        smoke=about["preset"] == "smoke",
        xscale="log",
    )
    return [Section("What a layer keeps for its backward pass", FIGURE, plots.in_card(figure))]


FIGURE = "All scales are logarithmic. Softmax is in ink; weights that would not fit the limit were not computed."

MEASUREMENT = Measurement(
    id="003-memory",
    title="Training causal linear attention: states kept or computed again",
    shows="memory and time of a forward and a backward pass against the number of tokens",
    source="the text Transformers are RNNs, which has no experiments",
    presets={
        "smoke": Preset(Study(lengths=(256, 512), rounds=1), "seconds, 1 CPU core", "smoke: few tokens, timed once"),
        "cpu": Preset(Study(), "a few minutes, 1 CPU core", "cpu: attention of one layer, without a model"),
    },
    items=items,
    measure=measure,
    columns=(
        Column("method", "method"),
        Column("tokens", "n"),
        Column("layer_bytes", "a layer keeps, MB", factor=1e-6, digits=2),
        Column("formula", "formula"),
        Column("expected_bytes", "by the formula, MB", factor=1e-6, digits=2),
        Column("bytes", "peak of both passes, MB", factor=1e-6, digits=2),
        Column("ms", "ms of both passes", digits=1),
        Column("took", "implementation"),
    ),
    sections=sections,
    about=(
        "One sequence in float32, causal; a layer's output is q, k and v of the next. What a layer keeps is half "
        "of what the peak of four layers, forward and backward, has above that of two: its output, n·e numbers in "
        "each head, is part of it. Bytes are those of torch's allocator: buffers of attnkit's library for CPUs are "
        "not among them, which has a few segments of 64 tokens for each thread and a state, d·(e + 1) numbers. "
        "Times are medians, and may be those of a busy machine; bytes do not depend on that."
    ),
    deviations=(
        "The text has no experiments. Its cumulative sums are the running sums; chunks are those of attnkit's generic "
        "body, which keeps a state for each and not for each token.",
        "A model has projections between layers, whose outputs q, k and v are kept too, n·(2d + e) numbers.",
    ),
    check=check,
)
