"""The optional arrays of attention scenes: one maker per option."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np

from attnkit_conformance.model.scene import Scene

Array = np.ndarray
Maker = Callable[[Scene, np.random.Generator], Array]

DENSITIES = (0.1, 0.5, 0.9)  # of random masks
DENSE = 0.75  # of masks in rows of a grammar, where other options hide pairs too
KEEP = 0.75  # keep probability of dropout
LEARNED = ("array", "heads")  # levels of a number (A15): an array of one, and one of a number for each head
NUMBERS: Mapping[str, tuple[float, ...]] = {
    "scale": (0.7, 0.0, -0.3, 0.2),
    "alpha": (0.6, 1.0, 0.0, 0.75),
    "gain": (1.3, 0.0, -0.7, 0.4),
    "shift": (0.3, -0.2, 0.1, 0.0),
    "gamma": (0.6, 1.5, 1.0, 0.8),
    "slope": (0.3, 0.0, -0.2, 0.1),
    "intercept": (0.4, 1.0, -0.3, 0.0),
    "sink": (0.6, -1.5, 4.0, -0.3),
}
DECAYS = ("log_decay", "log_decay_t")
"""Numbers that are at most 0: of heads or tokens of k, and of one token."""
INTEGERS = ("uint64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")  # dtypes of lengths
FAR = (None, 2**31 - 1, 2**63 - 1, 2**70)  # bounds of windows that exclude nothing
EXACT_SCALES = (0.5, -0.25, 0.25, 1.0)  # of exact scores


def pairs(scene: Scene) -> tuple[int, ...]:
    return (*scene.leading, scene.L, scene.S)


def items(scene: Scene, *last: int) -> tuple[int, ...]:
    """The batch axes, one for heads if there are heads, and further ones."""
    return (*scene.leading[:-1], *(1 for _ in scene.leading[-1:]), *last)


def arbitrary_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A random mask with a few null rows and one unseen key."""
    mask = rng.random(shape) < 0.6
    mask[..., ::5, :] = False
    mask[..., shape[-1] // 2 : shape[-1] // 2 + 1] = False
    return mask


def dense_mask(scene: Scene, rng: np.random.Generator) -> Array:
    """A mask with a null row and an unseen key, if there are several."""
    mask = rng.random(pairs(scene)) < DENSE
    if scene.L > 3:
        mask[..., scene.L // 2, :] = False
    if scene.S > 3:
        mask[..., scene.S // 3] = False
    return mask


def lengths(scene: Scene, least: float, most: float) -> Array:
    """Valid keys per batch item, from `least` to `most`."""
    shape = items(scene)
    return np.linspace(least, most, int(np.prod(shape))).astype(np.int64).reshape(shape)


def of_some_dtype(name: str, keys: int, x: Array, whole: bool = False) -> Array:
    """Lengths in an integer dtype that a name draws and that holds them. If `whole`, those of all keys but one are the
    largest number of the dtype, beyond the integers that most libraries count with: all keys.
    """
    fitting = [dtype for dtype in INTEGERS if np.iinfo(dtype).max >= keys]
    dtype = fitting[draw_number(name, len(fitting))]
    own = x.astype(dtype)
    if whole:
        own[x == keys - 1] = np.iinfo(dtype).max
    return own


def draw_number(name: str, count: int) -> int:
    """A number below `count`, the same for the same name."""
    return zlib.crc32(name.encode()) % count


def some_lengths(scene: Scene, rng: np.random.Generator) -> Array:
    return of_some_dtype(scene.name, scene.S, lengths(scene, 0.6 * scene.S, max(0, scene.S - 1)))


def zero_to_huge(scene: Scene, rng: np.random.Generator) -> Array:
    return of_some_dtype(scene.name, scene.S, lengths(scene, 0, max(0, scene.S - 1)), whole=True)


def some_queries(scene: Scene, rng: np.random.Generator) -> Array:
    """Most queries, but where there are several items none of the last, no key of which is seen."""
    mask = rng.random(items(scene, scene.L)) < DENSE
    if mask.ndim > 1 and len(mask) > 1:
        mask[-1] = False
    return mask


def per_key(rng: np.random.Generator, scene: Scene) -> Array:
    return rng.standard_normal(items(scene, 1, scene.S))


def with_infinities(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A bias that hides some pairs and all of every seventh row."""
    bias = rng.standard_normal(shape)
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    bias[..., ::7, :] = -np.inf
    return bias


def draw_dropout(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return (rng.random(shape) < KEEP) / KEEP


def numbers_of(scene: Scene, name: str, level: str) -> Array:
    """A learned number, or one for each head."""
    exact = name == "scale" and bool({"integers", "grid"} & set(scene.options))
    values = np.asarray(EXACT_SCALES if exact else NUMBERS[name])
    return values[0].reshape(()) if level == "array" else np.resize(values, scene.leading[-1:])


MAKERS: Mapping[str, Mapping[str, Maker]] = {
    "key_lengths": {
        "key_lengths": lambda scene, rng: lengths(scene, 0.6 * scene.S, 0),
        "key_lengths_random": lambda scene, rng: rng.integers(0, scene.S + 1, items(scene)),
        "key_lengths=some": some_lengths,
        "key_lengths=zero": zero_to_huge,
    },
    "query_mask": {
        "query_mask": lambda scene, rng: rng.random(items(scene, scene.L)) < 0.7,
        "query_mask_random": lambda scene, rng: rng.random(items(scene, scene.L)) < rng.choice(DENSITIES),
        "query_mask=some": some_queries,
    },
    "mask": {
        "key_mask": lambda scene, rng: rng.random(items(scene, 1, scene.S)) < 0.6,
        "key_mask_1d": lambda scene, rng: rng.random(scene.S) < 0.6,
        "mask": lambda scene, rng: arbitrary_mask(rng, pairs(scene)),
        "mask_2d": lambda scene, rng: arbitrary_mask(rng, (scene.L, scene.S)),
        "mask_nothing": lambda scene, rng: np.zeros(pairs(scene), bool),
        "mask_random": lambda scene, rng: rng.random(pairs(scene)) < rng.choice(DENSITIES),
        "mask=pairs": dense_mask,
        "mask=2d": lambda scene, rng: rng.random((scene.L, scene.S)) < DENSE,
        "mask=heads": lambda scene, rng: rng.random((scene.leading[-1], 1, scene.S)) < DENSE,
        "mask=keys": lambda scene, rng: rng.random(items(scene, 1, scene.S)) < DENSE,
        "mask=1d": lambda scene, rng: rng.random(scene.S) < DENSE,
        "mask=queries": lambda scene, rng: rng.random((*scene.leading, scene.L, 1)) < DENSE,
    },
    "bias": {
        "bias_2d": lambda scene, rng: rng.standard_normal((scene.L, scene.S)),
        "bias": lambda scene, rng: rng.standard_normal((1, scene.leading[-1], scene.L, scene.S)),
        "bias_per_key": lambda scene, rng: per_key(rng, scene),
        "bias_inf": lambda scene, rng: with_infinities(rng, (1, scene.leading[-1], scene.L, scene.S)),
        "bias=pairs": lambda scene, rng: rng.standard_normal(pairs(scene)),
        "bias=heads": lambda scene, rng: rng.standard_normal((scene.leading[-1], scene.L, scene.S)),
        "bias=keys": lambda scene, rng: per_key(rng, scene),
        "bias=2d": lambda scene, rng: rng.standard_normal((scene.L, scene.S)),
        "bias=queries": lambda scene, rng: rng.standard_normal((*scene.leading, scene.L, 1)),
        "bias=infinite": lambda scene, rng: with_infinities(rng, pairs(scene)),
    },
    "dropout_mask": {
        "dropout_mask": lambda scene, rng: draw_dropout(rng, pairs(scene)),
        "dropout=mask": lambda scene, rng: draw_dropout(rng, pairs(scene)),
        "dropout=2d": lambda scene, rng: draw_dropout(rng, (scene.L, scene.S)),
    },
    "scale": {
        "scale=array": lambda scene, rng: numbers_of(scene, "scale", "array"),
        "scale=heads": lambda scene, rng: numbers_of(scene, "scale", "heads"),
    },
}  # fmt: skip


def option_arrays(scene: Scene, rng: np.random.Generator) -> dict[str, Array]:
    """The optional arrays of a scene."""
    arrays: dict[str, Array] = {}
    for name, makers in MAKERS.items():
        for option in (option for option in scene.options if option in makers):
            arrays[name] = makers[option](scene, rng)
    return arrays
