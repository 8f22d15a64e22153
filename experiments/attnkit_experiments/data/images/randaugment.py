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

An operation takes images (B, 3, H, W) uint8 and one argument per image, and returns the same as Pillow (ImageOps,
ImageEnhance, Image.transform), except that shears fix pixel (0, 0), as in big_vision. Where big_vision's own
arithmetic differs from Pillow's, it is by one grey level: it truncates where Pillow rounds in sharpness and in the mean
of contrast, and its weights of grey have four digits. Older versions of it take the mean of contrast from a wrong sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from attnkit_experiments.data.images.augment import Draws

HIGHEST = 10.0
SIDE = 224  # image size for which big_vision's lengths in pixels are defined


class Argument(NamedTuple):
    """The arguments of an operation: a number and a random position per image, and the fill colour."""

    value: Tensor  # (B,) float64
    place: Tensor  # (2, B) in 0..1
    fill: tuple[int, int, int]
    bilinear: bool


Operation = Callable[[Tensor, Argument], Tensor]


class Choice(NamedTuple):
    """An operation and its argument at a magnitude (of 1, or beyond) and a side; signed: ± at random."""

    apply: Operation
    argument: Callable[[Tensor, int], Tensor]
    signed: bool = False


@dataclass(frozen=True)
class Policy:
    """`layers` times one of `choices`, with `probability`, at a magnitude normal around `magnitude` (of 10)."""

    choices: Mapping[str, Choice]
    layers: int
    magnitude: float
    spread: float = 0.0
    probability: float = 1.0
    limit: float = math.inf
    fill: tuple[int, int, int] = (128, 128, 128)
    bilinear: bool = False

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """(B, 3, H, W) uint8 to the same; a function of (seed, step, row) for each image."""
        names = list(self.choices)
        for layer in range(self.layers):
            operation = draws.below(len(names), f"randaugment {layer}", 1)[0]
            skipped, sign, down, across = draws.uniform(f"randaugment {layer} numbers", 4)
            level = self.magnitude + self.spread * draws.normal(f"randaugment {layer} magnitude", 1)[0].double()
            level = level.clamp(0, self.limit) / HIGHEST
            operation[skipped >= self.probability] = -1
            images = images.clone()
            for number, choice in enumerate(self.choices.values()):
                own = (operation == number).nonzero().flatten()
                if not len(own):
                    continue
                value = choice.argument(level[own], images.shape[-1]).broadcast_to(own.shape)
                value = torch.where(sign[own] < 0.5, -value, value) if choice.signed else value
                argument = Argument(value, torch.stack([down, across])[:, own], self.fill, self.bilinear)
                there = own.to(images.device)
                images[there] = choice.apply(images[there], argument)
        return images


def _column(values: Tensor, images: Tensor) -> Tensor:
    """(B,) to (B, 1, 1, 1) on the device of the images."""
    return values.to(images.device)[:, None, None, None]


def _looked_up(images: Tensor, table: Tensor) -> Tensor:
    """Every pixel through its channel's table (B, C, 256) uint8."""
    return table.gather(2, images.flatten(2).long()).view_as(images)


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, device=images.device)


def _blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """other + factor · (images - other), clipped to 0..255 and rounded down."""
    start = other.float()
    mixed = start + _column(factor, images).float() * (images.float() - start)
    return mixed.clamp(0, 255).byte()


def _grey(images: Tensor) -> Tensor:
    """ITU-R 601 luma (B, 1, H, W) in Pillow's fixed point: (19595 R + 38470 G + 7471 B + 2¹⁵) / 2¹⁶."""
    red, green, blue = images.int().unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000).bitwise_right_shift(16).byte()[:, None]


def _histogram(images: Tensor) -> Tensor:
    """Counts (B, C, 256) int64."""
    count, channels = images.shape[:2]
    first = 256 * torch.arange(count * channels, device=images.device)
    flat = first[:, None] + images.reshape(count * channels, -1)
    return torch.bincount(flat.flatten(), minlength=256 * count * channels).view(count, channels, 256)


def autocontrast(images: Tensor, _: Argument) -> Tensor:
    """Each channel stretched to 0..255."""
    lowest, highest = images.flatten(2).aminmax(dim=2, keepdim=True)
    lowest, span = lowest.double(), highest.double() - lowest.double()
    scale = torch.full_like(span, 255) / span.clamp(min=1)  # 255 / tensor would multiply by a rounded reciprocal
    table = (_levels(images) * scale - lowest * scale).clamp(0, 255).byte()
    return torch.where((span > 0)[..., None], _looked_up(images, table), images)


