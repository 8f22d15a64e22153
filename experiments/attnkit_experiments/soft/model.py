"""The image models of Lu et al. 2021 (SOFT): Tiny to Huge, with configurable attention.

A convolutional stem and a pyramid of four stages (§3.3, Table 2), each a 3×3 convolution of stride 2 (BN, ReLU),
learned positions and blocks of attention and MLP. Two sets of options define the blocks: OFFICIAL, the authors'
code, and PAPER, only the formulas of the paper. Linear maps and positions start as in the code, normal of
std 0.02 (which it cuts at 100 of them), biases at 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnkit_experiments.engine.counting import multiply_adds, parameters
from attnkit_experiments.engine.errors import unknown
from attnkit_experiments.soft.attention import Place, SoftOptions
from attnkit_experiments.soft.methods import METHODS, last_soft, last_softmax

POSITION_STD = 0.02
PATCH = 16  # of models without a pyramid
PRE_NORM_EPS = 1e-6  # of stage 4 and the last norm; the others have torch's 1e-5
MLP_RATIO = 4
NEWTON_PRODUCTS = 2 * 20 + 4  # of m×m matrices: two per step, and four for the gradient


class SoftSize(NamedTuple):
    """Features, heads and blocks of each stage; one stage is a model without a pyramid."""

    widths: tuple[int, ...]
    heads: tuple[int, ...]
    depths: tuple[int, ...]


_HEADS, _WIDTHS = (2, 4, 10, 16), (64, 128, 320, 512)

# Table 2; for Small the code has 20 blocks in stage 3, which gives 39 M parameters instead of the paper's 24 M
SIZES: dict[str, SoftSize] = {
    "tiny": SoftSize(_WIDTHS, _HEADS, (1, 2, 3, 2)),
    "small": SoftSize(_WIDTHS, _HEADS, (1, 3, 7, 4)),
    "medium": SoftSize((64, 128, 288, 512), (2, 4, 9, 16), (1, 3, 29, 5)),
    "large": SoftSize(_WIDTHS, _HEADS, (1, 3, 40, 5)),
    "huge": SoftSize((64, 128, 352, 512), (2, 4, 11, 16), (1, 5, 49, 5)),
    "plain": SoftSize((384,), (12,), (12,)),
    "mini": SoftSize((16, 32, 64, 96), (1, 2, 2, 3), (1, 1, 2, 1)),
    "plain-mini": SoftSize((64,), (2,), (4,)),
}

OFFICIAL = SoftOptions(
    sampling="convolution", ridge=0.01, landmark_norm=True, value_convs=(9, 5, 3), softmax_last=True,
    stochastic_depth=False,
)  # fmt: skip
"""The authors' code of 2022: the convolution of values and LayerNorm with GELU on landmarks are not in the paper, stage
4 is softmax attention, and its drop_path drops single features."""

PAPER = SoftOptions(
    sampling="average_pool", init_scale=1.0, value_convs=(), softmax_last=False, stochastic_depth=True
)  # fmt: skip
"""Equation 9 in every stage, Algorithm 2 with its α = 2/‖A‖₁², average pooling (§4.4)."""

OPTIONS: dict[str, SoftOptions] = {"official": OFFICIAL, "paper": PAPER}


@dataclass(frozen=True)
class SoftConfig:
    """The configuration of the model.

    Attributes:
        size: a key of SIZES.
        image, channels, classes: what it is for; `image` a multiple of all strides together.
        method: a key of METHODS, the attention of all stages; with options.softmax_last of all but the last.
        options: of the blocks and of SOFT's attention.
        landmarks: m, a square number; the paper's 49. It is the same in all stages.
        stem_stride: 4 as in the paper, 2 or 1 for small images.
        overlap: 3×3 convolutions with BN and ReLU between stages; else patches of 4×4 and 2×2 with LayerNorm, as PVT's.
        drop_path: of the last block; it rises from 0 at the first.
        channels_last: images are (B, H, W, C) in memory, as the tokens of all stages are, which spares a GPU's
            convolutions the change from one to the other. Sums are taken in another order.
    """

    size: str
    image: int
    channels: int
    classes: int
    method: str = "soft"
    options: SoftOptions = OFFICIAL
    landmarks: int = 49
    stem_stride: int = 4
    overlap: bool = True
    drop_path: float = 0.0
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise unknown("model size", self.size, SIZES)
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if self.stem_stride not in (1, 2, 4):
            raise ValueError(f"stem_stride must be 1, 2 or 4, got {self.stem_stride}")
        if not self.overlap and self.stem_stride == 1:
            raise ValueError("overlap=False needs a stem_stride of 2 or 4, got 1")
        if self.method != "soft" and not self.options.softmax_last:
            raise ValueError(f"softmax_last=False is for the method soft, got {self.method}")
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path must lie in [0, 1), got {self.drop_path}")
        if self.image % self.stride:
            raise ValueError(
                f"images of {self.image} pixels do not fit the strides of the stages, {self.stride} in all"
            )

    @property
    def pyramid(self) -> bool:
        return len(SIZES[self.size].widths) > 1

    @property
    def stride(self) -> int:
        """Pixels per side of a token of the last stage."""
        return self.stem_stride * 2 ** (len(SIZES[self.size].widths) - 1) if self.pyramid else self.patch

    @property
    def patch(self) -> int:
        """Pixels per side of a patch of a model without a pyramid: 16, in proportion for small images."""
        return PATCH * self.stem_stride // 4

    @property
    def grids(self) -> tuple[int, ...]:
        """Tokens per side in each stage."""
        if not self.pyramid:
            return (self.image // self.patch,)
        return tuple(self.image // self.stem_stride // 2**i for i in range(len(SIZES[self.size].widths)))

    @property
    def newton_multiply_adds(self) -> int:
        """Multiply-adds of one image's inversions, which the paper's FLOPs seem to omit."""
        size = SIZES[self.size]
        stages = len(size.depths) - (self.pyramid and self.options.softmax_last)
        tokens = [self.landmarks] * len(size.depths)
        if self.pyramid:
            tokens[-1] = self.grids[-1] ** 2 + 1
        if self.method != "soft":
            return 0
        return sum(size.depths[i] * size.heads[i] * NEWTON_PRODUCTS * tokens[i] ** 3 for i in range(stages))


# ---------------------------------------------------------------------------------------------- tokens


class ConvUnit(nn.Sequential):
    """3×3 convolution, batch normalisation, ReLU."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(nn.Conv2d(channels, width, 3, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class Patches(nn.Module):
    """Patches that do not overlap, projected, and LayerNorm over features."""

    def __init__(self, channels: int, width: int, side: int) -> None:
        super().__init__()
        self.project, self.norm = nn.Conv2d(channels, width, side, side), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.project(x).movedim(1, -1)).movedim(-1, 1)


