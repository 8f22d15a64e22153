"""Augmentation as torch operations on the device that holds the images; every random number comes from (seed, step).

The few numbers per image (offsets, flips, the mixing share) are drawn on the CPU, so a GPU and a CPU train on the same
crops, and copied to the device without a wait. They are drawn for all rows of a batch, whichever rows a process has
(`Draws`), so a batch does not depend on how it is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from attnkit_experiments.engine.sampler import generator
from attnkit_experiments.engine.transfer import upload, upload_together


@dataclass(frozen=True)
class Draws:
    """Random numbers of step `step` for `rows` of a batch of `batch`."""

    seed: int
    step: int
    batch: int
    rows: np.ndarray

    def uniform(self, purpose: str, count: int) -> Tensor:
        """(count, rows) in 0..1."""
        return torch.rand(count, self.batch, generator=generator(self.seed, self.step, purpose))[:, self.rows]

    def below(self, limit: int, purpose: str, count: int) -> Tensor:
        """(count, rows) integers from 0 to `limit` - 1."""
        rng = generator(self.seed, self.step, purpose)
        return torch.randint(0, limit, (count, self.batch), generator=rng)[:, self.rows]

    def normal(self, purpose: str, count: int) -> Tensor:
        """(count, rows) of the standard normal distribution."""
        return torch.randn(count, self.batch, generator=generator(self.seed, self.step, purpose))[:, self.rows]


def normalise(images: Tensor) -> Tensor:
    """(B, H, W, C) uint8 in 0..255 to (B, C, H, W) float32 in -1..1, as big_vision does."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def to_bytes(images: Tensor) -> Tensor:
    """The pixels 0..255 (B, C, H, W) uint8 of normalised images, rounded: the inverse of `normalise`."""
    return images.add(1).mul_(127.5).round_().clamp_(0, 255).byte()


