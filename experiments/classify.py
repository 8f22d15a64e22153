"""Image classification as a Task of the training loop: augmented batches in, label-smoothed cross-entropy out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from experiments.data import augment
from experiments.data.images import ImageData
from experiments.data.sampler import sample_ids
from experiments.models.vit import ViT

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training batch; tests see the images as they are."""

    crop: Literal["none", "pad", "inception"] = "pad"
    padding: int = 4
    smallest_crop: float = 0.05
    flip: bool = True
    mixup: float = 0.2
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        if self.mixup < 0 or not 0 <= self.smoothing < 1 or not 0 < self.smallest_crop <= 1:
            raise ValueError("mixup must be at least 0, smoothing in [0, 1), smallest_crop in (0, 1]")


class ImageTask:
    """A model on `data`: what `build` makes of a configuration that has `classes`.

    The same seed starts every variant of equal shape from the same weights and batches.
    """

    def __init__(
        self,
        data: ImageData,
        model: Any,
        augmentation: AugmentConfig,
        *,
        batch: int,
        precision: str,
        seed: int,
        device: torch.device,
        build: Callable[[Any], nn.Module] = ViT,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: Any = build(model).to(device)
        self.apply: Callable[..., Tensor] = self.model
        self.augmentation, self.batch, self.seed, self.device = augmentation, batch, seed, device
        self.precision = precision
        self.classes = model.classes
        self.train_images = torch.from_numpy(data.train_images).to(device)
        self.train_labels = torch.from_numpy(data.train_labels).to(device)
        self.test_images = torch.from_numpy(data.test_images).to(device)
        self.test_labels = torch.from_numpy(data.test_labels).to(device)

    def sample_ids(self, step: int) -> np.ndarray:
        return sample_ids(self.seed, step, self.batch, len(self.train_labels))

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        images, targets = (x[own] for x in self.training_batch(ids, step))
        # smoothing spreads over all classes, the true one included (torch's convention)
        total = cross_entropy(self.apply(images), targets, label_smoothing=self.augmentation.smoothing, reduction="sum")
        return total / len(ids)

    def training_batch(self, ids: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        """Augmented images (B, C, H, W) and target distributions (B, classes) of step `step`."""
        chosen = torch.from_numpy(ids).to(self.device)
        images = augment.normalise(self.train_images[chosen])
        targets = one_hot(self.train_labels[chosen], self.classes).float()
        wanted = self.augmentation

        def rng(purpose: str) -> torch.Generator:
            return augment.generator(self.seed, step, purpose)

        if wanted.crop == "pad":
            images = augment.random_crop(images, wanted.padding, rng("crop"))
        elif wanted.crop == "inception":
            images = augment.inception_crop(images, wanted.smallest_crop, rng("crop"))
        if wanted.flip:
            images = augment.random_flip(images, rng("flip"))
        if wanted.mixup:
            share = augment.mixup_share(wanted.mixup, rng("mixup"))
            images, targets = augment.mixup(images, targets, share)
        return images, targets

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Accuracy and cross-entropy on the test split."""
        correct, total = 0, 0.0
        for start in range(0, len(self.test_labels), EVALUATION_BATCH):
            images = augment.normalise(self.test_images[start : start + EVALUATION_BATCH])
            labels = self.test_labels[start : start + EVALUATION_BATCH]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(images).float()
            correct += int((logits.argmax(1) == labels).sum())
            total += float(cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": correct / len(self.test_labels), "test_loss": total / len(self.test_labels)}
