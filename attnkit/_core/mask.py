"""Visibility and lengths: which query may see which key, and how many keys a query sees (semantics A3-A6).

Everything is None (or a Python number) where nothing is masked, so a call without masks does no extra work.
"""

import math
from typing import NamedTuple, TypeVar, overload

from attnkit._core.check import broadcast
from attnkit._core.library import beside
from attnkit._core.special import as_index, cumulative_sum, is_symbol, stop_gradient, take_along
from attnkit._core.typing import Array, Bindings, Causal, DType, Factor, Length, Namespace, OfLibrary

T = TypeVar("T", bound=Array | None)


class Rows(NamedTuple):
    """A range of queries, `start .. stop` of `total`, so that long sequences can be processed in tiles."""

    start: int
    stop: int
    total: int


def positions(xp: Namespace, x: Array, start: int, stop: int) -> Array:
    """The integers start .. stop - 1 on x's device."""
    return xp.arange(start, stop, **beside(x))


class Visibility(NamedTuple):
    """Which query may see which key: the options of semantics A3 as one value."""

    mask: Array | None = None  # broadcasts to (..., L, S)
    causal: Causal = False
    window: tuple[int | None, int | None] | None = None
    key_lengths: Array | int | None = None  # integers that broadcast to (...)
    query_mask: Array | None = None  # broadcasts to (..., L)

    @property
    def masked(self) -> bool:
        """Whether anything but causality hides pairs."""
        return not (self.mask is None and self.window is None and self.key_lengths is None and self.query_mask is None)

    def tile(self, rows: Rows) -> "Visibility":
        """The visibility of a range of queries."""
        if rows.stop - rows.start == rows.total:
            return self
        return self._replace(mask=tile(self.mask, -2, rows), query_mask=tile(self.query_mask, -1, rows))

    def pairs(self, xp: Namespace, q: Array, keys: int, rows: Rows) -> Array | None:
        """visible(i, j) as a boolean array that broadcasts to (..., L, S) and has S columns; None if every pair is.

        causal=True aligns the last query with the last key: j <= i + S - L; causal="upper_left" means j <= i. Without
        queries or keys there are no pairs: no token sees or is seen by another (A6).
        """
        i: OfLibrary = None
        j: OfLibrary = None
        visibility = self if self.causal or (keys > 0 and rows.total > 0) else self._replace(causal=True)
        if visibility.causal or self.window is not None or self.key_lengths is not None:
            j = positions(xp, q, 0, keys)
            i = positions(xp, q, rows.start, rows.stop)[:, None]
        return visibility.between(xp, i, j, keys, keys - rows.total)

    def between(self, xp: Namespace, i: Array, j: Array, keys: int, shift: int) -> Array | None:
        """`pairs` of the queries at i (L, 1) and the first keys, at j (S,); always an array.

        shift is S - L of the whole call.
        """
        terms: list[Array] = []
        if self.causal:
            terms.append(j <= (i if self.causal == "upper_left" else i + shift))
        left, right = self.window or (None, None)
        if left is not None:
            terms.append(j >= i + (shift - left))
        if right is not None:
            terms.append(j <= i + (shift + right))
        n = self.key_lengths
        if n is not None:
            terms.append(j < (n if isinstance(n, int) else n[..., None, None]))
        if self.query_mask is not None:
            terms.append(self.query_mask[..., None])
        if self.mask is not None:
            terms.append(self.mask)
        if not terms:
            return None
        pairs = terms[0]
        for term in terms[1:]:
            pairs = pairs & term
        if pairs.ndim < 2:
            pairs = xp.reshape(pairs, (1, -1))
        if pairs.shape[-1] != keys:
            pairs = xp.broadcast_to(pairs, (*pairs.shape[:-1], keys))
        return pairs

    def always(self, rows: Rows, keys: int) -> tuple[bool, bool]:
        """Whether shapes alone guarantee that every query sees a key and every key is seen by a query."""
        if self.masked or self.causal == "upper_left" or keys == 0 or rows.total == 0:
            return not self.masked and keys > 0, not self.masked and not self.causal and rows.total > 0
        whole = rows.stop == rows.total
        return (not self.causal or rows.total <= keys), (not self.causal or whole)

    def counted(self, xp: Namespace, q: Array, keys: int, dtype: DType) -> Factor:
        """n_i of all queries, a number or (..., L, 1), without an array of pairs unless a mask has an axis of queries.

        A query sees the keys from `low` to `high`, of which a key mask leaves what its running sum says.
        """
        queries, mask = q.shape[-2], self.mask
        if keys == 0 or queries == 0:
            return 0
        if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
            pairs = self.pairs(xp, q, keys, Rows(0, queries, queries))
            return xp.sum(xp.astype(pairs, dtype), axis=-1, keepdims=True)
        low, high = self._span(xp, positions(xp, q, 0, queries)[:, None], keys, keys - queries)
        n = high - low if mask is None else _allowed(xp, mask, low, high, keys)
        if self.query_mask is not None:
            n = xp.where(self.query_mask[..., None], n, 0)
        return xp.astype(n, dtype)

    def _span(self, xp: Namespace, i: Array, keys: int, shift: int) -> tuple[Array, Array]:
        """The first key that the queries at i (L, 1) see by their positions, and the first behind the last one, at
        least the former."""
        left, right = self.window or (None, None)
        low, high = i * 0, i * 0 + keys
        if left is not None:
            low = _clipped(xp, i + (shift - left), 0, keys)
        if self.causal:
            high = _clipped(xp, i + (1 if self.causal == "upper_left" else 1 + shift), 0, keys)
        for bound in (None if right is None else i + (shift + right + 1), _lengths(self.key_lengths)):
            if bound is not None:
                high = xp.where(high < bound, high, _like(xp, bound, high))
        return low, xp.where(high > low, high, low)

    def counts(self, xp: Namespace, q: Array, pairs: Array, keys: int, rows: Rows, dtype: DType) -> Factor:
        """n_i, the number of keys visible to query i: (..., L, 1) in the compute dtype.

        Lower-right causality alone needs no (L, S) array: then n_i = max(i + 1 + S - L, 0).
        """
        if self.causal is True and not self.masked:
            n = positions(xp, q, rows.start, rows.stop)[:, None] + (1 + keys - rows.total)
            return xp.astype(xp.where(n > 0, n, 0), dtype)
        return xp.sum(xp.astype(pairs, dtype), axis=-1, keepdims=True)


