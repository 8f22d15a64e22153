"""Real images as uint8 arrays, a stateless sampler, and augmentation on the device that trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnkit_experiments.data.images import digits, folder
from attnkit_experiments.data.images.dataset import ImageData
from attnkit_experiments.engine.terms import TERMS, Terms

__all__ = ["ImageData", "ImageRequest", "load_images"]


@dataclass(frozen=True)
class ImageRequest:
    """The images of a study: side in pixels (0: as stored), how many of each split (0: all), and which split is tested
    on, where there are several.
    """

    size: int = 0
    train_images: int = 0
    test_images: int = 0
    test_split: str = ""


def load_images(source: str, request: ImageRequest, *, cache: Path, terms: Terms = TERMS) -> ImageData:
    """Images from scikit-learn (`source` = "digits") or from a directory, zips or tars (`listing`).

    Errors: UserError, one line, if the path does not exist, holds no images or holds an unreadable one.
    """
    if source == "digits":
        data = digits.load(request.size)
        return data.take(request.train_images, request.test_images)
    return folder.load(
        Path(source),
        size=request.size,
        train_images=request.train_images,
        test_images=request.test_images,
        cache=cache,
        test_split=request.test_split,
        terms=terms,
    )
