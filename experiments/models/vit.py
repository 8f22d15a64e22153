"""The vision transformer of Dosovitskiy et al. 2021, as big_vision trains it, with the attention left open.

Pre-LN blocks, GELU MLP, learned position embedding of std 1/√width, Xavier-uniform attention and MLP weights, head of
zeros. What stands in for softmax is an op of attnkit by name (Wortsman et al. 2023 §3), with qk-layernorm and the gate
of their §4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnkit import RowStatistics
from attnkit.nn import MultiHeadAttention
from experiments.errors import unknown

LAYERNORM_EPS = 1e-6  # flax's default, which big_vision uses

# name: width, depth, width of the MLP, heads
SIZES: dict[str, tuple[int, int, int, int]] = {
    "d64": (64, 4, 256, 2),
    "w96": (96, 6, 384, 3),
    "w192": (192, 6, 768, 3),
    "w384": (384, 6, 1536, 6),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
}


@dataclass(frozen=True)
class ViTConfig:
    """Everything that fixes the model; `op` and `options` are attnkit's, `gate` is "" or "silu"."""

    size: str
    patch: int
    image: int
    channels: int
    classes: int
    op: str = "softmax_attention"
    options: dict[str, Any] = field(default_factory=dict)
    qk_norm: bool = True
    gate: Literal["", "silu"] = ""
    pool: Literal["gap", "tok"] = "gap"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise unknown("model size", self.size, SIZES)
        if self.image % self.patch:
            raise ValueError(f"images of {self.image} pixels cannot be cut into patches of {self.patch}")

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + (self.pool == "tok")


class LayerRecord(NamedTuple):
    """What one layer's attention did: weights (B, H, L, L) and attnkit's row statistics."""

    weights: Tensor
    statistics: RowStatistics


class Block(nn.Module):
    """x + attention(LN x), then x + MLP(LN x)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, _, hidden, heads = SIZES[config.size]
        self.attention_norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        self.attention = MultiHeadAttention(
            width,
            heads,
            op=config.op,
            options=config.options,
            qk_norm=config.qk_norm,
            gate=nn.functional.silu if config.gate == "silu" else None,
        )
        self.mlp_norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def inspect(self, x: Tensor, fields: tuple[str, ...]) -> tuple[Tensor, LayerRecord]:
        """The same, and what the attention did."""
        out, weights, rows = self.attention(self.attention_norm(x), return_weights=True, return_statistics=fields)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), LayerRecord(weights, rows)


class ViT(nn.Module):
    """(B, C, H, W) images in -1..1 to (B, classes) logits."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, depth, _, _ = SIZES[config.size]
        self.config = config
        self.embed = nn.Linear(config.channels * config.patch**2, width)
        self.position = nn.Parameter(torch.empty((config.image // config.patch) ** 2, width))
        self.class_token = nn.Parameter(torch.zeros(width)) if config.pool == "tok" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        self.head = nn.Linear(width, config.classes)
        self.initialise()

    def initialise(self) -> None:
        """big_vision's distributions: LeCun-normal embedding, Xavier-uniform blocks, zero head."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if name == "embed":
                    nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5)
                elif name == "head":
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.position, std=1 / math.sqrt(self.position.shape[1]))

    def tokens(self, images: Tensor) -> Tensor:
        """Patches as tokens with their positions: (B, L, width)."""
        batch, channels, height, width = images.shape
        patch = self.config.patch
        cut = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
        cut = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)
        x = self.embed(cut) + self.position
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(batch, 1, -1), x], dim=1)
        return x

    def classify(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(x[:, 0] if self.class_token is not None else x.mean(dim=1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)

    @torch.no_grad()
    def inspect(self, images: Tensor, *, fields: tuple[str, ...] = ("total",)) -> tuple[Tensor, list[LayerRecord]]:
        """Logits, and for every layer the attention weights and the named row statistics."""
        x = self.tokens(images)
        records = []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, record = block.inspect(x, fields)
            records.append(record)
        return self.classify(x), records


def forward_flops(config: ViTConfig) -> int:
    """Floating-point operations of the matrix products of one image's forward pass (a multiply-add is 2).

    Activations, normalisation and softmax are left out, as is usual: the count is equal for every point-wise op and
    softmax, and what differs between them shows in the measured time.
    """
    width, depth, hidden, _ = SIZES[config.size]
    length = config.tokens
    patches = (config.image // config.patch) ** 2
    projections = (5 if config.gate else 4) * width * width
    block = length * (projections + 2 * width * hidden) + 2 * length * length * width
    return 2 * (patches * config.channels * config.patch**2 * width + depth * block + width * config.classes)