def random_crop(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Pad (B, C, H, W) by `padding` pixels (reflected) and cut a window of the original size at a random place."""
    sides = images.shape[2:]
    if padding >= min(sides):
        raise ValueError(f"padding is reflected: it must be below the side of {min(sides)} pixels, got {padding}")
    offsets = draws.below(2 * padding + 1, "crop", 2).numpy() - padding
    rows, columns = (
        side - 1 - np.abs(side - 1 - np.abs(offset[:, None] + np.arange(side)))
        for offset, side in zip(offsets, sides, strict=True)
    )
    which = np.arange(len(images))[:, None, None]
    places = upload_together([which, rows[:, :, None], columns[:, None, :]], images.device)
    return images.permute(0, 2, 3, 1)[tuple(places)].permute(0, 3, 1, 2)


def inception_crop(images: Tensor, smallest: float, draws: Draws, *, widest: float = 4 / 3) -> Tensor:
    """Cut a window of random area (`smallest` to 1 of the image) and aspect (1/widest to widest), resized bilinearly.

    Szegedy et al. 2015 §6. A window that does not fit is shrunk to the image's side.
    """
    batch = images.shape[0]
    u = draws.uniform("crop", 4)
    area = smallest + (1 - smallest) * u[0]
    aspect = torch.exp((2 * u[1] - 1) * torch.log(torch.tensor(widest)))
    height, width = (area / aspect).sqrt().clamp(max=1), (area * aspect).sqrt().clamp(max=1)
    theta = torch.zeros(batch, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = width, height
    theta[:, 0, 2] = (1 - width) * (2 * u[2] - 1)
    theta[:, 1, 2] = (1 - height) * (2 * u[3] - 1)
    grid = affine_grid(upload(theta.numpy(), images.device), list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def random_flip(images: Tensor, draws: Draws) -> Tensor:
    """Mirror each image left to right with probability ½."""
    flipped = upload((draws.uniform("flip", 1)[0] < 0.5).numpy(), images.device)
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def random_erase(images: Tensor, probability: float, draws: Draws) -> Tensor:
    """Put standard normal noise into a rectangle of some images (Zhong et al. 2020, Algorithm 1; noise as in timm).

    The rectangle has an area of 0.02 to ⅓ of the image and an aspect of 0.3 to 1/0.3, uniform in its logarithm; of ten
    attempts the first that fits is used, or none. The noise is in the units of normalised pixels.
    """
    channels, height, width = images.shape[1:]
    erased = np.flatnonzero((draws.uniform("erase", 1)[0] < probability).numpy())
    sizes, places = draws.uniform("erase sizes", 2 * ERASE_ATTEMPTS).numpy(), draws.uniform("erase places", 2).numpy()
    boxes = {n: box for n in erased.tolist() if (box := _box(sizes[:, n], places[:, n], height, width))}
    if not boxes:
        return images
    noise = []
    for n, (_, _, tall, wide) in boxes.items():
        rng = generator(draws.seed, draws.step, f"erase noise {draws.rows[n]}")
        noise.append(torch.randn(channels, tall, wide, generator=rng).flatten().numpy())
    top, left, tall, wide = np.array([*boxes.values()]).T[:, :, None]
    y, x = np.arange(height) - top, np.arange(width) - left
    rows, columns = (y >= 0) & (y < tall), (x >= 0) & (x < wide)
    first = np.cumsum([0, *map(len, noise[:-1])])[:, None, None]
    down = np.where(
        rows[:, None], first + (np.arange(channels)[:, None] * tall[:, None] + y[:, None]) * wide[:, None], 0
    )
    which, flat, in_rows, in_columns, below, beside = upload_together(
        [
            np.array([*boxes]), np.concatenate(noise), rows[:, None, :, None], columns[:, None, None],
            down[..., None], np.where(columns, x, 0)[:, None, None],
        ],
        images.device,
    )  # fmt: skip
    new = torch.where(in_rows & in_columns, flat[below + beside], images.index_select(0, which))
    return images.index_copy(0, which, new)


def _box(sizes: np.ndarray, place: np.ndarray, height: int, width: int) -> tuple[int, int, int, int] | None:
    """Top, left, height and width of the first of the attempted rectangles that fits, None if none does."""
    for area, aspect in sizes.reshape(ERASE_ATTEMPTS, 2).tolist():
        target = (ERASE_AREA[0] + area * (ERASE_AREA[1] - ERASE_AREA[0])) * height * width
        ratio = math.exp((2 * aspect - 1) * math.log(ERASE_ASPECT))
        tall, wide = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < tall < height and 0 < wide < width:
            return int(place[0] * (height - tall + 1)), int(place[1] * (width - wide + 1)), tall, wide
    return None


ERASE_ATTEMPTS = 10
ERASE_AREA = (0.02, 1 / 3)
ERASE_ASPECT = 1 / 0.3


def beta(concentration: float, rng: torch.Generator) -> float:
    """A sample of the distribution Beta(p, p)."""
    while True:  # Jöhnk's method: the first pair under the simplex gives a Beta sample
        first, second = torch.rand(2, generator=rng, dtype=torch.float64).pow(1 / concentration).tolist()
        if 0 < first + second <= 1:
            return float(first / (first + second))


def mixup_share(concentration: float, rng: torch.Generator) -> float:
    """The share of the first image, Beta(p, p) folded to ½..1, one per batch (Zhang et al. 2018; big_vision)."""
    share = beta(concentration, rng)
    return max(share, 1 - share)


def mixup(images: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mix every image and target distribution except the first with the one before it; returns one fewer."""
    return (
        share * images[1:] + (1 - share) * images[:-1],
        share * targets[1:] + (1 - share) * targets[:-1],
    )


def cutmix(images: Tensor, targets: Tensor, concentration: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of the previous image into every image except the first; returns one fewer.

    Yun et al. 2019, §3.1: λ is Beta(p, p), the rectangle of sides √(1-λ) has its centre anywhere and is cut at the
    borders; targets are mixed by the resulting areas. One rectangle per batch.
    """
    height, width = images.shape[2:]
    side = math.sqrt(1 - beta(concentration, rng))
    middle = torch.rand(2, generator=rng).tolist()
    (top, bottom), (left, right) = (
        (max(round(extent * (at - side / 2)), 0), min(round(extent * (at + side / 2)), extent))
        for extent, at in zip((height, width), middle, strict=True)
    )
    mixed = images[1:].clone()
    mixed[:, :, top:bottom, left:right] = images[:-1, :, top:bottom, left:right]
    share = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, share * targets[1:] + (1 - share) * targets[:-1]
