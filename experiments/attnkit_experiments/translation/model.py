"""The encoder-decoder Transformer of Vaswani et al. 2017 with configurable attention and feed-forward network.

Post-norm layers as in fairseq's transformer_iwslt_de_en and Shen et al. 2023 (App. A.2), or pre-norm. Softmax
is replaced by an op of attnkit, one for the encoder, one for the causal decoder, one for the decoder's attention to the
source; the feed-forward network is a `KeyValueMemory` (their §2.1, §3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnkit import RowStatistics
from attnkit._core.typing import OpName
from attnkit.nn import KeyValueCache, KeyValueMemory, MultiHeadAttention, StateCache
from attnkit_experiments.data.text.pairs import PAD
from attnkit_experiments.engine.counting import attention_multiply_adds
from attnkit_experiments.engine.errors import require_in, unknown
from attnkit_experiments.translation.methods import VANILLA, Method

MEMORIES: dict[str, dict[str, Any]] = {
    "relu": {"activation": "relu"},
    "softmax": {"activation": "softmax"},
    "softmax_norm": {"activation": "softmax", "norm": True},
    **{f"softmax_t{t}": {"activation": "softmax", "temperature": float(t)} for t in (2, 4, 8)},
}
"""Feed-forward networks of Shen et al. 2023 Table 1 and of §3.4, as options of `Memory`."""


@dataclass(frozen=True)
class TranslationConfig:
    """The configuration of the model. Defaults: fairseq's transformer_iwslt_de_en, dropout as in the paper (A.2).

    `memory` names one of `MEMORIES`, `slots` is its d_h. `shared` keeps one matrix for source, target and output
    embeddings. `max_length` counts tokens of either side with EOS. `attention_dropout` drops weights: an op that takes
    no dropout (linear, cosine, efficient, performer) refuses any but 0. `statistics` names the implementation of
    `attnkit.attention_with_statistics`, which regularised layers call: "native" keeps no (L, S) array for the backward
    pass, and "auto" takes it on a CPU; "generic" keeps a few.
    """

    vocabulary: int
    encoder_layers: int = 6
    decoder_layers: int = 6
    dim: int = 512
    heads: int = 4
    slots: int = 1024
    memory: str = "relu"
    encoder: Method = VANILLA
    decoder: Method = VANILLA
    cross: Method = VANILLA
    norm: Literal["post", "pre"] = "post"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    shared: bool = True
    max_length: int = 1024
    statistics: str = "auto"

    def __post_init__(self) -> None:
        if self.memory not in MEMORIES:
            raise unknown("memory", self.memory, MEMORIES)
        if self.norm not in JOINS:
            raise unknown("norm", self.norm, JOINS)
        if self.dim % 2:
            raise ValueError(f"TranslationConfig: dim must be even for sinusoidal positions; got {self.dim}")
        layers = {"encoder_layers": self.encoder_layers, "decoder_layers": self.decoder_layers}
        require_in("[1, inf)", vocabulary=self.vocabulary, max_length=self.max_length, **layers)


def sinusoids(length: int, dim: int) -> Tensor:
    """(length, dim): sin(t/10000^(2i/dim)) in the first half, cos in the second (Vaswani et al. 2017 §3.5, where the
    two alternate; with learned projections after it the order does not matter).
    """
    rates = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10000.0) / dim))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


# ---------------------------------------------------------------------------------------------- layers

Branch = Callable[[Tensor], Tensor]


def post_norm(x: Tensor, branch: Branch, norm: nn.Module, dropout: nn.Module) -> Tensor:
    """norm(x + dropout(branch(x)))."""
    joined: Tensor = norm(x + dropout(branch(x)))
    return joined


def pre_norm(x: Tensor, branch: Branch, norm: nn.Module, dropout: nn.Module) -> Tensor:
    """x + dropout(branch(norm(x)))."""
    joined: Tensor = x + dropout(branch(norm(x)))
    return joined


JOINS = {"post": post_norm, "pre": pre_norm}


class Memory(KeyValueMemory):
    """A memory whose scores x·key/temperature are flatter the higher it is (§3.4). Biases are not divided."""

    def __init__(self, dim: int, slots: int, *, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(dim, slots, **options)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.temperature if self.temperature != 1 else x)


class NormedAttention(MultiHeadAttention):
    """Attention whose result passes through a LayerNorm."""

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        self.result_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Any:
        result = super().forward(x, context, **options)
        if isinstance(result, tuple):
            return (self.result_norm(result[0]), *result[1:])
        return self.result_norm(result)


def _attention(config: TranslationConfig, method: Method, *, causal: bool = False) -> MultiHeadAttention:
    layer = NormedAttention if method.norm else MultiHeadAttention
    return layer(
        config.dim,
        config.heads,
        op=cast(OpName, method.op),
        options=method.options,
        dropout=config.attention_dropout,
        causal=causal,
        statistics_impl=config.statistics,
    )


class EncoderLayer(nn.Module):
    """Attention among the tokens of the source, then the memory."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.attention = _attention(config, config.encoder)
        self.attention_norm = nn.LayerNorm(config.dim)
        self.memory = Memory(config.dim, config.slots, **MEMORIES[config.memory])
        self.memory_norm = nn.LayerNorm(config.dim)
        self.dropout, self.join = nn.Dropout(config.dropout), JOINS[config.norm]

    def forward(self, x: Tensor, own: Branch) -> Tensor:
        """`own` calls `attention` with the masks of the batch."""
        x = self.join(x, own, self.attention_norm, self.dropout)
        return self.join(x, self.memory, self.memory_norm, self.dropout)


