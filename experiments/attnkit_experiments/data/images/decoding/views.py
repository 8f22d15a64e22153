"""Views of an image: the part to use, cropped and resized while it is decoded.

A crop is drawn from (seed, step, row) before the image is decoded, so it does not depend on the process. JPEG images
are decoded at ½, ¼ or ⅛ of their size (the decoder's draft mode) if a training crop still has at least the needed
number of pixels; test images never are. Resizing uses Pillow's bilinear filter, which averages when it shrinks;
big_vision resizes training crops without averaging and test images by area.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from attnkit_experiments.data.unpacking import Place, Unreadable, readable
from attnkit_experiments.engine.terms import Limits

Box = tuple[float, float, float, float]
View = Callable[[Image.Image], Image.Image]

# Pillow warns of images above its limit and refuses those of twice as many pixels: `require_pixels` refuses the first
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

ASPECTS = (3 / 4, 4 / 3)
ATTEMPTS = 100
SHRUNK = 7 / 8
"""The share of a test image's shorter side that is used: of 256 pixels the middle 224."""


@dataclass(frozen=True)
class RandomCrop:
    """The inception crop of row `row` of step `step` in `side`² pixels; `smallest` is a share of the area."""

    side: int
    smallest: float
    seed: int
    step: int
    row: int

    def box(self, width: int, height: int) -> Box:
        """What is cut out of an image of this size; it depends on nothing else of the image."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, self.step], counter=[0, 0, 1, self.row]))
        return inception_box(width, height, self.smallest, rng)

    def __call__(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        box = self.box(width, height)
        fewest = min(box[2] - box[0], box[3] - box[1]) / self.side
        image.draft("RGB", (math.ceil(width / max(fewest, 1)), math.ceil(height / max(fewest, 1))))
        shrunk = round(width / image.width)  # an integer factor: a draft's last column may cover fewer pixels
        scaled = (box[0] / shrunk, box[1] / shrunk, box[2] / shrunk, box[3] / shrunk)
        return rgb(image).resize((self.side, self.side), Image.Resampling.BILINEAR, box=scaled)


@dataclass(frozen=True)
class CentralCrop:
    """The middle square of `side` pixels of an image whose shorter side is `side`·8/7 (224 of 256, as big_vision)."""

    side: int

    def __call__(self, image: Image.Image) -> Image.Image:
        shorter = round(self.side / SHRUNK)
        factor = shorter / min(image.size)
        width, height = (max(shorter, round(side * factor)) for side in image.size)
        require_pixels(width, height)
        resized = rgb(image).resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        return resized.crop((left, top, left + self.side, top + self.side))


@dataclass(frozen=True)
class Square:
    """`square` of an image with three channels: what is held in memory of images of a data set."""

    side: int

    def __call__(self, image: Image.Image) -> Image.Image:
        return square(rgb(image), self.side)


@dataclass(frozen=True)
class WholeImage:
    """The whole image in `side`² pixels, whatever its aspect: what a cache keeps to cut crops out of."""

    side: int

    def __call__(self, image: Image.Image) -> Image.Image:
        image.draft("RGB", (self.side, self.side))
        return rgb(image).resize((self.side, self.side), Image.Resampling.BILINEAR)


def inception_box(width: int, height: int, smallest: float, rng: np.random.Generator) -> Box:
    """Left, top, right, bottom of a random part: aspect uniform in ¾..4/3, then its height uniform in what fits.

    Szegedy et al. 2015 §6 with the distribution of TensorFlow's `sample_distorted_bounding_box`, which big_vision uses:
    it is the height, not the area, that is uniform between the one that gives `smallest` of the image's area and the
    largest that fits. The whole image if nothing fits.
    """
    area = width * height
    for _ in range(ATTEMPTS):
        aspect = rng.uniform(*ASPECTS)
        lowest = round(math.sqrt(smallest * area / aspect))
        highest = min(round(math.sqrt(area / aspect)), height, int(width / aspect))
        tall = int(rng.integers(lowest, highest + 1)) if lowest < highest else highest
        wide = min(round(tall * aspect), width)
        if tall > 0 and wide > 0 and smallest * area <= wide * tall:
            left, top = int(rng.integers(0, width - wide + 1)), int(rng.integers(0, height - tall + 1))
            return left, top, left + wide, top + tall
    return 0, 0, width, height


class UnknownRange(ValueError):
    """Pixels whose smallest and largest value are not known."""


def rgb(image: Image.Image) -> Image.Image:
    """The image with three channels of 8 bits. Pillow would clip values of 16 bits at 255: they are scaled, 65,535 to
    255. Errors: UnknownRange for values of 32 bits, which may have any range.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # Pillow scales a PPM to 65,535
        levels = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((levels + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UnknownRange(f"mode {image.mode}: pixels of 32 bits, whose range is not known")
    return image.convert("RGB")


def grey(image: Image.Image) -> Image.Image:
    """One channel of 8 bits, scaled as in `rgb`."""
    return (rgb(image) if image.mode.startswith(("I", "F")) else image).convert("L")


def square(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to `size`, then a centre crop."""
    shorter = min(image.size)
    if image.size != (size, size):
        width, height = (max(size, round(side * size / shorter)) for side in image.size)
        require_pixels(width, height)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (image.width - size) // 2, (image.height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return image


def decode(items: Sequence[tuple[Place, View]]) -> np.ndarray:
    """The views of images, which are equally large: (n, side, side, 3) uint8. Errors: Unreadable, for the first."""
    return np.stack([np.asarray(opened(place, view)) for place, view in items])


def decode_with_sizes(items: Sequence[tuple[Place, View]]) -> tuple[np.ndarray, np.ndarray]:
    """As `decode`, and width and height of the images themselves: (n, 2) uint32."""
    sizes: list[tuple[int, int]] = []

    def measured(view: View) -> View:
        def call(image: Image.Image) -> Image.Image:
            sizes.append(image.size)
            return view(image)

        return call

    pixels = decode([(place, measured(view)) for place, view in items])
    return pixels, np.array(sizes, dtype=np.uint32)


def draw_boxes(drawn: Sequence[Any]) -> np.ndarray:
    """The boxes of `RandomCrop` as shares of width and height, (n, 4) float32, for (smallest, seed, step, rows, sizes).

    A process of `decoders` draws them: 15 µs each, which the training process has not.
    """
    smallest, seed, step, rows, sizes = drawn
    pairs = zip(rows.tolist(), sizes.tolist(), strict=True)
    boxes = [RandomCrop(0, smallest, seed, step, row).box(*size) for row, size in pairs]
    return (np.array(boxes) / sizes[:, [0, 1, 0, 1]]).astype(np.float32)


def failures(places: Sequence[Place]) -> list[tuple[int, str, str]]:
    """Position, reason and kind of every image that cannot be decoded; JPEG images are decoded at ⅛ of their size."""
    errors = []
    for position, place in enumerate(places):
        try:
            opened(place, _coarse)
        except Unreadable as error:
            errors.append((position, error.reason, error.kind))
    return errors


def opened(place: Place, view: View) -> Image.Image:
    """`view` of the image at this place. Errors: Unreadable if it cannot be read, or has more pixels than the limit."""
    return viewed(place.name, place.read(), view, place.limits)


def viewed(name: str, encoded: bytes, view: View, limits: Limits) -> Image.Image:
    """`view` of an encoded image; as `opened`."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, limits.pixels
    try:
        with readable(name):
            return _viewed(name, encoded, view, limits)
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _viewed(name: str, encoded: bytes, view: View, limits: Limits) -> Image.Image:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            require_pixels(*image.size)
            return view(image)
    except UnidentifiedImageError:
        raise Unreadable(name, "unknown format") from None
    except UnknownRange as error:
        raise Unreadable(name, str(error), "mode") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unreadable(name, f"more than {limits.pixels:,} pixels; --max-pixels allows more") from None


def require_pixels(width: int, height: int) -> None:
    """DecompressionBombError for too large an image, which a long narrow one becomes when it is resized."""
    if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"{width}×{height} pixels")


def _coarse(image: Image.Image) -> Image.Image:
    image.draft("RGB", (1, 1))
    return rgb(image)
