"""Point-wise attention on JAX arrays by the same Triton kernels as for torch.

Arrays are row-major; leading axes that cannot be merged are broadcast in memory. n^-alpha and log n are computed by JAX
if they differ between queries. vmap adds a leading axis, or loops if there is dropout by counter, because counters
belong to a single call. Launches use jax-triton, whose import clears a setting of Triton that is then restored.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from attnkit._core import blocks, quadratic
from attnkit._core.check import dtype_name
from attnkit._core.dispatch import with_gradients
from attnkit._core.mask import log, power
from attnkit._core.special import is_key
from attnkit.backends.jax import gpu, transforms
from attnkit.backends.jax.blocked import SEED, Arrays, Static, arguments_of, divided
from attnkit.backends.jax.rows import lengths
from attnkit.kernels.plan import Layout, Plan, blocks_of, cached_plan, is_array, signature
from attnkit.kernels.strides import as_items, row_major
from attnkit.ops.pointwise import POINTWISE, pointwise_attention

OP = POINTWISE.name
WIDEST = 256  # head size
INPUTS = {
    "q": "q", "k": "k", "v": "v", "bias": "pairs", "mask": "pairs", "dropout_mask": "pairs", "key_lengths": "heads",
    "query_mask": "rows", "factors": "rows", "logs": "rows", SEED: "",
}  # fmt: skip
"""The inputs of the kernels and the names of their shapes in `Layout.shape_of`."""
DIFFERENTIABLE = ("q", "k", "v", "bias")
CAPABILITY = 9  # for tile sizes if arrays have no device: the newest GPUs
CACHE = "TRITON_CACHE_DIR"


# ---------------------------------------------------------------------------------------------- jax-triton


class Launch(NamedTuple):
    """A kernel, the number of programs, its arrays, the shapes and dtypes of its outputs, and named constants."""

    kernel: Any
    programs: int
    arrays: tuple[Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: dict[str, Any]


def jax_triton() -> Any:
    """The module jax-triton, imported without changing Triton's cache."""
    before = os.environ.get(CACHE)
    try:
        import jax_triton as module
    finally:
        if before is None:
            os.environ.pop(CACHE, None)
        else:
            os.environ[CACHE] = before
    return module


def missing() -> str | None:
    """Why there is no jax-triton, or None."""
    try:
        jax_triton()
    except ImportError as error:
        return f"needs jax-triton and a JAX with CUDA ({error})"
    return None


def call(launch: Launch, compute_capability: int | None = None) -> tuple[Array, ...]:
    """Run a launch on JAX's GPU, or compile it for a compute capability such as 90."""
    outputs = jax_triton().triton_call(
        *launch.arrays,
        kernel=launch.kernel,
        out_shape=launch.outputs,
        grid=(launch.programs,),
        compute_capability=compute_capability,
        **launch.constants,
    )
    return tuple(outputs)


# ---------------------------------------------------------------------------------------------- a call


class Call(NamedTuple):
    """A call as the kernels take it."""

    arrays: Arrays  # the inputs of `INPUTS` that are present
    plan: Plan
    activation: str


def call_of(static: Static, arrays: Arrays) -> Call:
    """The options of pointwise_attention."""
    arguments = {"activation": "relu", **arguments_of(static, arrays)}
    q, k, v = (arguments[name] for name in "qkv")
    plan = cached_plan(signature(q, k, v, arguments))
    inputs = {name: x for name, x in arguments.items() if name in INPUTS and is_array(x)}
    inputs |= {name: inputs[name].astype(jnp.uint8) for name in ("mask", "query_mask") if name in inputs}
    n = plan.numbers
    if any(n.rows):
        length = lengths(plan, arguments).astype(jnp.float32)
        inputs |= {"factors": power(length, n.alpha)} if n.alpha else {}
        inputs |= {"logs": log(jnp, length)} if n.log_length else {}
    if n.drops:
        inputs[SEED] = jnp.asarray(arguments["dropout"][1], jnp.uint32).reshape(1)
    return Call(inputs, plan, arguments["activation"])


def views(c: Call) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    """Arrays and STRIDES of the kernels' inputs; q replaces absent arrays."""
    pairs = [view(c.plan.layout, what, c.arrays.get(name)) for name, what in INPUTS.items()]
    return tuple(c.arrays["q"] if x is None else x for x, _ in pairs), tuple(strides for _, strides in pairs)


def view(a: Layout, what: str, x: Array | None) -> tuple[Array | None, tuple[int, ...] | None]:
    """x and its strides as (items, heads, ...); a seed has one."""
    if x is None or not what:
        return x, None if x is None else (1,)
    shape, outer = a.shape_of(what), len(a.leading)
    strides = as_items(x.shape, row_major(x.shape), shape[:outer], *shape[outer:])
    if strides is None:
        x = jnp.broadcast_to(x, shape)
        strides = as_items(shape, row_major(shape), shape[:outer], *shape[outer:])
    return x, strides


