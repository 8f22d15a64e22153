"""A train and a test split of images of one size, as uint8 arrays."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from attnkit_experiments.data.census import Census
from attnkit_experiments.engine.sampler import Permutation, shuffled


@dataclass(frozen=True)
class ImageData:
    """`train_images` (N, H, W, C) uint8, `train_labels` (N,) int64, the same for test, and their origin."""

    name: str
    classes: tuple[str, ...]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    skipped: tuple[str, ...] = ()
    permutation: Permutation = shuffled
    census: Census | None = None  # None: not read from files

    @property
    def size(self) -> int:
        return int(self.train_images.shape[1])

    @property
    def channels(self) -> int:
        return int(self.train_images.shape[3])

    def checksum(self) -> str:
        """A hash of every pixel and label: it identifies the data independently of its path."""
        digest = hashlib.sha256()
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(f"{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def take(self, train: int, test: int) -> ImageData:
        """The first `train` and `test` images in an order that takes the classes in turn (0: all)."""
        fields = {}
        for split, limit in (("train", train), ("test", test)):
            labels = getattr(self, f"{split}_labels")
            indices = in_turn(labels)[: limit or None]
            fields[f"{split}_images"] = getattr(self, f"{split}_images")[indices]
            fields[f"{split}_labels"] = labels[indices]
        return dataclasses.replace(self, **fields)


def in_turn(labels: Iterable[int]) -> np.ndarray:
    """Indices ordered so that every prefix contains all classes equally often, as far as possible."""
    each = labels if isinstance(labels, np.ndarray) else np.array([*labels], dtype=np.int64)
    by_class = np.argsort(each, kind="stable")
    ranks = np.empty(len(each), dtype=np.int64)
    ranks[by_class] = np.arange(len(each)) - np.searchsorted(each[by_class], each[by_class])
    return np.lexsort((each, ranks))
