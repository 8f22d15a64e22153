"""RandAugment (Cubuk et al. 2020) on the device: each image goes through a few operations chosen at random.

Two published sets of operations, as `Policy`:

`big_vision(n, m)` is `randaug(n,m)` of big_vision (pp/archive/autoaugment.py), which the ViT recipes train with: 16
operations (no identity), n of them with replacement, the magnitude m of 10 for all, moved pixels taken from the nearest
one, uncovered ones 128. Its lengths are meant for 224 pixels; here they are shares of 224, so small images are moved as
far as large ones. m may be larger than 10, and m = 0 is not the identity: equalize, invert and others have no
magnitude.

`timm_increasing(n, m, spread)` is `rand-mM-nN-mstdS-inc1` of timm, which SOFT and DeiT train with: 15 operations that
grow with m, each applied with probability ½, the magnitude of an image normal around m and cut to 0..10, translations
up to 0.45 of the side, uncovered pixels (124, 116, 104). timm draws bilinear or bicubic interpolation; here it is
bilinear.

An operation returns the same as Pillow (ImageOps, ImageEnhance, Image.transform), except that shears fix pixel (0, 0),
as in big_vision. Where big_vision's own arithmetic differs from Pillow's, it is by one grey level: it truncates where
Pillow rounds in sharpness and in the mean of contrast, and its weights of grey have four digits. Older versions of it
take the mean of contrast from a wrong sum.

A GPU is kept busy by few large operations, so those of a kind are applied together: the images of a layer are sorted by
operation, and a slice of them is moved, looked up in tables, blended, or cut. What does not depend on pixels
(matrices, tables, order) is computed on the CPU and copied at once; the CPU never waits for the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from attnkit_experiments.data.images.augment import Draws
from attnkit_experiments.engine.transfer import upload_together

HIGHEST = 10.0
SIDE = 224  # image size for which big_vision's lengths in pixels are defined
LEVELS = np.arange(256, dtype=np.uint8)
GREY = np.array([19595, 38470, 7471], dtype=np.float32).reshape(3, 1, 1) / 2**16
"""ITU-R 601 luma in Pillow's fixed point; sums of products with bytes are exact in float32."""


class Matrix(NamedTuple):
    """Pixel (x, y) comes from across·x + down·y + shift; each (n, 2) for n images, the column first."""

    across: np.ndarray
    down: np.ndarray
    shift: np.ndarray


def _matrix(value: np.ndarray, *entries: np.ndarray | float) -> Matrix:
    """(x, y) from (a x + b y + c, d x + e y + f) with the entries a to f, each a number or one for each value."""
    a, b, c, d, e, f = (np.broadcast_to(entry, value.shape) for entry in entries)
    return Matrix(*(np.stack(pair, axis=1) for pair in ((a, d), (b, e), (c, f))))


