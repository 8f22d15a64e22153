"""Image classification with SOFT's models (Lu et al. 2021): settings, cells and costs.

A variant's `op` is a key of `methods.METHODS`; its `options` are what the published model of its row has
other than Tiny at 224 pixels, for the columns of full scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import torch

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.images.settings import ImageSettings, about_images, augmentation, image_source, read_images
from attnkit_experiments.images.task import require_fit
from attnkit_experiments.soft.inspection import Inspected, inspect
from attnkit_experiments.soft.model import OPTIONS, SoftConfig, SoftVisionTransformer, cost
from attnkit_experiments.soft.task import SoftImageTask
from attnkit_experiments.study.recipe import Cell, Domain, Measure, Section, Variant, from_study
from attnkit_experiments.study.stored import Count, Share


@dataclass(frozen=True)
class SoftStudy(ImageSettings):
    """The settings every recipe of SOFT on images shares.

    `sampling` "" is that of the options. `full_scale`: count parameters and multiply-adds of each row's published model
    too; `measured_batch`: and measure its memory and speed with so many random images of 224 pixels, on the device of
    the run (0: do not). `channels_last`: see `SoftConfig`.
    """

    size: str = "mini"
    options: Literal["official", "paper"] = "official"
    sampling: Literal["", "convolution", "random", "biased", "average_pool"] = ""
    landmarks: int = 4
    stem_stride: int = 2
    overlap: bool = True
    drop_path: float = 0.0
    channels_last: bool = False
    weight_decay: float = 0.05
    smallest_crop: float = 0.08
    full_scale: bool = True
    measured_batch: int = 0


def row(name: str, *, baseline: str = "", full: Mapping[str, Any] | None = None, **changes: Any) -> Variant:
    """A row of SOFT itself, with what it changes in the study and in the published model."""
    return Variant(name=name, series=name, op="soft", baseline=baseline, changes=changes, options=full or {})


class Result(TypedDict):
    """The numbers of a cell that was trained to its end."""

    tokens: Count
    flops_per_sample: float
    training_flops: float
    full_parameters: NotRequired[float]
    full_multiply_adds: NotRequired[float]
    full_multiply_adds_without_inverse: NotRequired[float]
    accuracy: Share
    test_loss: float


class SoftDomain(Domain):
    name = "soft images"
    unit = "images"
    result = Result
    inspected = Inspected
    measure = Measure("accuracy", "accuracy", factor=100, unit="%", better="more")
    evaluation = ("test_images",)

    source = staticmethod(image_source)
    load = staticmethod(read_images)
    about = staticmethod(about_images)

    def cell(
        self, settings: SoftStudy, variant: Variant, seed: int, data: ImageData | LazyImages, checksum: str
    ) -> Cell:
        options = OPTIONS[settings.options]
        if settings.sampling:
            options = dataclasses.replace(options, sampling=settings.sampling)
        own: dict[str, Any] = {"method": variant.op, "options": options}
        model = from_study(
            SoftConfig, settings, image=data.size, channels=data.channels, classes=len(data.classes), **own
        )
        own["channels_last"] = settings.channels_last
        full = {"size": "tiny", "image": 224, "channels": 3, "classes": 1000, **own}
        augmented = augmentation(settings)
        require_fit(data, augmented, settings.batch)
        parts = {
            "batch": settings.batch,
            "model": model,
            "augmentation": augmented,
            "full": SoftConfig(**(full | dict(variant.options))) if settings.full_scale else None,
            "measured_batch": settings.measured_batch,
        }
        return Cell(variant, seed, from_study(TrainConfig, settings), parts, checksum)

    def task(self, cell: Cell, data: ImageData | LazyImages, device: torch.device) -> SoftImageTask:
        of = cell.settings
        return SoftImageTask(
            data, of["model"], of["augmentation"], batch=of["batch"], precision=cell.train.precision, seed=cell.seed,
            device=device, build=SoftVisionTransformer,
        )  # fmt: skip

    inspect = staticmethod(inspect)

    def facts(self, cell: Cell) -> dict[str, Any]:
        model, full = cell.settings["model"], cell.settings["full"]
        numbers = self.flops_of(cell, model.grids[0] ** 2, 2 * cost(model)[1])
        if full:
            numbers["full_parameters"], products = cost(full)
            numbers["full_multiply_adds"] = products
            numbers["full_multiply_adds_without_inverse"] = products - full.newton_multiply_adds
        return numbers

    def sections(self, study: Any, show_images: bool) -> list[Section]:
        from attnkit_experiments.soft import page  # imports plotting

        return page.sections(study, show_images)


DOMAIN = SoftDomain()