def constants(c: Call, kernel: str, strides: tuple[Any, ...], *functions: str) -> dict[str, Any]:
    """The compile-time arguments of a kernel."""
    from attnkit.kernels.triton import activations, sizes
    from attnkit.kernels.triton.sizes import padded, with_pairs

    (a, limits, n, *_), q = c.plan, c.arrays["q"]
    rounded = kernel == "forward" and q.dtype.itemsize < 4
    h = dict(zip(("H", "DH"), activations.functions(c.activation, rounded), strict=True))
    forms = ("sharing",) * (rounded and c.activation in activations.SHARING)
    tile = sizes.pointwise(kernel, q.dtype.itemsize * 8, a.d, a.e, CAPABILITY, *forms)
    beside = sum(c.arrays[name].dtype.itemsize for name, what in INPUTS.items() if what == "pairs" and name in c.arrays)
    values = {name: h[name] for name in functions} | with_pairs(tile, beside)._asdict()
    values |= {"d": a.d, "e": a.e, "D": padded(a.d), "E": padded(a.e), "LAST_KEPT": n.last_kept}
    values |= {"STRIDES": strides, "LIMITS": (a.queries, limits.keys, limits.left, limits.right)}
    values |= {"NUMBERS": (n.scale, n.shift or None, n.gain, n.alpha or None), "HEADS": (a.heads, a.groups)}
    return values | {"PRECISION": "tf32x3" if dtype_name(q) == "float32" else "ieee"}


# ---------------------------------------------------------------------------------------------- launches


def output(static: Static, arrays: Arrays) -> Array:
    """o (..., L, e) in the dtype of q."""
    from attnkit.kernels.triton import flat

    c = call_of(static, arrays)
    a, o = c.plan.layout, jax.ShapeDtypeStruct(c.plan.layout.shape_of("o"), arrays["q"].dtype)
    if 0 in o.shape:
        return jnp.zeros(o.shape, o.dtype)
    inputs, strides = views(c)
    values = constants(c, "forward", (*strides, strides_out(a, "o")), "H")
    programs = blocks_of(a.queries, values["ROWS"]) * a.heads * a.items
    return call(Launch(flat.forward, programs, inputs, (o,), values))[0]


def strides_out(a: Layout, what: str) -> tuple[int, ...]:
    """Strides of an output."""
    shape, outer = a.shape_of(what), len(a.leading)
    return as_items(shape, row_major(shape), shape[:outer], *shape[outer:]) or ()


def vjp(static: Static, arrays: Arrays, do: Array) -> Arrays:
    """Gradients of the arguments that have one, in their dtypes."""
    c = call_of(static, arrays)
    names = [name for name in DIFFERENTIABLE if name in arrays]
    if 0 in (*c.plan.layout.leading, *do.shape, c.plan.layout.keys):
        return {name: jnp.zeros_like(arrays[name]) for name in names}
    inputs, strides = views(c)
    inputs, strides = (*inputs, do), (*strides, strides_out(c.plan.layout, "o"))
    grads = {"q": gradient_of_queries(c, inputs, strides)} | gradients_of_keys(c, inputs, strides)
    if "bias" in arrays:
        grads["bias"] = gradient_of_bias(c, inputs, strides)
    return {name: quadratic.sum_to(jnp, x, arrays[name].shape).astype(arrays[name].dtype) for name, x in grads.items()}


def room(c: Call, name: str) -> jax.ShapeDtypeStruct:
    """A gradient before it is summed over broadcast axes: float32 if it has any."""
    like, shape = c.arrays[name], c.plan.layout.shape_of(name)
    return jax.ShapeDtypeStruct(shape, like.dtype if like.shape == shape else jnp.float32)


def gradient_of_queries(c: Call, inputs: tuple[Array, ...], strides: tuple[Any, ...]) -> Array:
    from attnkit.kernels.triton import flat

    a = c.plan.layout
    values = constants(c, "backward_queries", (*strides, strides_out(a, "q")), "H", "DH")
    programs = blocks_of(a.queries, values["ROWS"]) * a.heads * a.items
    return call(Launch(flat.backward_queries, programs, inputs, (room(c, "q"),), values))[0]


def gradients_of_keys(c: Call, inputs: tuple[Array, ...], strides: tuple[Any, ...]) -> Arrays:
    from attnkit.kernels.triton import flat

    a = c.plan.layout
    both = (*strides, strides_out(a, "k"), strides_out(a, "v"))
    values = constants(c, "backward_keys", both, "H", "DH")
    values |= {"STORED": a.keys, "HEADS": (a.kv_heads, a.groups)}
    programs = blocks_of(a.keys, values["KEYS"]) * a.kv_heads * a.items
    grads = call(Launch(flat.backward_keys, programs, inputs, (room(c, "k"), room(c, "v")), values))
    return dict(zip("kv", grads, strict=True))


