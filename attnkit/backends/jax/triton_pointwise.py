"""Point-wise attention on JAX arrays by the Triton kernels that serve torch.

Arrays lie in row-major order; leading axes that cannot be joined are broadcast in memory. n^-alpha and log n come from
JAX where queries differ in them. vmap adds a leading axis; with dropout by counter it is a loop, for counters belong
to a call.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from attnkit._core import blocks, quadratic
from attnkit._core.check import dtype_name
from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS
from attnkit._core.mask import log, power
from attnkit.backends.jax import transforms, triton_call
from attnkit.backends.jax.blocked import SEED, Arrays, Static, divided, given_by
from attnkit.backends.jax.pallas_pointwise import bounds
from attnkit.backends.jax.triton_call import Launch
from attnkit.kernels.strides import joined, row_major, strides_of

OP = "pointwise_attention"
WIDEST = 256  # head size
INPUTS = ("q", "k", "v", "bias", "mask", "dropout_mask", "key_lengths", "query_mask", "factors", "logs", SEED)
DIFFERENTIABLE = ("q", "k", "v", "bias")
CAPABILITY = 9  # tiles are those of the newest GPUs where arrays do not say which one they are on


# ---------------------------------------------------------------------------------------------- a call


class Prepared(NamedTuple):
    """A call as the kernels take it."""

    c: blocks.Call
    arrays: Arrays  # those of `INPUTS` that the call has
    activation: str
    limits: tuple[int | None, ...]
    numbers: tuple[float | None, ...]
    last_kept: int

    @property
    def leading(self) -> tuple[int, ...]:
        return self.c.leading

    @property
    def shared(self) -> tuple[int, ...]:
        """Leading axes of k and v."""
        return (*self.leading[:-1], self.leading[-1] // self.c.groups) if self.leading else ()

    @property
    def heads(self) -> int:
        return self.leading[-1] if self.leading else 1

    @property
    def items(self) -> int:
        return math.prod(self.leading[:-1])

    def wanted(self, name: str) -> tuple[int, ...]:
        """The shape that an input is read in."""
        queries, keys = self.c.lengths
        arrays = self.c.arrays
        if name in ("k", "v"):
            return (*self.shared, keys, arrays[name].shape[-1])
        if name == "q":
            return (*self.leading, queries, arrays["q"].shape[-1])
        if name == "key_lengths":
            return self.leading
        return (*self.leading, queries) if name in ("query_mask", "factors", "logs") else (*self.leading, queries, keys)


def prepared(static: Static, arrays: Arrays) -> Prepared:
    """Arrays and numbers; what is the same for all queries is put into gain and shift."""
    given = given_by(static, arrays)
    q, k, v = (given.pop(name) for name in "qkv")
    c = blocks.call(RECORDS[OP].family, q, k, v, given)
    given = {**c.common, **c.arrays}
    own = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "length": "visible", "shift": 0.0, **c.own}
    found = {name: x for name, x in c.arrays.items() if name in INPUTS}
    found |= {name: found[name].astype(jnp.uint8) for name in ("mask", "query_mask") if name in found}
    gain, alpha, shift = float(own["gain"]), float(own["alpha"]), own["shift"]
    n = c.arrays.get("length", own["length"])
    n = lengths(c) if isinstance(n, str) else n
    if not hasattr(n, "ndim"):
        gain, alpha, shift = gain * n**-alpha, 0.0, -math.log(n) if isinstance(shift, str) else shift
    if alpha:
        found["factors"] = power(n.astype(jnp.float32), alpha)
    if isinstance(shift, str):
        found["logs"] = log(jnp, n.astype(jnp.float32))
    last_kept = 0
    if given.get("dropout") is not None and given["dropout"][0] > 0:
        p, seed = given["dropout"]
        gain, last_kept = gain / (1.0 - p), math.ceil((1.0 - p) * 2**32) - 1
        found[SEED] = jnp.asarray(seed, jnp.uint32).reshape(1)
    scale = given.get("scale")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    moved = None if isinstance(shift, str) else float(shift) or None
    numbers = (scale, moved, gain, alpha or None)
    return Prepared(c, found, own["activation"], limits(c, given), numbers, last_kept)


def limits(c: blocks.Call, given: dict[str, Any]) -> tuple[int | None, ...]:
    """limits of `attnkit.kernels.triton.pointwise`."""
    queries, keys = c.lengths
    offset, (before, after) = keys - queries, given.get("window") or (None, None)
    left = None if before is None else int(before) - offset
    reaches = [offset] if given.get("causal") is True else [0] if given.get("causal") == "upper_left" else []
    reaches += [] if after is None else [offset + int(after)]
    valid, lengths = keys, given.get("key_lengths")
    if lengths is not None and not hasattr(lengths, "ndim"):
        valid = min(keys, int(lengths))
    return queries, valid, left, min(reaches, default=None)


def lengths(c: blocks.Call) -> Any:
    """n_i: a number where all queries see as many keys, else (..., L); 1 where a query sees none."""
    given = {**c.common, **c.arrays}
    if not any(given.get(name) for name in ("causal", "window")) and not any(
        given.get(name) is not None for name in ("key_lengths", "query_mask", "mask")
    ):
        return max(c.lengths[1], 1)
    first, limit = bounds(c)
    if "mask" in given:
        j = jnp.arange(c.lengths[1])
        inside = (j >= first[..., None]) & (j < limit[..., None]) & given["mask"]
        return jnp.maximum(jnp.sum(inside, -1, dtype=jnp.int32), 1)
    return jnp.maximum(limit - first, 1)


def views(p: Prepared) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    """Arrays and STRIDES of the kernels' inputs."""
    found: list[Array] = []
    strides: list[Any] = []
    for name in INPUTS:
        x = p.arrays.get(name)
        if x is None or name == SEED:
            found.append(p.arrays["q"] if x is None else x)
            strides.append(None if x is None else (1,))
            continue
        x, own = view(x, p.wanted(name), len(p.shared if name in ("k", "v") else p.leading))
        found.append(x)
        strides.append(own)
    return tuple(found), tuple(strides)


