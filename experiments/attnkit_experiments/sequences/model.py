"""The encoder of Long Range Arena's PyTorch port (Xiong et al. 2021, used by Lu et al. 2021 §4.5).

Any attention, token and learned position embeddings of std 0.02, pre-norm blocks with a GELU MLP, a last norm, mean
pooling, and a head of one hidden layer. Two layers of width 64, MLP 128, 2 heads, dropout 0.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnkit_experiments.data.sequences.dataset import PADDING
from attnkit_experiments.engine.counting import multiply_adds
from attnkit_experiments.engine.errors import require_in, unknown
from attnkit_experiments.sequences.methods import METHODS

EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class ClassifierConfig:
    """The configuration of the model.

    Attributes:
        vocabulary: ids, padding included.
        classes: of the answer.
        length: tokens of a padded sequence, the number of positions.
        towers: 2 for pairs of sequences, which one encoder reads one by one.
        method: a key of METHODS.
        pool: a key of POOLINGS.
        dropout: of embeddings, of the outputs of attention and MLP, and inside the MLP.
        weight_dropout: of attention weights, if METHODS says so. The published 0.1 affects only softmax; 0 by
            default, so that all methods are regularised equally.
    """

    vocabulary: int
    classes: int
    length: int
    towers: int = 1
    method: str = "transformer"
    pool: str = "masked"
    width: int = 64
    depth: int = 2
    hidden: int = 128
    heads: int = 2
    dropout: float = 0.1
    weight_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if self.pool not in POOLINGS:
            raise unknown("pooling", self.pool, POOLINGS)
        if self.towers not in (1, 2):
            raise ValueError(f"towers must be 1 or 2, got {self.towers}")
        require_in("[2, inf)", vocabulary=self.vocabulary)
        require_in("[1, inf)", classes=self.classes, length=self.length, width=self.width, hidden=self.hidden)
        require_in("[0, inf)", depth=self.depth)


# ---------------------------------------------------------------------------------------------- pooling


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of the valid tokens (B, T, width) (mask: (B, T), at least one each)."""
    total: Tensor = torch.where(mask[..., None], x, 0.0).sum(1)
    return total / mask.sum(1, keepdim=True)


def padded_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The sum of the valid tokens over the padded length, as in the published code: smaller for shorter texts."""
    return torch.where(mask[..., None], x, 0.0).mean(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"masked": masked_mean, "mean_padded": padded_mean}


# ---------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """x + attention(LN x), then x + MLP(LN x)."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        method = METHODS[config.method]
        self.attention_norm = nn.LayerNorm(width)
        self.attention, self.masks = method.build(config), method.masks
        self.dropout = nn.Dropout(config.dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(hidden, width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention(self.attention_norm(x), **dict.fromkeys(self.masks, mask))
        x = x + self.dropout(attended)
        return x + self.mlp(self.mlp_norm(x))


class SequenceClassifier(nn.Module):
    """(B, towers, T) token ids, 0 being trailing padding, to (B, classes) logits; T is at most `length`.

    Of a pair (u, v) the head reads u, v, u·v and u - v, as in the published code (and the benchmark's own): the
    answer may depend on the order of the two.
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, width)
        self.position = nn.Embedding(config.length, width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.pool = POOLINGS[config.pool]
        features = width if config.towers == 1 else 4 * width
        self.head = nn.Sequential(
            nn.Linear(features, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.classes)
        )
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD)

    def encode(self, tokens: Tensor) -> Tensor:
        """(B, T) to the pooled (B, width)."""
        mask = tokens != PADDING
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.pool(self.norm(x), mask)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 3 or tokens.shape[1] != self.config.towers or tokens.shape[2] > self.config.length:
            expected = f"(B, {self.config.towers}, T) with T at most {self.config.length}"
            raise ValueError(f"SequenceClassifier: tokens must be {expected}, got {tuple(tokens.shape)}")
        pooled = [self.encode(tokens[:, tower]) for tower in range(self.config.towers)]
        if len(pooled) == 2:
            u, v = pooled
            pooled += [u * v, u - v]
        logits: Tensor = self.head(torch.cat(pooled, dim=-1))
        return logits


@functools.cache
def forward_flops(config: ClassifierConfig, length: int) -> int:
    """Floating-point operations of the matrix products and convolutions of the forward pass of a sample (a multiply-add
    is 2) that is padded to `length` tokens, as torch counts them in the model: padding is computed too.
    """
    tokens = torch.ones(1, config.towers, length, dtype=torch.long, device="meta")
    return 2 * multiply_adds(lambda: SequenceClassifier(config), tokens)