def gradient_of_bias(c: Call, inputs: tuple[Array, ...], strides: tuple[Any, ...]) -> Array:
    """(items, heads, L, S) as (..., L, S), 1 for shared axes."""
    from attnkit.kernels.triton import flat

    a, shape = c.plan.layout, c.plan.dbias or ()
    items, heads = shape[:2]
    values = constants(c, "backward_queries", (*strides, tuple(row_major(shape))), "H", "DH")
    values |= {"STORED": a.keys, "ITEMS": a.items, "OWN": (items, heads)}
    programs = blocks_of(a.queries, values["ROWS"]) * blocks_of(a.keys, values["KEYS"]) * heads * items
    dbias = jax.ShapeDtypeStruct(shape, jnp.float32)
    (grad,) = call(Launch(flat.backward_bias, programs, inputs, (dbias,), values))
    return grad.reshape(*a.leading[:-1], *shape[1:]) if items > 1 else grad


# ---------------------------------------------------------------------------------------------- transformations


def with_axis(arrays: Arrays, batched: dict[str, bool], size: int, own: tuple[str, ...]) -> Arrays:
    """The arrays with the axis of vmap as first leading axis; those in `own` always have it."""
    leading = max(arrays[name].ndim - batched[name] - 2 for name in "qkv")
    result = {}
    for name, x in arrays.items():
        rank = x.ndim - batched[name]
        missing = leading - max(0, rank - blocks.TRAILING.get(name, 0))
        if batched[name]:
            result[name] = x.reshape(size, *(1,) * missing, *x.shape[1:])
        else:
            result[name] = jnp.broadcast_to(x, (size, *(1,) * missing, *x.shape)) if name in own else x
    return result


def mapped(function: Any, static: Static, own: tuple[str, ...]) -> Any:
    """`function(static, arrays, ...)` with a rule for vmap: one more leading axis, or a loop if there is dropout."""

    @custom_vmap
    def run(arrays: Arrays, *rest: Array) -> Any:
        return function(static, arrays, *rest)

    def rule(size: int, batched: list[Any], arrays: Arrays, *rest: Array) -> tuple[Any, Any]:
        def repeated(x: Array, batched: bool) -> Array:
            return x if batched else jnp.broadcast_to(x, (size, *x.shape))

        if SEED in arrays or any(name == "dropout" for name, _ in static.options):
            wide = jax.tree.map(repeated, [arrays, *rest], batched)
            result = jax.lax.map(lambda arguments: run(*arguments), wide)
        else:
            result = run(with_axis(arrays, batched[0], size, own), *map(repeated, rest, batched[1:]))
        return result, jax.tree.map(lambda x: True, result)

    run.def_vmap(rule)
    return run


def vjp_once(static: Static, arrays: Arrays, do: Array) -> Arrays:
    """Explicit gradients, with an error when they are differentiated."""
    once = transforms.differentiated_once(f"{OP}: impl='triton'", mapped(vjp, static, DIFFERENTIABLE))
    grads: Arrays = once(arrays, do)
    return grads


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attended(static: Static, arrays: Arrays) -> Array:
    """o, with explicit gradients."""
    o: Array = mapped(output, static, ())(arrays)
    return o


def attended_fwd(static: Static, arrays: Arrays) -> tuple[Array, Arrays]:
    return attended(static, arrays), arrays


def attended_bwd(static: Static, arrays: Arrays, do: Array) -> tuple[dict[str, Array | None]]:
    grads = vjp_once(static, arrays, do)
    return ({name: grads.get(name) for name in arrays},)


attended.defvjp(attended_fwd, attended_bwd)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """pointwise_attention."""
    o: Array = attended(*divided(OP, {"q": q, "k": k, "v": v, **options}))
    return o


def pull(q: Array, k: Array, v: Array, do: Array, **options: Any) -> Arrays:
    """The explicit gradients of pointwise_attention."""
    return vjp_once(*divided(OP, {"q": q, "k": k, "v": v, **options}), do)


def unsupported_options(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """Why the kernels do not support a call on any device."""
    if dtype_name(q) == "float64":
        return "float64 is served by the generic implementation"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"head sizes beyond {WIDEST} are served by the generic implementation"
    seed = (options.get("dropout") or (0, 0))[1]
    if is_key(seed) or (not hasattr(seed, "ndim") and int(seed) >= 2**32):
        return "dropout seeds of more than 32 bits are served by the generic implementation"
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return None


def unsupported(q: Array, k: Array, v: Array, *rest: Array, **options: Any) -> str | None:
    """Why a call is not supported."""
    refused = gpu.unsupported("Triton", q, k, v, rest, options) or missing()
    return refused or unsupported_options(q, k, v, *rest, **options)


KERNELS = with_gradients(pointwise_attention, gpu.kernel("triton", attend, unsupported, counted=True), pull)
