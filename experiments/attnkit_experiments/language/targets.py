"""What a language model is trained to predict, and where it counts: the next byte, a copy, or masked bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit_experiments.language.model import BYTES, MASK

CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1  # Devlin et al. 2019 §3.1


class Sample(NamedTuple):
    """Tokens that the model reads, the byte to predict at each, and whether it counts: (n, length) each."""

    tokens: Tensor
    targets: Tensor
    counts: Tensor


def following(windows: Tensor, rng: torch.Generator) -> Sample:
    """Every next byte."""
    return Sample(windows[:, :-1], windows[:, 1:], torch.ones_like(windows[:, 1:], dtype=torch.bool))


def copied(windows: Tensor, rng: torch.Generator) -> Sample:
    """The next byte in the second w of a window 0w0w, which is then determined by the first."""
    tokens, targets, counts = following(windows, rng)
    length = tokens.shape[1]
    counts[:, : length // 2] = False
    counts[:, -1] = False
    return Sample(tokens, targets, counts)


def masked(windows: Tensor, rng: torch.Generator) -> Sample:
    """15 % of the bytes, at least one: 80 % of these are replaced by a mask, 10 % by any byte, 10 % stay."""
    targets = windows[:, :-1]
    ranks = torch.rand(targets.shape, generator=rng).argsort(1).argsort(1)
    chosen = ranks < max(round(CHOSEN * targets.shape[1]), 1)
    fate = torch.rand(targets.shape, generator=rng)
    shown = torch.where(fate < MASKED, MASK, torch.randint(BYTES, targets.shape, generator=rng))
    chosen, changed, shown = (x.to(targets.device) for x in (chosen, chosen & (fate < MASKED + RANDOM), shown))
    return Sample(torch.where(changed, shown, targets), targets, chosen)


TARGETS: dict[str, Callable[[Tensor, torch.Generator], Sample]] = {
    "next": following,
    "copying": copied,
    "masked": masked,
}
"""By the name of a task, for windows (n, length + 1) of bytes; random numbers are drawn on the CPU."""
