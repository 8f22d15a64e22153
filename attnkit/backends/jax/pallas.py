"""Launches of the Pallas kernels of point-wise attention, and their gradients for JAX.

Causality, windows, key_lengths and query_mask reach the kernels as two numbers per query: it sees the keys
first_i ≤ j < limit_i. The factor gain·n^-alpha multiplies rows of o and of do outside.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from attnkit._core import quadratic
from attnkit._core.activations import ACTIVATIONS
from attnkit._core.check import dtype_name
from attnkit._core.dispatch import with_gradients
from attnkit._core.mask import log, power
from attnkit.backends.jax import blocked, gpu, transforms
from attnkit.backends.jax.blocked import Arrays, Static, arguments_of, divided
from attnkit.backends.jax.rows import bounds, lengths
from attnkit.kernels.plan import Layout, Plan, cached_plan, signature
from attnkit.kernels.strides import row_major, strides_of
from attnkit.ops.pointwise import POINTWISE, pointwise_attention

OP = POINTWISE.name
TILE = 64  # queries, and keys
LEAST = 16  # minimal row length of a tile, which is a power of 2
WIDEST = 256  # head size
REFUSED = ("mask", "bias", "dropout", "dropout_mask")


class Launch(NamedTuple):
    """A call as the kernels take it: tokens and vectors padded to whole tiles; padded queries see no key."""

    plan: Plan
    like: Arrays  # q, k and v
    tokens: tuple[Array, Array, Array]
    rows: tuple[Array, Array, Array]  # shift, first, limit: (items, 1, L)
    factor: Array  # (..., L, 1)
    activation: str
    interpret: bool

    @property
    def items(self) -> int:
        return math.prod(self.plan.layout.leading)


def whole_tiles(x: Array) -> Array:
    """Tokens (..., L, width) as (items, L, width), zeros behind them up to a tile and a power of 2."""
    x = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    width = max(LEAST, 1 << (x.shape[2] - 1).bit_length())
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, width - x.shape[2])))


def vector(x: Any, a: Layout, dtype: Any) -> Array:
    """A number per query as (items, 1, L), zeros behind it."""
    x = jnp.broadcast_to(x, a.shape_of("rows")).reshape(math.prod(a.leading), 1, a.queries).astype(dtype)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % TILE)))


def prepared(static: Static, arrays: Arrays, interpret: bool) -> Launch:
    """The call as launches need it."""
    arguments = {"activation": "relu", **arguments_of(static, arrays)}
    q, k, v = (arguments[name] for name in "qkv")
    plan = cached_plan(signature(q, k, v, arguments))
    a, n = plan.layout, plan.numbers
    first, limit = bounds(plan, arguments)
    length = lengths(plan, arguments).astype(jnp.float32) if any(n.rows) else 1.0
    shift = n.shift - log(jnp, length) if n.log_length else n.shift
    factor = jnp.asarray(power(length, n.alpha) * n.gain, jnp.float32)
    return Launch(
        plan,
        {"q": q, "k": k, "v": v},
        (whole_tiles(q), whole_tiles(k), whole_tiles(v)),
        (vector(shift, a, jnp.float32), vector(first, a, jnp.int32), vector(limit, a, jnp.int32)),
        jnp.broadcast_to(factor, a.shape_of("rows"))[..., None],
        arguments["activation"],
        interpret,
    )


def launch(launched: Launch, kernel: Callable[..., None], inputs: Any, specs: Any, outputs: Any) -> Any:
    """Run a kernel with a program per item and tile; `outputs` are the shapes (items, tokens, width) of its outputs."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    from attnkit.kernels.pallas import pointwise

    h = ACTIVATIONS[launched.activation]
    score = pointwise.Score(partial(h.h, jnp), partial(h.slope, jnp), launched.plan.numbers.scale)
    return pl.pallas_call(
        partial(kernel, score, TILE),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outputs],
        grid=(launched.items, outputs[0][1] // TILE),
        in_specs=specs,
        out_specs=[pl.BlockSpec((1, TILE, shape[2]), lambda b, i: (b, i, 0)) for shape in outputs],
        interpret=launched.interpret,
        compiler_params=None if launched.interpret else triton.CompilerParams(),  # or some versions take Mosaic
    )(*inputs)


