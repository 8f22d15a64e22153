"""Language modelling of bytes as a Task of the training loop: windows of text in, cross-entropy of bytes out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attnkit_experiments.data.text.bytes import TextData
from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.engine.losses import nats
from attnkit_experiments.engine.sampler import build_seeded, generator, sample_ids
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.engine.world import ALONE, World
from attnkit_experiments.language.model import LanguageConfig, LanguageModel
from attnkit_experiments.language.targets import TARGETS, Sample

EVALUATION_TOKENS = 1 << 14


class LanguageTask:
    """A LanguageModel on `data`: consecutive windows of its length, in a new order every epoch.

    Args:
        data: bytes to train and test on, each part longer than the model's length.
        model: the model.
        kind: what is predicted, a key of TARGETS; "masked" is for models that are not causal.
        batch: windows of a step.
        tested: windows of the test part that are evaluated, spread evenly; 0: all.
        precision: float32, or bfloat16 to evaluate under autocast, as the loop trains.
        seed: of weights, order and masks. Masks of test windows are the same for every seed.
        device: of the model and the text.

    Raises:
        ValueError: batch below 1; a part of the text that is not longer than a window.
    """

    divisible = True

    def __init__(
        self,
        data: TextData,
        model: LanguageConfig,
        *,
        kind: str = "next",
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
        self.precision, self.device, self.kind = precision, device, kind
        self.train, self.test = (torch.from_numpy(part.copy()).to(device) for part in (data.train, data.test))

    def sample_ids(self, step: int) -> np.ndarray:
        return sample_ids(self.seed, step, self.batch, windows(len(self.train), self.length))

    def sample(self, text: Tensor, ids: np.ndarray, rng: torch.Generator) -> Sample:
        """Windows of a text with what is to be predicted."""
        starts = upload(ids, self.device)[:, None] * self.length
        return TARGETS[self.kind](text[starts + torch.arange(self.length + 1, device=self.device)].long(), rng)

    def tested_sample(self, start: int, count: int) -> Sample:
        """`count` of the tested windows from one of them on; `start` seeds the masks."""
        return self.sample(self.test, self.tested_ids()[start : start + count], generator(0, start, "test"))

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        tokens, targets, counts = self.sample(self.train, ids, generator(self.seed, step, "masks"))
        losses = nats(self.apply(tokens[own]), targets[own])
        return losses.where(counts[own], 0.0).sum() / counts.sum()

    def tested_ids(self) -> np.ndarray:
        count = windows(len(self.test), self.length)
        return np.arange(count) if not self.tested else np.unique(np.arange(self.tested) * count // self.tested)

    @torch.no_grad()
    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """Bits per byte and accuracy over the bytes of the test windows that count; of next bytes also the bits of the
        first and the last quarter of a window.
        """
        at_once = max(EVALUATION_TOKENS // self.length, 1)
        parts = []
        for start in world.own(range(0, len(self.tested_ids()), at_once)):
            tokens, targets, counts = self.tested_sample(start, at_once)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(tokens)
            found = nats(logits, targets) / math.log(2), logits.argmax(-1) == targets, torch.ones_like(targets)
            parts.append(torch.stack([each.double().where(counts, 0.0).sum(0) for each in found]).cpu())
        bits, right, counted = torch.stack(world.gathered(parts)).sum(0)
        mean, quarter = float(bits.sum() / counted.sum()), max(self.length // 4, 1)
        scores = {
            "bits_per_byte": mean,
            "test_loss": mean * math.log(2),
            "accuracy": float(right.sum() / counted.sum()),
        }
        if self.kind == "next":
            for name, part in (("first_quarter", slice(quarter)), ("last_quarter", slice(-quarter, None))):
                scores[name] = float(bits[part].sum() / counted[part].sum())
        return scores


def windows(count: int, length: int) -> int:
    """The number of windows of `length` bytes, each with a next byte, in `count` bytes."""
    return (count - 1) // length


def require_fit(data: TextData, model: LanguageConfig, batch: int) -> None:
    """ValueError for an impossible LanguageTask, before it is built."""
    require_in("[1, inf)", batch=batch)
    for name, part in (("train", data.train), ("test", data.test)):
        if not windows(len(part), model.length):
            raise ValueError(f"length {model.length:,} does not fit into the {len(part):,} {name} bytes of {data.name}")
