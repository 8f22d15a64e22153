"""What a recipe is: frozen settings, the variants it compares, and the cells (variant × seed) it expands to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.classify import AugmentConfig
from experiments.data.images import ImageData
from experiments.files import fingerprint
from experiments.models.vit import ViTConfig
from experiments.train import TrainConfig

# Activations whose weights can be negative: attnkit defines no entropy for them
SIGNED = ("identity", "gelu", "gelu_tanh", "silu")


@dataclass(frozen=True)
class ImageStudy:
    """The settings every image recipe shares; each is a key of `--set`. Zero for a count or size means "all"."""

    model: str = "d64"
    patch: int = 4
    image_size: int = 0
    train_images: int = 0
    test_images: int = 0
    steps: int = 300
    batch: int = 64
    lr: float = 1e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    crop: Literal["none", "pad", "inception"] = "pad"
    padding: int = 4
    smallest_crop: float = 0.05
    flip: bool = True
    mixup: float = 0.2
    smoothing: float = 0.1
    qk_norm: bool = True
    pool: Literal["gap", "tok"] = "gap"
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    evaluate_every: int = 0
    checkpoint_every: int = 100
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Variant:
    """One line of a figure at one place: an op with its options, and what else differs from the study's settings."""

    name: str
    series: str
    op: str = "softmax_attention"
    options: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    gate: Literal["", "silu"] = ""
    point: str = ""
    baseline: str = ""  # the variant whose step time this one's is divided by
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How tables and legends name it."""
        parts = [self.series, f"α = {self.alpha:g}" if self.alpha is not None else "", self.point]
        return ", ".join(part for part in parts if part)

    @property
    def signed(self) -> bool:
        return self.options.get("activation") in SIGNED


@dataclass(frozen=True)
class Cell:
    """One training run. Its hash covers all that decides its numbers, the pixels included, and nothing else."""

    variant: Variant
    seed: int
    batch: int
    model: ViTConfig
    train: TrainConfig
    augmentation: AugmentConfig
    data_checksum: str

    @property
    def name(self) -> str:
        return f"{self.variant.name}-seed{self.seed}"

    def config(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch": self.batch,
            "model": dataclasses.asdict(self.model),
            "train": dataclasses.asdict(self.train),
            "augmentation": dataclasses.asdict(self.augmentation),
            "data": self.data_checksum,
        }

    def config_hash(self) -> str:
        return fingerprint(self.config())


@dataclass(frozen=True)
class Preset:
    """A study's settings at one scale, what they cost, and the label its numbers carry."""

    study: ImageStudy
    cost: str
    label: str


@dataclass(frozen=True)
class Recipe:
    """A figure of a paper: what it shows, at which scales it can be run, and what those cannot show."""

    id: str
    title: str
    shows: str
    source: str
    presets: Mapping[str, Preset]
    variants: Callable[[Any], tuple[Variant, ...]]
    deviations: tuple[str, ...]
    claims: bool = False  # whether the exact statements belong to it
    later: Mapping[str, str] = field(default_factory=dict)


def softmax_variant(**changes: Any) -> Variant:
    return Variant(name="softmax", series="softmax", changes=changes)


def pointwise_variant(activation: str, alpha: float) -> Variant:
    """L^-alpha·h as attnkit spells it (Wortsman et al. 2023 §3)."""
    return Variant(
        name=f"{activation}-alpha{alpha:g}",
        series=activation,
        op="pointwise_attention",
        options={"activation": activation, "alpha": alpha},
        alpha=alpha,
    )


def expand(recipe: Recipe, study: ImageStudy, data: ImageData) -> tuple[Cell, ...]:
    """Every variant with every seed; seeds are the outer loop, so an interrupted study is balanced."""
    variants = recipe.variants(study)
    checksum = data.checksum()
    return tuple(make_cell(study, variant, seed, data, checksum) for seed in study.seeds for variant in variants)


def make_cell(study: ImageStudy, variant: Variant, seed: int, data: ImageData, checksum: str) -> Cell:
    settings = dataclasses.replace(study, **variant.changes)
    model = ViTConfig(
        size=settings.model,
        patch=settings.patch,
        image=data.size,
        channels=data.channels,
        classes=len(data.classes),
        op=variant.op,
        options=dict(variant.options),
        qk_norm=settings.qk_norm,
        gate=variant.gate,
        pool=settings.pool,
    )
    train = TrainConfig(
        steps=settings.steps,
        lr=settings.lr,
        warmup=settings.warmup,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
        precision=settings.precision,
        compile=settings.compile,
        evaluate_every=settings.evaluate_every,
        checkpoint_every=settings.checkpoint_every,
    )
    augmentation = AugmentConfig(
        crop=settings.crop,
        padding=settings.padding,
        smallest_crop=settings.smallest_crop,
        flip=settings.flip,
        mixup=settings.mixup,
        smoothing=settings.smoothing,
    )
    return Cell(variant, seed, settings.batch, model, train, augmentation, checksum)
