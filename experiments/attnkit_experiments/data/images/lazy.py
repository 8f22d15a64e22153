"""Images that are decoded on demand, for sets that do not fit into memory when decoded."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnkit_experiments.data.images.dataset import in_turn
from attnkit_experiments.data.images.decoding.decoders import Decoders
from attnkit_experiments.data.images.decoding.views import View, decode, failures
from attnkit_experiments.data.images.index import AT_ONCE, ImageIndex, open_index
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import read_json, write_json
from attnkit_experiments.engine.progress import meter
from attnkit_experiments.engine.sampler import Permutation, ShuffledShards, shuffled

CHUNK = 8
"""Images per job of a decoding process."""


@dataclass(frozen=True)
class LazyImages:
    """The images `train` and `test` of an index (its numbers), decoded as squares of `size` pixels, RGB.

    It replaces an `ImageData`. The number of `decoders` does not affect any pixel.
    """

    index: ImageIndex
    train: np.ndarray
    test: np.ndarray
    size: int
    decoders: Decoders
    permutation: Permutation = shuffled
    skipped: tuple[str, ...] = ()
    channels: int = 3

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

        The contents of files are not read, which would take as long as an epoch.
        """
        digest = hashlib.sha256(repr((self.size, self.classes)).encode())
        digest.update(np.ascontiguousarray(self.permutation(0, 0, len(self.train))).data)
        for ids in (self.train, self.test):
            for array in (self.index.names, self.index.labels, self.index.sizes):
                for start in range(0, len(ids), AT_ONCE):
                    digest.update(array[ids[start : start + AT_ONCE]].data)
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
    """Side in pixels, images of each split (0: all), order by samples, or by shards in windows of `window` (0: no)."""

    size: int
    train_images: int = 0
    test_images: int = 0
    window: int = 0


def load_lazily(
    data: str, request: LazyRequest, *, cache: Path, workers: int = 0, skip_unreadable: bool = False
) -> LazyImages:
    """Images of a directory, zips or tar shards (`index`), to be decoded on demand.

    skip_unreadable: every image is decoded once in advance, and unreadable ones are left out. The list is stored
    in `cache`, so that all processes and later runs leave out the same. Errors: UserError.
    """
    if request.size < 1:
        raise UserError("images that are decoded lazily need a size: --set image_size=224")
    index = open_index(data, cache=cache)
    train, test = np.flatnonzero(index.train), np.flatnonzero(~index.train)
    images = LazyImages(index, train, test, request.size, Decoders(workers))
    if skip_unreadable:
        bad = unreadable(images, cache)
        names = {name for name, _ in bad}
        readable = np.array([index.place(i).name not in names for i in range(len(index.names))])
        images = dataclasses.replace(
            images,
            train=images.train[readable[images.train]],
            test=images.test[readable[images.test]],
            skipped=tuple(f"{name} ({reason})" for name, reason in bad),
        )
        for split in ("train", "test"):
            if not len(getattr(images, split)):
                raise UserError(f"--data {data}: no readable {split} images are left")
    splits = {}
    for split, limit in (("train", request.train_images), ("test", request.test_images)):
        if limit:
            ids = getattr(images, split)
            splits[split] = ids[in_turn(index.labels[ids])[:limit]]
    images = dataclasses.replace(images, **splits) if splits else images
    if not request.window:
        return images
    if not index.files:
        raise UserError(f"--data {data}: order=shards needs shards (tar or zip); a directory has none")
    return dataclasses.replace(images, permutation=ShuffledShards(index.archives[images.train], request.window))


def unreadable(images: LazyImages, cache: Path) -> list[tuple[str, str]]:
    """Name and reason of every image that cannot be decoded: all are tried once, and the result is cached."""
    count = len(images.index.names)
    digest = hashlib.sha256()
    for array in (images.index.names, images.index.sizes):
        for start in range(0, count, AT_ONCE):
            digest.update(np.ascontiguousarray(array[start : start + AT_ONCE]).data)
    file = cache / f"unreadable-{digest.hexdigest()[:20]}.json"
    if file.exists():
        return [(name, reason) for name, reason in read_json(file)["unreadable"]]
    failed: list[tuple[str, str]] = []
    with meter("trying to decode every image", count) as update:
        jobs: deque[Future[list[tuple[str, str]]]] = deque()
        for start in range(0, count, CHUNK):
            places = [images.index.place(i) for i in range(start, min(start + CHUNK, count))]
            jobs.append(images.decoders.submit(failures, places))
            if len(jobs) > 4 * max(images.decoders.count, 1):
                failed += jobs.popleft().result()
                update(start, f"{len(failed)} unreadable")
        failed += [each for future in jobs for each in future.result()]
    write_json(file, {"images": count, "unreadable": failed})
    return failed
