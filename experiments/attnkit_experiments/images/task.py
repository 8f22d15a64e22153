"""Image classification as a Task of the training loop: augmented batches in, softmax or sigmoid cross-entropy out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from attnkit_experiments.data.images import augment, randaugment
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.data.images.pixels import open_pixels
from attnkit_experiments.engine.errors import require_in
from attnkit_experiments.engine.outcomes import Outcomes
from attnkit_experiments.engine.sampler import build_seeded, generator, sample_ids
from attnkit_experiments.engine.speed import INPUT
from attnkit_experiments.engine.transfer import upload
from attnkit_experiments.engine.world import ALONE, World
from attnkit_experiments.images import fewshot
from attnkit_experiments.images.model import ViT, forward_flops

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class AugmentConfig:
    """The augmentation of a training batch, in this order; test images are unchanged.

    randaug: "" or a policy of `randaugment`. mixup, cutmix: concentration of their Beta distribution, 0 for none; of
    both, each batch gets one at even odds. erase: the probability that a part of an image becomes noise.
    """

    crop: Literal["none", "pad", "inception"] = "pad"
    padding: int = 4
    smallest_crop: float = 0.05
    flip: bool = True
    randaug: str = ""
    mixup: float = 0.2
    cutmix: float = 0.0
    erase: float = 0.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        if self.randaug:
            randaugment.named(self.randaug)
        require_in("[0, inf)", mixup=self.mixup, cutmix=self.cutmix)
        require_in("[0, 1]", erase=self.erase)
        require_in("[0, 1)", smoothing=self.smoothing)
        require_in("(0, 1]", smallest_crop=self.smallest_crop)


def softmax_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0, reduction: str = "sum") -> Tensor:
    """-Σ_n Σ_c t_nc log softmax(z_n)_c; smoothing spreads over all classes, the true one included (torch's way).

    reduction="none" gives each n instead.
    """
    return cross_entropy(logits, targets, label_smoothing=smoothing, reduction=reduction)


def sigmoid_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0, reduction: str = "sum") -> Tensor:
    """-Σ_n Σ_c (t_nc log σ(z_nc) + (1 - t_nc) log σ(-z_nc)): big_vision's sigmoid_xent, a sum over classes.

    reduction="none" gives each n and c instead.

    ValueError for a smoothing other than 0: it has none.
    """
    if smoothing:
        raise ValueError(f"the sigmoid loss has no label smoothing: smoothing must be 0, got {smoothing:g}")
    return binary_cross_entropy_with_logits(logits, targets, reduction=reduction)


LOSSES: dict[str, Callable[..., Tensor]] = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def require_fit(data: ImageData | LazyImages, augmentation: AugmentConfig, batch: int) -> None:
    """ValueError for an impossible ImageTask, before it is built."""
    require_in("[1, inf)", batch=batch)
    if augmentation.randaug and data.channels != 3:
        raise ValueError(f"randaug needs images of 3 channels, got {data.channels}")


class ImageTask:
    """A model on `data`, built by `build` from a configuration with `classes`.

    The same seed starts every variant of equal shape from the same weights and batches. `judged`: the classes among
    which a test image's top one is taken, or None for all. `probes`: sets on whose classes its features are probed
    with `shots` images of each.
    """

    divisible = True

    def __init__(
        self,
        data: ImageData | LazyImages,
        model: Any,
        augmentation: AugmentConfig,
        *,
        batch: int,
        precision: str,
        seed: int,
        device: torch.device,
        build: Callable[[Any], nn.Module] = ViT,
        loss: Callable[..., Tensor] = softmax_loss,
        judged: tuple[int, ...] | None = None,
        probes: tuple[ImageData | LazyImages, ...] = (),
        shots: tuple[int, ...] = (),
    ) -> None:
        self.model: Any = build_seeded(lambda: build(model), seed).to(device)
        self.apply: Callable[..., Tensor] = self.model
        self.augmentation, self.batch, self.seed, self.device = augmentation, batch, seed, device
        self.precision = precision
        self.outcomes: Outcomes = {}
        self.classes, self.config = model.classes, model
        self.loss_of = loss
        self.probes, self.shots = probes, shots
        self.judged = torch.arange(model.classes, device=device)
        if judged is not None:
            self.judged = torch.tensor(judged, device=device)
        self.permutation = data.permutation
        self.train_labels = torch.from_numpy(data.train_labels).to(device)
        self.test_labels = torch.from_numpy(data.test_labels).to(device)
        self.randaugment = randaugment.named(augmentation.randaug) if augmentation.randaug else None
        smallest = augmentation.smallest_crop if augmentation.crop == "inception" else None
        self.pixels = open_pixels(data, device, sample_ids=self.sample_ids, seed=seed, smallest=smallest)

    def sample_ids(self, step: int) -> np.ndarray:
        return sample_ids(self.seed, step, self.batch, len(self.train_labels), self.permutation)

    def loss(self, ids: np.ndarray, step: int, own: slice) -> Tensor:
        images, targets = self.training_batch(ids, step, own)
        return self.loss_of(self.apply(images).float(), targets, self.augmentation.smoothing) / len(ids)

    def flops(self, ids: np.ndarray) -> int:
        return len(ids) * forward_flops(self.config)

    def training_batch(self, ids: np.ndarray, step: int, own: slice) -> tuple[Tensor, Tensor]:
        """Augmented images (n, C, H, W) and target distributions (n, classes) of the samples ids[own] of a step.

        The previous sample is included if neighbours are mixed.
        """
        options, count = self.augmentation, len(ids)
        mixed = options.mixup > 0 or options.cutmix > 0
        rows = np.arange(own.start - mixed, own.stop) % count
        draws = augment.Draws(self.seed, step, count, rows)
        with INPUT:
            pixels = self.pixels.train(step, rows)
        images = self.augmented(pixels.permute(0, 3, 1, 2), draws)
        targets = one_hot(self.train_labels[upload(ids[rows], self.device)], self.classes).float()
        if mixed:
            images, targets = self._mixed(images, targets, step)
            draws = augment.Draws(self.seed, step, count, rows[1:])
        if options.erase:
            images = augment.random_erase(images, options.erase, draws)
        return images, targets

    def augmented(self, images: Tensor, draws: augment.Draws) -> Tensor:
        """Bytes (n, C, H, W) cropped, flipped and through RandAugment, normalised: bytes as long as they can be."""
        options = self.augmentation
        if options.crop == "pad":
            images = augment.random_crop(images, options.padding, draws)
        elif options.crop == "inception" and not self.pixels.cropped:
            images = augment.inception_crop(augment.normalise(images.permute(0, 2, 3, 1)), options.smallest_crop, draws)
        if options.flip:
            images = augment.random_flip(images, draws)
        if self.randaugment:
            pixels = augment.to_bytes(images) if images.is_floating_point() else images
            images = self.randaugment(pixels, draws)
        return images if images.is_floating_point() else augment.normalise(images.permute(0, 2, 3, 1))

    def _mixed(self, images: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        options = self.augmentation
        coin = torch.rand((), generator=generator(self.seed, step, "mixup or cutmix")).item() < 0.5
        if options.cutmix and (coin or not options.mixup):
            return augment.cutmix(images, targets, options.cutmix, generator(self.seed, step, "cutmix"))
        share = augment.mixup_share(options.mixup, generator(self.seed, step, "mixup"))
        return augment.mixup(images, targets, share)

    @torch.no_grad()
    def evaluate(self, world: World = ALONE) -> dict[str, float]:
        """On the test split accuracy among the judged classes and the loss over all; accuracies of the probes."""
        count, parts = len(self.test_labels), []
        starts = world.own(range(0, count, EVALUATION_BATCH))
        for start, pixels in zip(starts, self.pixels.test_batches(starts, EVALUATION_BATCH), strict=True):
            labels, images = self.test_labels[start : start + EVALUATION_BATCH], augment.normalise(pixels)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                logits = self.model(images).float()
            right = self.judged[logits[:, self.judged].argmax(1)] == labels
            targets = one_hot(labels, self.classes).float()
            losses = self.loss_of(logits, targets, reduction="none").reshape(len(labels), -1).sum(1)
            each = right.cpu().numpy(), losses.cpu().numpy()
            parts.append((int(right.sum()), float(self.loss_of(logits, targets)), each))
        corrects, totals, found = zip(*world.gathered(parts), strict=True)
        correct, total = sum(corrects), sum(totals)
        self.outcomes = dict(zip(("accuracy", "test_loss"), map(np.concatenate, zip(*found, strict=True)), strict=True))
        return {"accuracy": correct / count, "test_loss": total / count} | self.probed(world)

    def probed(self, world: World) -> dict[str, float]:
        """The mean accuracy of few-shot probes, "fewshot_accuracy", and that of each set and number of shots.

        All processes compute features of a set, batch by batch, and one of them its regressions.
        """
        own = []
        for number, data in enumerate(self.probes):
            known = fewshot.used(data.train_labels, len(data.classes), self.shots)
            train = self.features(data, "train", known, world), data.train_labels
            test = self.features(data, "test", np.arange(len(data.test_labels)), world), data.test_labels
            if number % world.size == world.rank:
                own.append(fewshot.accuracies(train, test, len(data.classes), shots=self.shots, known=known))
        accuracies = {data.name: found for data, found in zip(self.probes, world.gathered(own), strict=True)}
        return fewshot.summary(accuracies, self.shots) if accuracies else {}

    @torch.no_grad()
    def features(self, data: ImageData | LazyImages, split: str, ids: np.ndarray, world: World = ALONE) -> np.ndarray:
        """The features for probes of some images of a split: (n, width) float32, in every process."""
        own = world.own([ids[start : start + EVALUATION_BATCH] for start in range(0, len(ids), EVALUATION_BATCH)])
        parts = []
        for pixels in fewshot.read(data, split, own):
            images = augment.normalise(upload(pixels, self.device))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                parts.append(self.model.features(images).float().cpu().numpy())
        return np.concatenate(world.gathered(parts))