def view(x: Array, wanted: tuple[int, ...], leading: int) -> tuple[Array, tuple[int, ...]]:
    """x and the strides with which it is read as (items, heads, ...), the first `leading` axes of `wanted` joined."""
    own = strides_of(x.shape, row_major(x.shape), wanted)
    own, shape = (own, wanted) if leading else ([0, *own], (1, *wanted))
    split = max(leading, 1) - 1
    items = joined(shape[:split], own[:split])
    if items is None:
        x = jnp.broadcast_to(x, wanted)
        own = row_major(wanted)
        items = joined(shape[:split], own[:split]) or 0
    return x, (items, *own[split:])


def constants(p: Prepared, kernel: str, strides: tuple[Any, ...], *functions: str) -> dict[str, Any]:
    """The arguments of a kernel that are known when it is compiled."""
    from attnkit.kernels.triton import activations
    from attnkit.kernels.triton.blocks import padded, tile, with_pairs

    q, v = p.c.arrays["q"], p.c.arrays["v"]
    d, e = q.shape[-1], v.shape[-1]
    h = dict(zip(("H", "DH"), activations.ACTIVATIONS[p.activation], strict=True))
    sizes = tile(kernel, q.dtype.itemsize * 8, d, e, CAPABILITY)
    beside = sum(p.arrays[n].dtype.itemsize for n in ("bias", "mask", "dropout_mask") if n in p.arrays)
    found = {name: h[name] for name in functions} | with_pairs(sizes, beside)._asdict()
    found |= {"d": d, "e": e, "D": padded(d), "E": padded(e), "LAST_KEPT": p.last_kept}
    found |= {"STRIDES": strides, "LIMITS": p.limits, "NUMBERS": p.numbers, "HEADS": (p.heads, p.c.groups)}
    return found | {"PRECISION": "tf32x3" if dtype_name(q) == "float32" else "ieee"}


# ---------------------------------------------------------------------------------------------- launches


def blocks_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


