"""Parallel text as token sequences, with the lines they were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PAD, BOS, EOS, UNK = 0, 1, 2, 3


@dataclass(frozen=True)
class Sentences:
    """Token sequences one behind the other, without BOS and EOS: `ids` (total,) int32, `starts` (n + 1,) int64."""

    ids: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, n: int) -> np.ndarray:
        return self.ids[self.starts[n] : self.starts[n + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


@dataclass(frozen=True)
class Split:
    """Aligned sentences, and the lines themselves as references."""

    source: Sentences
    target: Sentences
    source_text: tuple[str, ...]
    target_text: tuple[str, ...]


@dataclass(frozen=True)
class TranslationData:
    """Three splits over one vocabulary."""

    name: str
    source_language: str
    target_language: str
    train: Split
    valid: Split
    test: Split
    vocabulary: int
    tokenizer: str
    about: dict[str, Any] = field(default_factory=dict)

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers of the tokens up to the first EOS."""
        tokens = list(ids)
        return " ".join(f"w{n}" for n in (tokens[: tokens.index(EOS)] if EOS in tokens else tokens))

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for split in (self.train, self.valid, self.test):
            digest.update(split.source.ids.tobytes() + split.target.ids.tobytes())
        return digest.hexdigest()
