"""The pixels of a batch on the training device: of images stored there, or decoded for the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.views import CentralCrop, RandomCrop, View, draw_boxes
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.data.images.pixel_cache import PixelCache, unreadable
from attnkit_experiments.data.unpacking import Unreadable
from attnkit_experiments.engine.transfer import pinned, upload

AHEAD = 2
"""Steps decoded ahead of the current one."""
BOXES = 256
"""Crops drawn by a process at a time, and images cut at a time on the device, as float32."""


class Pixels(Protocol):
    """Images as (n, side, side, channels) uint8."""

    cropped: bool
    """Whether training images are inception crops already."""

    def train(self, step: int, rows: np.ndarray) -> Tensor:
        """The given rows of a step's batch."""

    def test(self, ids: Sequence[int]) -> Tensor:
        """Test images."""

    def test_batches(self, starts: Iterable[int], batch: int) -> Iterator[Tensor]:
        """The test images from each of `starts` on, at most `batch`."""


def open_pixels(
    data: ImageData | LazyImages,
    device: torch.device,
    *,
    sample_ids: Callable[[int], np.ndarray],
    seed: int,
    smallest: float | None,
) -> Pixels:
    """The pixels of `data`. sample_ids: the ids of a step. smallest: minimal area of an inception crop, None: no crop.

    Only images decoded for the step are cropped here, because crops of the original pixels are sharper.
    """
    if isinstance(data, ImageData):
        return ResidentPixels(data, device, sample_ids)
    return DecodedPixels(data, device, sample_ids, seed, smallest)


class ResidentPixels:
    """All of `data` on `device`."""

    cropped = False

    def __init__(self, data: ImageData, device: torch.device, sample_ids: Callable[[int], np.ndarray]) -> None:
        self.sample_ids = sample_ids
        self.train_images = torch.from_numpy(data.train_images).to(device)
        self.test_images = torch.from_numpy(data.test_images).to(device)

    def train(self, step: int, rows: np.ndarray) -> Tensor:
        return self.train_images[upload(self.sample_ids(step)[rows], self.train_images.device)]

    def test(self, ids: Sequence[int]) -> Tensor:
        return self.test_images[list(ids)]

    def test_batches(self, starts: Iterable[int], batch: int) -> Iterator[Tensor]:
        for start in starts:
            yield self.test_images[start : start + batch]


def cut(images: Tensor, boxes: Tensor, side: int) -> Tensor:
    """The `boxes` (n, 4) of images (n, S, S, C) uint8, in `side`² pixels, rounded: (n, side, side, C) uint8.

    A box is left, top, right, bottom as shares of the sides. Bilinear, without averaging where it shrinks, as
    big_vision resizes training crops.
    """
    parts = []
    for some, (left, top, right, bottom) in zip(images.split(BOXES), (x.T for x in boxes.split(BOXES)), strict=True):
        zero = torch.zeros_like(left)
        across, down = (right - left, zero, left + right - 1), (zero, bottom - top, top + bottom - 1)
        theta = torch.stack([torch.stack(each, 1) for each in (across, down)], 1)
        grid = affine_grid(theta, [len(some), some.shape[3], side, side], align_corners=False)
        pixels = some.permute(0, 3, 1, 2).float()
        resized = grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
        parts.append(resized.round_().byte().permute(0, 2, 3, 1))
    return torch.cat(parts)


class Asked(NamedTuple):
    """Pixels of a batch, complete when the jobs are done, and what is to be cut out of them, in parts."""

    pixels: Tensor
    jobs: list[Future[None]]
    boxes: Sequence[Future[np.ndarray]] = ()


class DecodedPixels:
    """The next steps are decoded, or read where images are kept decoded, while this one is computed; only the requested
    rows of a batch.
    """

    def __init__(
        self,
        data: LazyImages,
        device: torch.device,
        sample_ids: Callable[[int], np.ndarray],
        seed: int,
        smallest: float | None,
    ) -> None:
        self.data, self.device, self.sample_ids, self.seed, self.smallest = data, device, sample_ids, seed, smallest
        self.cropped = smallest is not None
        self.waiting: dict[tuple[int, bytes], Asked] = {}

    def train(self, step: int, rows: np.ndarray) -> Tensor:
        key = rows.tobytes()
        for later in range(step, step + 1 + (AHEAD if self.data.decoders.count else 0)):
            if (later, key) not in self.waiting:
                self.waiting[later, key] = self._asked(later, rows)
        return self._fetched(self.waiting.pop((step, key)))

    def test(self, ids: Sequence[int]) -> Tensor:
        return self._fetched(self._submit_test(ids))

    def test_batches(self, starts: Iterable[int], batch: int) -> Iterator[Tensor]:
        jobs: deque[Asked] = deque()
        for start in starts:
            jobs.append(self._submit_test(range(start, min(start + batch, len(self.data.test)))))
            if len(jobs) > (1 if self.data.decoders.count else 0):
                yield self._fetched(jobs.popleft())
        while jobs:
            yield self._fetched(jobs.popleft())

    def _asked(self, step: int, rows: np.ndarray) -> Asked:
        ids, side = self.sample_ids(step)[rows], self.data.size
        if self.data.caches:
            return self._read(self.data.caches.train, ids)._replace(boxes=self._drawn(ids, step, rows))
        return self._submit(
            [(int(self.data.train[id]), self._view(side, step, int(row))) for id, row in zip(ids, rows, strict=True)]
        )

    def _view(self, side: int, step: int, row: int) -> View:
        return CentralCrop(side) if self.smallest is None else RandomCrop(side, self.smallest, self.seed, step, row)

    def _drawn(self, ids: np.ndarray, step: int, rows: np.ndarray) -> list[Future[np.ndarray]]:
        if self.smallest is None or not self.data.caches:
            return []
        sizes, draw = self.data.caches.train.sizes(ids), self.data.decoders.submit
        parts = [slice(start, start + BOXES) for start in range(0, len(rows), BOXES)]
        return [draw(draw_boxes, (self.smallest, self.seed, step, rows[part], sizes[part])) for part in parts]

    def _read(self, cache: PixelCache, ids: np.ndarray) -> Asked:
        pixels = pinned((len(ids), *cache.shape), torch.uint8, self.device)
        return Asked(pixels, cache.read(ids, pixels.numpy()))

    def _submit_test(self, ids: Sequence[int]) -> Asked:
        if self.data.caches:
            return self._read(self.data.caches.test, np.asarray(ids))
        return self._submit([(int(self.data.test[id]), CentralCrop(self.data.size)) for id in ids])

    def _submit(self, items: Sequence[tuple[int, View]]) -> Asked:
        pixels = pinned((len(items), self.data.size, self.data.size, 3), torch.uint8, self.device)
        return Asked(pixels, self.data.decode(items, pixels.numpy()))

    def _fetched(self, asked: Asked) -> Tensor:
        try:
            for job in asked.jobs:
                job.result()
        except Unreadable as error:
            raise unreadable(self.data.index, error) from None
        pixels = asked.pixels.to(self.device, non_blocking=True)
        if not asked.boxes:
            return pixels
        boxes = np.concatenate([job.result() for job in asked.boxes])
        return cut(pixels, upload(boxes, self.device), self.data.size)