class DecoderLayer(nn.Module):
    """Causal attention among the tokens of the target, attention to the source, then the memory."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.attention = _attention(config, config.decoder, causal=True)
        self.attention_norm = nn.LayerNorm(config.dim)
        self.cross = _attention(config, config.cross)
        self.cross_norm = nn.LayerNorm(config.dim)
        self.memory = Memory(config.dim, config.slots, **MEMORIES[config.memory])
        self.memory_norm = nn.LayerNorm(config.dim)
        self.dropout, self.join = nn.Dropout(config.dropout), JOINS[config.norm]

    def forward(self, x: Tensor, own: Branch, across: Branch) -> Tensor:
        """`own` and `across` call `attention` and `cross` with masks, source and caches."""
        x = self.join(x, own, self.attention_norm, self.dropout)
        x = self.join(x, across, self.cross_norm, self.dropout)
        return self.join(x, self.memory, self.memory_norm, self.dropout)


# ---------------------------------------------------------------------------------------------- looking at rows


class LayerRows(NamedTuple):
    """Row statistics of one attention layer, (B, H, L), and which queries are tokens, boolean (B, L)."""

    statistics: RowStatistics
    queries: Tensor


def _attend(
    attention: MultiHeadAttention, x: Tensor, context: Tensor | None = None, *, queries: Tensor, **masks: Any
) -> Tensor:
    out: Tensor = attention(x, context, **masks)
    return out


def _watched(
    fields: tuple[str, ...],
    rows: list[LayerRows],
    attention: MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    queries: Tensor,
    **masks: Any,
) -> Tensor:
    out: Tensor
    out, statistics = attention(x, context, return_statistics=fields, **masks)
    rows.append(LayerRows(statistics, queries))
    return out


class _Watch:
    """Collects the statistics named of the attention layers named (None = all).

    Each layer gets an empty list and does not know its name, so that all compiled layers are equal.
    """

    def __init__(self, fields: tuple[str, ...] = (), layers: Collection[str] | None = None) -> None:
        self.fields, self.layers = fields, layers
        self.layer_rows: dict[str, list[LayerRows]] = {}

    def of(self, name: str) -> Callable[..., Tensor]:
        """The function that calls the attention layer of that name."""
        if not self.fields or (self.layers is not None and name not in self.layers):
            return _attend
        self.layer_rows[name] = []
        return partial(_watched, self.fields, self.layer_rows[name])

    @property
    def rows(self) -> dict[str, LayerRows]:
        return {name: rows[0] for name, rows in self.layer_rows.items()}


# ---------------------------------------------------------------------------------------------- decoding state


@dataclass
class DecoderState:
    """The state of decoding: caches of the decoder's own tokens per hypothesis, and of the source per item."""

    own: list[KeyValueCache | StateCache]
    cross: list[KeyValueCache | StateCache]
    memory: Tensor
    mask: Tensor
    position: int = 0

    def follow(self, parents: Tensor) -> None:
        """Make hypothesis b of item i a continuation of hypothesis parents[i, b] (items, beams), long."""
        items = parents.shape[0]
        before = self.own[0].batch_size // items
        rows = (torch.arange(items, device=parents.device)[:, None] * before + parents).flatten()
        for cache in self.own:
            cache.reorder(rows)

    def keep(self, items: Tensor) -> None:
        """Continue with only these items (n,), long."""
        beams = self.own[0].batch_size // self.memory.shape[0]
        rows = (items[:, None] * beams + torch.arange(beams, device=items.device)).flatten()
        for cache in self.own:
            cache.reorder(rows)
        for cache in self.cross:
            cache.reorder(items)
        self.memory, self.mask = self.memory[items], self.mask[items]


