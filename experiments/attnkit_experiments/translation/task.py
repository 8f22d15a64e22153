"""Translation as a Task of the training loop: token-budget batches in, label-smoothed loss and ReLUFormer's regulariser
out; perplexity and BLEU of beam search as evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnkit import attention_regulariser
from attnkit_experiments.data.text.batches import TokenBatches
from attnkit_experiments.data.text.pairs import BOS, EOS, PAD, Sentences, Split, TranslationData
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.losses import nats
from attnkit_experiments.engine.outcomes import Outcomes
from attnkit_experiments.engine.sampler import build_seeded, seeded
from attnkit_experiments.engine.speed import INPUT
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.engine.world import ALONE, World
from attnkit_experiments.translation.bleu import corpus_bleu, sentence_statistics
from attnkit_experiments.translation.decode import DecodeConfig, beam_search
from attnkit_experiments.translation.model import LayerRows, TranslationConfig, Translator, forward_flops
from attnkit_experiments.translation.smoothing import Smoothed, fairseq_smoothed

FIELDS = ("total", "entropy", "visible")  # the fields needed by the regulariser


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: label smoothing, and the terms of the regulariser (Shen et al. 2023 eq 7, A.2: C = 0.7·log n).

    loss = mean over target tokens + mean over regularised layers of their `Method.regulariser` times the mean over
    rows and heads of sum_weight·|log Z| + entropy_weight·max(H - entropy_cap·log n, 0). The paper gives no weights and
    does not say whether layers are added: ours do not depend on the number of layers.
    """

    smoothing: float = 0.1
    entropy_cap: float = 0.7
    sum_weight: float = 1.0
    entropy_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"ObjectiveConfig: smoothing must lie in [0, 1); got {self.smoothing}")


class Batch(NamedTuple):
    """Padded sentence pairs: source with EOS (n, S) and its mask, target after BOS and before EOS (n, T)."""

    source: Tensor
    source_mask: Tensor
    target_in: Tensor
    target_out: Tensor


def make_batch(split: Split, ids: np.ndarray, device: torch.device) -> Batch:
    """The pairs `ids` (n,) of a split, as wide as the longest of them."""
    source = padded(split.source, ids, after=EOS)
    target_in, target_out = padded(split.target, ids, before=BOS), padded(split.target, ids, after=EOS)
    arrays = (source, source != PAD, target_in, target_out)
    return Batch(*(upload(array, device) for array in arrays))


def padded(sentences: Sentences, ids: np.ndarray, *, before: int | None = None, after: int | None = None) -> np.ndarray:
    """(n, longest + given) int64: each sentence with `before` and `after` around it, if not None, then PAD."""
    lengths = sentences.lengths[ids]
    front, back = int(before is not None), int(after is not None)
    out = np.full((len(ids), int(lengths.max()) + front + back), PAD, dtype=np.int64)
    place = np.arange(out.shape[1] - front - back)
    there = place < lengths[:, None]
    out[:, front : out.shape[1] - back][there] = sentences.ids[(sentences.starts[ids][:, None] + place)[there]]
    if before is not None:
        out[:, 0] = before
    if after is not None:
        out[np.arange(len(ids)), lengths + front] = after
    return out


class Translated(NamedTuple):
    """Detokenised translations in the order of the split, how many reached their limit, seconds of searching, which
    are those of all processes together.
    """

    texts: tuple[str, ...]
    cut: int
    seconds: float


