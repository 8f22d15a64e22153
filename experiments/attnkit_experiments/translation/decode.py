"""Translation token by token with caches: greedy, and beam search over whole batches.

A hypothesis is scored by Σ log p(token)/n^length_penalty over its n tokens, EOS included (fairseq's convention; Shen et
al. 2023 A.2: 1.1 on IWSLT14, 0.6 on WMT14, beam 5). PAD and BOS are never produced. An item may take floor(a·(its
source tokens without EOS) + b) tokens before EOS, (a, b) = (1.2, 10) by default: this depends on its own length only,
so results do not depend on the rest of the batch; at the limit only EOS may follow.

Both run without gradients, in the mode (call `model.eval()` before) and the dtype that the model is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit_experiments.data.text.pairs import BOS, EOS, PAD
from attnkit_experiments.engine.errors import Diverged, require_in
from attnkit_experiments.engine.losses import log_probabilities
from attnkit_experiments.translation.model import DecoderState, Translator

NEVER = -torch.inf


@dataclass(frozen=True)
class DecodeConfig:
    """How to search; `beam` 1 is greedy. The length limit is a·n + b of the source's n tokens, see above."""

    beam: int = 5
    length_penalty: float = 1.0
    a: float = 1.2
    b: int = 10

    def __post_init__(self) -> None:
        require_in("[1, inf)", beam=self.beam)
        require_in("[0, inf)", a=self.a, b=self.b)


class Translations(NamedTuple):
    """One translation per item: tokens (B, T) with EOS, then PAD; score (B,); whether it reached its limit (B,)."""

    tokens: Tensor
    score: Tensor
    cut: Tensor

    def sequences(self) -> list[list[int]]:
        """The tokens of each item without EOS and padding."""
        return [[token for token in row if token not in (EOS, PAD)] for row in self.tokens.tolist()]


def limits(model: Translator, source_mask: Tensor, config: DecodeConfig) -> Tensor:
    """(B,) the maximal number of tokens before EOS, at most the model's positions."""
    lengths = source_mask.sum(1) - 1
    return (config.a * lengths.double() + config.b).floor().long().clamp(0, model.config.max_length - 1)


@torch.no_grad()
def greedy(model: Translator, source: Tensor, source_mask: Tensor, config: DecodeConfig | None = None) -> Translations:
    """The most likely token at each step; of equally likely ones the one with the smallest id.

    Args:
        source, source_mask: as in `Translator`, (B, S).
        config: its length penalty enters the scores that are returned, nothing else; its beam is not used.
    """
    config = config or DecodeConfig(beam=1)
    limit = limits(model, source_mask, config)
    room = int(limit.max()) + 1
    state = model.start(source, source_mask, room)
    items = source.shape[0]
    tokens, last = source.new_full((items, room), PAD), source.new_full((items, 1), BOS)
    score = torch.zeros(items, dtype=torch.float64, device=source.device)
    length = torch.zeros_like(limit)
    running = torch.ones_like(limit, dtype=torch.bool)
    for step in range(room):
        logs = _next_logs(model, last, state, limit <= step)[:, 0]
        value, word = logs.max(-1)
        score = torch.where(running, score + value, score)
        tokens[:, step] = torch.where(running, word, PAD)
        length += running
        running = running & (word != EOS)
        if not running.any():
            break
        last = word[:, None]
    return _finished(tokens, score / length.double() ** config.length_penalty, length > limit)


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, source_mask: Tensor, config: DecodeConfig | None = None
) -> Translations:
    """The best finished hypothesis of a beam search, for all items of the batch at once.

    At each step the 2·beam best continuations of an item's hypotheses are taken. Those of the first `beam` that end
    with EOS are finished; the best `beam` of the others go on. An item is done when `beam` hypotheses have finished, or
    at its limit. Equal sums are ordered by hypothesis and token; of equal scores the one that finished first wins.
    Sums are kept in float64. With beam = 1 this is `greedy`.
    """
    config = config or DecodeConfig()
    limit = limits(model, source_mask, config)
    room = int(limit.max()) + 1
    state = model.start(source, source_mask, room)
    best = _Best.of(source, room)
    items = torch.arange(source.shape[0], device=source.device)  # those not done yet
    tokens, last = source.new_empty((len(items), 1, 0)), source.new_full((len(items), 1), BOS)
    sums = torch.zeros(len(items), 1, dtype=torch.float64, device=source.device)
    for step in range(room):
        at_limit = limit[items] <= step
        scores, parents, words = _continuations(sums, _next_logs(model, last, state, at_limit), 2 * config.beam)
        hypotheses = torch.cat([_of_parents(tokens, parents), words[..., None]], -1)

        ends = (words == EOS) & (scores > NEVER)
        eligible = ends.clone()
        eligible[:, config.beam :] = False
        best.add(items, hypotheses, scores / (step + 1) ** config.length_penalty, eligible, at_limit)

        going = torch.where((best.count[items] < config.beam) & ~at_limit)[0]
        if not len(going):
            break
        # stable: finished ones go last, and the others keep their order
        unfinished = ends[going].int().argsort(dim=1, stable=True)[:, : config.beam]
        if len(going) < len(items):
            state.keep(going)
        tokens = hypotheses[going].gather(1, unfinished[..., None].expand(-1, -1, step + 1))
        sums, last = scores.masked_fill(ends, NEVER)[going].gather(1, unfinished), tokens[..., -1]
        state.follow(parents[going].gather(1, unfinished))
        items = items[going]
    return _finished(best.tokens, best.score, best.cut)