def rotate(value: np.ndarray, height: int, width: int) -> Matrix:
    """By `value` degrees, counter-clockwise, about the centre."""
    radians = torch.deg2rad(torch.from_numpy(value))
    cos, sin = torch.cos(radians).numpy(), torch.sin(radians).numpy()
    x, y = (width - 1) / 2, (height - 1) / 2
    return _matrix(value, cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def shear_x(value: np.ndarray, height: int, width: int) -> Matrix:
    """Row y moves by value · y."""
    return _matrix(value, 1.0, value, 0.0, 0.0, 1.0, 0.0)


def shear_y(value: np.ndarray, height: int, width: int) -> Matrix:
    """Column x moves by value · x."""
    return _matrix(value, 1.0, 0.0, 0.0, value, 1.0, 0.0)


def translate_x(value: np.ndarray, height: int, width: int) -> Matrix:
    """By `value` pixels to the left."""
    return _matrix(value, 1.0, 0.0, value, 0.0, 1.0, 0.0)


def translate_y(value: np.ndarray, height: int, width: int) -> Matrix:
    """By `value` pixels upwards."""
    return _matrix(value, 1.0, 0.0, 0.0, 0.0, 1.0, value)


def invert(value: np.ndarray) -> np.ndarray:
    """255 - x."""
    return np.broadcast_to(255 - LEVELS, (len(value), 256))


def posterize(value: np.ndarray) -> np.ndarray:
    """Keep the `value` highest bits of 8, at least one (TensorFlow shifts by at most 7)."""
    shift = np.minimum(8 - value.astype(np.uint8), 7)[:, None]
    return LEVELS >> shift << shift


def posterize_to_black(value: np.ndarray) -> np.ndarray:
    """Keep the `value` highest bits of 8; 0 bits give black, as in Pillow."""
    return np.where(value[:, None] > 0, posterize(value), 0).astype(np.uint8)


def solarize(value: np.ndarray) -> np.ndarray:
    """Invert levels from `value` on."""
    return np.where(value[:, None] > LEVELS, LEVELS, 255 - LEVELS)


def solarize_add(value: np.ndarray) -> np.ndarray:
    """Add `value` to levels below 128."""
    brighter = np.clip(LEVELS + value.astype(np.int64)[:, None], 0, 255).astype(np.uint8)
    return np.where(LEVELS < 128, brighter, LEVELS)


def brightness(value: np.ndarray) -> np.ndarray:
    """0: black, 1: unchanged."""
    return np.clip(value.astype(np.float32)[:, None] * LEVELS.astype(np.float32), 0, 255).astype(np.uint8)


MOVES: Mapping[str, Callable[[np.ndarray, int, int], Matrix]] = {
    each.__name__: each for each in (rotate, shear_x, shear_y, translate_x, translate_y)
}
"""Operations that take pixels from elsewhere: matrices of values, height and width."""
TABLES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    each.__name__: each for each in (invert, posterize, posterize_to_black, solarize, solarize_add, brightness)
}
"""Operations that change every level into another: tables (n, 256) uint8 of values (n,)."""
FITTED = ("autocontrast", "equalize")
"""Operations whose tables depend on the image."""
BLENDS = ("color", "contrast", "sharpness")
"""Operations between an image and another one made of it: other + value · (image - other)."""
KINDS = (*MOVES, *TABLES, *FITTED, *BLENDS, "cutout", "none")
"""All operations in the order in which the images of a layer are sorted."""


class Layer(NamedTuple):
    """What happens to each of B images, on the CPU."""

    kind: np.ndarray  # (B,) numbers in KINDS
    value: np.ndarray  # (B,) float64: the operation's argument
    place: np.ndarray  # (2, B) float32: where a square is cut, in 0..1 from above and from the left


class Uploaded(NamedTuple):
    """A layer on the device; n is the number of images that an array is for."""

    order: Tensor  # (B,) int64: the places of sorted images among those of the layer before
    across: Tensor  # (n, 2, 1, W) and (n, 2, H, 1) and (n, 2, 1, 1) float64: the column and the row that a pixel
    down: Tensor  # comes from are their sum
    shift: Tensor
    tables: Tensor  # (n, 1, 256) uint8
    factor: Tensor  # (n, 1, 1, 1) float32
    rows: Tensor  # (n, 1, H, 1) and (n, 1, 1, W) bool: the square that is cut
    columns: Tensor


class Constants(NamedTuple):
    """What all layers need on the device."""

    levels: Tensor  # (256,) uint8
    one: Tensor  # (1,) int64
    stretch: Tensor  # (256, 2) float64: factor and offset of autocontrast by the difference between its levels
    grey: Tensor  # (3, 1, 1) float32
    last: Tensor  # (2, 1, 1) float64: the last column and row
    sides: Tensor  # (2, 1, 1) float64: width and height
    fill: Tensor  # (3, 1, 1) uint8


def apply_layers(images: Tensor, layers: Sequence[Layer], fill: tuple[int, int, int], bilinear: bool) -> Tensor:
    """(B, 3, H, W) uint8 through one layer after another; `fill` where nothing is."""
    height, width = images.shape[2:]
    arrays = list(_constants(height, width, fill))
    places = np.arange(len(images))
    for layer in layers:
        order = np.argsort(layer.kind, kind="stable")
        arrays += [places[order], *_computed(layer, order, height, width)]
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
    *tensors, back = upload_together([*arrays, places], images.device)
    constants, rest = Constants(*tensors[: len(Constants._fields)]), tensors[len(Constants._fields) :]
    size = len(Uploaded._fields)
    for n, layer in enumerate(layers):
        counts = np.bincount(layer.kind, minlength=len(KINDS)).tolist()
        uploaded = Uploaded(*rest[n * size : (n + 1) * size])
        images = _applied(images, uploaded, dict(zip(KINDS, counts, strict=True)), constants, bilinear)
    return images.index_select(0, back)


