"""Language modelling as a Task of the training loop: windows of bytes or tokens in, cross-entropy of each out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attnkit.nn import parallelize
from attnkit_experiments.data.text.bytes import TextData
from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.engine.losses import nats
from attnkit_experiments.engine.outcomes import Outcomes
from attnkit_experiments.engine.sampler import build_seeded, generator, sample_ids
from attnkit_experiments.engine.speed import INPUT
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.engine.world import ALONE, Context, World
from attnkit_experiments.language.model import LanguageConfig, LanguageModel, forward_flops
from attnkit_experiments.language.targets import TARGETS, Draw, Sample

EVALUATION_TOKENS = 1 << 14
EVALUATION_LOGITS = 1 << 28  # a gibibyte


class LanguageTask:
    """A LanguageModel on `data`: consecutive windows of its length, in a new order every epoch.

    The text stays where it is, in memory or in a mapped file: a device has the windows of one call. Windows do not heed
    documents, which a token ends: one may hold the end of a document and the start of the next.

    Args:
        data: tokens to train and test on, each part longer than the model's length.
        model: the model, of the vocabulary of the data.
        kind: what is predicted, a key of TARGETS; "masked" is for models that are not causal.
        batch: windows of a step.
        tested: windows of the test part that are evaluated, spread evenly; 0: all.
        precision: float32, or bfloat16 to evaluate under autocast, as the loop trains.
        seed: of weights, order and masks. Masks of test windows are the same for every seed.
        device: of the model and its windows.

    Raises:
        ValueError: batch below 1; a part of the text that is not longer than a window; another vocabulary. In use, a
            token outside the vocabulary.
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
        self.window_flops = forward_flops(model)
        self.precision, self.device, self.kind = precision, device, kind
        self.name, self.vocabulary, self.tokens_per_byte = data.name, data.vocabulary, data.tokens_per_byte
        self.train, self.test = data.train, data.test
        self.counted = TARGETS[kind].counted(data, self.length)
        self.outcomes: Outcomes = {}
        self.part = slice(0, self.length)
        """The tokens of a window that this process has."""

    def divide(self, context: Context) -> None:
        """Take a part of every window, and attend over the parts of all processes of `context`."""
        parts = self.length // context.size
        parallelize(self.model, context.group, lengths=[parts] * context.size)
        self.part = slice(context.rank * parts, (context.rank + 1) * parts)

    def sample_ids(self, step: int) -> np.ndarray:
        return sample_ids(self.seed, step, self.batch, windows(len(self.train), self.length))

    def sample(self, text: np.ndarray, ids: np.ndarray, rng: torch.Generator, own: slice = slice(None)) -> Sample:
        """Windows ids[own] of a text with what is to be predicted, on the device; `rng` draws for all ids."""
        rows = np.stack([text[at : at + self.length + 1] for at in ids[own] * self.length]).astype(np.int64)
        if (largest := int(rows.max())) >= self.vocabulary:
            raise ValueError(
                f"{self.name} has the token {largest} outside its vocabulary of {self.vocabulary}: damaged"
            )
        draw = Draw(rng, own, len(ids), self.vocabulary)
        whole = TARGETS[self.kind].sample(torch.from_numpy(rows), draw)
        return Sample(*(upload(x[:, self.part].numpy(), self.device) for x in whole))

    def tested_sample(self, start: int, count: int) -> Sample:
        """`count` of the tested windows from one of them on; `start` seeds the masks."""
        return self.sample(self.test, self.tested_ids()[start : start + count], generator(0, start, "test"))

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        with INPUT:
            tokens, targets, counts = self.sample(self.train, ids, generator(self.seed, step, "masks"), own)
        losses = nats(self.apply(tokens, self.part.start), targets)
        return losses.where(counts, 0.0).sum() / (len(ids) * self.counted)

    def flops(self, ids: np.ndarray) -> int:
        return len(ids) * self.window_flops

    def tested_ids(self) -> np.ndarray:
        count = windows(len(self.test), self.length)
        return np.arange(count) if not self.tested else np.unique(np.arange(self.tested) * count // self.tested)

    @torch.no_grad()
    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """Bits per byte and accuracy over the tokens of the test windows that count; of next tokens also the bits of
        the first and the last quarter of a window.

        Bits per byte are those per token, times the tokens of the whole test text for each of its bytes; `test_loss` is
        in nats per token.
        """
        at_once = max(min(EVALUATION_TOKENS, EVALUATION_LOGITS // self.vocabulary) // self.length, 1)
        parts: list[torch.Tensor] = []
        windows_of: list[tuple[int, np.ndarray]] = []
        for start in world.own(range(0, len(self.tested_ids()), at_once)):
            tokens, targets, counts = self.tested_sample(start, at_once)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(tokens, self.part.start)
            found = nats(logits, targets) / math.log(2), logits.argmax(-1) == targets, torch.ones_like(targets)
            sums = torch.zeros(len(found), self.length, dtype=torch.float64)  # 0 where other processes have tokens
            each = torch.stack([x.double().where(counts, 0.0) for x in found]).cpu()
            sums[:, self.part] = each.sum(1)
            parts.append(sums)
            windows_of.append((start, each.sum(2).numpy()))
        self.outcomes = self.of_windows(world.gathered(windows_of))
        bits, right, counted = torch.stack(world.gathered(parts)).sum(0)
        mean, quarter = float(bits.sum() / counted.sum()), max(self.length // 4, 1)
        scores = {
            "bits_per_byte": mean * self.tokens_per_byte,
            "test_loss": mean * math.log(2),
            "accuracy": float(right.sum() / counted.sum()),
        }
        if self.kind == "next":
            for name, part in (("first_quarter", slice(quarter)), ("last_quarter", slice(-quarter, None))):
                scores[name] = float(bits[part].sum() / counted[part].sum()) * self.tokens_per_byte
        return scores

    def of_windows(self, parts: list[tuple[int, np.ndarray]]) -> Outcomes:
        """The outcomes of windows from bits, right tokens and their number (3, windows), from one window on: sums over
        the tokens that a process has.
        """
        sums = np.zeros((3, len(self.tested_ids())))
        for start, part in parts:
            sums[:, start : start + part.shape[1]] += part
        bits, right, counted = sums
        scores = {"bits_per_byte": bits * self.tokens_per_byte, "test_loss": bits * math.log(2), "accuracy": right}
        return {name: np.stack([x, counted], 1).astype(np.float32) for name, x in scores.items()}


def windows(count: int, length: int) -> int:
    """The number of windows of `length` tokens, each with a next one, in `count` tokens."""
    return (count - 1) // length


def require_fit(data: TextData, model: LanguageConfig, batch: int) -> None:
    """ValueError for an impossible LanguageTask, before it is built."""
    require_in("[1, inf)", batch=batch)
    if model.vocabulary != data.vocabulary:
        raise ValueError(f"vocabulary must be that of {data.name}, {data.vocabulary}, got {model.vocabulary}")
    for name, part in (("train", data.train), ("test", data.test)):
        if not windows(len(part), model.length):
            unit = "tokens" if data.tokenizer else "bytes"
            raise ValueError(
                f"length {model.length:,} does not fit into the {len(part):,} {name} {unit} of {data.name}"
            )
