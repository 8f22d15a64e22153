"""The settings of all image classification studies: images, augmentation, training; each is a key of `--set`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.lazy import LazyImages, LazyRequest, load_lazily
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.images.randaugment import AUGREG
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.progress import many
from attnkit_experiments.images.task import AugmentConfig
from attnkit_experiments.study.recipe import Source, Training, data_place, from_study


@dataclass(frozen=True)
class ImageSettings(Training):
    """Zero for a count or size means "all".

    test_split: val, valid, validation or test, where the data have several of them. lazy: decode images on demand, for
    sets that do not fit into memory. order: shuffle all samples, or shards and then the samples of `window` shards.
    augreg: a level of big_vision's augmentation, which sets randaug and mixup. ema: the decay of a moving average of
    the weights, which is judged beside them (0: none).
    """

    image_size: int = 0
    train_images: int = 0
    test_images: int = 0
    test_split: str = ""
    lazy: bool = False
    order: Literal["samples", "shards"] = "samples"
    window: int = 16
    batch: int = 64
    crop: Literal["none", "pad", "inception"] = "pad"
    padding: int = 4
    smallest_crop: float = 0.05
    flip: bool = True
    augreg: Literal["", "none", "light1", "light2", "medium1", "medium2", "strong1", "strong2"] = ""
    randaug: str = ""
    mixup: float = 0.2
    cutmix: float = 0.0
    erase: float = 0.0
    smoothing: float = 0.1
    ema: float = 0.0


def augmentation(settings: ImageSettings) -> AugmentConfig:
    randaug, mixup = AUGREG[settings.augreg] if settings.augreg else (settings.randaug, settings.mixup)
    return from_study(AugmentConfig, settings, randaug=randaug, mixup=mixup)


def image_source() -> str:
    return data_place("cifar10-subset.zip", otherwise="digits")


def about_images(data: ImageData | LazyImages) -> dict[str, Any]:
    train, test = len(data.train_labels), len(data.test_labels)
    text = f"{train:,} train and {test:,} test images of {data.size}×{data.size} pixels, {len(data.classes)} classes"
    if data.skipped:
        text += f" ({len(data.skipped)} unreadable files left out)"
    untrained = sorted({*data.test_labels.tolist()} - {*data.train_labels.tolist()})
    if untrained:
        text += f"; {many(len(untrained), 'class')} with test images and no train images"
    return {
        "name": data.name,
        "text": text,
        "classes": list(data.classes),
        "train": train,
        "test": test,
        "size": data.size,
        "channels": data.channels,
        "skipped": list(data.skipped),
    } | ({"census": data.census.record()} if data.census else {})


def read_images(source: Source) -> ImageData | LazyImages:
    study = source.study
    if study.lazy:
        if source.place == "digits":
            raise UserError("--set lazy: digits are always held in memory")
        window = study.window if study.order == "shards" else 0
        lazily = LazyRequest(study.image_size, study.train_images, study.test_images, window, study.test_split)
        return load_lazily(source.place, lazily, cache=source.cache, workers=source.workers, terms=source.terms)
    if study.order == "shards":
        raise UserError("--set order=shards: images that are held in memory have none; --set lazy=true")
    request = ImageRequest(study.image_size, study.train_images, study.test_images, study.test_split)
    return load_images(source.place, request, cache=source.cache, terms=source.terms)
