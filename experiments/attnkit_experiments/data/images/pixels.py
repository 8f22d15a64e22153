"""The pixels of a batch on the training device: of images stored there, or decoded for the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.data.images.decoding.views import CentralCrop, RandomCrop, View
from attnkit_experiments.data.images.lazy import LazyImages
from attnkit_experiments.data.unpacking import Unreadable, printable
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.transfer import pinned, upload

AHEAD = 2
"""Steps decoded ahead of the current one."""


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


class Asked(NamedTuple):
    """Pixels of a batch, complete when the jobs are done."""

    pixels: Tensor
    jobs: list[Future[None]]


class DecodedPixels:
    """The next steps are decoded while this one is computed; only the requested rows of a batch."""

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
        return self._submit(
            [(int(self.data.train[id]), self._view(side, step, int(row))) for id, row in zip(ids, rows, strict=True)]
        )

    def _view(self, side: int, step: int, row: int) -> View:
        return CentralCrop(side) if self.smallest is None else RandomCrop(side, self.smallest, self.seed, step, row)

    def _submit_test(self, ids: Sequence[int]) -> Asked:
        return self._submit([(int(self.data.test[id]), CentralCrop(self.data.size)) for id in ids])

    def _submit(self, items: Sequence[tuple[int, View]]) -> Asked:
        pixels = pinned((len(items), self.data.size, self.data.size, 3), torch.uint8, self.device)
        return Asked(pixels, self.data.decode(items, pixels.numpy()))

    def _fetched(self, asked: Asked) -> Tensor:
        try:
            for job in asked.jobs:
                job.result()
        except Unreadable as error:
            raise UserError(
                f"--data {self.data.index.root}: {printable(error.name)} cannot be read as an image "
                f"({printable(error.reason)}); "
                "--skip-unreadable decodes all once, leaves such files out and counts them"
            ) from None
        return asked.pixels.to(self.device, non_blocking=True)
