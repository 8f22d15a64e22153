"""The vision transformer of Dosovitskiy et al. 2021, as big_vision trains it, with configurable attention.

Pre-LN blocks, GELU MLP, learned position embedding of std 1/√width or a fixed one of sines, Xavier-uniform attention
and MLP weights, head of zeros. Softmax is replaced by an op of attnkit by name (Wortsman et al. 2023 §3), with
qk-layernorm and the gate of their §4, and with learned factors on the weights, their question of §5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import attnkit
from attnkit import RowStatistics
from attnkit.nn import MultiHeadAttention
from attnkit_experiments.engine.errors import unknown
from attnkit_experiments.images.learned_scale import LearnedScale, Scale, ScaledValues, factors_of, scale_of

LAYERNORM_EPS = 1e-6  # flax's default, which big_vision uses
MLP_BIAS_STD = 1e-6
TEMPERATURE = 10_000.0

# name: width, depth, width of the MLP, heads
SIZES: dict[str, tuple[int, int, int, int]] = {
    "d32x2": (32, 2, 128, 1),
    "w128x2": (128, 2, 512, 1),
    "d64": (64, 4, 256, 2),
    "w96": (96, 6, 384, 3),
    "w192": (192, 6, 768, 3),
    "w384": (384, 6, 1536, 6),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "w2048": (2048, 18, 8192, 32),
}


@dataclass(frozen=True)
class ViTConfig:
    """The configuration of the model; `op` and `options` are attnkit's, `gate` is "" or "silu".

    `position`: learned, or `sincos_2d`. `pre_logits`: tanh of a linear map of the pooled features before the head
    (big_vision's rep_size). `head_bias`: the initial biases of the head; -log(classes) makes a sigmoid loss
    start near its base rate. `mlp_gelu`: "exact" (erf), or the "tanh" approximation, which is flax's default.
    `learned_scale`: a factor on the weights per layer or head, learned as a gain or as alpha (see `learned_scale`).
    """

    size: str
    patch: int
    image: int
    channels: int
    classes: int
    op: str = attnkit.softmax_attention.__name__
    options: dict[str, Any] = field(default_factory=dict)
    qk_norm: bool = True
    gate: Literal["", "silu"] = ""
    pool: Literal["gap", "tok"] = "gap"
    position: Literal["learned", "sincos2d"] = "learned"
    pre_logits: bool = False
    head_bias: float = 0.0
    mlp_gelu: Literal["exact", "tanh"] = "exact"
    learned_scale: LearnedScale = ""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise unknown("model size", self.size, SIZES)
        if self.image % self.patch:
            raise ValueError(f"images of {self.image} pixels cannot be cut into patches of {self.patch}")
        if self.position == "sincos2d" and (self.width % 4 or self.width < 8):
            raise ValueError(f"position sincos2d needs a width of 8 or more that is a multiple of 4, got {self.width}")
        if self.learned_scale and self.op != attnkit.pointwise_attention.__name__:
            raise ValueError(f"learned_scale is for pointwise_attention, whose weights have a scale; got {self.op}")

    @property
    def width(self) -> int:
        return SIZES[self.size][0]

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + (self.pool == "tok")


def tiny_biases(model: nn.Module) -> None:
    """Biases of MLPs of std 1e-6, as big_vision draws them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".mlp." in name:
            nn.init.normal_(module.bias, std=MLP_BIAS_STD)


class LayerRecord(NamedTuple):
    """The attention of one layer: weights (B, H, L, L) and attnkit's row statistics."""

    weights: Tensor
    statistics: RowStatistics


class Block(nn.Module):
    """x + attention(LN x), then x + MLP(LN x); `attention` is given to `layer`."""

    def __init__(
        self,
        size: str,
        *,
        layer: Callable[..., Any] = MultiHeadAttention,
        mlp_gelu: str = "exact",
        scale: Scale | None = None,
        gate: str = "",
        **attention: Any,
    ) -> None:
        super().__init__()
        width, _, hidden, heads = SIZES[size]
        gated = nn.functional.silu if gate == "silu" else None
        self.attention_norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        self.attention = layer(width, heads, gate=gated, **attention)
        if scale is not None:
            self.attention.v_proj = ScaledValues(self.attention.v_proj, heads, scale)
        self.mlp_norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        gelu = nn.GELU("tanh" if mlp_gelu == "tanh" else "none")
        self.mlp = nn.Sequential(nn.Linear(width, hidden), gelu, nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def inspect(self, x: Tensor, fields: tuple[str, ...]) -> tuple[Tensor, LayerRecord]:
        """The same, and the attention."""
        out, weights, rows = self.attention(self.attention_norm(x), return_weights=True, return_statistics=fields)
        x = x + out
        factors = factors_of(self.attention)
        if factors is not None:  # not known to the op
            weights = weights * factors[:, None, None]
            rows = rows._replace(total=None if rows.total is None else rows.total * factors[:, None])
        return x + self.mlp(self.mlp_norm(x)), LayerRecord(weights, rows)


def sincos_2d(side: int, width: int) -> Tensor:
    """Positions (side², width) of Chen et al. 2021 (MoCo v3): of column x and row y the sines and cosines of x·ω and
    y·ω, in the order sin x, cos x, sin y, cos y, with ω_i = 10000^(-i/(width/4 - 1)), i = 0 … width/4 - 1.
    """
    row, column = torch.meshgrid(*(torch.arange(side, dtype=torch.float64),) * 2, indexing="ij")
    omega = TEMPERATURE ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    x, y = (axis.reshape(-1, 1) * omega for axis in (column, row))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


class ViT(nn.Module):
    """(B, C, H, W) images in -1..1 to (B, classes) logits."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, depth, _, _ = SIZES[config.size]
        self.config = config
        self.embed = nn.Linear(config.channels * config.patch**2, width)
        side = config.image // config.patch
        self.position: Tensor
        if config.position == "learned":
            self.position = nn.Parameter(torch.empty(side**2, width))
        else:
            self.register_buffer("position", sincos_2d(side, width), persistent=False)
        self.class_token = nn.Parameter(torch.zeros(width)) if config.pool == "tok" else None
        scale = None
        if config.learned_scale:
            scale = scale_of(config.learned_scale, config.options.get("alpha", 1.0), config.tokens)
        self.blocks = nn.ModuleList(
            Block(
                config.size,
                mlp_gelu=config.mlp_gelu,
                scale=scale,
                gate=config.gate,
                op=config.op,
                options=config.options,
                qk_norm=config.qk_norm,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        self.pre_logits = nn.Linear(width, width) if config.pre_logits else None
        self.head = nn.Linear(width, config.classes)
        self.initialise()

    def initialise(self) -> None:
        """big_vision's distributions: LeCun-normal embedding and pre-logits, Xavier-uniform blocks, zero head.

        The biases of an MLP are small but not zero. With relu a class token of zeros would stay zero: its scores are 0,
        where relu and its gradient are 0, and with a head of zeros only the head's bias would ever learn.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if name in ("embed", "pre_logits"):
                    nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5)
                elif name == "head":
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.constant_(self.head.bias, self.config.head_bias)
        if isinstance(self.position, nn.Parameter):
            nn.init.normal_(self.position, std=1 / math.sqrt(self.position.shape[1]))
        tiny_biases(self)

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

    def pooled(self, x: Tensor) -> Tensor:
        """The head's input from the last block's output, (B, width): big_vision's `pre_logits`."""
        x = self.norm(x)
        x = x[:, 0] if self.class_token is not None else x.mean(dim=1)
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def features(self, images: Tensor) -> Tensor:
        """(B, width): the features for probes."""
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.pooled(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    @torch.no_grad()
    def inspect(self, images: Tensor, *, fields: tuple[str, ...] = ("total",)) -> tuple[Tensor, list[LayerRecord]]:
        """Logits, and for every layer the attention weights and the named row statistics."""
        x = self.tokens(images)
        records = []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, record = block.inspect(x, fields)
            records.append(record)
        return self.head(self.pooled(x)), records


def forward_flops(config: ViTConfig) -> int:
    """Floating-point operations of the matrix products of one image's forward pass (a multiply-add is 2).

    Activations, normalisation and softmax are left out, as usual: the count is the same for every point-wise op and
    softmax; differences between them show in the measured time.
    """
    width, depth, hidden, _ = SIZES[config.size]
    length = config.tokens
    patches = (config.image // config.patch) ** 2
    projections = (5 if config.gate else 4) * width * width
    block = length * (projections + 2 * width * hidden) + 2 * length * length * width
    head = width * config.classes + (width * width if config.pre_logits else 0)
    return 2 * (patches * config.channels * config.patch**2 * width + depth * block + head)