def output(static: Static, arrays: Arrays) -> Array:
    """o (..., L, e) in the dtype of q."""
    from attnkit.kernels.triton import flat

    p = prepared(static, arrays)
    shape = (*p.leading, p.c.lengths[0], arrays["v"].shape[-1])
    if 0 in shape:
        return jnp.zeros(shape, arrays["q"].dtype)
    inputs, strides = views(p)
    found = constants(p, "forward", (*strides, strides_out(p, shape)), "H")
    programs = blocks_of(p.c.lengths[0], found["ROWS"]) * p.heads * p.items
    outputs = (jax.ShapeDtypeStruct(shape, arrays["q"].dtype),)
    return triton_call.call(Launch(flat.forward, programs, inputs, outputs, found))[0]


def strides_out(p: Prepared, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an output, whose leading axes are those of the call or of its keys."""
    own = row_major(shape)
    return (0 if len(shape) < 4 else own[-4], 0 if len(shape) < 3 else own[-3], *own[-2:])


def pulled(static: Static, arrays: Arrays, do: Array) -> Arrays:
    """Gradients of the arguments that have one, in their dtypes."""
    p = prepared(static, arrays)
    names = [name for name in DIFFERENTIABLE if name in arrays]
    if 0 in (*p.leading, *p.c.lengths, *do.shape):
        return {name: jnp.zeros_like(arrays[name]) for name in names}
    inputs, strides = views(p)
    inputs, strides = (*inputs, do), (*strides, strides_out(p, do.shape))
    grads = {"q": gradient_of_queries(p, inputs, strides)} | gradients_of_keys(p, inputs, strides)
    if "bias" in arrays:
        grads["bias"] = gradient_of_bias(p, inputs, strides)
    return {name: quadratic.sum_to(jnp, x, arrays[name].shape).astype(arrays[name].dtype) for name, x in grads.items()}


def room(p: Prepared, name: str) -> jax.ShapeDtypeStruct:
    """A gradient before it is summed over broadcast axes: float32 if it has to be."""
    like, shape = p.c.arrays[name], p.wanted(name)
    return jax.ShapeDtypeStruct(shape, like.dtype if like.shape == shape else jnp.float32)


def gradient_of_queries(p: Prepared, inputs: tuple[Array, ...], strides: tuple[Any, ...]) -> Array:
    from attnkit.kernels.triton import flat

    dq = room(p, "q")
    found = constants(p, "backward_queries", (*strides, strides_out(p, dq.shape)), "H", "DH")
    programs = blocks_of(p.c.lengths[0], found["ROWS"]) * p.heads * p.items
    return triton_call.call(Launch(flat.backward_queries, programs, inputs, (dq,), found))[0]


def gradients_of_keys(p: Prepared, inputs: tuple[Array, ...], strides: tuple[Any, ...]) -> Arrays:
    from attnkit.kernels.triton import flat

    dk, dv = room(p, "k"), room(p, "v")
    both = (*strides, strides_out(p, dk.shape), strides_out(p, dv.shape))
    found = constants(p, "backward_keys", both, "H", "DH")
    found |= {"STORED": p.c.lengths[1], "HEADS": (p.heads // p.c.groups, p.c.groups)}
    programs = blocks_of(p.c.lengths[1], found["KEYS"]) * (p.heads // p.c.groups) * p.items
    grads = triton_call.call(Launch(flat.backward_keys, programs, inputs, (dk, dv), found))
    return dict(zip("kv", grads, strict=True))


def gradient_of_bias(p: Prepared, inputs: tuple[Array, ...], strides: tuple[Any, ...]) -> Array:
    """(items, heads, L, S) as (..., L, S), 1 for axes that all share."""
    from attnkit.kernels.triton import flat

    bias, (queries, keys) = p.arrays["bias"], p.c.lengths
    items = 1 if all(size == 1 for size in bias.shape[:-3]) else p.items
    heads = 1 if bias.ndim < 3 or bias.shape[-3] == 1 else p.heads
    shape = (items, heads, queries, keys)
    found = constants(p, "backward_queries", (*strides, tuple(row_major(shape))), "H", "DH")
    found |= {"STORED": keys, "ITEMS": p.items, "OWN": (items, heads)}
    programs = blocks_of(queries, found["ROWS"]) * blocks_of(keys, found["KEYS"]) * heads * items
    dbias = jax.ShapeDtypeStruct(shape, jnp.float32)
    (grad,) = triton_call.call(Launch(flat.backward_bias, programs, inputs, (dbias,), found))
    return grad.reshape(*p.leading[:-1], *shape[1:]) if items > 1 else grad


# ---------------------------------------------------------------------------------------------- transformations


def with_axis(arrays: Arrays, batched: dict[str, bool], size: int, own: tuple[str, ...]) -> Arrays:
    """The arrays with the axis of vmap as the first leading one; those in `own` have it even if they are shared."""
    leading = max(arrays[name].ndim - batched[name] - 2 for name in "qkv")
    found = {}
    for name, x in arrays.items():
        rank = x.ndim - batched[name]
        missing = leading - max(0, rank - blocks.TRAILING.get(name, 0))
        if batched[name]:
            found[name] = x.reshape(size, *(1,) * missing, *x.shape[1:])
        else:
            found[name] = jnp.broadcast_to(x, (size, *(1,) * missing, *x.shape)) if name in own else x
    return found


def repeated(size: int, x: Array, batched: bool) -> Array:
    """x with the axis of vmap."""
    return x if batched else jnp.broadcast_to(x, (size, *x.shape))


def mapped(function: Any, static: Static, own: tuple[str, ...]) -> Any:
    """`function(static, arrays, ...)` with a rule for vmap: one more leading axis, or a loop if there is dropout."""

    @custom_vmap
    def run(arrays: Arrays, *rest: Array) -> Any:
        return function(static, arrays, *rest)

    def rule(size: int, batched: list[Any], arrays: Arrays, *rest: Array) -> tuple[Any, Any]:
        if SEED in arrays or any(name == "dropout" for name, _ in static.options):
            wide = jax.tree.map(
                lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), [arrays, *rest], batched
            )
            found = jax.lax.map(lambda given: run(*given), wide)
        else:
            rest = tuple(
                x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(rest, batched[1:], strict=True)
            )
            found = run(with_axis(arrays, batched[0], size, own), *rest)
        return found, jax.tree.map(lambda x: True, found)

    run.def_vmap(rule)
    return run


def pulled_once(static: Static, arrays: Arrays, do: Array) -> Arrays:
    """Explicit gradients, which refuse to be differentiated."""
    once = transforms.differentiated_once(f"{OP}: impl='triton'", mapped(pulled, static, DIFFERENTIABLE))
    grads: Arrays = once(arrays, do)
    return grads


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attended(static: Static, arrays: Arrays) -> Array:
    """o, with explicit gradients."""
    o: Array = mapped(output, static, ())(arrays)
    return o


def kept(static: Static, arrays: Arrays) -> tuple[Array, Arrays]:
    return attended(static, arrays), arrays


def gradients(static: Static, arrays: Arrays, do: Array) -> tuple[dict[str, Array | None]]:
    found = pulled_once(static, arrays, do)
    return ({name: found.get(name) for name in arrays},)


attended.defvjp(kept, gradients)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """pointwise_attention."""
    o: Array = attended(*divided(OP, {"q": q, "k": k, "v": v, **options}))
    return o


def pull(q: Array, k: Array, v: Array, do: Array, **options: Any) -> Arrays:
    """Its explicit gradients."""
    return pulled_once(*divided(OP, {"q": q, "k": k, "v": v, **options}), do)


def unsupported_options(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """What the kernels do not serve on any device."""
    if dtype_name(q) == "float64":
        return "float64 is served by the generic implementation"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    seed = (options.get("dropout") or (0, 0))[1]
    if not hasattr(seed, "ndim") and int(seed) >= 2**32:
        return "dropout seeds of more than 32 bits are served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return None


def unsupported(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """Why a call is not served."""
    if jax.default_backend() != "gpu":
        return f"Triton kernels run on GPUs; the default device of JAX is a {jax.default_backend()}"
    return triton_call.missing() or unsupported_options(q, k, v, *rest, **options)


def is_faster(*arrays: Array, **options: Any) -> bool:
    """Only by name: no GPU has run them."""
    return False


KERNELS = {
    OP: Kernel("triton", attend, unsupported, is_faster),
    f"{OP}_vjp": Kernel("triton", pull, unsupported, is_faster),
}
