"""The encoder of Long Range Arena's PyTorch port (Xiong et al. 2021, used by Lu et al. 2021 §4.5), attention left open.

Token and learned position embeddings of std 0.02, pre-norm blocks with a GELU MLP, a last norm, mean pooling, and a
head of one hidden layer. Two layers of width 64, MLP 128, 2 heads, dropout 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnkit.nn import LSHAttention, MultiHeadAttention, SoftAttention1d
from attnkit_experiments.data.sequences.dataset import PADDING
from attnkit_experiments.engine.errors import unknown

EMBEDDING_STD = 0.02
NYSTROM_CONV = 35
LSH_CHUNK = 64  # what the published code's Reformer layer has by default


@dataclass(frozen=True)
class ClassifierConfig:
    """Everything that fixes the model.

    Attributes:
        vocabulary: ids, padding included.
        classes: of the answer.
        length: tokens of a padded sequence, the number of positions.
        towers: 2 for pairs of sequences, which one encoder reads one by one.
        method: a key of METHODS.
        pool: a key of POOLINGS.
        dropout: of embeddings, of the outputs of attention and MLP, and inside the MLP.
        weight_dropout: of attention weights, where METHODS says so. The published 0.1 falls on softmax alone; 0 by
            default, so that all methods are regularised alike.
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
        if min(self.vocabulary - 1, self.classes, self.length, self.width, self.hidden) < 1 or self.depth < 0:
            raise ValueError("vocabulary must be at least 2; classes, length, width and hidden at least 1; depth 0")


# ---------------------------------------------------------------------------------------------- attention


class Method(NamedTuple):
    """An attention layer for the comparison.

    Attributes:
        build: the layer of a configuration.
        masks: the keywords under which it takes the mask of tokens.
        about: what it is, and how it differs from what was published.
        any_padding: whether logits are the same whatever number of padding tokens follows.
        alone: whether logits of a sequence are the same whatever else is in the batch.
    """

    build: Callable[[ClassifierConfig], nn.Module]
    masks: tuple[str, ...]
    about: str
    any_padding: bool = True
    alone: bool = True


def multi_head(
    op: str, *, drops_weights: bool = False, value_conv: int | None = None, **options: Any
) -> Callable[[ClassifierConfig], nn.Module]:
    """Attention with separate queries, keys and values: `op` of attnkit with its options."""

    def build(config: ClassifierConfig) -> nn.Module:
        of_length = {"max_length": config.length} if op == "linformer_attention" else {}
        return MultiHeadAttention(
            config.width,
            config.heads,
            op=op,
            options={**options, **of_length},
            value_conv=value_conv,
            dropout=config.weight_dropout if drops_weights else 0.0,
        )

    return build


def reformer(*, num_hashes: int) -> Callable[[ClassifierConfig], nn.Module]:
    """LSH attention with as many buckets as the authors' rule gives for a padded sequence."""

    def build(config: ClassifierConfig) -> nn.Module:
        buckets = 2 * max(1, config.length // LSH_CHUNK)
        return LSHAttention(
            config.width, config.heads, num_buckets=buckets, num_hashes=num_hashes, chunk_size=LSH_CHUNK
        )

    return build


def soft(*, window: int) -> Callable[[ClassifierConfig], nn.Module]:
    """SOFT with the ridge of the authors' code for pictures, 0.01; their code for sequences is not public."""

    def build(config: ClassifierConfig) -> nn.Module:
        return SoftAttention1d(config.width, config.heads, window=window, ridge=0.01)

    return build


_SEPARATE, _SHARED = ("key_mask", "query_mask"), ("token_mask",)

METHODS: dict[str, Method] = {
    "transformer": Method(
        multi_head("softmax_attention", drops_weights=True), _SEPARATE, "softmax attention; weights can be dropped"
    ),
    "reformer": Method(
        reformer(num_hashes=2),
        _SHARED,
        "2 rounds of hashing, chunks of 64; rotations are drawn once per model, the published code draws them at every "
        "call, in evaluation too",
        any_padding=False,
    ),
    "linformer": Method(
        multi_head("linformer_attention", num_slots=256),
        _SEPARATE,
        "256 slots; every layer learns a projection of keys and one of values for all heads, the published code learns "
        "one per head for keys, values and all layers",
    ),
    "performer": Method(
        multi_head("performer_attention", num_features=256),
        _SEPARATE,
        "256 orthogonal features of the exponential (FAVOR+). The published configuration says relu features, its code "
        "ignores that, scales scores twice and does not mask keys",
    ),
    "performer_relu": Method(
        multi_head("performer_attention", num_features=256, kernel="relu"),
        _SEPARATE,
        "256 relu features, as the published configuration says",
    ),
    "nystromformer": Method(
        multi_head("nystrom_attention", value_conv=NYSTROM_CONV, num_landmarks=64),
        _SEPARATE,
        "64 landmarks, convolution of 35 values; landmarks are means of tokens only, and every matrix is divided by "
        "its own norm",
    ),
    "nystromformer_128": Method(
        multi_head("nystrom_attention", value_conv=NYSTROM_CONV, num_landmarks=128),
        _SEPARATE,
        "the same with 128 landmarks",
    ),
    "nystromformer_batch_max": Method(
        multi_head("nystrom_attention", value_conv=NYSTROM_CONV, num_landmarks=64, init="batch_max"),
        _SEPARATE,
        "64 landmarks and the published start of the inverse: the largest norm of the batch, so that a sequence's "
        "logits depend on its neighbours",
        alone=False,
    ),
    "soft": Method(
        soft(window=4), _SHARED, "Gaussian kernel, landmarks are means of 4 tokens with stride 4 (Lu et al. 2021 §4.5)"
    ),
    "soft_16": Method(
        soft(window=16), _SHARED, "the same with 16 tokens: 4×4 if the paper's window is one of a picture"
    ),
    "linear": Method(
        multi_head("linear_attention"),
        _SEPARATE,
        "φ = elu + 1 with its denominator (Katharopoulos et al. 2020); the published code's has none",
    ),
    "relu": Method(
        multi_head("pointwise_attention", drops_weights=True, activation="relu", alpha=1.0),
        _SEPARATE,
        "relu / n over the tokens that are there (Wortsman et al. 2023); weights can be dropped",
    ),
}


# ---------------------------------------------------------------------------------------------- pooling


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of the tokens (B, T, width) that are there (mask: (B, T), at least one each)."""
    total: Tensor = torch.where(mask[..., None], x, 0.0).sum(1)
    return total / mask.sum(1, keepdim=True)


def padded_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The sum of the tokens that are there over the padded length: the published code's, smaller for shorter texts."""
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
    """(B, towers, T) token ids, 0 being padding behind the others, to (B, classes) logits; T is at most `length`.

    Of a pair (u, v) the head reads u, v, u·v and u - v, as the published code does (also the benchmark's own): the
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
            wanted = f"(B, {self.config.towers}, T) with T at most {self.config.length}"
            raise ValueError(f"SequenceClassifier: tokens must be {wanted}, got {tuple(tokens.shape)}")
        pooled = [self.encode(tokens[:, tower]) for tower in range(self.config.towers)]
        if len(pooled) == 2:
            u, v = pooled
            pooled += [u * v, u - v]
        logits: Tensor = self.head(torch.cat(pooled, dim=-1))
        return logits
