"""What a language model is trained to predict, and where: the next token, a copy, masked tokens, or values of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit_experiments.data.text.bytes import TextData
from attnkit_experiments.data.text.keys_values import keys_of

CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1  # Devlin et al. 2019 §3.1


class Sample(NamedTuple):
    """Tokens that the model reads, the one to predict at each, and whether it counts: (n, length) each."""

    tokens: Tensor
    targets: Tensor
    counts: Tensor


class Draw(NamedTuple):
    """The random numbers of `total` windows, of which `own` are those of a call, and the size of the vocabulary.

    Numbers are drawn for all, so that those of a window do not depend on who asks for which.
    """

    rng: torch.Generator
    own: slice
    total: int
    vocabulary: int


def following(windows: Tensor, draw: Draw) -> Sample:
    """Every next token."""
    return Sample(windows[:, :-1], windows[:, 1:], torch.ones_like(windows[:, 1:], dtype=torch.bool))


def copied(windows: Tensor, draw: Draw) -> Sample:
    """The next byte in the second w of a window 0w0w, which is then determined by the first."""
    tokens, targets, counts = following(windows, draw)
    length = tokens.shape[1]
    counts[:, : length // 2] = False
    counts[:, -1] = False
    return Sample(tokens, targets, counts)


def masked(windows: Tensor, draw: Draw) -> Sample:
    """15 % of the tokens, at least one: 80 % of these are replaced by a mask, 10 % by any token, 10 % stay."""
    targets = windows[:, :-1]
    shape, mask = (draw.total, targets.shape[1]), draw.vocabulary
    ranks = torch.rand(shape, generator=draw.rng).argsort(1).argsort(1)
    chosen = ranks < chosen_of(targets.shape[1])
    fate = torch.rand(shape, generator=draw.rng)
    shown = torch.where(fate < MASKED, mask, torch.randint(draw.vocabulary, shape, generator=draw.rng))
    chosen, changed, shown = (x[draw.own] for x in (chosen, chosen & (fate < MASKED + RANDOM), shown))
    return Sample(torch.where(changed, shown, targets), targets, chosen)


def recall(windows: Tensor, draw: Draw) -> Sample:
    """The value behind each key of the second half of a window's keys, which are those of the first."""
    tokens, targets, _ = following(windows, draw)
    keys = keys_of(draw.vocabulary)
    of_key = (tokens >= keys.start) & (tokens < keys.stop)
    asked = 2 * of_key.cumsum(1) > of_key.sum(1, keepdim=True)
    return Sample(tokens, targets, of_key & asked)


def chosen_of(length: int) -> int:
    return max(round(CHOSEN * length), 1)


class Target(NamedTuple):
    sample: Callable[[Tensor, Draw], Sample]
    """Of windows (n, length + 1) of tokens, on the CPU."""
    counted: Callable[[TextData, int], int]
    """How many tokens of a window of this length count."""


TARGETS: dict[str, Target] = {
    "next": Target(following, lambda data, length: length),
    "copying": Target(copied, lambda data, length: length - length // 2 - 1),
    "masked": Target(masked, lambda data, length: chosen_of(length)),
    "recall": Target(recall, lambda data, length: data.answers),
}
"""By the name of a task."""