def first_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x (n, m) and their places, in order; of equal ones, other than -inf, the first.

    torch.topk does not specify which of equal ones it takes, so positions are compared as well.
    """
    values, places = x.topk(min(k + 1, x.shape[1]), dim=1)
    equal = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] > NEVER)
    if not equal.any():
        return values[:, :k], places[:, :k]
    least = values[:, k - 1 : k]
    behind = torch.arange(x.shape[1], 0, -1, device=x.device)
    # whatever is larger than the k-th value comes before what equals it, and that in the order of places
    rank = torch.where(x > least, 2 * x.shape[1], torch.where(x == least, behind, 0))
    places = rank.topk(k, dim=1).indices.sort(dim=1).values
    values, order = x.gather(1, places).sort(dim=1, descending=True, stable=True)
    return values, places.gather(1, order)


def _continuations(sums: Tensor, logs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of all hypotheses of each item, in order: sums, hypotheses and tokens, each (n, c).

    sums (n, hypotheses) so far, logs (n, hypotheses, vocabulary) of the next tokens. No hypothesis has more
    than `count` of the best, so only that many of each are summed.
    """
    items, hypotheses, vocabulary = logs.shape
    each = min(count, vocabulary)
    best, words = (x.view(items, hypotheses, each) for x in first_largest(logs.flatten(0, 1), each))
    scores, index = first_largest((sums[..., None] + best).flatten(1), min(count, hypotheses * each))
    return scores, index // each, words.flatten(1).gather(1, index)


@dataclass
class _Best:
    """The best finished hypothesis of every item, and the number of finished ones."""

    tokens: Tensor
    score: Tensor
    cut: Tensor
    count: Tensor

    @classmethod
    def of(cls, source: Tensor, room: int) -> _Best:
        items = source.shape[0]
        score = torch.full((items,), NEVER, dtype=torch.float64, device=source.device)
        count = source.new_zeros(items)
        return cls(source.new_full((items, room), PAD), score, count > 0, count)

    def add(self, items: Tensor, hypotheses: Tensor, scores: Tensor, ended: Tensor, at_limit: Tensor) -> None:
        """Hypotheses (n, c, length) of some items with their scores (n, c), of which `ended` count."""
        value, which = scores.masked_fill(~ended, NEVER).max(1)
        better = torch.where(value > self.score[items])[0]
        rows = items[better]
        self.tokens[rows, : hypotheses.shape[-1]] = hypotheses[better, which[better]]
        self.score[rows], self.cut[rows] = value[better], at_limit[better]
        self.count[items] += ended.sum(1)


def _of_parents(tokens: Tensor, parents: Tensor) -> Tensor:
    """tokens (n, hypotheses, length) of the parents (n, c)."""
    return tokens.gather(1, parents[..., None].expand(-1, -1, tokens.shape[-1]))


def _next_logs(model: Translator, last: Tensor, state: DecoderState, at_limit: Tensor) -> Tensor:
    """log p of the next token, (items, hypotheses, vocabulary); -inf for forbidden tokens."""
    logs = log_probabilities(model.decode_step(last, state))
    logs[..., [PAD, BOS]] = NEVER
    other = torch.arange(logs.shape[-1], device=logs.device) != EOS
    return logs.masked_fill_(at_limit[:, None, None] & other, NEVER)


def _finished(tokens: Tensor, score: Tensor, cut: Tensor) -> Translations:
    if not score.isfinite().all():
        bad = torch.where(~score.isfinite())[0].tolist()
        raise Diverged(f"decoding: the model's probabilities of items {bad} of the batch are not finite")
    width = int((tokens != PAD).sum(1).max())
    return Translations(tokens[:, :width], score, cut)
