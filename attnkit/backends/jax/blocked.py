"""Quadratic attention in blocks of queries, as loops in a compiled program, with explicit gradients.

Only the arguments are stored for the gradients: memory is O((L + S)·d + block), forward and backward. Shapes are static
in XLA, while the position of a block is only known at run time. So the queries are divided into a few segments, each
with a fixed number of keys, which under causality excludes most keys that no query of the segment sees; a segment is a
loop over blocks of one shape.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from attnkit._core import blocks, quadratic
from attnkit._core.dropout import keep_mask_of_counters
from attnkit._core.family import RECORDS, score_ops
from attnkit._core.mask import visibility_of
from attnkit._core.special import varying_alike
from attnkit._core.typing import Keywords, Option
from attnkit.backends.jax import transforms
from attnkit.ops.entmax import ENTMAX

SCORES = 1 << 21  # per block
QUERIES, CAUSAL_QUERIES = 512, 256  # per block at most; causality masks more of a taller block
LEAST = 8  # queries per block, if there are as many
SEGMENTS = 4  # under causality: more segments skip more keys but take longer to compile
Number = int | jax.Array
Carry = TypeVar("Carry")
Output = TypeVar("Output")
Index = tuple[Number, ...]  # a number for each leading axis


class Segment(NamedTuple):
    """`blocks` blocks of `rows` queries from `start` on, which see only keys before `keys`."""

    start: int
    rows: int
    blocks: int
    keys: int


def segments(c: blocks.Call) -> Iterator[Segment]:
    """Segments that cover the queries; those with `keys` = 0 are null rows."""
    (queries, keys), causal = c.lengths, c.common.get("causal", False)
    most = CAUSAL_QUERIES if causal else QUERIES
    rows = min(max(LEAST, c.size // max(1, keys)), most, queries) or 1
    whole = queries // rows
    together = max(1, -(-whole // SEGMENTS)) if causal else max(1, whole)
    pieces = [(first * rows, rows, min(together, whole - first)) for first in range(0, whole, together)]
    pieces += [(whole * rows, queries - whole * rows, 1)] if queries > whole * rows else []
    for start, size, several in pieces:
        stop = start + size * several
        visible = keys if not causal else stop if causal == "upper_left" else stop + keys - queries
        yield Segment(start, size, several, max(0, min(keys, visible)))


def unravel(number: Number, shape: tuple[int, ...]) -> Index:
    """The index of an item of the leading axes, in the order of memory."""
    index = []
    for size in reversed(shape):
        index.append(number % size)
        number = number // size
    return tuple(reversed(index))


def place(c: blocks.Call, name: str, x: Array, index: Index, start: Number) -> Index:
    """The start of the part of an argument that a block needs; an axis of size 1 serves every block."""
    own = x.ndim - min(blocks.TRAILING[name], x.ndim)
    starts = []
    for axis, at in zip(range(own), index[len(index) - own :], strict=True):
        shared = name in ("k", "v") and axis == own - 1 and c.groups > 1
        starts.append(0 if x.shape[axis] == 1 else at // c.groups if shared else at)
    starts += [0] * (x.ndim - own)
    at = blocks.QUERY_AXIS.get(name, 0)
    if at and x.ndim >= -at and x.shape[at] != 1:
        starts[at] = start
    return tuple(starts)


def extent(name: str, x: Array, rows: int, keys: int) -> tuple[int, ...]:
    """The shape of that part, leading axes of size 1 included."""
    own = x.ndim - min(blocks.TRAILING[name], x.ndim)
    shape = [1] * own + list(x.shape[own:])
    for axes, size in ((blocks.QUERY_AXIS, rows), (blocks.KEY_AXIS, keys)):
        at = axes.get(name, 0)
        if at and x.ndim >= -at and x.shape[at] != 1:
            shape[at] = size
    return tuple(shape)


def slice_of(c: blocks.Call, name: str, x: Array, index: Index, start: Number, rows: int, keys: int) -> Array:
    """The part of an argument, without leading axes."""
    shape = extent(name, x, rows, keys)
    own = x.ndim - min(blocks.TRAILING[name], x.ndim)
    return lax.dynamic_slice(x, place(c, name, x, index, start), shape).reshape(shape[own:])


def add_slice(
    c: blocks.Call, name: str, total: Array, grad: Array, index: Index, start: Number, rows: int, keys: int
) -> Array:
    """`total` with the gradient of a part added to it."""
    at, shape = place(c, name, total, index, start), extent(name, total, rows, keys)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, shape) + grad.reshape(shape), at)


def part(c: blocks.Call, tokens: dict[str, Array], index: Index, start: Number, segment: Segment) -> blocks.Call:
    """The call restricted to a block; `tokens` are the keys and values of the item."""
    others = {name: x for name, x in c.arrays.items() if name not in tokens}
    arrays = {name: slice_of(c, name, x, index, start, segment.rows, segment.keys) for name, x in others.items()}
    return c._replace(arrays=tokens | arrays)


def inputs_and_scores(c: blocks.Call, p: blocks.Call, index: Index, start: Number) -> blocks.Scored:
    """Inputs and scores of the part p of the call c."""
    q, k, v = (p.arrays[name] for name in "qkv")
    arguments = {**c.common, **{name: x for name, x in p.arrays.items() if name in c.family.common}}
    options: Keywords = {name: arguments[name] for name in ("bias", "scale", "dropout_mask") if name in arguments}
    i = start + jnp.arange(q.shape[0])[:, None]
    shift = c.lengths[1] - c.lengths[0]
    visibility = visibility_of(arguments)
    pairs = visibility.between(jnp, i, jnp.arange(k.shape[0]), k.shape[0], shift)
    options |= dropped(c, arguments, index, i, k)
    alone = visibility.causal is True and c.lengths[0] <= c.lengths[1] and not visibility.masked
    if alone and c.family.prepare is quadratic.prepare:  # every query sees a known number of keys, at least one
        a = quadratic.prepare(jnp, q, k, v, **options)
        a = a._replace(pairs=pairs, count=quadratic.cast(jnp, i + (1 + shift), a.dtype))
        if a.drop is not None:
            a = a._replace(drop=quadratic.masked(jnp, a, a.drop))
    else:
        if "log_forget" in arguments:
            options |= {name: x for name, x in arguments.items() if name in ("log_forget", "kept")}
            options["at"] = i[:, 0] + shift
        a = c.family.prepare(jnp, q, k, v, mask=pairs, **options)
    return c.family.scored(jnp, a, blocks.options_of(p))


def dropped(c: blocks.Call, arguments: Keywords, index: Index, i: Array, k: Array) -> dict[str, Array]:
    """Dropout by counter as a mask in the compute dtype that multiplies the weights."""
    if "dropout" not in arguments or arguments["dropout"][0] <= 0:
        return {}
    p, seed = arguments["dropout"]
    *items, head = index or (0,)
    item: Number = 0
    for size, at in zip(c.leading[:-1], items, strict=True):
        item = item * size + at
    counter = tuple(jnp.asarray(x).astype(jnp.uint32) for x in (jnp.arange(k.shape[0]), i, head, item))
    kept = keep_mask_of_counters(jnp, counter, p, seed).astype(quadratic.compute_dtype(jnp, k))
    return {"dropout_mask": kept * (1.0 / (1.0 - p))}


def over_blocks(
    segment: Segment, block: Callable[[Carry, Array], tuple[Carry, Output]], carry: Carry
) -> tuple[Carry, Output]:
    """scan of `block(carry, start)` over the blocks of a segment."""
    starts = segment.start + segment.rows * jnp.arange(segment.blocks)
    return jax.lax.scan(block, carry, starts)


# ---------------------------------------------------------------------------------------------- calls

SLOWER = (ENTMAX.name,)  # only by name, for less memory: gradients find the thresholds once more
OPS = score_ops()
SEED = "dropout_seed"
Arrays = dict[str, Array]


class Static(NamedTuple):
    """The static arguments of a program: the op and the options that are not arrays."""

    op: str
    options: tuple[tuple[str, Option], ...]


def divided(op: str, arguments: Keywords) -> tuple[Static, Arrays]:
    """The arguments of a call, split into static ones and arrays."""
    arguments = {name: x for name, x in arguments.items() if x is not None}
    if "dropout" in arguments and isinstance(arguments["dropout"][1], jax.Array):
        p, arguments[SEED] = arguments.pop("dropout")
        arguments["dropout"] = (p, None)
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    static = Static(op, tuple((name, x) for name, x in arguments.items() if name not in arrays))
    return static, varying_alike(arrays)


def arguments_of(static: Static, arrays: Arrays) -> Keywords:
    """The inverse of `divided`."""
    arguments = {**dict(static.options), **arrays}
    if SEED in arguments:
        arguments["dropout"] = (arguments["dropout"][0], arguments.pop(SEED))
    return arguments


def call_of(static: Static, arrays: Arrays) -> blocks.Call:
    """The call with its tokens in the compute dtype, so that they are cast once, not per block."""
    arguments = arguments_of(static, arrays)
    dtype = quadratic.compute_dtype(jnp, arguments["q"])
    q, k, v = (quadratic.cast(jnp, arguments.pop(name), dtype) for name in "qkv")
    return blocks.call(RECORDS[static.op].family, q, k, v, arguments, SCORES)


def tokens_of(c: blocks.Call, index: Index, keys: int) -> Arrays:
    """Keys and values of an item that a segment sees."""
    return {name: slice_of(c, name, c.arrays[name], index, 0, 0, keys) for name in "kv"}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@transforms.promoting
def attended(static: Static, arrays: Arrays) -> Array:
    """o (..., L, e) in the dtype of q."""
    c = call_of(static, arrays)
    pieces = [segment_output(c, segment) for segment in segments(c)]
    o = jnp.concatenate(pieces, -2) if pieces else jnp.zeros((*c.leading, 0, c.arrays["v"].shape[-1]))
    return o.astype(arrays["q"].dtype)


def segment_output(c: blocks.Call, segment: Segment) -> Array:
    """o of the queries of a segment."""
    width = c.arrays["v"].shape[-1]
    shape = (*c.leading, segment.rows * segment.blocks, width)
    if segment.keys == 0 or 0 in c.leading:
        return jnp.zeros(shape, c.arrays["q"].dtype)

    def item(number: Array) -> Array:
        index = unravel(number, c.leading)
        tokens = tokens_of(c, index, segment.keys)

        def block(carry: None, start: Array) -> tuple[None, Array]:
            p = part(c, tokens, index, start, segment)
            return None, blocks.output_of(jnp, p, inputs_and_scores(c, p, index, start))

        return over_blocks(segment, block, None)[1]

    return lax.map(item, jnp.arange(math.prod(c.leading))).reshape(shape)


@transforms.promoting
def vjp(static: Static, arrays: Arrays, do: Array) -> Arrays:
    """Gradients of the arguments that have one, in their dtypes, added up in the compute dtype."""
    c = call_of(static, arrays)
    names = [name for name in blocks.DIFFERENTIABLE if name in arrays]
    total = {name: jnp.zeros_like(c.arrays[name], dtype=c.arrays["q"].dtype) for name in names}
    for segment in segments(c):
        if segment.keys and 0 not in c.leading:
            total = segment_gradients(c, segment, do, total)
    return {name: quadratic.cast(jnp, x, arrays[name].dtype) for name, x in total.items()}


def segment_gradients(c: blocks.Call, segment: Segment, do: Array, total: Arrays) -> Arrays:
    """`total` with the gradients added that come from the queries of a segment."""
    rows, keys = segment.rows, segment.keys

    def item(total: Arrays, number: Array) -> tuple[Arrays, None]:
        index = unravel(number, c.leading)
        tokens = tokens_of(c, index, keys)

        def block(total: Arrays, start: Array) -> tuple[Arrays, None]:
            p = part(c, tokens, index, start, segment)
            there = slice_of(c, "do", do, index, start, rows, keys)
            grads = blocks.gradients_of(jnp, p, inputs_and_scores(c, p, index, start), there)
            return {n: add_slice(c, n, x, grads[n], index, start, rows, keys) for n, x in total.items()}, None

        return over_blocks(segment, block, total)[0], None

    return lax.scan(item, total, jnp.arange(math.prod(c.leading)))[0]


def attended_fwd(static: Static, arrays: Arrays) -> tuple[Array, Arrays]:
    return attended(static, arrays), arrays


def attended_bwd(static: Static, arrays: Arrays, do: Array) -> tuple[dict[str, Array | None]]:
    grads = vjp(static, arrays, do)
    return ({name: grads.get(name) for name in arrays},)


attended.defvjp(attended_fwd, attended_bwd)


def attend(op: str, q: Array, k: Array, v: Array, **options: object) -> Array:
    """An op of `OPS`."""
    o: Array = attended(*divided(op, {"q": q, "k": k, "v": v, **options}))
    return o


def pull(op: str, q: Array, k: Array, v: Array, do: Array, *rest: None, **options: object) -> Arrays:
    """The explicit gradients of an op of `OPS`."""
    static, arrays = divided(op, {"q": q, "k": k, "v": v, **options})
    arrays, do = varying_alike((arrays, do))
    return vjp(static, arrays, do)


def is_faster(op: str, q: Array, k: Array, *rest: Array, **options: object) -> bool:
    """Whether there are enough scores, on a CPU: nothing is known of other devices, and a traced array has none."""
    return jax.default_backend() == "cpu" and op not in SLOWER and blocks.is_faster(q, k)


KERNELS = {op: blocks.kernel(partial(attend, op), is_faster=partial(is_faster, op)) for op in OPS}
KERNELS |= {f"{op}_vjp": blocks.kernel(partial(pull, op), is_faster=partial(is_faster, op)) for op in OPS}
