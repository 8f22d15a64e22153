"""Dropout of attention weights by counter (semantics A9): which pair is kept is a function of (seed, j, i, head, item).

The bits are the first 32-bit word of Philox4x32-10 (Salmon et al. 2011, §3.3) with the 64-bit seed as its key and
(j, i, head, flattened leading index) as its counter, so every library and every gradient recomputes the same ones.
"""

import math

from attnkit._core.library import library
from attnkit._core.mask import Rows, positions
from attnkit._core.special import is_key, traced_once, unsigned, words_of_key
from attnkit._core.typing import Array, Namespace, OfLibrary, Picks, Seed

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
Key = tuple[OfLibrary, OfLibrary]
_LOW, _WORD = 0xFFFF, 0xFFFFFFFF


def _is_wide(x: Array) -> bool:
    """Whether words are held in more than 32 bits: torch counts in int64, Python without end."""
    return library(x) in ("torch", None)


def _wrap(x: Array) -> Array:
    """A sum of words modulo 2^32: uint32 wraps by itself."""
    return x & _WORD if _is_wide(x) else x


def _multiply(a: Array, b: int) -> tuple[Array, Array]:
    """High and low word of a 32 by 32 bit product, through 16-bit halves: no step exceeds 32 bits, or 49 of wide
    words."""
    b1, b0 = b >> 16, b & _LOW
    if _is_wide(a):
        p0 = a * b0
        p1 = a * b1 + (p0 >> 16)
        return p1 >> 16, ((p1 & _LOW) << 16) | (p0 & _LOW)
    a1, a0 = a >> 16, a & _LOW
    p00, p01, p10, p11 = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (p00 >> 16) + (p01 & _LOW) + (p10 & _LOW)
    low = ((middle & _LOW) << 16) | (p00 & _LOW)
    return p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16), low


def _round(counter: tuple[Array, ...], key: Key) -> tuple[tuple[Array, ...], Key]:
    """One round of Philox4x32, and the key of the next."""
    c0, c1, c2, c3 = counter
    (high0, low0), (high1, low1) = _multiply(c0, _MULTIPLIERS[0]), _multiply(c2, _MULTIPLIERS[1])
    k0, k1 = (_wrap(k + unsigned(step, c0)) for k, step in zip(key, _KEY_STEPS, strict=True))
    return (high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0), (k0, k1)


def _philox_word(counter: tuple[Array, ...], key: Key) -> Array:
    """The first output word of Philox4x32-10."""
    step = traced_once(_round, counter[0])
    for _ in range(_ROUNDS):
        counter, key = step(counter, key)
    return counter[0]


def _key(xp: Namespace, seed: Seed, like: Array) -> Key:
    """The two key words of a seed: a Python integer, an integer array of shape (), or a key of jax.random.key."""
    if not hasattr(seed, "dtype"):
        return unsigned(int(seed) & _WORD, like), unsigned(int(seed) >> 32, like)
    if is_key(seed):
        low, high = (xp.reshape(word, (1,)) for word in words_of_key(seed))
        return xp.astype(low, like.dtype), xp.astype(high, like.dtype)
    seed = xp.reshape(seed, (1,))
    wide, signed = str(seed.dtype).endswith("64"), library(seed) == "torch"
    seed = xp.astype(seed, xp.int64) if signed else seed  # torch shifts no uint64
    low = seed & _WORD if wide or signed else seed
    high = (seed >> 32) & _WORD if wide else seed * 0
    return xp.astype(low, like.dtype), xp.astype(high, like.dtype)


def keep_mask_of_counters(xp: Namespace, counter: tuple[Array, ...], p: float, seed: Seed) -> OfLibrary:
    """True where the pair of a counter (j, i, head, item), unsigned words, is kept."""
    first = counter[0]
    word = traced_once(_philox_word, first)(counter, _key(xp, seed, first))
    return word <= unsigned(last_kept(p), word)


def last_kept(p: float) -> int:
    """The largest word that keeps a pair: word / 2^32 < 1 - p."""
    return math.ceil((1.0 - p) * 2**32) - 1


def keep_mask(
    xp: Namespace,
    like: Array,
    p: float,
    seed: Seed,
    leading: tuple[int, ...],
    keys: int,
    rows: Rows,
    picked: Picks = (),
) -> Array:
    """Boolean (..., L, S): True where the pair is kept, with probability 1 - p.

    `leading` are the leading axes of the output; the last of them counts heads. `picked` holds the indices and slices
    of the leading axes to compute; None means all.
    """
    dtype = xp.int64 if library(like) == "torch" else xp.uint32

    def words(start: int, stop: int, *shape: int) -> Array:
        return xp.reshape(xp.astype(positions(xp, like, start, stop), dtype), shape)

    *items, heads = leading or (1,)
    j = words(0, keys, keys)
    i = words(rows.start, rows.stop, rows.stop - rows.start, 1)
    shape = (*items, heads)
    head = xp.broadcast_to(words(0, heads, heads), shape)[picked or ...]
    item = xp.broadcast_to(words(0, math.prod(items), *items, 1), shape)[picked or ...]
    mask: Array = keep_mask_of_counters(xp, (j, i, head[..., None, None], item[..., None, None]), p, seed)
    return mask if leading else mask[0, ...]
