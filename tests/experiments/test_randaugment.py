"""Every operation of RandAugment beside Pillow, the arguments of its levels, and that a row's draws are its own."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from attnkit_experiments.data.images import randaugment
from attnkit_experiments.data.images.augment import Draws
from attnkit_experiments.data.images.randaugment import (
    AUGREG,
    BIG_VISION,
    KINDS,
    TIMM_INCREASING,
    Choice,
    Layer,
    apply_layers,
    big_vision,
    named,
)
from attnkit_experiments.images.settings import ImageSettings, augmentation
from attnkit_experiments.images.task import AugmentConfig
from tests.library.arrays import assert_close

HEIGHT, WIDTH = 37, 53
FILL = (128, 127, 126)
CENTRE = np.array([[0.5], [0.25]])


def pictures() -> list[Image.Image]:
    """Noise, a dim slope of few levels, one level only, and black with a single bright pixel."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    slope = np.linspace(40, 90, WIDTH)[None, :, None] + np.arange(3) * 20 + np.arange(HEIGHT)[:, None, None] / 3
    dot = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    dot[5, 7] = 200, 10, 0
    return [Image.fromarray(x) for x in (noise, slope.astype(np.uint8), np.full_like(noise, 77), dot)]


def tensor(images: list[Image.Image]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


def apply(name: str, value: float, *, bilinear: bool = False) -> torch.Tensor:
    """An operation on the four pictures at once."""
    return apply_layers(tensor(pictures()), [layer_of([name] * 4, [value] * 4)], FILL, bilinear)


def layer_of(names: list[str], values: list[float]) -> Layer:
    kinds = np.array([KINDS.index(name) for name in names])
    return Layer(kinds, np.array(values, dtype=np.float64), CENTRE.repeat(len(names), axis=1))


def moved(image: Image.Image, matrix: tuple[float, ...], resample=Image.Resampling.NEAREST) -> Image.Image:
    """The pixel with centre (x, y) from a x + b y + c, d x + e y + f; Pillow counts from corners."""
    a, b, c, d, e, f = matrix
    from_corners = (a, b, c + (1 - a - b) / 2, d, e, f + (1 - d - e) / 2)
    return image.transform(image.size, Image.Transform.AFFINE, from_corners, resample, fillcolor=FILL)


def cut(image: Image.Image, half: float) -> Image.Image:
    image = image.copy()
    row, column = HEIGHT // 2, WIDTH // 4
    image.paste(FILL, (max(column - int(half), 0), max(row - int(half), 0), column + int(half), row + int(half)))
    return image


def solarized_add(image: Image.Image, value: float) -> Image.Image:
    return image.point([min(level + int(value), 255) if level < 128 else level for level in range(256)] * 3)


# operation, what Pillow says, arguments
EXPECTED = {
    "autocontrast": (lambda image, _: ImageOps.autocontrast(image), (0,)),
    "equalize": (lambda image, _: ImageOps.equalize(image), (0,)),
    "invert": (lambda image, _: ImageOps.invert(image), (0,)),
    "rotate": (lambda image, value: image.rotate(value, fillcolor=FILL), (30, -30, 13.7, 0)),
    "posterize": (lambda image, value: ImageOps.posterize(image, int(value)), (1, 4, 6, 8)),
    "solarize": (lambda image, value: ImageOps.solarize(image, int(value)), (0, 100, 256, 384)),
    "color": (lambda image, value: ImageEnhance.Color(image).enhance(value), (0.1, 1, 1.9, 2.8)),
    "contrast": (lambda image, value: ImageEnhance.Contrast(image).enhance(value), (0.1, 1, 1.9, 2.8)),
    "brightness": (lambda image, value: ImageEnhance.Brightness(image).enhance(value), (0.1, 1, 1.9, 2.8)),
    "sharpness": (lambda image, value: ImageEnhance.Sharpness(image).enhance(value), (0.1, 1, 1.9, 2.8)),
    "shear_x": (lambda image, value: moved(image, (1, value, 0, 0, 1, 0)), (0.3, -0.45)),
    "shear_y": (lambda image, value: moved(image, (1, 0, 0, value, 1, 0)), (0.3, -0.45)),
    "translate_x": (lambda image, value: moved(image, (1, 0, value, 0, 1, 0)), (11, -7, 100)),
    "translate_y": (lambda image, value: moved(image, (1, 0, 0, 0, 1, value)), (11, -7, 100)),
    "cutout": (cut, (0, 6, 40)),
    "solarize_add": (solarized_add, (0, 60, 165)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_operation_is_pillows(name):
    expected, values = EXPECTED[name]
    for value in values:
        found = apply(name, value)
        assert found.dtype == torch.uint8
        wanted = tensor([expected(image, value) for image in pictures()])
        differing = int((found != wanted).sum())
        # a place that is half-way between two pixels may be taken from either
        assert differing <= (3 if name == "rotate" else 0), (value, differing)


@pytest.mark.parametrize("name", ["rotate", "translate_x", "translate_y"])
def test_bilinear_places_are_pillows(name):
    resample = Image.Resampling.BILINEAR
    expected = {
        "rotate": lambda image, value: image.rotate(value, resample, fillcolor=FILL),
        "translate_x": lambda image, value: moved(image, (1, 0, value, 0, 1, 0), resample),
        "translate_y": lambda image, value: moved(image, (1, 0, 0, 0, 1, value), resample),
    }[name]
    for value in (7.3713, -11.8517):
        found = apply(name, value, bilinear=True)
        gap = (found.int() - tensor([expected(image, value) for image in pictures()]).int()).abs()
        assert gap.max() <= 1
        assert gap.float().mean() < 2e-3, "a place in float32 may be a hair aside"


def test_posterizing_to_no_bits():
    assert (apply("posterize", 0) == tensor(pictures()) // 128 * 128).all(), "big_vision keeps one bit"
    assert not apply("posterize_to_black", 0).any()


def arguments(choices: tuple[Choice, ...], level: float, side: int) -> dict[str, float]:
    share = np.array([level / 10])
    return {choice.operation: float(choice.argument(share, side)[0]) for choice in choices}


def assert_same_arguments(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name], float(value))


def test_the_arguments_of_big_visions_levels():
    assert_same_arguments(
        arguments(BIG_VISION, 10, 224),
        dict.fromkeys(randaugment.ENHANCED, 1.9)
        | {"autocontrast": 0, "equalize": 0, "invert": 0, "rotate": 30, "posterize": 4, "solarize": 256}
        | {"shear_x": 0.3, "shear_y": 0.3, "translate_x": 100, "translate_y": 100, "cutout": 40, "solarize_add": 110},
    )
    at_15 = arguments(BIG_VISION, 15, 224)
    assert (at_15["posterize"], at_15["rotate"], at_15["cutout"], at_15["solarize_add"]) == (6, 45, 60, 165)
    assert arguments(BIG_VISION, 10, 56)["translate_x"] == 25, "lengths are shares of 224"
    signed = {choice.operation for choice in BIG_VISION if choice.signed}
    assert {choice.operation for choice in BIG_VISION} == {*EXPECTED}
    assert signed == {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


def test_the_arguments_of_timms_levels():
    assert_same_arguments(
        arguments(TIMM_INCREASING, 9, 200),
        dict.fromkeys(randaugment.ENHANCED, 0.81)
        | {"autocontrast": 0, "equalize": 0, "invert": 0, "rotate": 27, "posterize_to_black": 1, "solarize": 26}
        | {"shear_x": 0.27, "shear_y": 0.27, "translate_x": 81, "translate_y": 81, "solarize_add": 99},
    )
    enhance = next(choice for choice in TIMM_INCREASING if choice.operation == "brightness")
    values = enhance.values(np.array([0.5, 1.0, 1.0]) / 0.9, 200, np.array([True, True, False]))
    assert_close(values, np.array([0.5, 0.1, 2.0]))  # at least a tenth


def test_images_with_different_operations_are_as_each_alone():
    """Two layers of all operations, in another order in each."""
    rng = np.random.default_rng(0)
    names = [name for name in KINDS for _ in range(2)]
    values = [0 if name == "none" else EXPECTED.get(name, (None, (2,)))[1][-1] for name in names]
    order = rng.permutation(len(names))
    images = tensor(pictures()[:2]).repeat(len(names) // 2, 1, 1, 1)
    layers = [layer_of(names, values), layer_of([names[n] for n in order], [values[n] for n in order])]
    found = apply_layers(images, layers, FILL, False)
    for n, image in enumerate(images):
        alone = [Layer(each.kind[n : n + 1], each.value[n : n + 1], each.place[:, n : n + 1]) for each in layers]
        for layer in alone:
            image = apply_layers(image.reshape(1, 3, HEIGHT, WIDTH), [layer], FILL, False)
        assert torch.equal(found[n], image[0]), (names[n], names[order[n]])
    assert torch.equal(apply_layers(images, [], FILL, False), images)


def test_a_policy_draws_what_it_always_drew():
    """The pixels of big_vision's policy that studies were trained with before operations were grouped."""
    digest = hashlib.sha256()
    for step in range(3):
        noise = np.random.default_rng(step).integers(0, 256, (BATCH, 3, 24, 24), dtype=np.uint8)
        digest.update(named("2,14")(torch.from_numpy(noise), Draws(1, step, 2 * BATCH, np.arange(BATCH) + 3)).numpy())
    assert digest.hexdigest() == "58642b0d742031816e6b93694ad5389d65421cbe5af3b3e2f121b932d0fa7807"


BATCH = 60


def augmented(policy, *, seed: int = 0, step: int = 0, rows: slice = slice(None)) -> torch.Tensor:
    chosen = np.arange(BATCH)[rows]
    images = tensor(pictures()[:1]).expand(BATCH, -1, -1, -1)[rows]
    return policy(images, Draws(seed, step, BATCH, chosen))


@pytest.mark.parametrize("text", ["2,15", "rand-m9-mstd0.5-inc1"])
def test_a_policy_is_a_function_of_seed_step_and_row(text):
    policy = named(text)
    first = augmented(policy, seed=1, step=5)
    torch.manual_seed(3)
    assert torch.equal(augmented(policy, seed=1, step=5), first)
    assert torch.equal(augmented(policy, seed=1, step=5, rows=slice(7, 12)), first[7:12])
    for other in (augmented(policy, seed=2, step=5), augmented(policy, seed=1, step=6)):
        assert (other != first).flatten(1).any(1).sum() > BATCH // 2
    assert len({image.numpy().tobytes() for image in first}) > BATCH // 3


def test_a_layer_chooses_all_alike_and_signs_at_random():
    policy = big_vision(1, 10)
    layers = [policy.drawn(Draws(0, step, BATCH, np.arange(BATCH)), 0, WIDTH) for step in range(50)]
    kind, value = (np.concatenate([getattr(layer, name) for layer in layers]) for name in ("kind", "value"))
    shares = np.bincount(kind, minlength=len(KINDS)) / len(kind)
    for name, share in zip(KINDS, shares, strict=True):
        wanted = 1 / 16 if name in EXPECTED else 0
        assert abs(share - wanted) < 5 * math.sqrt(wanted / len(kind)) or share == wanted, name
    assert set(value[kind == KINDS.index("rotate")]) == {-30.0, 30.0}
    assert set(value[kind == KINDS.index("cutout")]) == {9.0}


def test_what_is_skipped_is_left_alone():
    policy = dataclasses.replace(named("rand-m9-n1-mstd0.5-inc1"), probability=0.0)
    assert torch.equal(augmented(policy), tensor(pictures()[:1]).expand(BATCH, -1, -1, -1))


def test_timms_magnitudes_are_normal_cut_and_applied_half_of_the_time():
    policy = dataclasses.replace(
        named("rand-m9-n1-mstd0.5-inc1"), choices=(Choice("invert", lambda level, side: level),)
    )
    layers = [policy.drawn(Draws(0, step, BATCH, np.arange(BATCH)), 0, WIDTH) for step in range(50)]
    levels = np.concatenate([layer.value[layer.kind == KINDS.index("invert")] for layer in layers]) * 10
    assert abs(len(levels) / (50 * BATCH) - 0.5) < 0.05
    assert abs(np.median(levels) - 9) < 0.06
    assert levels.max() == 10
    assert abs(np.quantile(levels, 0.1587) - 8.5) < 0.08, "one standard deviation below"


def test_policies_are_named_as_their_authors_name_them():
    assert named("2,15") == big_vision(2, 15.0)
    timm = named("rand-m7-n3-mstd1-inc1")
    assert (timm.layers, timm.magnitude, timm.spread, timm.fill) == (3, 7, 1, (124, 116, 104))
    assert named("rand-m9-mstd0.5-inc1").layers == 2
    with pytest.raises(
        ValueError, match=r"expected layers,magnitude such as 2,15, or rand-m9-mstd0.5-inc1, got '2;15'"
    ):
        named("2;15")
    with pytest.raises(ValueError, match="got 'rand-m9'"):
        AugmentConfig(randaug="rand-m9")
    assert all(named(text) for text, _ in AUGREG.values() if text)


@pytest.mark.parametrize(("level", "policy"), AUGREG.items())
def test_a_level_decides_the_policy_and_mixup(level, policy):
    chosen = augmentation(ImageSettings(augreg=level, randaug="2,1", mixup=0.3))
    assert (chosen.randaug, chosen.mixup) == policy
    own = augmentation(ImageSettings(randaug="2,1", mixup=0.3))
    assert (own.randaug, own.mixup) == ("2,1", 0.3)