class TranslationTask:
    """A Translator on `data`. The same seed starts every method of equal shape from the same weights and batches.

    `loss(ids, step, own)` is the share of ids[own]: the sum over their target tokens and rows, divided by the number of
    target tokens and of rows of all `ids`. Shares of disjoint slices that cover `ids` add up to the loss of the batch,
    exactly up to rounding without dropout. Dropout is a function of (seed, step, where `own` begins) and of the
    shapes: equal calls are bitwise equal, but other slices draw other masks.

    Rows of the regulariser are those of all tokens, EOS included; dead rows (weights that are all 0), which have no
    logarithm and no gradient, add 0.

    Args:
        data: three splits that are not empty.
        model, objective, decoding: their configurations.
        budget: tokens of a padded side of a batch, see `TokenBatches`.
        precision: "bfloat16" computes the losses of `evaluate` under autocast, as training does.
        seed: of weights, batches and dropout.
        device: of the model.
        smoothed: the convention of label smoothing, `fairseq_smoothed` or `torch_smoothed`.
        scored: the split that is translated in `evaluate`; default data.test.
        tokenised: tokenises detokenised text for "bleu_tokenised". Identity by default, which gives the
            tokenised BLEU of papers only for data whose text is tokenised.

    Raises:
        UserError: an empty split, another vocabulary than the model's, a sentence that the model has no positions for.
    """

    divisible = False

    def __init__(
        self,
        data: TranslationData,
        model: TranslationConfig,
        objective: ObjectiveConfig,
        decoding: DecodeConfig,
        *,
        budget: int,
        precision: str,
        seed: int,
        device: torch.device,
        smoothed: Smoothed = fairseq_smoothed,
        scored: Split | None = None,
        tokenised: Callable[[str], str] = str,
    ) -> None:
        self.data, self.scored = data, data.test if scored is None else scored
        _require_fit(data, self.scored, model)
        self.model = build_seeded(lambda: Translator(model), seed).to(device)
        self.objective, self.decoding, self.smoothed, self.tokenised = objective, decoding, smoothed, tokenised
        self.seed, self.device, self.precision = seed, device, precision
        self.batches = _batches(data.train, budget, seed)
        self.valid_batches = _batches(data.valid, budget, 0)
        sources = self.scored.source.lengths
        # every sentence is searched `beam` times over; the length of its translation is not known
        beam_budget = max(budget // decoding.beam, int(sources.max()) + 1)
        self.search_batches = TokenBatches(sources, sources, budget=beam_budget, seed=0)
        self.regularised = self.model.regularised()
        self.apply: Callable[..., Any] = self.model
        self.outcomes: Outcomes = {}
        self.translations: tuple[str, ...] = ()
        self.decode_seconds = math.nan
        """The translations of the scored split by `evaluate`, and their time."""
        self.signatures: dict[str, str] = {}
        """sacrebleu's signature of each BLEU of `evaluate`."""

    def sample_ids(self, step: int) -> np.ndarray:
        return self.batches.ids(step)

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        with INPUT:
            batch = make_batch(self.data.train, ids[own], self.device)
        rows: Mapping[str, LayerRows] = {}
        with seeded(self.seed, step, f"dropout {own.indices(len(ids))[0]}", self.device):
            if self.regularised:
                logits, rows = self.apply(*batch[:3], fields=FIELDS, layers=tuple(self.regularised))
            else:
                logits = self.apply(*batch[:3])
        source, target = self.lengths(ids)
        tokens = {"source": int(source.sum()), "target": int(target.sum())}
        losses = self.smoothed(logits, batch.target_out, self.objective.smoothing)
        share = losses.masked_fill(batch.target_out == PAD, 0.0).sum() / tokens["target"]
        return share + self.regulariser(rows, tokens) if rows else share

    def lengths(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the sources and targets of training pairs, with the one that ends each."""
        return self.data.train.source.lengths[ids] + 1, self.data.train.target.lengths[ids] + 1

    def flops(self, ids: np.ndarray) -> int:
        return forward_flops(self.model.config, *self.lengths(ids))

    def regulariser(self, rows: Mapping[str, LayerRows], tokens: Mapping[str, int]) -> Tensor:
        """The regulariser's share of the loss: of rows of some samples of a batch with that many tokens."""
        o = self.objective
        shares = []
        for name, (statistics, queries) in rows.items():
            query_mask = queries[:, None, :]
            assert statistics.total is not None, "one of FIELDS"
            mean = attention_regulariser(
                statistics,
                entropy_cap=o.entropy_cap,
                sum_weight=o.sum_weight,
                entropy_weight=o.entropy_weight,
                query_mask=query_mask,
            )[0]
            valid = ((statistics.total > 0) & query_mask).sum()
            whole = self.model.config.heads * tokens["source" if name.startswith("encoder.") else "target"]
            shares.append(self.regularised[name] * mean * valid / whole)
        return torch.stack(shares).mean()

    @torch.no_grad()
    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """Loss (nats per token, not smoothed) and perplexity of the valid split; BLEU of translating the scored split.

        "bleu" is sacrebleu's 13a on detokenised text against the original lines, "bleu_tokenised" without
        tokenisation and case on both after `tokenised`; "length_ratio" is that of the former; "cut" is the
        share of translations that reached their limit. Searching is done in the model's own dtype, whatever the
        precision of training.
        """
        with evaluating(self.model):
            losses = self.sentence_losses(self.data.valid, self.valid_batches, world)
            translated = self.translate(self.scored, self.search_batches, world)
        tokens = self.data.valid.target.lengths + 1
        loss = float(losses.sum() / tokens.sum())
        self.translations, self.decode_seconds = translated.texts, translated.seconds
        texts, references = translated.texts, self.scored.target_text
        bleu = corpus_bleu(texts, references)
        flat = [[self.tokenised(text) for text in side] for side in (texts, references)]
        tokenised = corpus_bleu(flat[0], flat[1], tokenize="none", lowercase=True)
        self.signatures = {"bleu": bleu.signature, "bleu_tokenised": tokenised.signature}
        self.outcomes = {
            "valid_loss": np.stack([losses, tokens], 1).astype(np.float32),
            "bleu": sentence_statistics(texts, references),
        }
        return {
            "valid_loss": loss,
            "valid_perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bleu": bleu.score,
            "bleu_tokenised": tokenised.score,
            "length_ratio": bleu.length_ratio,
            "cut": translated.cut / len(texts),
            "decode_seconds": translated.seconds,
        }

    @torch.no_grad()
    def sentence_losses(self, split: Split, batches: TokenBatches, world: World = ALONE) -> np.ndarray:
        """-Σ log p over the tokens of each target sentence of a split and its EOS, (n,) float64, in nats."""
        parts = []
        for ids in _share_of_epoch(batches, world):
            batch = make_batch(split, ids, self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(*batch[:3])
            each = nats(logits, batch.target_out)
            parts.append((ids, each.masked_fill(batch.target_out == PAD, 0.0).double().sum(1).cpu().numpy()))
        losses = np.empty(len(split.target))
        for ids, found in world.gathered(parts):
            losses[ids] = found
        return losses

    def translate(self, split: Split, batches: TokenBatches, world: World = ALONE) -> Translated:
        """Search for a translation of every sentence of a split."""
        parts = []
        for ids in _share_of_epoch(batches, world):
            start = time.perf_counter()
            batch = make_batch(split, ids, self.device)
            translations = beam_search(self.model, batch.source, batch.source_mask, self.decoding)
            found = [self.data.decode(tokens) for tokens in translations.sequences()]
            parts.append((ids, found, int(translations.cut.sum()), time.perf_counter() - start))
        parts = world.gathered(parts)
        texts = {place: text for ids, found, _, _ in parts for place, text in zip(ids.tolist(), found, strict=True)}
        cut, seconds = sum(part[2] for part in parts), sum(part[3] for part in parts)
        return Translated(tuple(texts[place] for place in range(len(split.source))), cut, seconds)


def _batches(split: Split, budget: int, seed: int) -> TokenBatches:
    return TokenBatches(split.source.lengths, split.target.lengths, budget=budget, seed=seed)


def _share_of_epoch(batches: TokenBatches, world: World) -> Iterator[np.ndarray]:
    """Every sentence once, in one of the processes."""
    return map(batches.ids, world.own(range(batches.batches_per_epoch)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with the model in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _require_fit(data: TranslationData, scored: Split, model: TranslationConfig) -> None:
    if data.vocabulary != model.vocabulary:
        raise UserError(f"{data.name} has a vocabulary of {data.vocabulary}; the model was given {model.vocabulary}")
    for split, name in ((data.train, "train"), (data.valid, "valid"), (scored, "scored")):
        if not len(split.source):
            raise UserError(f"{data.name}: the {name} split is empty")
        # references that are only compared may have any length
        sides = (split.source,) if name == "scored" else (split.source, split.target)
        longest = max(int(side.lengths.max()) for side in sides) + 1
        if longest > model.max_length:
            raise UserError(
                f"{data.name}: the {name} split has a sentence of {longest} tokens with EOS; "
                f"the model was made for max_length={model.max_length}"
            )