def _constants(height: int, width: int, fill: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    span = np.arange(256, dtype=np.float64)
    stretch = np.stack([255 / span.clip(min=1), 255 / span.clip(min=1)], axis=1)
    stretch[0] = 1, 0  # of one level: as it is
    sides = np.array([width, height], dtype=np.float64).reshape(2, 1, 1)
    colour = np.array(fill, dtype=np.uint8).reshape(3, 1, 1)
    return LEVELS, np.ones(1, dtype=np.int64), stretch, GREY, sides - 1, sides, colour


def _computed(layer: Layer, order: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """The arrays of `Uploaded` after the order."""
    kind, value = layer.kind[order], layer.value[order]
    bounds = np.searchsorted(kind, np.arange(len(KINDS) + 1))
    of = {name: slice(bounds[n], bounds[n + 1]) for n, name in enumerate(KINDS)}
    matrices = [move(value[of[name]], height, width) for name, move in MOVES.items()]
    across, down, shift = (np.concatenate(each)[:, :, None, None] for each in zip(*matrices, strict=True))
    tables = np.concatenate([table(value[of[name]]) for name, table in TABLES.items()])
    factor = value[of[BLENDS[0]].start : of[BLENDS[-1]].stop].astype(np.float32)
    cut = of["cutout"]
    top, left = ((layer.place[n, order[cut]] * side).astype(np.int64) for n, side in enumerate((height, width)))
    half = value[cut].astype(np.int64)
    rows, columns = (
        (np.arange(side) >= (at - half)[:, None]) & (np.arange(side) < (at + half)[:, None])
        for at, side in ((top, height), (left, width))
    )
    return [
        across * np.arange(width, dtype=np.float64), down * np.arange(height, dtype=np.float64)[:, None], shift,
        tables[:, None], factor[:, None, None, None], rows[:, None, :, None], columns[:, None, None, :],
    ]  # fmt: skip


def _applied(images: Tensor, layer: Uploaded, counts: dict[str, int], constants: Constants, bilinear: bool) -> Tensor:
    """The images of a layer sorted by operation."""
    sizes = [sum(counts[name] for name in names) for names in (MOVES, (*TABLES, *FITTED), BLENDS)]
    parts = images.index_select(0, layer.order).split([*sizes, counts["cutout"], counts["none"]])
    moved, mapped, blended, cut, rest = parts
    if len(moved):
        moved = _moved(moved, layer, constants, bilinear)
    if len(mapped):
        mapped = _mapped(mapped, layer.tables, counts["autocontrast"], constants)
    if len(blended):
        blended = _blended(blended, layer.factor, [counts[name] for name in BLENDS], constants)
    if len(cut):
        cut = torch.where(layer.rows & layer.columns, constants.fill, cut)
    return torch.cat([moved, mapped, blended, cut, rest])


def _moved(images: Tensor, layer: Uploaded, constants: Constants, bilinear: bool) -> Tensor:
    """Every pixel from its place, the nearest pixel there or a bilinear mean; `fill` where that is outside."""
    width = images.shape[3]
    source = (layer.across + layer.down).add_(layer.shift)
    nearest = (source + 0.5).floor_()
    inner = torch.minimum(nearest, constants.last).clamp_(min=0)
    column_inside, row_inside = (inner == nearest).split(1, dim=1)
    if bilinear:
        grid = ((2 * source + 1) / constants.sides - 1).float().permute(0, 2, 3, 1)
        out = grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
        out = out.add_(1e-3).byte()  # truncated as in Pillow, except for integers up to rounding
    else:
        column, row = inner.unbind(1)
        index = column.add_(row, alpha=width).long().flatten(1)[:, None].expand(-1, 3, -1)
        out = images.flatten(2).gather(2, index).view_as(images)
    return torch.where(column_inside & row_inside, out, constants.fill)


def _mapped(images: Tensor, tables: Tensor, stretched: int, constants: Constants) -> Tensor:
    """Every level through a table: first images with tables from the CPU, then those of autocontrast and equalize."""
    pixels = images.flatten(2)
    index = pixels.long()
    every = [tables.expand(-1, 3, -1)]
    if len(fitted := pixels[len(tables) :]):
        lowest, highest = fitted.aminmax(dim=2, keepdim=True)
        if stretched:
            every.append(autocontrast(lowest[:stretched], highest[:stretched], constants))
        if stretched < len(fitted):
            every.append(equalize(index[len(tables) + stretched :], highest[stretched:], constants))
    table = torch.cat(every).clamp_(0, 255).byte()
    return table.gather(2, index).view_as(images)


def autocontrast(lowest: Tensor, highest: Tensor, constants: Constants) -> Tensor:
    """Tables (n, C, 256) that stretch each channel to 0..255, in float64, beyond 0..255 for levels that it has not."""
    factor, offset = constants.stretch[(highest - lowest).long()].unbind(-1)
    return constants.levels * factor - lowest * offset


def equalize(pixels: Tensor, highest: Tensor, constants: Constants) -> Tensor:
    """Tables that make each channel's levels about equally frequent: integer ones as in ImageOps.equalize.

    pixels (n, C, H·W) int64. The step is the 255th part of the pixels below the highest level, s; level v becomes
    (below(v) + s // 2) // s, which is the floor of below(v) / s + ½.
    """
    counts = pixels.new_zeros(*pixels.shape[:2], 256).scatter_add_(2, pixels, constants.one.expand_as(pixels))
    below = counts.cumsum(2) - counts
    step = below.gather(2, highest.long()).floor_divide_(255)
    return torch.where(step > 0, (below.double() / step).add_(0.5), constants.levels)


def _blended(images: Tensor, factor: Tensor, counts: Sequence[int], constants: Constants) -> Tensor:
    """other + factor · (image - other), clipped to 0..255 and rounded down.

    The other is for color an image's grey, for contrast the mean of that everywhere, and for sharpness the image
    smoothed by (1 1 1; 1 5 1; 1 1 1)/13 except at the border.
    """
    color, contrast, _ = counts
    pixels = images.float()
    other = pixels.clone()
    if color + contrast:
        grey = (pixels[: color + contrast] * constants.grey).sum(1, keepdim=True).add_(0.5).floor_()
        other[:color].copy_(grey[:color])
        mean = grey[color:].mean((1, 2, 3), keepdim=True, dtype=torch.float64)
        other[color : color + contrast].copy_(mean.add_(0.5).floor_())
    if len(sharp := pixels[color + contrast :]):
        rows = sharp[:, :, :-2] + sharp[:, :, 1:-1] + sharp[:, :, 2:]
        around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
        around = around.add_(sharp[:, :, 1:-1, 1:-1], alpha=4).add_(6.5)
        torch.div(around, 13, rounding_mode="floor", out=other[color + contrast :, :, 1:-1, 1:-1])
    return pixels.sub_(other).mul_(factor).add_(other).clamp_(0, 255).byte()


Argument = Callable[[np.ndarray, int], np.ndarray]
"""The arguments of an operation from magnitudes (of 1, or beyond) and the side of images."""


class Choice(NamedTuple):
    """An operation and its argument; signed: ± at random; around_one: 1 ± it, at least 0.1."""

    operation: str
    argument: Argument
    signed: bool = False
    around_one: bool = False

    def values(self, level: np.ndarray, side: int, negative: np.ndarray) -> np.ndarray:
        value = np.broadcast_to(self.argument(level, side), level.shape)
        value = np.where(negative, -value, value) if self.signed else value
        return np.maximum(1 + value, 0.1) if self.around_one else value


@dataclass(frozen=True)
class Policy:
    """`layers` times one of `choices`, with `probability`, at a magnitude normal around `magnitude` (of 10)."""

    choices: tuple[Choice, ...]
    layers: int
    magnitude: float
    spread: float = 0.0
    probability: float = 1.0
    limit: float = math.inf
    fill: tuple[int, int, int] = (128, 128, 128)
    bilinear: bool = False

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """(B, 3, H, W) uint8 to the same; a function of (seed, step, row) for each image."""
        layers = [self.drawn(draws, layer, images.shape[-1]) for layer in range(self.layers)]
        return apply_layers(images, layers, self.fill, self.bilinear)

    def drawn(self, draws: Draws, layer: int, side: int) -> Layer:
        """The layer of that number for images of `side` pixels."""
        chosen = draws.below(len(self.choices), f"randaugment {layer}", 1)[0].numpy()
        skipped, sign, down, across = draws.uniform(f"randaugment {layer} numbers", 4).numpy()
        normal = draws.normal(f"randaugment {layer} magnitude", 1)[0].double().numpy()
        level = np.clip(self.magnitude + self.spread * normal, 0, self.limit) / HIGHEST
        kind, value = np.full(len(level), KINDS.index("none")), np.zeros_like(level)
        for number, choice in enumerate(self.choices):
            own = (chosen == number) & (skipped < self.probability)
            kind[own] = KINDS.index(choice.operation)
            value[own] = choice.values(level[own], side, sign[own] < 0.5)
        return Layer(kind, value, np.stack([down, across]))


def _nothing(level: np.ndarray, side: int) -> np.ndarray:
    return np.zeros_like(level)


def _share(most: float) -> Argument:
    return lambda level, side: level * most


def _whole(most: float) -> Argument:
    return lambda level, side: np.floor(level * most)


def _pixels(most: float) -> Argument:
    return lambda level, side: np.round(level * most * side / SIDE)


def _enhanced(level: np.ndarray, side: int) -> np.ndarray:
    return 1.8 * level + 0.1


BIG_VISION = (
    Choice("autocontrast", _nothing),
    Choice("equalize", _nothing),
    Choice("invert", _nothing),
    Choice("rotate", _share(30), signed=True),
    Choice("posterize", lambda level, side: np.minimum(np.floor(4 * level), 8)),
    Choice("solarize", _whole(256)),
    Choice("color", _enhanced),
    Choice("contrast", _enhanced),
    Choice("brightness", _enhanced),
    Choice("sharpness", _enhanced),
    Choice("shear_x", _share(0.3), signed=True),
    Choice("shear_y", _share(0.3), signed=True),
    Choice("translate_x", _pixels(100), signed=True),
    Choice("translate_y", _pixels(100), signed=True),
    Choice("cutout", lambda level, side: np.floor(40 * level * side / SIDE)),
    Choice("solarize_add", _whole(110)),
)
ENHANCED = ("color", "contrast", "brightness", "sharpness")
TIMM_INCREASING = (
    Choice("autocontrast", _nothing),
    Choice("equalize", _nothing),
    Choice("invert", _nothing),
    Choice("rotate", _share(30), signed=True),
    Choice("shear_x", _share(0.3), signed=True),
    Choice("shear_y", _share(0.3), signed=True),
    Choice("solarize_add", _whole(110)),
    Choice("posterize_to_black", lambda level, side: 4 - np.floor(4 * level)),
    Choice("solarize", lambda level, side: 256 - np.floor(256 * level)),
    Choice("translate_x", lambda level, side: 0.45 * level * side, signed=True),
    Choice("translate_y", lambda level, side: 0.45 * level * side, signed=True),
    *(Choice(name, _share(0.9), signed=True, around_one=True) for name in ENHANCED),
)


def big_vision(layers: int, magnitude: float) -> Policy:
    """`randaug(layers,magnitude)` of big_vision."""
    return Policy(BIG_VISION, layers, magnitude)


def timm_increasing(layers: int, magnitude: float, spread: float) -> Policy:
    """`rand-m{magnitude}-n{layers}-mstd{spread}-inc1` of timm."""
    return Policy(
        TIMM_INCREASING, layers, magnitude, spread, probability=0.5, limit=HIGHEST, fill=(124, 116, 104), bilinear=True
    )


def named(text: str) -> Policy:
    """A policy as its authors write it: "2,15" or "rand-m9-mstd0.5-inc1". Errors: ValueError."""
    if match := re.fullmatch(r"(\d+),(\d+)", text):
        return big_vision(int(match[1]), float(match[2]))
    if match := re.fullmatch(r"rand-m(\d+)(?:-n(\d+))?-mstd(\d*\.?\d+)-inc1", text):
        return timm_increasing(int(match[2] or 2), float(match[1]), float(match[3]))
    raise ValueError(f"randaug: expected layers,magnitude such as 2,15, or rand-m9-mstd0.5-inc1, got {text!r}")


AUGREG: Mapping[str, tuple[str, float]] = {
    "none": ("", 0.0),
    "light1": ("2,0", 0.0),
    "light2": ("2,10", 0.2),
    "medium1": ("2,15", 0.2),
    "medium2": ("2,15", 0.5),
    "strong1": ("2,20", 0.5),
    "strong2": ("2,20", 0.8),
}
"""RandAugment and mixup of the levels of Steiner et al. 2022 (Figure 4; configs/vit_i21k.py of big_vision)."""
