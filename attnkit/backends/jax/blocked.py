"""Quadratic attention in blocks of queries, as loops of a compiled program, with explicit gradients.

Nothing is kept for the gradients but the arguments: memory is O((L + S)·d + block), forward and backward.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from attnkit._core import blocks, quadratic
from attnkit._core.dispatch import Kernel
from attnkit.backends.jax import parts
from attnkit.ops.statistics_families import FAMILIES

ENOUGH = {
    "softmax_attention": 1 << 21,
    "pointwise_attention": 1 << 21,
    "entmax_attention": math.inf,  # only by name, for less memory: gradients find the thresholds once more
    "gaussian_attention": 1 << 21,
}
"""Scores of a call from which it took less time than the generic body under jit."""
OPS = tuple(ENOUGH)
DIFFERENTIABLE = ("q", "k", "v", "bias", "alpha")
SEED = "dropout_seed"
Arrays = dict[str, Array]


class Static(NamedTuple):
    """What a program is compiled for, beside shapes and dtypes: the op and its options that are no arrays."""

    op: str
    options: tuple[tuple[str, Any], ...]


def divided(op: str, given: dict[str, Any]) -> tuple[Static, Arrays]:
    """The arguments of a call, arrays apart."""
    given = {name: x for name, x in given.items() if x is not None}
    if "dropout" in given and isinstance(given["dropout"][1], jax.Array):
        p, given[SEED] = given.pop("dropout")
        given["dropout"] = (p, None)
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    return Static(op, tuple((name, x) for name, x in given.items() if name not in arrays)), arrays


def given_by(static: Static, arrays: Arrays) -> dict[str, Any]:
    """The inverse of `divided`."""
    given = {**dict(static.options), **arrays}
    if SEED in given:
        given["dropout"] = (given["dropout"][0], given.pop(SEED))
    return given


def call_of(static: Static, arrays: Arrays) -> blocks.Call:
    """The call with its tokens in the compute dtype, so that they are cast once and not for every block."""
    given = given_by(static, arrays)
    dtype = quadratic.compute_dtype(jnp, given["q"])
    q, k, v = (quadratic.cast(jnp, given.pop(name), dtype) for name in "qkv")
    return blocks.call(FAMILIES[static.op], q, k, v, given, parts.SCORES)


def tokens_of(c: blocks.Call, index: parts.Index, keys: int) -> Arrays:
    """Keys and values of an item that a segment sees."""
    return {name: parts.taken(c, name, c.arrays[name], index, 0, 0, keys) for name in "kv"}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attended(static: Static, arrays: Arrays) -> Array:
    """o (..., L, e) in the dtype of q."""
    c = call_of(static, arrays)
    pieces = [segment_output(c, segment) for segment in parts.segments(c)]
    o = jnp.concatenate(pieces, -2) if pieces else jnp.zeros((*c.leading, 0, c.arrays["v"].shape[-1]))
    return o.astype(arrays["q"].dtype)


def segment_output(c: blocks.Call, segment: parts.Segment) -> Array:
    """o of the queries of a segment."""
    width = c.arrays["v"].shape[-1]
    shape = (*c.leading, segment.rows * segment.blocks, width)
    if segment.keys == 0 or 0 in c.leading:
        return jnp.zeros(shape, c.arrays["q"].dtype)

    def item(number: Array) -> Array:
        index = parts.unravel(number, c.leading)
        tokens = tokens_of(c, index, segment.keys)

        def block(carry: None, start: Array) -> tuple[None, Array]:
            p = parts.part(c, tokens, index, start, segment)
            return None, blocks.output_of(jnp, p, parts.prepared(c, p, index, start))

        return parts.over_blocks(segment, block, None)[1]

    return lax.map(item, jnp.arange(math.prod(c.leading))).reshape(shape)


def pulled(static: Static, arrays: Arrays, do: Array) -> Arrays:
    """Gradients of the arguments that have one, in their dtypes, added up in the compute dtype."""
    c = call_of(static, arrays)
    names = [name for name in DIFFERENTIABLE if name in arrays]
    total = {name: jnp.zeros_like(c.arrays[name], dtype=c.arrays["q"].dtype) for name in names}
    for segment in parts.segments(c):
        if segment.keys and 0 not in c.leading:
            total = segment_gradients(c, segment, do, total)
    return {name: quadratic.cast(jnp, x, arrays[name].dtype) for name, x in total.items()}


def segment_gradients(c: blocks.Call, segment: parts.Segment, do: Array, total: Arrays) -> Arrays:
    """`total` with the gradients added that come from the queries of a segment."""
    rows, keys = segment.rows, segment.keys

    def item(total: Arrays, number: Array) -> tuple[Arrays, None]:
        index = parts.unravel(number, c.leading)
        tokens = tokens_of(c, index, keys)

        def block(total: Arrays, start: Array) -> tuple[Arrays, None]:
            p = parts.part(c, tokens, index, start, segment)
            there = parts.taken(c, "do", do, index, start, rows, keys)
            grads = blocks.gradients_of(jnp, p, parts.prepared(c, p, index, start), there)
            return {n: parts.added(c, n, x, grads[n], index, start, rows, keys) for n, x in total.items()}, None

        return parts.over_blocks(segment, block, total)[0], None

    return lax.scan(item, total, jnp.arange(math.prod(c.leading)))[0]


def kept(static: Static, arrays: Arrays) -> tuple[Array, Arrays]:
    return attended(static, arrays), arrays


def gradients(static: Static, arrays: Arrays, do: Array) -> tuple[dict[str, Array | None]]:
    found = pulled(static, arrays, do)
    return ({name: found.get(name) for name in arrays},)


attended.defvjp(kept, gradients)


def attend(op: str, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """An op of `OPS`."""
    o: Array = attended(*divided(op, {"q": q, "k": k, "v": v, **options}))
    return o


def pull(op: str, q: Array, k: Array, v: Array, do: Array, *rest: None, **options: Any) -> Arrays:
    """Its explicit gradients."""
    return pulled(*divided(op, {"q": q, "k": k, "v": v, **options}), do)


def unsupported(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """Why a call is not served in blocks."""
    if options.get("return_lse") or any(x is not None for x in rest[1:]):
        return "lse is served by the generic implementation"
    if rest and rest[0] is None:
        return "no cotangent of the output was given"
    return None


def pays(op: str, q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> bool:
    """Whether there are enough scores, on a CPU: nothing is known of other devices, and a traced array has none."""
    return jax.default_backend() == "cpu" and ENOUGH[op] <= max(
        math.prod(q.shape[:-1]) * k.shape[-2], math.prod(k.shape[:-1]) * q.shape[-2]
    )


KERNELS = {op: Kernel("blocked", partial(attend, op), unsupported, partial(pays, op)) for op in OPS}
KERNELS |= {f"{op}_vjp": Kernel("blocked", partial(pull, op), unsupported, partial(pays, op)) for op in OPS}
