"""Multi-query associative recall (Arora et al. 2024, *Zoology*, §4): pairs of keys and values, then queries of keys.

A window has k_1 v_1 … k_D v_D, and behind that D of the places for two tokens have a key and its value; between are
fillers. Keys of a window are different and so are values, so that the value of a query has one answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnkit_experiments.data.text.bytes import TextData

FILLER = 0
POWER = 0.01
"""Of the g-th place behind the pairs the weight g^(POWER - 1), as in the authors' settings: most queries come soon."""


@dataclass(frozen=True)
class RecallRules:
    """Sizes: `vocabulary` has a filler, vocabulary/2 - 1 keys and vocabulary/2 values; `train` and `test` windows of
    `length` tokens with `pairs` pairs.

    Raises:
        ValueError: numbers that do not fit.
    """

    length: int
    pairs: int
    vocabulary: int
    train: int
    test: int

    def __post_init__(self) -> None:
        if not 1 <= self.pairs < self.vocabulary / 2 or self.vocabulary % 2 or self.vocabulary > 1 << 16:
            raise ValueError(
                f"vocabulary must be even, at most 65,536, and have more than {self.pairs} keys; got {self.vocabulary}"
            )
        if self.length < 4 * self.pairs:
            raise ValueError(f"length must hold {self.pairs} pairs and their queries, got {self.length}")
        if min(self.train, self.test) < 1:
            raise ValueError(f"train and test must be at least 1, got {self.train} and {self.test}")


def keys_of(vocabulary: int) -> range:
    """The tokens that are keys; those above them are values."""
    return range(1, vocabulary // 2)


def generate(rules: RecallRules) -> TextData:
    """Windows one after the other, and a filler behind the last; the same at every call. No set of pairs is in two
    windows, of train or of test.

    Raises:
        ValueError: there are not so many different sets.
    """
    rng = np.random.Generator(np.random.Philox(key=0))
    windows = np.empty((0, rules.length), np.uint16)
    count = rules.train + rules.test
    while len(windows) < count:
        more = np.concatenate([windows, draw(rules, count - len(windows), rng)])
        _, first = np.unique(_sets(more, rules), axis=0, return_index=True)
        if len(first) == len(windows):
            raise ValueError(f"there are not {count:,} different sets of {rules.pairs} pairs; another vocabulary?")
        windows = more[np.sort(first)]
    train, test = (
        np.append(part.ravel(), np.uint16(FILLER)) for part in (windows[: rules.train], windows[rules.train :])
    )
    return TextData("recall", train, test, files=0, vocabulary=rules.vocabulary, answers=rules.pairs)


def draw(rules: RecallRules, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` windows (count, length)."""
    keys, pairs = keys_of(rules.vocabulary), rules.pairs
    key = _different(rng, count, len(keys), pairs) + keys.start
    value = _different(rng, count, rules.vocabulary - keys.stop, pairs) + keys.stop
    places = (rules.length - 2 * pairs) // 2
    weight = np.arange(1, places + 1) ** (POWER - 1.0)
    at = 2 * pairs + 2 * _different(rng, count, places, pairs, np.log(weight))
    windows = np.full((count, rules.length), FILLER, np.uint16)
    windows[:, : 2 * pairs : 2], windows[:, 1 : 2 * pairs : 2] = key, value
    np.put_along_axis(windows, at, key.astype(np.uint16), axis=1)
    np.put_along_axis(windows, at + 1, value.astype(np.uint16), axis=1)
    return windows


def _different(
    rng: np.random.Generator, count: int, of: int, chosen: int, log_weight: np.ndarray | float = 0.0
) -> np.ndarray:
    """`count` rows of `chosen` different numbers below `of`, drawn one after the other by their weights: those of the
    largest log-weights plus Gumbel noise.
    """
    rows = [
        np.argsort(-(log_weight + rng.gumbel(size=(min(count - start, 4096), of))), axis=1)[:, :chosen]
        for start in range(0, count, 4096)
    ]
    return np.concatenate(rows) if rows else np.empty((0, chosen), np.int64)


def _sets(windows: np.ndarray, rules: RecallRules) -> np.ndarray:
    """The pairs of each window in the order of their keys, a number for each."""
    told = windows[:, : 2 * rules.pairs].astype(np.int64)
    return np.sort(told[:, ::2] * rules.vocabulary + told[:, 1::2], axis=1)
