"""Images that are decoded on demand, for sets that do not fit into memory when decoded."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from attnkit_experiments.data.census import Census, require_classes
from attnkit_experiments.data.images.decoding.decoders import Decoders
from attnkit_experiments.data.images.decoding.views import CentralCrop, View, WholeImage, decode, failures
from attnkit_experiments.data.images.folder import chosen
from attnkit_experiments.data.images.index import AT_ONCE, ImageIndex, open_index
from attnkit_experiments.data.images.pixel_cache import Decoder, PixelCache, Views, open_pixel_cache
from attnkit_experiments.data.unpacking import printable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_json
from attnkit_experiments.engine.progress import meter
from attnkit_experiments.engine.sampler import Permutation, ShuffledShards, shuffled
from attnkit_experiments.engine.schema import read_as
from attnkit_experiments.engine.terms import TERMS, Terms

CHUNK = 8
"""Images per job of a decoding process."""


class Caches(NamedTuple):
    """Pixels of the training images, and of the test images as they are judged."""

    train: PixelCache
    test: PixelCache


@dataclass(frozen=True)
class LazyImages:
    """The images `train` and `test` of an index (its numbers), decoded as squares of `size` pixels, RGB.

    It replaces an `ImageData`. The number of `decoders` does not affect any pixel. caches: what was decoded once, None
    where images are decoded for each step.
    """

    index: ImageIndex
    train: np.ndarray
    test: np.ndarray
    size: int
    decoders: Decoders
    permutation: Permutation = shuffled
    skipped: tuple[str, ...] = ()
    census: Census = field(default_factory=Census)
    channels: int = 3
    caches: Caches | None = None

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.index.classes

    @property
    def train_labels(self) -> np.ndarray:
        return self.index.labels[self.train]

    @property
    def test_labels(self) -> np.ndarray:
        return self.index.labels[self.test]

    def checksum(self) -> str:
        """A hash of the name, class and encoded size of every image, and of their order.

        The contents of files are not read, which would take as long as an epoch; of caches, every pixel counts.
        """
        digest = hashlib.sha256(repr((self.size, self.classes)).encode())
        digest.update(np.ascontiguousarray(self.permutation(0, 0, len(self.train))).data)
        for ids in (self.train, self.test):
            for array in (self.index.names, self.index.labels, self.index.sizes):
                for start in range(0, len(ids), AT_ONCE):
                    digest.update(array[ids[start : start + AT_ONCE]].data)
        for cache in self.caches or ():
            digest.update(cache.contents())
        return digest.hexdigest()

    def decode(self, items: Sequence[tuple[int, View]], pixels: np.ndarray) -> list[Future[None]]:
        """Decode views of images of the index into `pixels` (n, size, size, 3) uint8, which has them when all of the
        futures are done.
        """
        jobs = [(self.index.place(image), view) for image, view in items]
        chunks = [slice(start, start + CHUNK) for start in range(0, len(jobs), CHUNK)]
        return [self.decoders.submit(decode, jobs[chunk], pixels[chunk]) for chunk in chunks]


@dataclass(frozen=True)
class LazyRequest:
    """Side in pixels, images of each split (0: all), order by samples, or by shards in windows of `window` (0: no);
    which split is tested on, where there are several.

    decoded_side: the side at which training images are decoded once and kept (0: not kept); cropped: whether crops are
    to be cut out of them; decoder: what decodes them then; test images are always Pillow's. check: whether every image
    kept is looked at, and made again where it is damaged.
    """

    size: int
    train_images: int = 0
    test_images: int = 0
    window: int = 0
    test_split: str = ""
    decoded_side: int = 0
    cropped: bool = False
    decoder: Decoder = "pillow"
    check: bool = False

    def __post_init__(self) -> None:
        smallest, largest = self.size, math.inf if self.cropped else self.size
        if self.decoded_side and not smallest <= self.decoded_side <= largest:
            expected = f"{self.size}, the image_size{', or more' if self.cropped else ' (without crop=inception)'}"
            raise UserError(f"--set decoded_side: expected {expected}, got {self.decoded_side}")
        if self.decoder != "pillow" and not (self.decoded_side and self.cropped):
            raise UserError(
                f"--set jpeg_decoder={self.decoder}: it decodes once, for crops; --set decoded_side=256 crop=inception"
            )

    @property
    def train_view(self) -> WholeImage | CentralCrop:
        return WholeImage(self.decoded_side) if self.cropped else CentralCrop(self.size)


def load_lazily(data: str, request: LazyRequest, *, cache: Path, workers: int = 0, terms: Terms = TERMS) -> LazyImages:
    """Images of a directory, zips or tars (`listing`), to be decoded on demand.

    terms: with skip_unreadable every image is decoded once in advance, and unreadable ones are left out. The list is
    stored in `cache`, so that all processes and later runs leave out the same. Errors: UserError.
    """
    if request.size < 1:
        raise UserError("images that are decoded lazily need a size: --set image_size=224")
    index = open_index(data, cache=cache, judged=request.test_split, limits=terms.limits)
    require_classes(data, index.classes, terms)
    census = index.census
    train, test = chosen(index, request.train_images, request.test_images)
    census.keep(len(train) + len(test))
    census.require(data, terms)
    images = LazyImages(index, train, test, request.size, Decoders(workers))
    skipped: tuple[str, ...] = ()
    if terms.skip_unreadable:
        bad = unreadable(images, np.concatenate([train, test]), cache)
        named = [(kind, printable(index.place(i).name), reason) for i, reason, kind in bad]
        skipped = tuple(f"{name} ({printable(reason)})" for _, name, reason in named)
        census.leave_out((kind, name) for kind, name, _ in named)
        census.require(data, terms)  # now with what is unreadable
        train, test = (part[~np.isin(part, [i for i, *_ in bad])] for part in (train, test))
    for split, members in (("train", train), ("test", test)):
        if not len(members):
            raise UserError(f"--data {data}: no readable {split} images are left")
    images = dataclasses.replace(images, train=train, test=test, skipped=skipped, census=census)
    if request.decoded_side:
        views = (
            Views(index, train, request.train_view, request.decoder),
            Views(index, test, CentralCrop(request.size)),
        )
        caches = (open_pixel_cache(each, cache, images.decoders, check=request.check) for each in views)
        images = dataclasses.replace(images, caches=Caches(*caches))
    if not request.window:
        return images
    if not index.files:
        raise UserError(f"--data {data}: order=shards needs shards (tar or zip); a directory has none")
    return dataclasses.replace(images, permutation=ShuffledShards(index.archives[images.train], request.window))


def unreadable(images: LazyImages, ids: np.ndarray, cache: Path) -> list[tuple[int, str, str]]:
    """Number, reason and kind of each of these images that cannot be decoded: all are tried once, and the result is
    cached.
    """
    limits = images.index.limits
    digest = hashlib.sha256(repr(limits).encode())
    for array in (images.index.names, images.index.sizes):
        for start in range(0, len(ids), AT_ONCE):
            digest.update(np.ascontiguousarray(array[ids[start : start + AT_ONCE]]).data)
    file = cache / f"unreadable-{digest.hexdigest()[:20]}.json"
    if file.exists() and (found := _tried(file, len(ids))) is not None:
        return [(int(ids[at]), reason, kind) for at, reason, kind in found]
    failed: list[tuple[int, str, str]] = []
    jobs: deque[tuple[int, Future[list[tuple[int, str, str]]]]] = deque()

    def collect() -> None:
        start, job = jobs.popleft()
        failed.extend((start + at, reason, kind) for at, reason, kind in job.result())

    with meter("trying to decode every image", len(ids)) as update:
        for start in range(0, len(ids), CHUNK):
            places = [images.index.place(int(i)) for i in ids[start : start + CHUNK]]
            jobs.append((start, images.decoders.submit(failures, places)))
            if len(jobs) > 4 * max(images.decoders.count, 1):
                collect()
                update(start, f"{len(failed)} unreadable")
        while jobs:
            collect()
    write_json(file, {"images": len(ids), "unreadable": failed})
    return [(int(ids[at]), reason, kind) for at, reason, kind in failed]


class Tried(TypedDict):
    """The images that cannot be decoded, of so many: place among those tried, reason and kind."""

    images: int
    unreadable: list[tuple[int, str, str]]


def _tried(file: Path, count: int) -> list[tuple[int, str, str]] | None:
    """What a file says of `count` images, None where it is damaged: they are tried again."""
    try:
        tried = read_as(file, Tried)
    except UserError:
        return None
    fit = tried["images"] == count and all(0 <= at < count for at, _, _ in tried["unreadable"])
    return tried["unreadable"] if fit else None
