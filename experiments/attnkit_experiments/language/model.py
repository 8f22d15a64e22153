"""A language model of bytes or tokens with the blocks of the ViT: Wortsman et al. 2023 transferred to text.

In a causal model query i sees the keys j ≤ i. Point-wise weights are divided by the number of keys that their query
sees, n_i = i + 1 (`length="visible"`), so the result for a token does not depend on later ones, as it would with L. In
a model of masked tokens every query sees all L keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import attnkit
from attnkit import RowStatistics
from attnkit.nn.gates import OfTokens
from attnkit_experiments.data.text.bytes import BYTES
from attnkit_experiments.engine.counting import attention_multiply_adds
from attnkit_experiments.engine.errors import require_in, unknown
from attnkit_experiments.images.model import LAYERNORM_EPS, SIZES, Block, tiny_biases
from attnkit_experiments.language import layers


@dataclass(frozen=True)
class LanguageConfig:
    """The configuration of the model: sizes are those of the ViT, `length` is the number of tokens it reads.

    `op` and `options` are those of `layers.attention`. `vocabulary`: the number of tokens, 256 for bytes; a model of
    masked tokens reads one more, the mask, whose id is `vocabulary`. `tied`: logits are products with the table that
    embeds tokens (Press and Wolf 2017), and a bias.
    """

    size: str
    length: int
    op: str = attnkit.softmax_attention.__name__
    options: dict[str, Any] = field(default_factory=dict)
    qk_norm: bool = True
    gate: Literal["", "silu"] = ""
    causal: bool = True
    vocabulary: int = BYTES
    tied: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise unknown("model size", self.size, SIZES)
        require_in("[2, inf)", length=self.length, vocabulary=self.vocabulary)


class LanguageModel(nn.Module):
    """Tokens (B, T), or the mask if it is not causal, to logits (B, T, vocabulary) of the token after each, or there;
    T ≤ length. They are those from `start` on where a window is cut over processes.
    """

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        width, depth, _, _ = SIZES[config.size]
        self.config = config
        self.embed = nn.Embedding(config.vocabulary + (not config.causal), width)
        self.position = nn.Parameter(torch.empty(config.length, width))
        own = {name: getattr(config, name) for name in ("gate", "causal", "length", "op", "options", "qk_norm")}
        self.blocks = nn.ModuleList(Block(config.size, layer=layers.attention, **own) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=LAYERNORM_EPS)
        self.head = nn.Linear(width, config.vocabulary) if not config.tied else None
        self.head_bias = nn.Parameter(torch.zeros(config.vocabulary)) if config.tied else None
        modules = self.named_modules()  # decays have their own start
        decays = {m.proj for name, m in modules if name.endswith("gates.log_decay") and isinstance(m, OfTokens)}
        for module in self.modules():
            if isinstance(module, nn.Linear) and module not in decays:
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
        for table in (self.embed.weight, self.position):
            nn.init.normal_(table, std=width**-0.5)
        tiny_biases(self)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.embed(tokens) + self.position[start : start + tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is not None:
            return self.head(x)
        return linear(x, self.embed.weight[: self.config.vocabulary], self.head_bias)

    @torch.no_grad()
    def statistics(self, tokens: Tensor, fields: tuple[str, ...]) -> list[RowStatistics]:
        """The named statistics of the rows of attention, layer by layer."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        layers = []
        for block in self.blocks:
            assert isinstance(block, Block)
            out, rows = block.attention(block.attention_norm(x), return_statistics=fields)
            x = x + out
            x = x + block.mlp(block.mlp_norm(x))
            layers.append(rows)
        return layers


def forward_flops(config: LanguageConfig) -> int:
    """Floating-point operations of the matrix products of one sequence's forward pass (a multiply-add is 2).

    Only visible pairs of tokens are counted, L(L + 1)/2 in a causal model: the needless work of an implementation
    shows in the measured time.
    """
    width, depth, hidden, heads = SIZES[config.size]
    length = config.length
    projections = (5 if config.gate else 4) * width * width
    pairs = length * (length + 1) // 2 if config.causal else length * length
    attention = attention_multiply_adds(
        config.op, config.options, queries=length, keys=length, pairs=pairs, width=width, heads=heads
    )
    block = length * (projections + 2 * width * hidden) + attention
    return 2 * (depth * block + length * width * config.vocabulary)
