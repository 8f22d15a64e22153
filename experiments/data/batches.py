"""Batches of sentence pairs of similar length under a budget of tokens, as a pure function of (seed, step)."""

from __future__ import annotations

import numpy as np


class TokenBatches:
    """`ids(step)`: pairs whose padded source and padded target, each with one token more, stay within `budget`."""

    def __init__(self, source_lengths: np.ndarray, target_lengths: np.ndarray, *, budget: int, seed: int) -> None:
        widths = np.maximum(source_lengths, target_lengths) + 1
        if widths.max() > budget:
            raise ValueError(f"TokenBatches: a sentence of {widths.max()} tokens does not fit into budget={budget}")
        order = np.argsort(widths, kind="stable")
        self._batches: list[np.ndarray] = []
        start = 0
        for stop in range(1, len(order) + 1):
            if stop == len(order) or (stop + 1 - start) * widths[order[stop]] > budget:
                self._batches.append(order[start:stop])
                start = stop
        self.seed, self.batches_per_epoch = seed, len(self._batches)

    def ids(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self.batches_per_epoch)
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.batches_per_epoch)
        return self._batches[order[place]]