def _lengths(n: Array | int | None) -> Array | int | None:
    return n if n is None or isinstance(n, int) else n[..., None, None]


def _like(xp: Namespace, n: Factor, like: Array) -> Factor:
    return xp.astype(n, like.dtype) if hasattr(n, "ndim") else n


def _clipped(xp: Namespace, x: Array, least: int, most: int) -> Array:
    x = xp.where(x < most, x, most)
    return xp.where(x > least, x, least)


def _allowed(xp: Namespace, mask: Array, low: Array, high: Array, keys: int) -> Array:
    """How many of the keys from low to high (..., L, 1) a mask (..., 1, S) or (S,) lets be seen."""
    mask = xp.broadcast_to(mask if mask.ndim > 1 else mask[None, :], (*mask.shape[:-2], 1, keys))
    ones = xp.astype(mask[..., 0, :], low.dtype)
    before = xp.concat([xp.zeros_like(ones[..., :1]), cumulative_sum(xp, ones, axis=-1)], axis=-1)
    leading = broadcast("attention", "leading axes", before.shape[:-1], low.shape[:-2], high.shape[:-2])
    before = xp.broadcast_to(before, (*leading, keys + 1))
    index = [as_index(xp.broadcast_to(x[..., 0], (*leading, x.shape[-2]))) for x in (low, high)]
    first, last = (take_along(xp, before, x, -1) for x in index)
    return (last - first)[..., None]


def visibility_of(options: Bindings) -> Visibility:
    """The visibility in the options of a call."""
    return Visibility(**{name: options[name] for name in Visibility._fields if name in options})


def tile(x: T, axis: int, rows: Rows) -> T:
    """The part of an option for these rows; an absent axis or one of size 1 serves all of them."""
    if x is None or rows.stop - rows.start == rows.total or x.ndim < -axis or x.shape[axis] == 1:
        return x
    part: OfLibrary = x[..., rows.start : rows.stop] if axis == -1 else x[..., rows.start : rows.stop, :]
    of_rows: T = part
    return of_rows


def seen_keys(xp: Namespace, pairs: Array, heads: int, shared: int) -> Array:
    """(..., S, 1): keys that some query sees, in any head of the group that shares a key/value head."""
    keys = xp.any(pairs, axis=-2)
    if heads != shared and keys.ndim >= 2 and keys.shape[-2] == heads:
        keys = xp.any(xp.reshape(keys, (*keys.shape[:-2], shared, heads // shared, keys.shape[-1])), axis=-2)
    return keys[..., None]


def row_length(xp: Namespace, length: Length, count: float | Array, keys: int, rows: Rows, dtype: DType) -> Factor:
    """The divisor of semantics A4, a number or (..., L, 1); 1 for rows that see nothing, to avoid 0·inf."""
    if isinstance(length, str):
        n = keys if length == "all" else count
    elif hasattr(length, "ndim"):
        own: OfLibrary = stop_gradient(length)
        if own.ndim == 0:
            return xp.astype(own, dtype)
        if own.shape[-1] == rows.total and rows.total > 1:
            own = own[..., rows.start : rows.stop]
        return xp.astype(own, dtype)[..., None]
    else:
        n = length
    if isinstance(n, (int, float)):
        return n if n > 0 else 1
    if is_symbol(n):
        n = xp.astype(xp.asarray(n), dtype)
    if not hasattr(n, "ndim"):  # a symbol of torch.export
        return n if n > 0 else 1
    n = n if n.dtype == dtype else xp.astype(n, dtype)  # torch.jit.trace makes arrays of integers of sizes
    return xp.where(n > 0, n, 1)


def power(length: float | Array, alpha: float) -> Factor:
    """length^-alpha, a number if length is one."""
    return 1.0 if alpha == 0 else raise_to(length, -alpha)


@overload
def raise_to(x: float, exponent: float) -> float: ...
@overload
def raise_to(x: Factor, exponent: Factor) -> Factor: ...
def raise_to(x: Factor, exponent: Factor) -> Factor:
    """x^exponent for x > 0; of numbers infinite where Python has no float for it."""
    try:
        raised: Factor = x**exponent
        return raised
    except OverflowError:
        return math.inf


def log(xp: Namespace, length: float | Array) -> Factor:
    """log(length), a number if length is one; a scalar array for a symbol of torch.export."""
    if isinstance(length, (int, float)):
        return math.log(length)
    return xp.log(length if hasattr(length, "ndim") else xp.ones((), dtype=xp.float64) * length)
