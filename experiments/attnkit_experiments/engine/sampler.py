"""The samples and random numbers of a step as a pure function of (seed, step): nothing to store or restore."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from attnkit_experiments.engine.errors import require_in

M = TypeVar("M", bound=nn.Module)

Permutation = Callable[[int, int, int], np.ndarray]
"""The order of an epoch: (seed, epoch, count) to a permutation of range(count)."""


@lru_cache(maxsize=2)
def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """Every order is equally likely."""
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)
    order.flags.writeable = False
    return order


class ShuffledShards:
    """Shards in random order, and samples in random order within `window` consecutive shards.

    For storage with fast sequential reads: at any time only `window` shards are read (twice that at the end of a
    window). `shards` (count,) is the shard of each sample. A pure function of (seed, epoch), unlike a shuffle buffer.
    """

    def __init__(self, shards: np.ndarray, window: int) -> None:
        require_in("[1, inf)", window=window)
        _, self._shard = np.unique(shards, return_inverse=True)
        self._window = window
        self._order = lru_cache(maxsize=2)(self._new)

    def __call__(self, seed: int, epoch: int, count: int) -> np.ndarray:
        return self._order(seed, epoch, count)

    def _new(self, seed: int, epoch: int, count: int) -> np.ndarray:
        if count != len(self._shard):
            raise ValueError(f"an order of {len(self._shard)} samples cannot order {count}")
        rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        place = rng.permutation(int(self._shard.max()) + 1)
        samples = rng.permutation(count)
        return samples[np.argsort(place[self._shard[samples]] // self._window, kind="stable")]


def sample_ids(seed: int, step: int, batch: int, count: int, permutation: Permutation = shuffled) -> np.ndarray:
    """Ids (batch,) of step `step`: an endless sequence of epochs, each a permutation of range(count), cut into batches.

    Every epoch visits every sample exactly once; a batch may hold the end of one epoch and the start of the next.
    """
    position = np.arange(step * batch, (step + 1) * batch)
    epochs = position // count
    ids = np.empty(batch, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        ids[here] = permutation(seed, epoch, count)[position[here] % count]
    return ids


def ids_hash(ids: np.ndarray) -> str:
    """A digest of the ids for the metrics: sixteen hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").data).hexdigest()[:16]


def generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """A CPU generator that depends on (seed, step, purpose) only."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def build_seeded(build: Callable[[], M], seed: int) -> M:
    """The model of `build` with weights from `seed`; torch's generators are restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


@contextmanager
def seeded(seed: int, step: int, purpose: str, device: torch.device) -> Iterator[None]:
    """A context with torch's generators, used by dropout, seeded by (seed, step, purpose) and then restored."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator(seed, step, purpose).initial_seed())
        yield