def item_of(a: Layout, name: str, x: Array) -> Callable[[Any], Any]:
    """The item of q, k or v for an item of the call."""
    leading, groups = (a.shared, a.groups) if name in ("k", "v") else (a.leading, 1)
    strides = strides_of(x.shape[:-2], row_major(x.shape[:-2]), leading)

    def number(item: Any) -> Any:
        index = blocked.unravel(item, a.leading)
        index = (*index[:-1], index[-1] // groups) if index else ()
        return sum(at * stride for at, stride in zip(index, strides, strict=True))

    return number


def specs_of(launched: Launch, by_keys: bool) -> tuple[Any, ...]:
    """The block specs of q, k, v and the rows: a tile of one kind of tokens and all of the other."""
    from jax.experimental import pallas as pl

    def tokens(name: str, x: Array, tiled: bool) -> Any:
        of = item_of(launched.plan.layout, name, launched.like[name])
        shape = (1, TILE if tiled else x.shape[1], x.shape[2])
        return pl.BlockSpec(shape, lambda b, i: (of(b), i if tiled else 0, 0))

    def rows(x: Array) -> Any:
        return pl.BlockSpec((1, 1, x.shape[2] if by_keys else TILE), lambda b, i: (b, 0, 0 if by_keys else i))

    of_tokens = (tokens(n, x, (n == "q") != by_keys) for n, x in zip("qkv", launched.tokens, strict=True))
    return (*of_tokens, *(rows(x) for x in launched.rows))


def output(static: Static, arrays: Arrays, interpret: bool) -> Array:
    """o (..., L, e) in the dtype of q."""
    at = prepared(static, arrays, interpret)
    (q, _, v), a = at.tokens, at.plan.layout
    shape = (at.items, q.shape[1], v.shape[2])
    if 0 in (*shape, v.shape[1]):
        return jnp.zeros(at.plan.layout.shape_of("o"), arrays["q"].dtype)
    from attnkit.kernels.pallas import pointwise

    (o,) = launch(at, pointwise.forward, (*at.tokens, *at.rows), specs_of(at, False), [shape])
    return (cropped(a, o, a.queries, a.e) * at.factor).astype(arrays["q"].dtype)


def cropped(a: Layout, x: Array, tokens: int, width: int) -> Array:
    """(items, tokens, width) in whole tiles as (..., tokens, width)."""
    return x[:, :tokens, :width].reshape(*a.leading, tokens, width)


def vjp(static: Static, arrays: Arrays, do: Array, interpret: bool) -> Arrays:
    """Gradients of q, k and v in their dtypes."""
    at = prepared(static, arrays, interpret)
    q, k, v = at.tokens
    if 0 in (at.items, q.shape[1], k.shape[1]):
        return {name: jnp.zeros_like(arrays[name]) for name in "qkv"}
    from jax.experimental import pallas as pl

    from attnkit.kernels.pallas import pointwise

    dy = whole_tiles(do.astype(jnp.float32) * at.factor)
    inputs = (*at.tokens, dy, *at.rows)
    tile_of_do = pl.BlockSpec((1, TILE, dy.shape[2]), lambda b, i: (b, i, 0))
    all_of_do = pl.BlockSpec((1, *dy.shape[1:]), lambda b, i: (b, 0, 0))
    one, both = specs_of(at, False), specs_of(at, True)
    of_queries = (*one[:3], tile_of_do, *one[3:])
    (dq,) = launch(at, pointwise.gradient_of_queries, inputs, of_queries, [(at.items, *q.shape[1:])])
    of_tile = [pl.BlockSpec((1, 1, 1), lambda b, j: (b, j, 0))] * 2
    shapes = [(at.items, *x.shape[1:]) for x in (k, v)]
    dk, dv = launch(
        at,
        pointwise.gradients_of_keys,
        (*inputs, *tiles_of_queries(at, k.shape[1] // TILE)),
        (*both[:3], all_of_do, *both[3:], *of_tile),
        shapes,
    )
    scale = at.plan.numbers.scale
    grads = {"q": dq * scale, "k": dk * scale, "v": dv}
    return {name: summed(at.plan.layout, arrays[name], x) for name, x in grads.items()}


def vjp_once(static: Static, arrays: Arrays, do: Array, interpret: bool) -> Arrays:
    """`vjp`, which refuses to be differentiated."""
    once = transforms.differentiated_once(f"{OP}: impl='pallas'", partial(vjp, static, interpret=interpret))
    grads: Arrays = once(arrays, do)
    return grads


def summed(a: Layout, like: Array, x: Array) -> Array:
    """Gradients of the items of the call, summed to the shape of an argument and in its dtype."""
    return quadratic.sum_to(jnp, cropped(a, x, *like.shape[-2:]), tuple(like.shape)).astype(like.dtype)


def tiles_of_queries(at: Launch, tiles: int) -> tuple[Array, Array]:
    """The range of query tiles that may see each tile of keys, two arrays (items, tiles, 1)."""
    _, first, limit = (x.reshape(at.items, -1, 1, TILE) for x in at.rows)
    j = TILE * jnp.arange(tiles)
    meets = (first.min(-1) < j + TILE) & (limit.max(-1) > j)
    count, any_of = meets.shape[1], meets.any(1)
    start, stop = jnp.argmax(meets, 1), count - jnp.argmax(meets[:, ::-1], 1)
    return tuple(jnp.where(any_of, x, 0).astype(jnp.int32)[..., None] for x in (start, stop))  # type: ignore[return-value]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attended(static: Static, interpret: bool, arrays: Arrays) -> Array:
    return output(static, arrays, interpret)


def attended_fwd(static: Static, interpret: bool, arrays: Arrays) -> tuple[Array, Arrays]:
    return attended(static, interpret, arrays), arrays


def attended_bwd(static: Static, interpret: bool, arrays: Arrays, do: Array) -> tuple[dict[str, Array | None]]:
    grads = vjp_once(static, arrays, do, interpret)
    return ({name: grads.get(name) for name in arrays},)


attended.defvjp(attended_fwd, attended_bwd)


def attend(q: Array, k: Array, v: Array, *, interpret: bool = False, **options: Any) -> Array:
    """pointwise_attention; `interpret` runs the kernels as an XLA program on any device, for tests."""
    static, arrays = divided(OP, {"q": q, "k": k, "v": v, **options})
    o: Array = attended(static, interpret, arrays)
    return o


def pull(q: Array, k: Array, v: Array, do: Array, *, interpret: bool = False, **options: Any) -> Arrays:
    """The explicit gradients of pointwise_attention."""
    return vjp_once(*divided(OP, {"q": q, "k": k, "v": v, **options}), do, interpret)


def unsupported_options(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """Why the kernels do not support a call on any device."""
    for name in REFUSED:
        if options.get(name) is not None:
            return f"{name} is served by other implementations"
    if dtype_name(q) == "float64":
        return "the kernels compute in float32"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"the kernels serve head sizes up to {WIDEST}"
    return None


def unsupported(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """Why a call is not supported."""
    return gpu.unsupported("Pallas", q, k, v, rest, options) or unsupported_options(q, k, v, *rest, **options)


KERNELS = with_gradients(pointwise_attention, gpu.kernel("pallas", attend, unsupported, None), pull)
