"""Visibility and lengths: which query may see which key, and how many keys a query sees (semantics A3-A6).

Everything is None (or a Python number) where nothing is masked, so that a call without masks pays nothing for them.
"""

import math
from typing import Any, NamedTuple

from attnkit._core.library import beside
from attnkit._core.special import stop_gradient
from attnkit._core.typing import Array, Causal, Length, Namespace


class Rows(NamedTuple):
    """The queries that are looked at: `start .. stop` of `total`, so that a long sequence can be served in tiles."""

    start: int
    stop: int
    total: int


def positions(xp: Namespace, x: Array, start: int, stop: int) -> Array:
    """The integers start .. stop - 1 on x's device."""
    return xp.arange(start, stop, **beside(x))


def visible_pairs(
    xp: Namespace,
    q: Array,
    keys: int,
    rows: Rows,
    *,
    mask: Array | None = None,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Array | int | None = None,
    query_mask: Array | None = None,
) -> Array | None:
    """visible(i, j) as a boolean array that broadcasts to (..., L, S) and has S columns; None if every pair is visible.

    causal=True aligns the last query with the last key: j <= i + S - L; causal="upper_left" means j <= i. Without
    queries or keys there is no pair, so that every token is one that nobody sees or that sees nobody (A6).
    """
    i: Any = None
    j: Any = None
    causal = causal or keys == 0 or rows.total == 0
    if causal or window is not None or key_lengths is not None:
        j = positions(xp, q, 0, keys)
        i = positions(xp, q, rows.start, rows.stop)[:, None]
    return pairs_between(
        xp,
        i,
        j,
        keys,
        keys - rows.total,
        mask=mask,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
        query_mask=query_mask,
    )


def pairs_between(
    xp: Namespace,
    i: Any,
    j: Any,
    keys: int,
    shift: int,
    *,
    mask: Array | None = None,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Array | int | None = None,
    query_mask: Array | None = None,
) -> Array | None:
    """`visible_pairs` of the queries at i (L, 1) and the first keys, at j (S,), which nobody asks for without need.

    shift is S - L of the whole call.
    """
    terms: list[Any] = []
    if causal:
        terms.append(j <= (i if causal == "upper_left" else i + shift))
    left, right = window or (None, None)
    if left is not None:
        terms.append(j >= i + (shift - left))
    if right is not None:
        terms.append(j <= i + (shift + right))
    if key_lengths is not None:
        terms.append(j < (key_lengths if isinstance(key_lengths, int) else key_lengths[..., None, None]))
    if query_mask is not None:
        terms.append(query_mask[..., None])
    if mask is not None:
        terms.append(mask)
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


def always_seen(rows: Rows, keys: int, causal: Causal, others: bool) -> tuple[bool, bool]:
    """Whether it is certain, from shapes alone, that every query sees a key and that every key is seen by a query."""
    if others or causal == "upper_left" or keys == 0 or rows.total == 0:
        return not others and keys > 0, not others and not causal and rows.total > 0
    whole = rows.stop == rows.total
    return (not causal or rows.total <= keys), (not causal or whole)


def seen_keys(xp: Namespace, pairs: Array, heads: int, shared: int) -> Array:
    """(..., S, 1): keys that some query sees, in any head of the group that shares a key/value head."""
    seen = xp.any(pairs, axis=-2)
    if heads != shared and seen.ndim >= 2 and seen.shape[-2] == heads:
        seen = xp.any(xp.reshape(seen, (*seen.shape[:-2], shared, heads // shared, seen.shape[-1])), axis=-2)
    return seen[..., None]


def visible_count(xp: Namespace, q: Array, pairs: Array | None, keys: int, rows: Rows, causal: bool, dtype: Any) -> Any:
    """n_i, the number of keys visible to query i: (..., L, 1) in the compute dtype, or a number without masks.

    `causal` says that lower-right causality is the only mask: then n_i = max(i + 1 + S - L, 0) needs no (L, S) array.
    """
    if pairs is None:
        return keys
    if causal:
        n = positions(xp, q, rows.start, rows.stop)[:, None] + (1 + keys - rows.total)
        return xp.astype(xp.where(n > 0, n, 0), dtype)
    return xp.sum(xp.astype(pairs, dtype), axis=-1, keepdims=True)


def row_length(xp: Namespace, length: Length, count: Any, keys: int, rows: Rows, dtype: Any) -> Any:
    """The divisor of semantics A4, a number or (..., L, 1); 1 where a row sees nothing, so that 0·inf never arises."""
    if isinstance(length, str):
        n = keys if length == "all" else count
    elif hasattr(length, "ndim"):
        length = stop_gradient(length)
        if length.ndim == 0:
            return xp.astype(length, dtype)
        if length.shape[-1] == rows.total and rows.total > 1:
            length = length[..., rows.start : rows.stop]
        return xp.astype(length, dtype)[..., None]
    else:
        n = length
    if isinstance(n, int | float) or not hasattr(n, "ndim"):  # a number, or its symbol while torch.export traces
        return n if n > 0 else 1
    return xp.where(n > 0, n, 1)


def power(length: Any, alpha: float) -> Any:
    """length^-alpha, a number if length is one."""
    return 1.0 if alpha == 0 else length**-alpha


def log(xp: Namespace, length: Any) -> Any:
    """log(length), a number if length is one; a scalar array for the symbol of one while torch.export traces."""
    if isinstance(length, int | float):
        return math.log(length)
    return xp.log(length if hasattr(length, "ndim") else xp.ones((), dtype=xp.float64) * length)
