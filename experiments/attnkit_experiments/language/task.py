"""Language modelling of bytes as a Task of the training loop: windows of text in, cross-entropy of the next out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attnkit_experiments.data.text.bytes import TextData
from attnkit_experiments.engine.losses import nats
from attnkit_experiments.engine.sampler import build_seeded, sample_ids
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.engine.world import ALONE, World
from attnkit_experiments.language.model import LanguageConfig, LanguageModel

EVALUATION_TOKENS = 1 << 14


class LanguageTask:
    """A LanguageModel on `data`: consecutive windows of its length, in a new order every epoch.

    Args:
        data: bytes to train and test on, each part longer than the model's length.
        model: the model.
        batch: windows of a step.
        tested: windows of the test part that are evaluated, spread evenly; 0: all.
        precision: float32, or bfloat16 to evaluate under autocast, as the loop trains.
        seed: of weights and order.
        device: of the model and the text.

    Raises:
        ValueError: batch below 1; a part of the text that is not longer than a window.
    """

    def __init__(
        self,
        data: TextData,
        model: LanguageConfig,
        *,
        batch: int,
        tested: int,
        precision: str,
        seed: int,
        device: torch.device,
    ) -> None:
        require_fit(data, model, batch)
        self.model = build_seeded(lambda: LanguageModel(model), seed).to(device)
        self.apply: Callable[..., Tensor] = self.model
        self.length, self.batch, self.tested, self.seed = model.length, batch, tested, seed
        self.precision, self.device = precision, device
        self.train, self.test = (torch.from_numpy(part.copy()).to(device) for part in (data.train, data.test))

    def sample_ids(self, step: int) -> np.ndarray:
        return sample_ids(self.seed, step, self.batch, windows(len(self.train), self.length))

    def cut(self, text: Tensor, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Windows (n, length) of a text and the next bytes."""
        starts = upload(ids, self.device)[:, None] * self.length
        place = starts + torch.arange(self.length, device=self.device)
        return text[place].long(), text[place + 1].long()

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        tokens, following = self.cut(self.train, ids[own])
        return nats(self.apply(tokens), following).sum() / (len(ids) * self.length)

    def tested_ids(self) -> np.ndarray:
        count = windows(len(self.test), self.length)
        return np.arange(count) if not self.tested else np.unique(np.arange(self.tested) * count // self.tested)

    @torch.no_grad()
    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """Bits per byte of the test windows: over all bytes, and over the first and the last quarter of a window."""
        ids, at_once = self.tested_ids(), max(EVALUATION_TOKENS // self.length, 1)
        parts = []
        for start in world.own(range(0, len(ids), at_once)):
            tokens, following = self.cut(self.test, ids[start : start + at_once])
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(tokens)
            parts.append(nats(logits, following).double().sum(0).cpu())
        bits = torch.stack(world.gathered(parts)).sum(0) / (len(ids) * math.log(2))
        quarter = max(self.length // 4, 1)
        return {
            "bits_per_byte": float(bits.mean()),
            "test_loss": float(bits.mean()) * math.log(2),
            "first_quarter": float(bits[:quarter].mean()),
            "last_quarter": float(bits[-quarter:].mean()),
        }


def windows(count: int, length: int) -> int:
    """The number of windows of `length` bytes, each with a next byte, in `count` bytes."""
    return (count - 1) // length


def require_fit(data: TextData, model: LanguageConfig, batch: int) -> None:
    """ValueError for an impossible LanguageTask, before it is built."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    for name, part in (("train", data.train), ("test", data.test)):
        if not windows(len(part), model.length):
            raise ValueError(f"length {model.length:,} does not fit into the {len(part):,} {name} bytes of {data.name}")
