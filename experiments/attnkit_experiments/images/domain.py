"""Image classification with vision transformers: settings, cells and the parts of a report."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.decoders import Decoders
from attnkit_experiments.data.images.lazy import LazyImages, LazyRequest, load_lazily
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.text.lines import read_lines
from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.engine.files import fingerprint
from attnkit_experiments.engine.optim import TrainConfig
from attnkit_experiments.images import inspection
from attnkit_experiments.images.fewshot import SHOTS
from attnkit_experiments.images.learned_scale import LearnedScale, learned_values
from attnkit_experiments.images.model import ViTConfig, forward_flops
from attnkit_experiments.images.settings import ImageSettings, about_images, augmentation, image_source, read_images
from attnkit_experiments.images.task import LOSSES, ImageTask, require_fit
from attnkit_experiments.study.recipe import Cell, Domain, Measure, Section, Source, Variant, from_study
from attnkit_experiments.study.stored import Count, Share


@dataclass(frozen=True)
class ImageStudy(ImageSettings):
    """The settings every recipe of vision transformers shares.

    `judged`: the classes among which a test image's top one is taken: "" for all, "test" for those that have test
    images (a model of ImageNet-21k on the images of ImageNet-1k), or a file with the name of one in each line.
    `fewshot`: image sets, each as --data takes them or with a path inside ATTNKIT_DATA, on whose classes the model's
    features are probed with `shots` images of a class, at every evaluation. They are decoded anew for each.
    """

    model: str = "d64"
    patch: int = 4
    decay_per_step: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    qk_norm: bool = True
    pool: Literal["gap", "tok"] = "gap"
    position: Literal["learned", "sincos2d"] = "learned"
    pre_logits: bool = False
    head_bias: float = 0.0
    mlp_gelu: Literal["exact", "tanh"] = "exact"
    learned_scale: LearnedScale = ""
    judged: str = ""
    fewshot: tuple[str, ...] = ()
    shots: tuple[int, ...] = SHOTS

    def __post_init__(self) -> None:
        require_in("[1, inf)", shots=self.shots)


@dataclass(frozen=True)
class ImageSets:
    """The images of a study, and the probe sets."""

    main: ImageData | LazyImages
    probes: tuple[ImageData | LazyImages, ...] = ()

    @property
    def name(self) -> str:
        return self.main.name

    def checksum(self) -> str:
        """The checksum of the images, and of probe sets if there are any."""
        sums = [data.checksum() for data in (self.main, *self.probes)]
        return fingerprint(sums) if self.probes else sums[0]


def judged_classes(judged: str, data: ImageData | LazyImages) -> tuple[int, ...] | None:
    """`ImageStudy.judged` as class numbers, None for all; UserError for an unknown name."""
    if not judged:
        return None
    if judged == "test":
        return tuple(np.unique(data.test_labels).tolist())
    number = {name: index for index, name in enumerate(data.classes)}
    names = [name for line in read_lines(Path(judged)) if (name := line.strip())]
    for name in names:
        if name not in number:
            raise UserError(f"--set judged={judged}: {name!r} is not among the {len(number):,} classes of {data.name}")
    numbers = tuple(sorted({number[name] for name in names}))
    if strangers := set(data.test_labels.tolist()) - set(numbers):
        raise UserError(f"--set judged={judged}: {data.classes[min(strangers)]!r} has test images but is not named")
    return numbers


def probe_set(place: str, size: int, decoders: Decoders, source: Source) -> ImageData | LazyImages:
    """A set to probe on, at `place` or there in ATTNKIT_DATA, decoded when it is needed; digits are held in memory."""
    if place == "digits":
        return load_images(place, ImageRequest(size), cache=source.cache, terms=source.terms)
    inside = Path(os.environ.get("ATTNKIT_DATA", "")) / place
    if not Path(place).exists() and inside.exists():
        place = str(inside)
    try:
        lazily = load_lazily(place, LazyRequest(size), cache=source.cache, terms=source.terms)
    except UserError as error:
        raise UserError(
            f"--set fewshot: {error}; sets are looked for here and in ATTNKIT_DATA. --set fewshot=A,B names those that "
            "there are, --set fewshot= none"
        ) from None
    return dataclasses.replace(lazily, decoders=decoders)


class Result(TypedDict):
    """The numbers of a cell that was trained to its end."""

    tokens: Count
    flops_per_sample: float
    training_flops: float
    accuracy: Share
    test_loss: float


class ImageDomain(Domain):
    name = "images"
    unit = "images"
    result = Result
    inspected = inspection.Inspected
    measure = Measure("accuracy", "accuracy", factor=100, unit="%", better="more")
    evaluation = ("test_images",)

    source = staticmethod(image_source)

    def load(self, source: Source) -> ImageSets:
        """The images, and the probe sets in their size; UserError if those cannot be read or do not fit."""
        main = read_images(source)
        decoders = main.decoders if isinstance(main, LazyImages) else Decoders(source.workers)
        probes = tuple(probe_set(place, main.size, decoders, source) for place in source.study.fewshot)
        for data in probes:
            if data.channels != main.channels:
                count = f"{data.channels} channels, the study's have {main.channels}"
                raise UserError(f"--set fewshot: {data.name} has images of {count}")
        if len({data.name for data in probes}) < len(probes):
            raise UserError("--set fewshot: two sets have one name")
        return ImageSets(main, probes)

    def about(self, sets: ImageSets) -> dict[str, Any]:
        probed = [
            {"name": data.name, "classes": len(data.classes)}
            | ({"census": data.census.record()} if data.census else {})
            for data in sets.probes
        ]
        return about_images(sets.main) | ({"probed": probed} if probed else {})

    def cell(self, settings: ImageStudy, variant: Variant, seed: int, sets: ImageSets, checksum: str) -> Cell:
        data = sets.main
        model = from_study(
            ViTConfig, settings, size=settings.model, image=data.size, channels=data.channels,
            classes=len(data.classes), op=variant.op, options=dict(variant.options), gate=variant.gate,
        )  # fmt: skip
        if settings.loss == "sigmoid" and settings.smoothing:
            raise ValueError(
                f"the sigmoid loss has no label smoothing: smoothing must be 0, got {settings.smoothing:g}"
            )
        augmented = augmentation(settings)
        require_fit(data, augmented, settings.batch)
        parts = {"batch": settings.batch, "model": model, "augmentation": augmented, "loss": settings.loss}
        parts["judged"] = judged_classes(settings.judged, data)
        parts["shots"] = settings.shots if settings.fewshot else ()
        return Cell(variant, seed, from_study(TrainConfig, settings), parts, checksum)

    def task(self, cell: Cell, sets: ImageSets, device: torch.device) -> ImageTask:
        of = cell.settings
        return ImageTask(
            sets.main, of["model"], of["augmentation"], batch=of["batch"], precision=cell.train.precision,
            seed=cell.seed, device=device, loss=LOSSES[of["loss"]], judged=of["judged"], probes=sets.probes,
            shots=of["shots"],
        )  # fmt: skip

    def inspect(self, task: ImageTask, initial: ImageTask, cell: Cell, folder: Path) -> dict[str, Any]:
        numbers = inspection.inspect(task, folder, signed=cell.variant.signed, initial=initial)
        return numbers | {"learned": learned_values(task.model)}

    def facts(self, cell: Cell) -> dict[str, Any]:
        model = cell.settings["model"]
        return self.flops_of(cell, model.tokens, forward_flops(model))

    def shape(self, cell: Cell) -> tuple[Any, ...]:
        model = cell.settings["model"]
        return model.size, model.patch, model.qk_norm, model.gate, model.learned_scale

    def sections(self, study: Any, show_images: bool) -> list[Section]:
        from attnkit_experiments.images import page  # imports plotting

        return page.sections(study, show_images)


DOMAIN = ImageDomain()
