"""Windows 0w0w of random symbols w, as in Katharopoulos et al. 2020 §4.1 (after Kitaev et al. 2020)."""

from __future__ import annotations

import numpy as np

from attnkit_experiments.data.text.bytes import TextData

SEPARATOR, SYMBOLS = 0, 10
TRAIN, TEST = 50_000, 2_000  # windows


def generate(length: int) -> TextData:
    """Windows of an even `length` one after the other, and a separator behind the last; the same at every call."""
    rng = np.random.Generator(np.random.Philox(key=0))
    parts = []
    for count in (TRAIN, TEST):
        half = np.full((count, length // 2), SEPARATOR, np.uint8)
        half[:, 1:] = rng.integers(1, SYMBOLS + 1, (count, length // 2 - 1), dtype=np.uint8)
        parts.append(np.append(np.concatenate([half, half], 1).ravel(), np.uint8(SEPARATOR)))
    train, test = parts
    return TextData("copying", train, test, files=0)
