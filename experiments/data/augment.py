"""Augmentation as torch operations on the device that holds the images; every random number comes from (seed, step).

The few numbers per image (offsets, flips, the mixing share) are drawn on the CPU, so a GPU and a CPU train on the
same crops.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad


def generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """A CPU generator that depends on (seed, step, purpose) only."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def normalise(images: Tensor) -> Tensor:
    """(B, H, W, C) uint8 in 0..255 to (B, C, H, W) float32 in -1..1, as big_vision does."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def random_crop(images: Tensor, padding: int, rng: torch.Generator) -> Tensor:
    """Pad (B, C, H, W) by `padding` pixels (reflected) and cut a window of the old size at a random place."""
    batch, _, height, width = images.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=rng).to(images.device)
    rows = offsets[0] + torch.arange(height, device=images.device)
    columns = offsets[1] + torch.arange(width, device=images.device)
    padded = pad(images, (padding,) * 4, mode="reflect")
    which = torch.arange(batch, device=images.device)
    cropped = padded.permute(0, 2, 3, 1)[which[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


def inception_crop(images: Tensor, smallest: float, rng: torch.Generator, *, widest: float = 4 / 3) -> Tensor:
    """Cut a window of random area (`smallest` to 1 of the image) and aspect (1/widest to widest), resized bilinearly.

    Szegedy et al. 2015 §6. A window that does not fit is shrunk to the image's side.
    """
    batch = images.shape[0]
    draws = torch.rand(4, batch, generator=rng)
    area = smallest + (1 - smallest) * draws[0]
    aspect = torch.exp((2 * draws[1] - 1) * torch.log(torch.tensor(widest)))
    height, width = (area / aspect).sqrt().clamp(max=1), (area * aspect).sqrt().clamp(max=1)
    theta = torch.zeros(batch, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = width, height
    theta[:, 0, 2] = (1 - width) * (2 * draws[2] - 1)
    theta[:, 1, 2] = (1 - height) * (2 * draws[3] - 1)
    grid = affine_grid(theta.to(images.device), list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def random_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability ½."""
    flipped = (torch.rand(images.shape[0], generator=rng) < 0.5).to(images.device)
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def mixup_share(concentration: float, rng: torch.Generator) -> float:
    """The share of the first image, Beta(p, p) folded to ½..1, one per batch (Zhang et al. 2018; big_vision)."""
    while True:  # Jöhnk's method: the first pair under the simplex gives a Beta sample
        first, second = torch.rand(2, generator=rng, dtype=torch.float64).pow(1 / concentration).tolist()
        if 0 < first + second <= 1:
            share = first / (first + second)
            return max(share, 1 - share)


def mixup(images: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mix every image and target distribution with its neighbour in the batch."""
    return (
        share * images + (1 - share) * images.roll(1, 0),
        share * targets + (1 - share) * targets.roll(1, 0),
    )
