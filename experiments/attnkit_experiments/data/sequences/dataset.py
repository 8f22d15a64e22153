"""Sequences of tokens for classification, ragged: one flat array, and the start of each sequence in it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from attnkit_experiments.data.census import Census
from attnkit_experiments.data.images.dataset import in_turn

PADDING = 0  # no sequence contains this id, so a batch needs no mask
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Split:
    """Samples: `rows` (N, towers) int64, the sequences of each, and `labels` (N,) int64."""

    rows: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, limit: int) -> Split:
        """The first `limit` samples in an order that takes the classes in turn (0: all, in order)."""
        if not limit:
            return self
        indices = in_turn(self.labels)[:limit]
        return Split(self.rows[indices], self.labels[indices])


@dataclass(frozen=True)
class SequenceData:
    """The data of a study.

    Attributes:
        name: the task, such as "listops".
        vocabulary: ids are 1 to vocabulary - 1; 0 is padding and occurs in no sequence.
        classes: their names.
        tokens: (T,) uint8 or int16, all sequences, concatenated.
        starts: (S + 1,) int64; sequence s is tokens[starts[s]:starts[s + 1]].
        train, valid, test: samples. A sample has one sequence, or two if pairs are compared. valid may be empty.
        truncated: number of sequences cut to the maximal length.
        skipped: number of unusable files.
        census: of the files that were read, None if none was.

    Raises:
        ValueError: inconsistent arrays, an id outside 1..vocabulary-1, an empty sequence, a split without
            samples (valid excepted).
    """

    name: str
    vocabulary: int
    classes: tuple[str, ...]
    tokens: np.ndarray
    starts: np.ndarray
    train: Split
    valid: Split
    test: Split
    truncated: int = 0
    skipped: int = 0
    census: Census | None = None

    def __post_init__(self) -> None:
        if self.tokens.dtype not in (np.uint8, np.int16):
            raise ValueError(f"SequenceData: tokens must be uint8 or int16, got {self.tokens.dtype}")
        if self.starts[0] != 0 or self.starts[-1] != len(self.tokens) or (np.diff(self.starts) < 1).any():
            raise ValueError("SequenceData: starts must rise from 0 to the number of tokens, no sequence being empty")
        if self.tokens.min() <= PADDING or self.tokens.max() >= self.vocabulary:
            extent = f"{self.tokens.min()}..{self.tokens.max()}"
            raise ValueError(f"SequenceData: ids must lie in 1..{self.vocabulary - 1}, got {extent}")
        for name in SPLITS:
            self._check_split(name, getattr(self, name))

    def _check_split(self, name: str, split: Split) -> None:
        count = len(self.starts) - 1
        if split.rows.ndim != 2 or len(split.rows) != len(split.labels):
            shapes = f"{split.rows.shape} and {split.labels.shape}"
            raise ValueError(f"SequenceData: {name} must have rows (N, towers) and labels (N,), got {shapes}")
        if not len(split):
            if name == "valid":
                return
            raise ValueError(f"SequenceData: {name} has no samples")
        if split.rows.shape[1] != self.towers or split.rows.min() < 0 or split.rows.max() >= count:
            raise ValueError(f"SequenceData: rows of {name} must be {self.towers} of the {count} sequences each")
        if split.labels.min() < 0 or split.labels.max() >= len(self.classes):
            raise ValueError(f"SequenceData: labels of {name} must lie in 0..{len(self.classes) - 1}")

    @property
    def towers(self) -> int:
        """Sequences of a sample: 1, or 2 for pairs."""
        return int(self.train.rows.shape[1])

    @property
    def lengths(self) -> np.ndarray:
        """(S,): tokens of each sequence."""
        return np.diff(self.starts)

    def sequence(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def majority(self, split: str = "test") -> float:
        """Accuracy on `split` of always answering the most common class of train (the first of several)."""
        labels: np.ndarray = getattr(self, split).labels
        commonest = np.bincount(self.train.labels, minlength=len(self.classes)).argmax()
        return float((labels == commonest).mean())

    def checksum(self) -> str:
        """A hash of every token, sample and label: it identifies the data independently of its path."""
        digest = hashlib.sha256()
        of_splits = (getattr(getattr(self, name), part) for name in SPLITS for part in ("rows", "labels"))
        for array in (self.tokens, self.starts, *of_splits):
            digest.update(f"{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def take(self, train: int, valid: int, test: int) -> SequenceData:
        """The first samples of each split in an order that takes the classes in turn (0: all)."""
        limits = zip(SPLITS, (train, valid, test), strict=True)
        return dataclasses.replace(self, **{name: getattr(self, name).take(limit) for name, limit in limits})


def flat(sequences: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, starts) of some sequences of one dtype."""
    arrays = list(sequences)
    starts = np.cumsum([0, *(len(sequence) for sequence in arrays)], dtype=np.int64)
    return np.concatenate(arrays), starts


def single(first: int, labels: np.ndarray) -> Split:
    """Samples of one sequence each, stored consecutively from `first`."""
    return Split(np.arange(first, first + len(labels), dtype=np.int64)[:, None], labels.astype(np.int64))


def split_off(split: Split, share: float) -> tuple[Split, Split]:
    """(rest, held out): every k-th sample of each class is held out, k = round(1/share); share 0 holds out none."""
    if not 0 <= share <= 0.5:
        raise ValueError(f"split_off: share must lie in 0..0.5, got {share}")
    rank = np.zeros(len(split), dtype=np.int64)
    for label in np.unique(split.labels):
        here = split.labels == label
        rank[here] = np.arange(np.count_nonzero(here))
    valid = rank % round(1 / share) == 0 if share else np.zeros(len(split), dtype=bool)
    return Split(split.rows[~valid], split.labels[~valid]), Split(split.rows[valid], split.labels[valid])
