"""Figure 1b of Lu et al. 2021: memory against the number of tokens, for SOFT and four other attention methods.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Figure 1b and §4.2, second setting: 12 layers of a
    ViT, d = 384, 12 heads, m = 49, n = 784·p tokens for p = 1..8, batch 1. The figure prints no numbers, and the paper
    does not say whether it trains or only predicts: both are measured.
Expected: the Transformer's memory grows with n², that of the four others with n. What is checked: doubling n takes at
    most 2.2 times the memory of a linear method, and at least 3 times that of the Transformer from p = 4 to p = 8.
Settings: `limit_gb`: a training whose attention weights alone would take more is not begun, and has no number.
Cost: smoke (2 layers, n = 196 and 392) seconds on 2 CPU cores; cpu and paper are the full published setting, cpu with
    a limit for a machine of 16 GB: within half an hour of one CPU core; paper under a minute on one H200 (estimated).
Command: python -m experiments run 002-fig1b --preset cpu --out runs/fig1b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnkit._core.typing import OpName
from attnkit.nn import MultiHeadAttention, SoftAttention2d
from attnkit_conformance.report.pages import table
from attnkit_experiments.engine.errors import require_in, require_names
from attnkit_experiments.engine.memory import peak_bytes
from attnkit_experiments.soft.attention import Soft, Tokens
from attnkit_experiments.soft.model import PreNormBlock
from attnkit_experiments.study.measurement import Column, Measurement, Row
from attnkit_experiments.study.recipe import Preset, Section

WIDTH, HEADS, LANDMARKS, HEIGHT = 384, 12, 49, 28
LINEAR = ("linformer", "performer", "nystromformer", "soft")
MODES = ("predicting", "training")


def textbook(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """softmax(qkᵀ/√d) v with the weights as a matrix in memory, as there was no other way in 2021."""
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v


def transformer(tokens: int) -> nn.Module:
    attention = MultiHeadAttention(WIDTH, HEADS)
    attention.attend = textbook
    return Tokens(attention)


def of_op(op: OpName, **options: Any) -> Callable[[int], nn.Module]:
    return lambda tokens: Tokens(MultiHeadAttention(WIDTH, HEADS, op=op, options=options))


def linformer(tokens: int) -> nn.Module:
    options = {"num_slots": LANDMARKS, "max_length": tokens}
    return Tokens(MultiHeadAttention(WIDTH, HEADS, op="linformer_attention", options=options))


METHODS: dict[str, Callable[[int], nn.Module]] = {
    "transformer": transformer,
    "linformer": linformer,
    "performer": of_op("performer_attention", num_features=110),
    "nystromformer": of_op("nystrom_attention", num_landmarks=LANDMARKS),
    "soft": lambda tokens: Soft(SoftAttention2d(WIDTH, HEADS, num_landmarks=LANDMARKS)),
    "transformer, fused": of_op("softmax_attention"),
}
"""A layer for so many tokens, those of a picture of 28 × n/28."""


@dataclass(frozen=True)
class Study:
    """`multiples` are p; `unit` tokens make one."""

    methods: tuple[str, ...] = tuple(METHODS)
    multiples: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    unit: int = 784
    layers: int = 12
    limit_gb: float = 16.0

    def __post_init__(self) -> None:
        require_names("methods", "method", self.methods, METHODS)
        require_in("[1, inf)", multiples=self.multiples, layers=self.layers)
        if self.unit % HEIGHT:
            raise ValueError(f"unit must be a multiple of {HEIGHT}, the height of a picture; got {self.unit}")


def items(study: Study) -> list[Row]:
    return [
        {"method": method, "mode": mode, "tokens": study.unit * p}
        for mode in MODES
        for method in study.methods
        for p in study.multiples
    ]


class Stack(nn.Module):
    """Layers of attention and MLP over tokens (1, n, 384)."""

    def __init__(self, method: str, tokens: int, layers: int) -> None:
        super().__init__()
        self.width = tokens // HEIGHT
        self.blocks = nn.ModuleList(PreNormBlock(METHODS[method](tokens), WIDTH, nn.Identity()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, HEIGHT, self.width)
        return x


def measure(item: Row, study: Study, device: torch.device) -> Row:
    """Peak bytes of one pass, the second one: what is set up once is not counted."""
    tokens, training = item["tokens"], item["mode"] == "training"
    weights = study.layers * HEADS * tokens**2 * 4
    if item["method"] == "transformer" and training and weights > study.limit_gb * 1e9:
        return {"bytes": None, "note": f"not begun: the weights alone take {weights / 1e9:.1f} GB"}
    torch.manual_seed(0)
    model = Stack(item["method"], tokens, study.layers).to(device)
    x = torch.randn(1, tokens, WIDTH, device=device)

    def once() -> None:
        with torch.set_grad_enabled(training):
            out = model(x)
        if training:
            out.square().sum().backward()
            model.zero_grad(set_to_none=True)

    if device.type == "cuda":
        once()
    return {"bytes": peak_bytes(once, device), "note": ""}


def check(rows: Sequence[Row]) -> None:
    """Linear methods grow linearly, the Transformer faster; ValueError with the pair of rows where they do not."""
    sizes = {(row["method"], row["mode"], row["tokens"]): row["bytes"] for row in rows if row["bytes"]}
    for (method, mode, tokens), size in sizes.items():
        doubled = sizes.get((method, mode, 2 * tokens))
        if doubled is None:
            continue
        growth = doubled / size
        if method in LINEAR and growth > 2.2:
            raise ValueError(f"{method}, {mode}: {2 * tokens} tokens take {growth:.2f} times the memory of {tokens}")
        if method == "transformer" and tokens >= 3136 and growth < 3:
            raise ValueError(f"transformer, {mode}: {2 * tokens} tokens take only {growth:.2f} times that of {tokens}")


def sections(rows: Sequence[Row], about: Mapping[str, Any]) -> list[Section]:
    from attnkit_conformance.report.pages.figures import DASHES  # draws: nothing that measuring needs to load
    from attnkit_experiments.report import plots

    def gigabytes(mode: str) -> Callable[[Row], float | None]:
        return lambda row: row["bytes"] / 1e9 if row["mode"] == mode and row["bytes"] else None

    figure = plots.against_tokens(
        rows,
        {mode: gigabytes(mode) for mode in MODES},
        {"transformer": "-", "transformer, fused": DASHES[1]},
        smoke=about["preset"] == "smoke",
        name="peak memory, GB",
    )
    sizes = sorted({row["tokens"] for row in rows})
    peaks = {(row["method"], row["mode"], row["tokens"]): row["bytes"] for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    tables = []
    for mode in MODES:
        cells = [
            [
                method,
                *("–" if peaks[method, mode, n] is None else f"{peaks[method, mode, n] / 1e6:,.0f}" for n in sizes),
            ]
            for method in methods
        ]
        tables.append(Section("", f"{mode.capitalize()}, MB:", table(["method", *(f"n = {n}" for n in sizes)], cells)))
    text = FIGURE.format(layers=about["study"]["layers"])
    return [Section("Memory against the number of tokens", text, plots.in_card(figure)), *tables]


FIGURE = (
    "Peak of one pass over {layers} layers, batch 1, float32, beyond the weights of the model and its input; training "
    "counts what the backward pass needs and the gradients. The scale is logarithmic; the Transformer ends where its "
    "weights would not fit the limit."
)

MEASUREMENT = Measurement(
    id="002-fig1b",
    title="Memory against the number of tokens",
    shows="peak memory of five attention methods in 12 layers, n = 784 to 6,272",
    source="Lu et al. 2021, Figure 1b",
    presets={
        "smoke": Preset(
            Study(multiples=(1, 2), unit=196, layers=2), "seconds, 2 CPU cores", "smoke: two layers, few tokens"
        ),
        "cpu": Preset(
            Study(limit_gb=6.0),
            "within half an hour, 1 CPU core",
            "cpu: the published setting on a CPU; the paper's is a 16 GB V100",
        ),
        "paper": Preset(
            Study(), "under a minute, one H200 (estimated)", "paper: the published setting, for a GPU of 16 GB or more"
        ),
    },
    items=items,
    measure=measure,
    columns=(
        Column("method", "method"),
        Column("mode", "mode"),
        Column("tokens", "n"),
        Column("bytes", "peak, MB", factor=1e-6, digits=1),
        Column("note", "note"),
    ),
    sections=sections,
    about=(
        "Peak bytes allocated by torch during one pass, counted from its allocator's own records; the second pass on a "
        "GPU. Not comparable with a GPU's reserved memory, nor with bytes that a math library allocates for itself."
    ),
    deviations=(
        "The paper does not say whether the figure is of training or of prediction: both are here.",
        "The Transformer keeps its weights as matrices, as every implementation of 2021 did. 'transformer, fused' is "
        "softmax attention as attnkit computes it today, and is not in the paper.",
        "Performer has 110 features (d ln d for heads of 32), Linformer 49 slots: the paper names neither.",
        "Layers have a GELU MLP of 4·384 and LayerNorm before both parts, as in ViT; there is no patch embedding and "
        "no head. SOFT is equation 9 alone, its landmarks means over 7 × 7 windows of a picture of 28 × n/28 tokens.",
    ),
    check=check,
)
