"""Which methods of linear cost can hide later tokens: linear attention can, Linformer cannot.

Source: the text "Transformers are RNNs" (after Su 2020), on Linformer: its projections EK and FV (m × n by n × d) mix
    all tokens of a sequence, so that later ones cannot be masked, and language models cannot be made of it.
Expected: nothing is printed. With causality no output changes by a bit when the tokens after it are others; without it
    every method's does. Linformer takes no `causal`, nor do the other methods that mix all tokens first. All of it is
    checked.
Settings: `methods`; `tokens`, of which the later half is replaced; `head_dim` features; `slots` of Linformer, landmarks
    of Nyström.
Cost: seconds on one CPU core.
Command: python -m experiments run 003-future --preset cpu --threads 1 --out runs/future
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnkit
from attnkit_experiments.engine.errors import require_in, require_names
from attnkit_experiments.study.measurement import Column, Measurement, Row
from attnkit_experiments.study.recipe import Preset, Section

CAUSAL = ("softmax", "linear", "cosine", "efficient", "performer")
MIXED = ("linformer", "nystrom", "soft", "sima")
"""Methods that sum over all tokens before a query meets a key."""


@dataclass(frozen=True)
class Study:
    methods: tuple[str, ...] = (*CAUSAL, *MIXED)
    tokens: int = 256
    head_dim: int = 64
    slots: int = 16

    def __post_init__(self) -> None:
        require_names("methods", "method", self.methods, (*CAUSAL, *MIXED))
        require_in("[2, inf)", tokens=self.tokens)
        require_in("[1, inf)", head_dim=self.head_dim, slots=self.slots)


def items(study: Study) -> list[Row]:
    return [{"method": method} for method in study.methods]


def call(method: str, study: Study, rng: torch.Generator, device: torch.device) -> Callable[..., Tensor]:
    """The op of a method with its further operands: (q, k, v, causal=…) to outputs."""
    operands: tuple[Tensor, ...] = ()
    options: dict[str, Any] = {"num_landmarks": study.slots} if method == "nystrom" else {}
    if method == "performer":
        operands = (torch.from_numpy(attnkit.orthogonal_features(study.head_dim, study.head_dim, 0)).float(),)
    if method == "linformer":
        operands = tuple(torch.randn(study.slots, study.tokens, generator=rng) for _ in range(2))
    op = getattr(attnkit, f"{method}_attention")
    placed = [x.to(device) for x in operands]
    return lambda q, k, v, **more: op(q, k, v, *placed, **options, **more)


@torch.no_grad()
def measure(item: Row, study: Study, device: torch.device) -> Row:
    """The largest change of the first half's outputs, by the largest output, when the tokens behind it are others."""
    rng = torch.Generator().manual_seed(0)
    half, shape = study.tokens // 2, (1, 1, study.tokens, study.head_dim)
    q, k, v, others, values = (torch.randn(shape, generator=rng).to(device) for _ in range(5))
    changed = [torch.cat([x[:, :, :half], y[:, :, half:]], 2) for x, y in ((k, others), (v, values))]
    attend = call(item["method"], study, rng, device)

    def change(**options: Any) -> float:
        before, after = attend(q, k, v, **options), attend(q, *changed, **options)
        return float((after - before)[:, :, :half].abs().max() / before.abs().max())

    row = {"change": change(), "causal_change": None, "refused": ""}
    try:
        return row | {"causal_change": change(causal=True)}
    except (TypeError, ValueError) as error:
        return row | {"refused": str(error).partition(";")[0]}


def check(rows: Sequence[Row]) -> None:
    """ValueError for a method that sees later tokens where it is causal, or does not where it is not."""
    for row in rows:
        name = row["method"]
        if not row["change"] > 0:
            raise ValueError(f"{name}: without causality earlier outputs do not change with later tokens")
        if name in CAUSAL and row["causal_change"] != 0:
            raise ValueError(
                f"{name}, causal: earlier outputs change by {row['causal_change']} {row['refused']}".rstrip()
            )
        if name in MIXED and not row["refused"].startswith(f"{name}_attention: "):
            raise ValueError(f"{name}: expected causal=True to be refused by name, got {row['refused']!r}")


def sections(rows: Sequence[Row], about: Mapping[str, Any]) -> list[Section]:
    return []


MEASUREMENT = Measurement(
    id="003-future",
    title="Which methods can hide later tokens",
    shows="by how much outputs change with later tokens, with and without causality, and which methods refuse it",
    source="the text Transformers are RNNs, which has no experiments",
    presets={
        "smoke": Preset(Study(tokens=8, head_dim=4, slots=2), "seconds, 1 CPU core", "smoke: eight tokens"),
        "cpu": Preset(Study(), "seconds, 1 CPU core", "cpu: one head, without a model"),
    },
    items=items,
    measure=measure,
    columns=(
        Column("method", "method"),
        Column("change", "change, not causal", digits=2),
        Column("causal_change", "change, causal", digits=2),
        Column("refused", "causal=True is refused"),
    ),
    sections=sections,
    about=(
        "The keys and values of the second half of a sequence are replaced by others. The change is the largest of the "
        "first half's outputs, by the largest output; 0.00 is no bit."
    ),
    deviations=(
        "The text says it of Linformer alone; Nyström, SOFT and SimA are attnkit's other methods that mix all tokens "
        "first. Numbers are drawn, nothing is trained.",
    ),
    check=check,
)
