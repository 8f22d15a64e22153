"""Integers of a call in the range of its positions, before anything casts them: lengths, windows and large numbers.

Query i sees key j by j - i, which lies within the number of all tokens: a larger bound is none, but added to a position
it leaves the integers that a library counts with. Lengths that a library cannot compare with positions become
integers that it can, no greater than the number of keys.
"""

import numbers
from typing import TypeGuard

from attnkit._core.library import library, namespace
from attnkit._core.typing import LEARNED, Array, Keywords

LARGE = 1 << 30
"""Sums of two smaller integers are integers of 32 bits."""
NUMBERS = (*LEARNED, "length", "eps", "ridge", "init_scale", "log_decay", "log_decay_t")
"""Options that are real numbers."""
AWKWARD = {
    "torch": ("uint16", "uint32", "uint64"),  # has no comparisons of them
    "jax": ("uint32", "int64", "uint64"),  # compares the first as int32; kernels take all of them as that
    "cupy": ("uint64",),  # kernels take it as int64
    "array_api_strict": ("uint64",),  # promotes it to nothing
}
"""By library, the dtypes of lengths that cannot stay."""
CONSTANTS = ("mask", "query_mask", "key_lengths")
"""Options that may be NumPy arrays beside JAX's."""


def in_library(first: Array, options: Keywords, keys: int) -> Keywords:
    """The options, with NumPy's masks and lengths as arrays of JAX where `first` is one: lengths within the number of
    keys, for JAX cuts integers to 32 bits."""
    given = [name for name in CONSTANTS if name in options and library(options[name]) == "numpy"]
    if not given or library(first) != "jax":
        return options
    xp, changed = namespace(first), {}
    for name in given:
        x = options[name]
        if isinstance(x, numbers.Number) or x.dtype.kind not in "biu" or not x.dtype.isnative:
            continue
        if x.dtype.kind != "b":
            most = int(namespace(x).iinfo(x.dtype).max)
            x = x.clip(0, min(keys, most) if isinstance(keys, int) else most)
        changed[name] = xp.asarray(x)
    return {**options, **changed}


def in_range(options: Keywords, queries: int, keys: int) -> Keywords:
    """The options of a checked call with so many queries and keys: the same dictionary if all are in range."""
    changed: Keywords = {name: float(x) for name, x in options.items() if name in NUMBERS and _is_awkward(x)}
    window, lengths = options.get("window"), options.get("key_lengths")
    if window is not None and any(_is_awkward(x) for x in window):
        changed["window"] = tuple([None if x is None else _bound(x, queries + keys) for x in window])
    if _is_awkward(lengths):
        changed["key_lengths"] = _bound(lengths, keys)
    elif lengths is not None and str(getattr(lengths, "dtype", "")).rpartition(".")[2] in AWKWARD.get(
        library(lengths) or "", ()
    ):
        changed["key_lengths"] = _comparable(lengths, keys)
    return {**options, **changed} if changed else options


def _is_awkward(x: object) -> TypeGuard[float]:
    """Whether x is a large integer, or a number that is not Python's: of NumPy, a fraction."""
    if isinstance(x, int):
        return not -LARGE < x < LARGE
    return isinstance(x, numbers.Real) and not isinstance(x, float)


def _bound(x: float, most: int) -> int | None:
    """x as an integer; None in place of one that excludes nothing. A symbol of a traced program is not compared where
    that would bound it for good: then positions have 64 bits.
    """
    own = x if isinstance(x, int) else int(x)
    if own < LARGE:
        return own
    if not isinstance(most, int):
        return min(own, 1 << 62)
    return None if own >= most else own


def _comparable(lengths: Array, keys: int) -> Array:
    """Integers that compare with positions as these lengths do."""
    xp = namespace(lengths)
    if library(lengths) == "torch":
        signed = xp.astype(lengths, xp.int64)  # the upper half of 64 bits without a sign becomes negative
        return xp.where(signed < 0, keys, signed)
    return xp.astype(xp.clip(lengths, 0, keys), xp.arange(0).dtype)