def equalize(images: Tensor, _: Argument) -> Tensor:
    """Each channel with about equally frequent levels: integer tables as in ImageOps.equalize."""
    counts = _histogram(images)
    last = counts.gather(2, 255 - (counts.flip(2) > 0).int().argmax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - last) // 255
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255).byte()
    return torch.where((step > 0)[..., None], _looked_up(images, table), images)


def invert(images: Tensor, _: Argument) -> Tensor:
    """255 - x."""
    return 255 - images


def rotate(images: Tensor, argument: Argument) -> Tensor:
    """By `value` degrees, counter-clockwise, about the centre."""
    radians = torch.deg2rad(argument.value)
    cos, sin, none = torch.cos(radians), torch.sin(radians), torch.zeros_like(radians)
    height, width = images.shape[2:]
    across, down = (width - 1) / 2, (height - 1) / 2
    matrix = [cos, -sin, across - cos * across + sin * down, sin, cos, down - sin * across - cos * down]
    return _transformed(images, torch.stack([m + none for m in matrix]), argument)


def shear_x(images: Tensor, argument: Argument) -> Tensor:
    """Row y moves by value · y."""
    return _affine(images, argument, shear_x=argument.value)


def shear_y(images: Tensor, argument: Argument) -> Tensor:
    """Column x moves by value · x."""
    return _affine(images, argument, shear_y=argument.value)


def translate_x(images: Tensor, argument: Argument) -> Tensor:
    """By `value` pixels to the left."""
    return _affine(images, argument, move_x=argument.value)


def translate_y(images: Tensor, argument: Argument) -> Tensor:
    """By `value` pixels upwards."""
    return _affine(images, argument, move_y=argument.value)


def _affine(images: Tensor, argument: Argument, **changes: Tensor) -> Tensor:
    none = torch.zeros_like(argument.value)
    parts = {"one": none + 1, "shear_x": none, "move_x": none, "shear_y": none, "also_one": none + 1, "move_y": none}
    return _transformed(images, torch.stack(list((parts | changes).values())), argument)


def _transformed(images: Tensor, matrix: Tensor, argument: Argument) -> Tensor:
    """Pixel (x, y) from (a x + b y + c, d x + e y + f) with (6, B) `matrix`; `fill` where that is outside."""
    height, width = images.shape[2:]
    a, b, c, d, e, f = matrix.to(images.device)[:, :, None, None]
    x = torch.arange(width, device=images.device, dtype=torch.float64)[None, None, :]
    y = torch.arange(height, device=images.device, dtype=torch.float64)[None, :, None]
    source_x, source_y = a * x + b * y + c, d * x + e * y + f
    column, row = (source_x + 0.5).floor().long(), (source_y + 0.5).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    if argument.bilinear:
        grid = torch.stack([(2 * source_x + 1) / width - 1, (2 * source_y + 1) / height - 1], dim=-1).float()
        out = grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
        out = out.add_(1e-3).byte()  # truncated as in Pillow, except for integers up to rounding
    else:
        nearest = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        out = images.flatten(2).gather(2, nearest.flatten(1)[:, None].expand(-1, 3, -1)).view_as(images)
    fill = torch.tensor(argument.fill, dtype=torch.uint8, device=images.device)[None, :, None, None]
    return torch.where(inside[:, None], out, fill)


def posterize(images: Tensor, argument: Argument) -> Tensor:
    """Keep the `value` highest bits of 8, at least one (TensorFlow shifts by at most 7)."""
    shift = (8 - _column(argument.value, images).to(torch.uint8)).clamp(max=7)
    return images.bitwise_right_shift(shift).bitwise_left_shift(shift)


def posterize_to_black(images: Tensor, argument: Argument) -> Tensor:
    """Keep the `value` highest bits of 8; 0 bits give black, as in Pillow."""
    return torch.where(_column(argument.value, images) > 0, posterize(images, argument), 0).byte()


def solarize(images: Tensor, argument: Argument) -> Tensor:
    """Invert levels from `value` on."""
    return torch.where(images < _column(argument.value, images), images, 255 - images)


def solarize_add(images: Tensor, argument: Argument) -> Tensor:
    """Add `value` to levels below 128."""
    brighter = (images.int() + _column(argument.value, images).int()).clamp(0, 255).byte()
    return torch.where(images < 128, brighter, images)


def color(images: Tensor, argument: Argument) -> Tensor:
    """0: grey, 1: unchanged."""
    return _blend(_grey(images).expand_as(images), images, argument.value)