def embedding(config: SoftConfig, stage: int) -> nn.Module:
    """The layer that turns the image (B, C, H, W) before a stage into its tokens."""
    size = SIZES[config.size]
    width = size.widths[stage]
    if not config.pyramid:
        return Patches(config.channels, width, config.patch)
    before = size.widths[stage - 1] if stage else config.channels
    if not config.overlap:
        return Patches(before, width, 2 if stage else config.stem_stride)
    if stage:
        return ConvUnit(before, width, 2)
    first, last = {4: (2, 2), 2: (2, 1), 1: (1, 1)}[config.stem_stride]
    half = width // 2
    return nn.Sequential(ConvUnit(before, half, first), ConvUnit(half, half, 1), ConvUnit(half, width, last))


# ---------------------------------------------------------------------------------------------- blocks


class StochasticDepth(nn.Module):
    """In training x·b/(1 - rate) with one b ~ Bernoulli(1 - rate) for each item (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        mask = x.new_empty(len(x), 1, 1).bernoulli_(1 - self.rate)
        return x * (mask / (1 - self.rate))


def mlp(width: int, approximate: str) -> nn.Sequential:
    hidden = MLP_RATIO * width
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate=approximate), nn.Linear(hidden, width))


class PostNormBlock(nn.Module):
    """x ← LN(x + attention(x)), x ← LN(x + MLP(x)): the block of SOFT."""

    def __init__(self, attention: nn.Module, width: int, drop: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp, self.drop = attention, mlp(width, "tanh"), drop
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        x = self.attention_norm(x + self.drop(self.attention(x, height, width)))
        return self.mlp_norm(x + self.drop(self.mlp(x)))


class PreNormBlock(nn.Module):
    """x + attention(LN x), then x + MLP(LN x): the block of a last stage with softmax."""

    def __init__(self, attention: nn.Module, width: int, drop: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp, self.drop = attention, mlp(width, "none"), drop
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, eps=PRE_NORM_EPS) for _ in range(2))

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), height, width))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


def make_block(config: SoftConfig, stage: int, rate: float) -> nn.Module:
    """A block of a stage; with a class token in the last stage of a pyramid."""
    size, options = SIZES[config.size], config.options
    # without a pyramid the tokens are those of stage 3
    like = stage if config.pyramid else max(len(options.value_convs) - 1, 0)
    place = Place(size.widths[stage], size.heads[stage], config.grids[stage], config.landmarks, like, options)
    if config.pyramid and stage == len(size.widths) - 1:
        if options.softmax_last:
            return PreNormBlock(last_softmax(place), place.width, StochasticDepth(rate))
        attention = last_soft(place)
    else:
        attention = METHODS[config.method](place)
    drop = StochasticDepth(rate) if options.stochastic_depth else nn.Dropout(rate)
    return PostNormBlock(attention, place.width, drop)


# ---------------------------------------------------------------------------------------------- model


class Stage(nn.Module):
    """An image (B, C, H, W) to the tokens (B, n, width) of the next stage, with a class token first if there is one."""

    def __init__(self, config: SoftConfig, stage: int, rates: list[float]) -> None:
        super().__init__()
        size = SIZES[config.size]
        width, self.grid = size.widths[stage], config.grids[stage]
        last = config.pyramid and stage == len(size.widths) - 1
        self.embed = embedding(config, stage)
        self.class_token = nn.Parameter(torch.empty(width)) if last else None
        self.position = nn.Parameter(torch.empty(self.grid**2 + last, width))
        self.blocks = nn.ModuleList(make_block(config, stage, rate) for rate in rates)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.embed(pictures).flatten(2).mT
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1)
        x = x + self.position
        for block in self.blocks:
            x = block(x, self.grid, self.grid)
        return x

    def picture(self, tokens: Tensor) -> Tensor:
        """Tokens (B, n, width) as (B, width, H, W)."""
        return tokens.mT.unflatten(-1, (self.grid, self.grid))


class SoftVisionTransformer(nn.Module):
    """(B, C, H, W) images in -1..1 to (B, classes) logits.

    The head reads the class token of the last stage, or the mean over tokens of a model without a pyramid.
    """

    def __init__(self, config: SoftConfig) -> None:
        super().__init__()
        size = SIZES[config.size]
        self.config = config
        depth = sum(size.depths)
        rates = [config.drop_path * i / max(depth - 1, 1) for i in range(depth)]
        starts = [sum(size.depths[:i]) for i in range(len(size.depths))]
        of_stage = [rates[start : start + depth] for start, depth in zip(starts, size.depths, strict=True)]
        # not a ModuleList, whose elements are compiled and sharded as blocks
        self.stages = nn.Sequential(*(Stage(config, i, of_stage[i]) for i in range(len(size.widths))))
        self.norm = nn.LayerNorm(size.widths[-1], eps=PRE_NORM_EPS)
        self.head = nn.Linear(size.widths[-1], config.classes)
        self.initialise()

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=POSITION_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Stage):
                nn.init.normal_(module.position, std=POSITION_STD)
                if module.class_token is not None:
                    nn.init.normal_(module.class_token, std=POSITION_STD)

    def forward(self, images: Tensor) -> Tensor:
        x = images.contiguous(memory_format=torch.channels_last) if self.config.channels_last else images
        for index, stage in enumerate(self.stages):
            assert isinstance(stage, Stage)
            x = stage(x)
            if index < len(self.stages) - 1:
                x = stage.picture(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.config.pyramid else x.mean(dim=1))


@functools.cache
def cost(config: SoftConfig) -> tuple[int, int]:
    """(parameters, multiply-adds of one image)."""

    def build() -> SoftVisionTransformer:
        return SoftVisionTransformer(config)

    image = torch.empty(1, config.channels, config.image, config.image, device="meta")
    return parameters(build), multiply_adds(build, image)