# ---------------------------------------------------------------------------------------------- the model


class Translator(nn.Module):
    """Source and target tokens to logits of the next target token.

    Sequences are padded at the end with PAD; `source_mask` (B, S) is True on tokens, EOS included. target_in starts
    with BOS. Results at tokens do not depend on the amount of padding.

    Initialisation is fairseq's: embeddings normal with std 1/√dim and 0 for PAD, scaled by √dim at the input;
    attention projections Xavier-uniform, those of q, k, v with gain 1/√2; their biases 0 (fairseq draws those of q, k,
    v as `torch.nn.Linear` does); memories as two `torch.nn.Linear`.

    Raises:
        ValueError: more tokens than `max_length`, or an op without causal form as the decoder's.
    """

    positions: Tensor

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        self.source = nn.Embedding(config.vocabulary, config.dim, padding_idx=PAD)
        self.target = None if config.shared else nn.Embedding(config.vocabulary, config.dim, padding_idx=PAD)
        self.output = None if config.shared else nn.Linear(config.dim, config.vocabulary, bias=False)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        last = nn.LayerNorm if config.norm == "pre" else nn.Identity
        self.encoder_norm, self.decoder_norm = last(config.dim), last(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(config.max_length, config.dim), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.dim**-0.5)
                nn.init.zeros_(module.weight[PAD])
            elif isinstance(module, MultiHeadAttention):
                for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    linear = getattr(module, name)
                    nn.init.xavier_uniform_(linear.weight, gain=1.0 if name == "out_proj" else 2**-0.5)
                    nn.init.zeros_(linear.bias)
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=self.config.dim**-0.5)

    def forward(
        self,
        source: Tensor,
        source_mask: Tensor,
        target_in: Tensor,
        *,
        fields: tuple[str, ...] = (),
        layers: Collection[str] | None = None,
    ) -> Any:
        """(B, S) tokens, boolean (B, S), (B, T) tokens -> logits (B, T, vocabulary).

        With `fields`, also {name: LayerRows} with those row statistics, with gradients, of the attention layers named
        (None = all): encoder.0.attention, decoder.0.attention, decoder.0.cross.
        """
        watch = _Watch(fields, layers)
        logits = self._logits(source, source_mask, target_in, watch)
        return (logits, watch.rows) if fields else logits

    def attentions(self) -> dict[str, MultiHeadAttention]:
        """Every attention layer by its name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, MultiHeadAttention)}

    def regularised(self) -> dict[str, float]:
        """{attention layer: weight of the regulariser on its rows}, without those that have none."""
        kinds = {"encoder": self.config.encoder, "attention": self.config.decoder, "cross": self.config.cross}
        weights = {}
        for name in self.attentions():
            stack, _, kind = name.split(".")
            weights[name] = kinds["encoder" if stack == "encoder" else kind].regulariser
        return {name: weight for name, weight in weights.items() if weight > 0}

    def encode(self, source: Tensor, source_mask: Tensor, watch: _Watch | None = None) -> Tensor:
        """(B, S, dim): the source for the decoder's attention."""
        watch = watch or _Watch()
        x = self._embedded(self.source, source, 0)
        for n, layer in enumerate(self.encoder):
            assert isinstance(layer, EncoderLayer)
            attend = watch.of(f"encoder.{n}.attention")
            masks = {"key_mask": source_mask, "query_mask": source_mask}
            x = layer(x, partial(attend, layer.attention, queries=source_mask, **masks))
        out: Tensor = self.encoder_norm(x)
        return out

    def start(self, source: Tensor, source_mask: Tensor, max_length: int) -> DecoderState:
        """Encode, and allocate caches for max_length target tokens (including BOS) of one hypothesis per item."""
        memory = self.encode(source, source_mask)
        layers = [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]
        items, width = source.shape
        own = [layer.attention.new_cache(items, max_length) for layer in layers]
        return DecoderState(own, [layer.cross.new_cache(items, width) for layer in layers], memory, source_mask)

    def decode_step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """The next tokens (items, beams) of all hypotheses -> logits (items, beams, vocabulary); fills the caches.

        In cross-attention the hypotheses of an item are queries of one row of the batch, so the keys of the
        source are stored once.
        """
        items, beams = tokens.shape
        x = self._embedded(self.source if self.target is None else self.target, tokens.reshape(-1, 1), state.position)
        for layer, own, cross in zip(self.decoder, state.own, state.cross, strict=True):
            assert isinstance(layer, DecoderLayer)
            across = partial(layer.cross, context=state.memory, key_mask=state.mask, cache=cross)

            def across_items(y: Tensor, across: Branch = across) -> Tensor:
                return across(y.view(items, beams, -1)).view(y.shape)

            # not __call__: a compiled layer would have more graphs, as sizes change with each token
            x = layer.forward(x, partial(layer.attention, cache=own), across_items)
        state.position += 1
        return self._to_vocabulary(x).view(items, beams, -1)

    def _logits(self, source: Tensor, source_mask: Tensor, target_in: Tensor, watch: _Watch) -> Tensor:
        memory = self.encode(source, source_mask, watch)
        x = self._embedded(self.source if self.target is None else self.target, target_in, 0)
        # padding comes last, so causality alone hides it from every token
        there = target_in != PAD
        for n, layer in enumerate(self.decoder):
            assert isinstance(layer, DecoderLayer)
            attend, attend_across = (watch.of(f"decoder.{n}.{name}") for name in ("attention", "cross"))
            across = partial(attend_across, layer.cross, context=memory, queries=there, key_mask=source_mask)
            x = layer(x, partial(attend, layer.attention, queries=there), across)
        return self._to_vocabulary(x)

    def _embedded(self, table: nn.Embedding, tokens: Tensor, start: int) -> Tensor:
        stop = start + tokens.shape[1]
        if stop > self.config.max_length:
            raise ValueError(f"Translator: {stop} tokens; made for max_length={self.config.max_length}")
        x: Tensor = self.dropout(table(tokens) * math.sqrt(self.config.dim) + self.positions[start:stop])
        return x

    def _to_vocabulary(self, x: Tensor) -> Tensor:
        weight = self.source.weight if self.output is None else self.output.weight
        return nn.functional.linear(self.decoder_norm(x), weight)


def forward_flops(config: TranslationConfig, sources: np.ndarray, targets: np.ndarray) -> int:
    """Floating-point operations of the matrix products of the forward pass of sentence pairs (a multiply-add is 2) of
    as many tokens, (n,) and (n,) int64 with the one that ends or begins each.

    Padding is not counted, nor are pairs that causality hides: needless work shows in the measured time.
    """
    width, slots = config.dim, config.slots

    def attention(method: Method, queries: np.ndarray, keys: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        own = attention_multiply_adds(
            method.op, method.options, queries=queries, keys=keys, pairs=pairs, width=width, heads=config.heads
        )
        return own + 2 * width * width * (queries + keys)  # q and out, k and v

    memory = 2 * width * slots
    encoder = attention(config.encoder, sources, sources, sources * sources) + memory * sources
    own = attention(config.decoder, targets, targets, targets * (targets + 1) // 2)
    decoder = own + attention(config.cross, targets, sources, targets * sources) + memory * targets
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return 2 * int((layers + width * config.vocabulary * targets).sum())