def contrast(images: Tensor, argument: Argument) -> Tensor:
    """0: the mean grey level everywhere, 1: unchanged."""
    mean = (_grey(images).double().mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean.expand_as(images), images, argument.value)


def brightness(images: Tensor, argument: Argument) -> Tensor:
    """0: black, 1: unchanged."""
    return _blend(torch.zeros_like(images), images, argument.value)


def sharpness(images: Tensor, argument: Argument) -> Tensor:
    """0: smoothed by (1 1 1; 1 5 1; 1 1 1)/13 except at the border, 1: unchanged."""
    rows, columns = images.shape[2:]
    pixels = images.int()
    around = sum(pixels[:, :, i : rows - 2 + i, j : columns - 2 + j] for i in range(3) for j in range(3))
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = ((2 * (around + 4 * pixels[:, :, 1:-1, 1:-1]) + 13) // 26).byte()
    return _blend(smooth, images, argument.value)


def cutout(images: Tensor, argument: Argument) -> Tensor:
    """A square of 2 · `value` pixels becomes `fill`; its centre is any pixel (DeVries & Taylor 2017)."""
    height, width = images.shape[2:]
    half = argument.value.to(images.device).long()
    down, across = argument.place.to(images.device)
    rows = torch.arange(height, device=images.device) - (down * height).long()[:, None]
    columns = torch.arange(width, device=images.device) - (across * width).long()[:, None]
    hidden = [(place >= -half[:, None]) & (place < half[:, None]) for place in (rows, columns)]
    fill = torch.tensor(argument.fill, dtype=torch.uint8, device=images.device)[None, :, None, None]
    return torch.where(hidden[0][:, None, :, None] & hidden[1][:, None, None, :], fill, images)


def _nothing(level: Tensor, side: int) -> Tensor:
    return torch.zeros_like(level)


def _share(most: float) -> Callable[[Tensor, int], Tensor]:
    return lambda level, side: level * most


def _whole(most: float) -> Callable[[Tensor, int], Tensor]:
    return lambda level, side: (level * most).floor()


def _pixels(most: float) -> Callable[[Tensor, int], Tensor]:
    return lambda level, side: (level * most * side / SIDE).round()


def _enhanced(level: Tensor, side: int) -> Tensor:
    return 1.8 * level + 0.1


BIG_VISION: Mapping[str, Choice] = {
    "autocontrast": Choice(autocontrast, _nothing),
    "equalize": Choice(equalize, _nothing),
    "invert": Choice(invert, _nothing),
    "rotate": Choice(rotate, _share(30), signed=True),
    "posterize": Choice(posterize, lambda level, side: (4 * level).floor().clamp(max=8)),
    "solarize": Choice(solarize, _whole(256)),
    "color": Choice(color, _enhanced),
    "contrast": Choice(contrast, _enhanced),
    "brightness": Choice(brightness, _enhanced),
    "sharpness": Choice(sharpness, _enhanced),
    "shear_x": Choice(shear_x, _share(0.3), signed=True),
    "shear_y": Choice(shear_y, _share(0.3), signed=True),
    "translate_x": Choice(translate_x, _pixels(100), signed=True),
    "translate_y": Choice(translate_y, _pixels(100), signed=True),
    "cutout": Choice(cutout, lambda level, side: (40 * level * side / SIDE).floor()),
    "solarize_add": Choice(solarize_add, _whole(110)),
}


def _of_timm() -> Mapping[str, Choice]:
    names = ("autocontrast", "equalize", "invert", "rotate", "shear_x", "shear_y", "solarize_add")
    return {
        **{name: BIG_VISION[name] for name in names},
        "posterize": Choice(posterize_to_black, lambda level, side: 4 - (4 * level).floor()),
        "solarize": Choice(solarize, lambda level, side: 256 - (256 * level).floor()),
        "translate_x": Choice(translate_x, lambda level, side: 0.45 * level * side, signed=True),
        "translate_y": Choice(translate_y, lambda level, side: 0.45 * level * side, signed=True),
        **{name: Choice(_around_one(BIG_VISION[name].apply), _share(0.9), signed=True) for name in ENHANCED},
    }


def _around_one(enhance: Operation) -> Operation:
    """`enhance` by 1 + value, at least 0.1."""
    return lambda images, argument: enhance(images, argument._replace(value=(1 + argument.value).clamp(min=0.1)))


ENHANCED = ("color", "contrast", "brightness", "sharpness")
TIMM_INCREASING = _of_timm()


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
