"""Classification of sequences as a Task of the training loop: padded batches in, cross-entropy out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit_experiments.data.sequences.dataset import PADDING, SequenceData, Split
from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.engine.losses import nats
from attnkit_experiments.engine.outcomes import Outcomes
from attnkit_experiments.engine.sampler import build_seeded, sample_ids, seeded
from attnkit_experiments.engine.speed import INPUT
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.engine.world import ALONE, World
from attnkit_experiments.sequences.methods import METHODS
from attnkit_experiments.sequences.model import ClassifierConfig, SequenceClassifier, forward_flops


class SequenceTask:
    """A SequenceClassifier on `data`. The same seed starts every method from the same batches.

    Args:
        data: what is trained and tested on.
        model: the classifier; its length must hold the longest sequence.
        batch: samples of a step.
        precision: float32, or bfloat16 to evaluate under autocast, as the loop trains.
        seed: of weights, batches and dropout.
        device: of the model and of the data, which are moved there whole.
        pad_to_multiple: 0 pads every batch to `model.length`, as the benchmark does: all steps have one shape. Another
            number pads to the longest sequence of the batch, rounded up to a multiple of it. That is faster, and the
            same for the methods that say so in METHODS.

    Raises:
        ValueError: sizes that do not fit, pad_to_multiple with a method or a pooling whose logits depend on padding.
    """

    divisible = False

    def __init__(
        self,
        data: SequenceData,
        model: ClassifierConfig,
        *,
        batch: int,
        precision: str,
        seed: int,
        device: torch.device,
        pad_to_multiple: int = 0,
    ) -> None:
        require_fit(data, model, batch, pad_to_multiple)
        self.model = build_seeded(lambda: SequenceClassifier(model), seed).to(device)
        self.apply: Callable[..., Any] = self.model
        self.data, self.batch, self.seed, self.device = data, batch, seed, device
        self.length, self.pad_to_multiple, self.precision = model.length, pad_to_multiple, precision
        self.config = model
        self.outcomes: Outcomes = {}
        self.tokens = torch.from_numpy(data.tokens).to(device)
        self.starts = torch.from_numpy(data.starts).to(device)

    def sample_ids(self, step: int) -> np.ndarray:
        return sample_ids(self.seed, step, self.batch, len(self.data.train))

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        """The share of samples ids[own] in the mean cross-entropy of all `ids`.

        Shares add up to the loss of the whole exactly without dropout. Dropout is drawn from (seed, step, first sample
        of the share), so it is the same after a resume, but differs if a batch is split differently.
        """
        with INPUT:
            rows = self.data.train.rows[ids]
            labels = upload(self.data.train.labels[ids[own]], self.device)
            tokens = self.padded(rows[own], self.width_of(rows))
        first = range(len(ids))[own].start
        with seeded(self.seed, step, f"dropout/{first}", self.device):
            logits = self.apply(tokens)
        return nats(logits, labels).sum() / len(ids)

    def flops(self, ids: np.ndarray) -> int:
        return len(ids) * forward_flops(self.config, self.width_of(self.data.train.rows[ids]))

    def width_of(self, rows: np.ndarray) -> int:
        """The padded length of a batch of sequences."""
        if not self.pad_to_multiple:
            return self.length
        longest = int((self.data.starts[rows + 1] - self.data.starts[rows]).max())
        return min(-(-longest // self.pad_to_multiple) * self.pad_to_multiple, self.length)

    def padded(self, rows: np.ndarray, length: int) -> Tensor:
        """The sequences of some samples, (B, towers) -> (B, towers, length), with padding behind."""
        index = upload(rows, self.device)
        start, stop = self.starts[index][..., None], self.starts[index + 1][..., None]
        place = start + torch.arange(length, device=self.device)
        inside = place < stop
        return torch.where(inside, self.tokens[torch.where(inside, place, 0)].long(), PADDING)

    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """Accuracy and cross-entropy on the test split, the majority baseline, and the same of valid if there is one.

        `majority` is the accuracy of always answering the most common class of train: a method below it has learned
        nothing.
        """
        accuracy, loss, self.outcomes = self.measure(self.data.test, world)
        scores = {"accuracy": accuracy, "test_loss": loss, "majority": self.data.majority()}
        if len(self.data.valid):
            accuracy, loss, _ = self.measure(self.data.valid, world)
            scores |= {"valid_accuracy": accuracy, "valid_loss": loss}
        return scores

    @torch.no_grad()
    def measure(self, split: Split, world: World) -> tuple[float, float, Outcomes]:
        """(accuracy, mean cross-entropy) of the model, which the caller has put in evaluation mode, and both of each
        sample.
        """
        parts = []
        for start in world.own(range(0, len(split), self.batch)):
            rows = split.rows[start : start + self.batch]
            labels = upload(split.labels[start : start + self.batch], self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(self.padded(rows, self.width_of(rows)))
            right, losses = logits.argmax(1) == labels, nats(logits, labels)
            parts.append((int(right.sum()), float(losses.sum()), (right.cpu().numpy(), losses.cpu().numpy())))
        corrects, totals, found = zip(*world.gathered(parts), strict=True)
        each = dict(zip(("accuracy", "test_loss"), map(np.concatenate, zip(*found, strict=True)), strict=True))
        return sum(corrects) / len(split), sum(totals) / len(split), each


def require_fit(data: SequenceData, model: ClassifierConfig, batch: int, pad_to_multiple: int) -> None:
    """ValueError for an impossible SequenceTask, before it is built."""
    require_in("[1, inf)", batch=batch)
    require_in("[0, inf)", pad_to_multiple=pad_to_multiple)
    for name, expected in (("vocabulary", data.vocabulary), ("classes", len(data.classes)), ("towers", data.towers)):
        if getattr(model, name) != expected:
            raise ValueError(f"{name} of the model must be {expected} for {data.name}, got {getattr(model, name)}")
    if model.length < data.lengths.max():
        raise ValueError(f"length must hold {data.lengths.max()} tokens for {data.name}, got {model.length}")
    if pad_to_multiple and not (METHODS[model.method].any_padding and model.pool == "masked"):
        raise ValueError(
            f"pad_to_multiple must be 0 for {model.method} with {model.pool} pooling: its logits depend on how much "
            f"padding there is; got {pad_to_multiple}"
        )
