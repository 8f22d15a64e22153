"""scikit-learn's handwritten digits: 1,797 real images of 8×8 pixels shipped with a dependency."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image

from attnkit_experiments.data.images.dataset import ImageData

HELD_OUT = 5  # every fifth image of a class is test


@functools.cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels in the order of the file, which is text: reading it takes longer than a step of training."""
    from sklearn.datasets import load_digits  # takes a second to import, only needed here

    source = load_digits()
    return np.round(source.images * (255 / 16)).astype(np.uint8), source.target.astype(np.int64)


def load(size: int = 0) -> ImageData:
    """1,433 train and 364 test images, grey, side `size` (0: the original 8 pixels; larger is bilinear).

    The split takes every fifth image of each class in the order of the file, so it is the same everywhere.
    """
    images, labels = _read()
    if size not in (0, 8):
        images = np.stack(
            [np.asarray(Image.fromarray(x).resize((size, size), Image.Resampling.BILINEAR)) for x in images]
        )
    rank = np.zeros(len(labels), dtype=int)
    for label in range(10):
        rank[labels == label] = np.arange(np.count_nonzero(labels == label))
    test = rank % HELD_OUT == 0
    return ImageData(
        name="scikit-learn digits",
        classes=tuple(str(label) for label in range(10)),
        train_images=images[~test, :, :, None],
        train_labels=labels[~test],
        test_images=images[test, :, :, None],
        test_labels=labels[test],
    )
