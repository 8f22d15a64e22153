"""Dropout of weights that every backend reproduces bit for bit: a counter-based generator without stored state."""

import numbers

import numpy as np
from numpy.typing import ArrayLike

from attnkit_reference._check import Array, as_float, broadcast, number, short

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], seed: int
) -> tuple[Array, Array, Array, Array]:
    """The four 32-bit words of Philox4x32-10, Salmon et al. 2011 "Parallel random numbers: as easy as 1, 2, 3".

    counter: four arrays of integers in [0, 2**32) that broadcast against each other; seed: the 64-bit key, its low
    half first. One round multiplies words 0 and 2 by constants and mixes the halves of the products with words 1, 3
    and the key; the key advances by constants (the golden ratio and sqrt(3) - 1) between rounds.
    """
    a, b, c, d = (np.asarray(word, dtype=np.uint64) for word in counter)
    for turn in range(_ROUNDS):
        key_low = np.uint64((seed + turn * _KEY_STEPS[0]) & 0xFFFFFFFF)
        key_high = np.uint64(((seed >> 32) + turn * _KEY_STEPS[1]) & 0xFFFFFFFF)
        first, second = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (
            (second >> _HALF) ^ b ^ key_low,
            second & _LOW,
            (first >> _HALF) ^ d ^ key_high,
            first & _LOW,
        )
    return a, b, c, d


def dropout_multiplier(
    op: str, pairs: tuple[int, ...], visible: Array, dropout_mask: object, dropout: object
) -> Array | None:
    """The multiplier of the weights: dropout_mask, or that of dropout = (p, seed); 0 where invisible."""
    if dropout_mask is not None:
        if dropout is not None:
            raise ValueError(f"{op}: dropout; expected dropout or dropout_mask, got both")
        mask = broadcast(op, "dropout_mask", as_float(op, "dropout_mask", dropout_mask), pairs)
        return np.where(visible, mask, 0.0)
    if dropout is None:
        return None
    if not isinstance(dropout, tuple | list) or len(dropout) != 2:
        raise ValueError(f"{op}: dropout; expected (p, seed), got {dropout!r}")
    p, seed = number(op, "dropout's p", dropout[0]), dropout[1]
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: dropout's p; expected 0 <= p < 1, got {p!r}")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**64:
        raise ValueError(f"{op}: dropout's seed; expected an integer in [0, 2**64), got {short(seed)}")
    return np.where(visible, _from_seed(pairs, p, int(seed)), 0.0)


def _from_seed(shape: tuple[int, ...], p: float, seed: int) -> Array:
    """The multiplier of the weights (..., H, L, S): 0 where dropped, 1/(1-p) where kept.

    w_ij is kept iff word 0 / 2**32 < 1 - p at counter (j, i, head, leading): head is the position on axis -3 and
    leading the flattened index of the axes before it, both 0 where the axis does not exist.
    """
    full = (1,) * (3 - len(shape)) + shape
    outer, (heads, queries, keys) = full[:-3], full[-3:]
    leading = np.arange(int(np.prod(outer, dtype=np.int64))).reshape((*outer, 1, 1, 1))
    head = np.arange(heads).reshape(-1, 1, 1)
    word = philox4x32((np.arange(keys), np.arange(queries)[:, None], head, leading), seed)[0]
    keep = np.broadcast_to(word / 2.0**32 < 1.0 - p, full).reshape(shape)
    return np.where(keep, 1.0 / (1.0 - p), 0.0)
