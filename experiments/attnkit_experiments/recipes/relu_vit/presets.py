"""The common presets of the figures of Wortsman et al. 2023: settings, and differences from the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import attnkit
from attnkit_experiments.engine.errors import UserError, require_in, require_names, unknown
from attnkit_experiments.images.domain import ImageStudy
from attnkit_experiments.images.model import SIZES
from attnkit_experiments.study.recipe import Scale, Variant, pointwise_variant, softmax_variant

# digits enlarged to 16 pixels and cut into 64 patches: the number of tokens of the cpu preset
SMOKE: dict[str, Any] = {
    "model": "d64",
    "patch": 2,
    "image_size": 16,
    "train_images": 2000,
    "test_images": 500,
    "steps": 40,
    "batch": 64,
    "lr": 2e-3,
    "warmup": 5,
    "padding": 1,
    "flip": False,
    "mixup": 0.0,
    "checkpoint_every": 10,
    "seeds": (0,),
}

CPU: dict[str, Any] = {
    "model": "d64",
    "patch": 4,
    "image_size": 32,
    "train_images": 25_000,
    "test_images": 5_000,
    "steps": 5000,
    "batch": 64,
    "lr": 2e-3,
    "warmup": 200,
    "mixup": 0.0,
    "evaluate_every": 500,
    "checkpoint_every": 500,
    "seeds": (0, 1, 2),
}

# CIFAR-10 at patch 2: 256 tokens
SMALL: dict[str, Any] = {
    "model": "w192",
    "patch": 2,
    "image_size": 32,
    "steps": 600,
    "batch": 512,
    "warmup": 60,
    "precision": "bfloat16",
    "compile": True,
    "checkpoint_every": 300,
    "seeds": (0,),
}

SCALES = {
    "smoke": Scale(
        SMOKE, "smoke: shows that the code runs; its accuracies mean nothing", "under a minute, 2 CPU cores"
    ),
    "small": Scale(
        SMALL, "small: one GPU, small images; not the paper's scale", "under 8 minutes, one H200 (estimated)"
    ),
    "cpu": Scale(CPU, "cpu: width 64, depth 4, minutes on two CPU cores; not the paper's scale"),
}


@dataclass(frozen=True)
class GridStudy(ImageStudy):
    """`activations` × `alphas`, at `points` such as S/16 if there are any.

    `augmentation`: see `big_vision.augmented`.
    """

    activations: tuple[str, ...] = ("relu",)
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
    points: tuple[str, ...] = ()
    augmentation: Literal["", "i21k", "i1k"] = ""


DEVIATIONS = (
    "The paper trains on ImageNet-21k (30 epochs) and ImageNet-1k (300 epochs) at 224 pixels; this preset trains a "
    "small model on small images, for minutes at most.",
    "AdamW with weight decay 0.1 on matrices stands for big_vision's decoupled 1e-4 (which is multiplied by the "
    "schedule only, not by the learning rate).",
    "Softmax cross-entropy with label smoothing and global average pooling stand for big_vision's sigmoid "
    "cross-entropy.",
    "Crop with padding, flip and mixup (where the settings below have them) stand for inception crop and RandAugment.",
    "qk-layernorm is on as in the paper; it is not in big_vision's published model, so the layer is ours (one weight "
    "per head feature, no bias).",
    "Queries see all tokens and L is their number; there is no class token.",
)


NOTHING = {"activation": "relu", "alpha": 1.0, "gain": 0.0}
FLOORS = {
    "zeros": Variant("zeros", "zeros", attnkit.pointwise_attention.__name__, NOTHING),
    "average": Variant("average", "average", attnkit.softmax_attention.__name__, {"scale": 0.0}),
}
"""Attention that returns zeros, and the mean of all visible values: what a model reaches without attention, and without
scores. A study takes them for activations, once at every point and with no factor: activations=relu,zeros,average."""


def require_activations(names: tuple[str, ...]) -> None:
    require_names("activations", "activation", names, (*attnkit.ACTIVATIONS, *FLOORS))


def pointwise_grid(activations: tuple[str, ...], alphas: tuple[float, ...]) -> tuple[Variant, ...]:
    """L^-alpha·h for every h and alpha, without FLOORS."""
    require_activations(activations)
    require_in("(-inf, inf)", alphas=alphas)
    named = [activation for activation in activations if activation not in FLOORS]
    return tuple(pointwise_variant(activation, alpha) for activation in named for alpha in alphas)


def floor(activations: tuple[str, ...]) -> tuple[Variant, ...]:
    """Those of FLOORS that are among the activations."""
    return tuple(FLOORS[activation] for activation in activations if activation in FLOORS)


def grid_with_floor(activations: tuple[str, ...], alphas: tuple[float, ...]) -> tuple[Variant, ...]:
    return pointwise_grid(activations, alphas) + floor(activations)


def beside_softmax(grid: Iterable[Variant]) -> tuple[Variant, ...]:
    """Softmax, and variants that are compared with it."""
    return (softmax_variant(), *(dataclasses.replace(each, baseline="softmax") for each in grid))


def at_points(points: tuple[str, ...], variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """Every variant at every model and patch size, such as "S/16"; without points the variants as they are."""
    every = tuple(variants)
    return tuple(_at_point(point, each) for point in points for each in every) if points else every


def _at_point(point: str, variant: Variant) -> Variant:
    size, slash, patch = point.partition("/")
    if not slash or not patch.isdigit() or int(patch) < 1:
        raise UserError(f"--set points: expected size/patch such as d64/4, got {point!r}")
    if size not in SIZES:
        raise unknown("model size", size, SIZES)
    return variant.at(point, f"{size}-p{patch}-{{}}", model=size, patch=int(patch))
