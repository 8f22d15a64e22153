"""Batches of sentence pairs of similar length under a budget of tokens, as a pure function of (seed, step)."""

from __future__ import annotations

import numpy as np

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.sampler import sample_ids

EXTRA = 1  # EOS after a source; BOS before an input target, EOS after a predicted one
COMPOSITION = 2**63  # a key that is not an epoch


class TokenBatches:
    """Sentence pairs cut into batches of at most `budget` padded tokens on either side.

    source_lengths, target_lengths: (n,) tokens without BOS and EOS. A batch of pairs I costs
    |I|·(max_{i∈I} source_i + 1) and |I|·(max_{i∈I} target_i + 1) tokens; both are at most `budget`. Which pairs share
    a batch depends on `seed` only, the order of the batches on (seed, epoch): every epoch takes every pair exactly once
    and has the same number of batches, so `ids` needs no state.

    Errors: UserError if there are no pairs or if one alone costs more than `budget`; ValueError on shapes.
    """

    def __init__(self, source_lengths: np.ndarray, target_lengths: np.ndarray, *, budget: int, seed: int) -> None:
        if source_lengths.ndim != 1 or source_lengths.shape != target_lengths.shape:
            raise ValueError(
                "TokenBatches: source_lengths and target_lengths must be one-dimensional and of one length, got shapes "
                f"{source_lengths.shape} and {target_lengths.shape}"
            )
        if not len(source_lengths):
            raise UserError("TokenBatches: there are no sentence pairs to make batches of")
        self.seed, self.budget = seed, budget
        costs = np.stack([source_lengths, target_lengths]).astype(np.int64) + EXTRA
        _require_within(costs, budget)
        self._order = _by_length(costs, seed)
        self._starts = _cut(costs[:, self._order], budget)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._starts) - 1

    def ids(self, step: int) -> np.ndarray:
        """Pairs (b,) int64 of step `step`, counted from 0; epoch k starts with step k·batches_per_epoch."""
        batch = int(sample_ids(self.seed, step, 1, self.batches_per_epoch)[0])
        return self._order[self._starts[batch] : self._starts[batch + 1]]


def _require_within(costs: np.ndarray, budget: int) -> None:
    longest = costs.max(axis=0)
    if longest.max() > budget:
        worst = int(longest.argmax())
        side = ("source", "target")[int(costs[:, worst].argmax())]
        raise UserError(
            f"TokenBatches: {side} sentence {worst} has {longest[worst]} tokens with EOS, more than the budget of "
            f"{budget} ({int((longest > budget).sum())} of {len(longest)} pairs are too long): raise the budget or "
            "lower max_length"
        )


def _by_length(costs: np.ndarray, seed: int) -> np.ndarray:
    """All pairs by the longer side, then by the other, then at random: neighbours must not always share a batch."""
    shuffled = np.random.Generator(np.random.Philox(key=[seed, COMPOSITION])).permutation(costs.shape[1])
    keys = costs[:, shuffled]
    order = shuffled[np.lexsort((keys.min(axis=0), keys.max(axis=0)))]
    order.flags.writeable = False
    return order


def _cut(costs: np.ndarray, budget: int) -> np.ndarray:
    """The starts of the batches (and the end), each as long as the budget allows."""
    starts = [0]
    source = target = 0
    for index, (more_source, more_target) in enumerate(costs.T.tolist()):
        rows = index + 1 - starts[-1]
        source, target = max(source, more_source), max(target, more_target)
        if rows * max(source, target) > budget:
            starts.append(index)
            source, target = more_source, more_target
    return np.array([*starts, costs.shape[1]])
