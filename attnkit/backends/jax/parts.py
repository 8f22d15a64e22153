"""Blocks of queries for XLA: shapes are static, and where a block lies may be known only while the program runs.

The queries are divided into a few segments with a number of keys each, which under causality leaves most of those out
that no query of the segment may see; a segment is a loop over blocks of one shape.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from attnkit._core import blocks, quadratic
from attnkit._core.dropout import kept_counters
from attnkit._core.mask import pairs_between
from attnkit.backends.in_place import MASKS

SCORES = 1 << 21  # of a block
QUERIES, CAUSAL_QUERIES = 512, 256  # of a block at most; causality hides more of a higher one
LEAST = 8  # queries of a block, if there are as many
SEGMENTS = 4  # under causality: more leave out more keys, and take longer to compile
Index = tuple[Any, ...]  # a number for each leading axis


class Segment(NamedTuple):
    """`blocks` blocks of `rows` queries from `start` on, which see no key from `keys` on."""

    start: int
    rows: int
    blocks: int
    keys: int


def segments(c: blocks.Call) -> Iterator[Segment]:
    """Cover the queries; where there is no key before `keys`, the queries are null rows."""
    (queries, keys), causal = c.lengths, c.common.get("causal", False)
    most = c.queries or (CAUSAL_QUERIES if causal else QUERIES)
    rows = min(max(LEAST, c.size // max(1, keys)), most, queries) or 1
    whole = queries // rows
    together = max(1, -(-whole // SEGMENTS)) if causal else max(1, whole)
    pieces = [(first * rows, rows, min(together, whole - first)) for first in range(0, whole, together)]
    pieces += [(whole * rows, queries - whole * rows, 1)] if queries > whole * rows else []
    for start, size, several in pieces:
        stop = start + size * several
        seen = keys if not causal else stop if causal == "upper_left" else stop + keys - queries
        yield Segment(start, size, several, max(0, min(keys, seen)))


def unravel(number: Any, shape: tuple[int, ...]) -> Index:
    """The index of an item of the leading axes, in the order of memory."""
    index = []
    for size in reversed(shape):
        index.append(number % size)
        number = number // size
    return tuple(reversed(index))


def place(c: blocks.Call, name: str, x: Array, index: Index, start: Any) -> Index:
    """Where the part of an argument begins that a block looks at; an axis of size 1 serves every block."""
    own = x.ndim - min(blocks.TRAILING[name], x.ndim)
    found = []
    for axis, at in zip(range(own), index[len(index) - own :], strict=True):
        shared = name in ("k", "v") and axis == own - 1 and c.groups > 1
        found.append(0 if x.shape[axis] == 1 else at // c.groups if shared else at)
    found += [0] * (x.ndim - own)
    at = blocks.QUERY_AXIS.get(name, 0)
    if at and x.ndim >= -at and x.shape[at] != 1:
        found[at] = start
    return tuple(found)


def extent(name: str, x: Array, rows: int, keys: int) -> tuple[int, ...]:
    """The shape of that part, leading axes of size 1 included."""
    own = x.ndim - min(blocks.TRAILING[name], x.ndim)
    found = [1] * own + list(x.shape[own:])
    for axes, size in ((blocks.QUERY_AXIS, rows), (blocks.KEY_AXIS, keys)):
        at = axes.get(name, 0)
        if at and x.ndim >= -at and x.shape[at] != 1:
            found[at] = size
    return tuple(found)


def taken(c: blocks.Call, name: str, x: Array, index: Index, start: Any, rows: int, keys: int) -> Array:
    """The part of an argument, without leading axes."""
    shape = extent(name, x, rows, keys)
    own = x.ndim - min(blocks.TRAILING[name], x.ndim)
    return lax.dynamic_slice(x, place(c, name, x, index, start), shape).reshape(shape[own:])


def added(
    c: blocks.Call, name: str, total: Array, grad: Array, index: Index, start: Any, rows: int, keys: int
) -> Array:
    """`total` with the gradient of a part added to it."""
    at, shape = place(c, name, total, index, start), extent(name, total, rows, keys)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, shape) + grad.reshape(shape), at)


def part(c: blocks.Call, tokens: dict[str, Array], index: Index, start: Any, segment: Segment) -> blocks.Call:
    """The call restricted to a block; `tokens` are the keys and values of the item."""
    others = {name: x for name, x in c.arrays.items() if name not in tokens}
    arrays = {name: taken(c, name, x, index, start, segment.rows, segment.keys) for name, x in others.items()}
    return c._replace(arrays=tokens | arrays)


def prepared(c: blocks.Call, p: blocks.Call, index: Index, start: Any) -> blocks.Prepared:
    """Inputs and scores of the part p of the call c."""
    q, k, v = (p.arrays[name] for name in "qkv")
    given = {**c.common, **{name: x for name, x in p.arrays.items() if name in c.family.common}}
    options: dict[str, Any] = {name: given[name] for name in ("bias", "scale", "dropout_mask") if name in given}
    i = start + jnp.arange(q.shape[0])[:, None]
    shift = c.lengths[1] - c.lengths[0]
    seeing = {name: given[name] for name in ("causal", *MASKS) if name in given}
    pairs = pairs_between(jnp, i, jnp.arange(k.shape[0]), k.shape[0], shift, **seeing)
    options |= dropped(c, given, index, i, k.shape[0])
    alone = given.get("causal") is True and c.lengths[0] <= c.lengths[1] and not any(name in given for name in MASKS)
    if alone and c.family.prepare is quadratic.prepare:  # every query sees a key, and how many is known
        a = quadratic.prepare(jnp, q, k, v, **options)
        a = a._replace(pairs=pairs, count=(i + (1 + shift)).astype(a.dtype))
        if a.drop is not None and pairs is not None:
            a = a._replace(drop=jnp.where(pairs, a.drop, 0.0))
    else:
        a = c.family.prepare(jnp, q, k, v, mask=pairs, **options)
    return a, c.family.scores(jnp, a)


def dropped(c: blocks.Call, given: dict[str, Any], index: Index, i: Array, keys: int) -> dict[str, Array]:
    """Dropout by counter as a mask that multiplies the weights."""
    if "dropout" not in given or given["dropout"][0] <= 0:
        return {}
    p, seed = given["dropout"]
    *items, head = index or (0,)
    item = 0
    for size, at in zip(c.leading[:-1], items, strict=True):
        item = item * size + at
    counter = tuple(jnp.asarray(x).astype(jnp.uint32) for x in (jnp.arange(keys), i, head, item))
    return {"dropout_mask": kept_counters(jnp, counter, p, seed).astype(jnp.float32) * (1.0 / (1.0 - p))}


def over_blocks(segment: Segment, block: Any, carry: Any) -> tuple[Any, Any]:
    """scan of `block(carry, start)` over the blocks of a segment."""
    starts = segment.start + segment.rows * jnp.arange(segment.blocks)
    return jax.lax.scan(block, carry, starts)
