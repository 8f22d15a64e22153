"""The settings of all image classification studies: images, augmentation, training; each is a key of `--set`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.views import WholeImage
from attnkit_experiments.data.images.lazy import LazyImages, LazyRequest, load_lazily
from attnkit_experiments.data.images.loading import ImageRequest, load_images
from attnkit_experiments.data.images.pixel_cache import Decoder
from attnkit_experiments.data.images.randaugment import AUGREG
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.progress import many
from attnkit_experiments.images.task import AugmentConfig
from attnkit_experiments.study.recipe import Source, Training, data_place, from_study


@dataclass(frozen=True)
class ImageSettings(Training):
    """Zero for a count or size means "all".

    test_split: val, valid, validation or test, where the data have several of them. lazy: decode images on demand, for
    sets that do not fit into memory. decoded_side: with lazy, decode every image once and keep it; inception crops are
    cut out of squares of this side then (0: decode for every step). jpeg_decoder: what decodes the training images
    once: Pillow, or nvImageCodec, where it is installed, on a GPU. order: shuffle all samples, or shards and then the
    samples of `window` shards. augreg: a level of big_vision's augmentation, which sets randaug and mixup. ema: the
    decay of a moving average of the weights, which is judged beside them (0: none).
    """

    image_size: int = 0
    train_images: int = 0
    test_images: int = 0
    test_split: str = ""
    lazy: bool = False
    decoded_side: int = 0
    jpeg_decoder: Decoder = "pillow"
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
    caches = data.caches if isinstance(data, LazyImages) else None
    if caches and isinstance(caches.train.view, WholeImage):
        side = caches.train.view.side
        text += f"; training crops cut, without averaging, out of images resized to {side}×{side}"
    untrained = sorted({*data.test_labels.tolist()} - {*data.train_labels.tolist()})
    if untrained:
        text += f"; {many(len(untrained), 'class')} with test images and no train images"
    about = {
        "name": data.name,
        "text": text,
        "classes": list(data.classes),
        "train": train,
        "test": test,
        "size": data.size,
        "channels": data.channels,
        "skipped": list(data.skipped),
    } | ({"census": data.census.record()} if data.census else {})
    return about | ({"decoded": {split: kept.record() for split, kept in caches._asdict().items()}} if caches else {})


def read_images(source: Source) -> ImageData | LazyImages:
    study = source.study
    if study.lazy:
        if source.place == "digits":
            raise UserError("--set lazy: digits are always held in memory")
        return load_lazily(
            source.place, lazy_request(study), cache=source.cache, workers=source.workers, terms=source.terms
        )
    if study.decoded_side or study.jpeg_decoder != "pillow":
        raise UserError(
            "--set decoded_side, jpeg_decoder: images that are held in memory are decoded once anyway; --set lazy=true"
        )
    if study.order == "shards":
        raise UserError("--set order=shards: images that are held in memory have none; --set lazy=true")
    request = ImageRequest(study.image_size, study.train_images, study.test_images, study.test_split)
    return load_images(source.place, request, cache=source.cache, terms=source.terms)


def lazy_request(study: ImageSettings) -> LazyRequest:
    window = study.window if study.order == "shards" else 0
    return LazyRequest(
        study.image_size, study.train_images, study.test_images, window, study.test_split, study.decoded_side,
        cropped=study.crop == "inception", decoder=study.jpeg_decoder,
    )  # fmt: skip
