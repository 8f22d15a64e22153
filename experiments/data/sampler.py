"""Which samples a step trains on, as a pure function of (seed, step): nothing to store, nothing to restore."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np


def sample_ids(seed: int, step: int, batch: int, count: int) -> np.ndarray:
    """Ids (batch,) of step `step`: an endless row of epochs, each a permutation of range(count), cut into batches.

    Every epoch visits every sample exactly once; a batch may hold the end of one epoch and the start of the next.
    """
    position = np.arange(step * batch, (step + 1) * batch)
    epochs = position // count
    ids = np.empty(batch, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        ids[here] = _permutation(seed, epoch, count)[position[here] % count]
    return ids


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)
    order.flags.writeable = False
    return order


def ids_hash(ids: np.ndarray) -> str:
    """Sixteen hexadecimal digits that stand for the ids in the metrics."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").data).hexdigest()[:16]
