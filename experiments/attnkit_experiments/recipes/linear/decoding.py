"""Decoding token by token: a state of constant size beside a cache of keys and values.

Source: the text "Transformers are RNNs" (after Su 2020), on autoregressive generation: S_i = S_{i-1} + φ(k_i) v_iᵀ and
    z_i = z_{i-1} + φ(k_i) make linear attention a recurrent network, whose memory does not grow with the tokens before.
Expected: nothing is printed. Bytes of a state are the same at every length, those of a cache grow in proportion; both
    are checked. Time per token should be constant with a state and grow with a cache; times depend on the machine and
    are not checked.
Settings: `methods` × `lengths`, the tokens before; `heads` of `head_dim` features; `features` of performer;
    `tokens` are timed one by one.
Cost: smoke seconds, cpu under a minute on one CPU core.
Command: python -m experiments run 003-decoding --preset cpu --threads 1 --out runs/decoding
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnkit
from attnkit.nn import KeyValueCache
from attnkit_experiments.engine.errors import require_in, require_names
from attnkit_experiments.study.measurement import Column, Measurement, Row
from attnkit_experiments.study.recipe import Preset, Section

WARMUP = 5
Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v (1, H, 1, d) of the next token to its output; calling it again decodes the same token anew."""


@dataclass(frozen=True)
class Study:
    """`methods` at `lengths`; medians are over `tokens`."""

    methods: tuple[str, ...] = ("softmax", "relu", "linear", "cosine", "performer", "efficient")
    lengths: tuple[int, ...] = (128, 512, 2048, 8192, 32_768)
    heads: int = 8
    head_dim: int = 64
    features: int = 256
    tokens: int = 200

    def __post_init__(self) -> None:
        require_names("methods", "method", self.methods, METHODS)
        require_in("[1, inf)", lengths=self.lengths, heads=self.heads, head_dim=self.head_dim)
        require_in("[1, inf)", features=self.features, tokens=self.tokens)


def cache(op: Callable[..., Tensor], k: Tensor, v: Tensor, study: Study) -> tuple[Step, int]:
    """A step that attends to a cache of k and v (1, H, n, d) and the new token, and the bytes of the n tokens."""
    length = k.shape[-2]
    before = KeyValueCache(*(x.new_empty(*x.shape[:-2], length + 1, x.shape[-1]) for x in (k, v)))
    before.append(k, v, None)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before.length = length
        before.append(k, v, None)
        keys, values, _ = before.filled()
        return op(q, keys, values)

    return step, k.nbytes + v.nbytes


def state(name: str, k: Tensor, v: Tensor, study: Study) -> tuple[Step, int]:
    """A step that adds the new token to the state of k and v (1, H, n, d), and the bytes of the state."""
    operands: tuple[Tensor, ...] = ()
    if name == "performer":
        operands = (torch.from_numpy(attnkit.orthogonal_features(study.features, k.shape[-1], 0)).to(k),)
    _, before = getattr(attnkit, f"{name}_attention")(k, k, v, *operands, causal=True, return_state=True)
    advance = getattr(attnkit, f"{name}_attention_step")

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = advance(before, *(x[:, :, 0] for x in (q, k, v)), *operands)
        return out[:, :, None]

    return step, sum(part.nbytes for part in before)


METHODS: dict[str, Callable[[Tensor, Tensor, Study], tuple[Step, int]]] = {
    "softmax": partial(cache, attnkit.softmax_attention),
    "relu": partial(cache, partial(attnkit.pointwise_attention, activation="relu", alpha=1.0)),
    **{name: partial(state, name) for name in ("linear", "cosine", "performer", "efficient")},
}
CACHED = ("softmax", "relu")


def items(study: Study) -> list[Row]:
    return [{"method": method, "tokens": n} for method in study.methods for n in study.lengths]


@torch.no_grad()
def measure(item: Row, study: Study, device: torch.device) -> Row:
    """Milliseconds of the token after n others: the median, the fastest and the slowest."""
    rng = torch.Generator().manual_seed(0)
    shape = 1, study.heads, item["tokens"] + 1, study.head_dim
    q, k, v = (torch.randn(shape, generator=rng).to(device) for _ in range(3))
    step, size = METHODS[item["method"]](k[:, :, :-1], v[:, :, :-1], study)
    token = [x[:, :, -1:] for x in (q, k, v)]
    ms = []
    for _ in range(WARMUP + study.tokens):
        start = time.perf_counter()
        step(*token)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ms.append(1000 * (time.perf_counter() - start))
    ms = ms[WARMUP:]
    return {"ms": statistics.median(ms), "fastest_ms": min(ms), "slowest_ms": max(ms), "bytes": size}


def check(rows: Sequence[Row]) -> None:
    """ValueError for a state that grows with the tokens before, or a cache that does not in proportion to them."""
    first: dict[str, Row] = {}
    for row in rows:
        one = first.setdefault(row["method"], row)
        growth = row["tokens"] / one["tokens"] if row["method"] in CACHED else 1
        if row["bytes"] != growth * one["bytes"]:
            raise ValueError(
                f"{row['method']}: expected {growth * one['bytes']:,.0f} bytes at {row['tokens']} tokens, "
                f"got {row['bytes']:,}"
            )


def sections(rows: Sequence[Row], about: Mapping[str, Any]) -> list[Section]:
    from attnkit_conformance.report.pages.figures import DASHES  # draws: nothing that measuring needs to load
    from attnkit_experiments.report import plots

    figure = plots.against_tokens(
        rows,
        {"ms per token": lambda row: row["ms"], "state or cache, MB": lambda row: row["bytes"] / 1e6},
        {"softmax": "-", "relu": DASHES[1]},
        smoke=about["preset"] == "smoke",
        xscale="log",
    )
    return [Section("A token after n others", FIGURE, plots.in_card(figure))]


FIGURE = (
    "All scales are logarithmic. Softmax and relu, in ink, keep the keys and values of all tokens before; the others "
    "keep a state."
)

MEASUREMENT = Measurement(
    id="003-decoding",
    title="Decoding with a state of constant size",
    shows="time of a token, and bytes of state or cache, against the number of tokens before it",
    source="the text Transformers are RNNs, which has no experiments",
    presets={
        "smoke": Preset(
            Study(lengths=(16, 64), tokens=5), "seconds, 1 CPU core", "smoke: few tokens, timed five times"
        ),
        "cpu": Preset(Study(), "under a minute, 1 CPU core", "cpu: attention of one layer, without a model"),
    },
    items=items,
    measure=measure,
    columns=(
        Column("method", "method"),
        Column("tokens", "tokens before"),
        Column("ms", "ms per token", digits=4),
        Column("fastest_ms", "fastest", digits=4),
        Column("slowest_ms", "slowest", digits=4),
        Column("bytes", "state or cache, kB", factor=1e-3, digits=1),
    ),
    sections=sections,
    about=(
        "One layer's attention of one sequence in float32, from q, k and v of a token to its output; projections are "
        "not timed. The same token is decoded again and again after the same tokens; the median is given. Bytes are "
        "those of the tokens before."
    ),
    deviations=(
        "The text has no experiments: methods are those that it names, beside performer, relu and softmax.",
        "A cache is allocated in advance, so that no token pays for its growth; every step returns a new state.",
    ),
    check=check,
)
