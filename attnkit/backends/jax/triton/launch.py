"""What the Triton kernels need to be called from JAX: arrays as the kernels read them, launches, and transformations.

Arrays are row-major; leading axes that cannot be merged are broadcast in memory. n^-alpha and log n are computed by JAX
if they differ between queries. vmap adds a leading axis, or loops if there is dropout by counter, because counters
belong to a single call. Launches use jax-triton, whose import clears a setting of Triton that is then restored.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from attnkit._core import blocks, quadratic
from attnkit._core.check import dtype_name
from attnkit._core.mask import log, power
from attnkit._core.special import is_key
from attnkit._core.typing import AnyFunction, Keywords, OfLibrary, OfTriton, Options, Results
from attnkit.backends.jax import gpu, transforms
from attnkit.backends.jax.blocked import SEED, Arrays, Static, arguments_of
from attnkit.backends.jax.rows import lengths
from attnkit.kernels.plan import Layout, Plan, blocks_of, cached_plan, is_array, signature
from attnkit.kernels.strides import as_items, row_major
from attnkit.ops.linear.states import INITIAL

OF_GRADIENTS = dict.fromkeys(("STORED", "ITEMS", "OWN"))  # constants that only some gradients have
WIDEST = 256  # head size
NEWEST = 9
INPUTS = {
    "q": "q", "k": "k", "v": "v", "bias": "pairs", "mask": "pairs", "dropout_mask": "pairs", "key_lengths": "heads",
    "query_mask": "rows", SEED: "",
}  # fmt: skip
"""The first inputs of all kernels and the names of their shapes in `Layout.shape_of`."""
Output = jax.ShapeDtypeStruct
Outputs = tuple[Array, ...]
DIFFERENTIABLE = ("q", "k", "v", "bias", *INITIAL)
TRAILING = blocks.TRAILING | dict(zip(INITIAL, (2, 1), strict=True))
"""The number of trailing axes of each argument."""
CACHE = "TRITON_CACHE_DIR"


# ---------------------------------------------------------------------------------------------- jax-triton


class Launch(NamedTuple):
    """A kernel, the number of programs, its arrays, the shapes and dtypes of its outputs, and named constants.

    In `aliases` are (array, output) whose memory is the same.
    """

    kernel: OfTriton
    programs: int
    arrays: tuple[Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: Keywords
    aliases: tuple[tuple[int, int], ...] = ()


def jax_triton() -> ModuleType:
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
    """Why there is no jax-triton, and what to install; None if it is there."""
    try:
        jax_triton()
    except ImportError as error:
        return f"needs jax-triton beside a JAX with CUDA: pip install 'attnkit[jax-triton]' 'jax[cuda13]' ({error})"
    return None


def call(launched: Launch, compute_capability: int | None = None) -> tuple[Array, ...]:
    """Run a launch on JAX's GPU, or compile it for a compute capability such as 90."""
    from attnkit.kernels.triton.flat import constant

    outputs = jax_triton().triton_call(
        *launched.arrays,
        kernel=launched.kernel,
        out_shape=launched.outputs,
        grid=(launched.programs,),
        compute_capability=compute_capability,
        input_output_aliases=dict(launched.aliases),
        **{name: constant(value) for name, value in launched.constants.items()},
    )
    return tuple(outputs)


def capability() -> int:
    """The major number of the device's compute capability; the newest if launches are only compiled or interpreted."""
    return gpu.major() or NEWEST


# ---------------------------------------------------------------------------------------------- a call


class Call(NamedTuple):
    """A call as the kernels take it."""

    arrays: Arrays  # those of `INPUTS` that are present, and n^-alpha and log n of every query
    plan: Plan
    arguments: Keywords

    @property
    def half(self) -> bool:
        return self.arrays["q"].dtype.itemsize < 4

    def blocks_of_queries(self, rows: int, keys: int) -> int:
        """The programs that own `rows` queries each."""
        a = self.plan.layout
        return blocks_of(a.queries, rows) * a.heads * a.items

    def blocks_of_keys(self, rows: int, keys: int) -> int:
        a = self.plan.layout
        return blocks_of(a.keys, keys) * a.kv_heads * a.items

    def blocks_of_bias(self, rows: int, keys: int) -> int:
        a, (items, heads) = self.plan.layout, self.of_bias["OWN"]
        return blocks_of(a.queries, rows) * blocks_of(a.keys, keys) * items * heads

    @property
    def of_keys(self) -> Keywords:
        """What kernels of gradients of keys have in place of other constants."""
        a = self.plan.layout
        return {"STORED": a.keys, "HEADS": (a.kv_heads, a.groups)}

    @property
    def of_bias(self) -> Keywords:
        """The same for kernels of the gradient of a bias."""
        return {"STORED": self.plan.layout.keys, "ITEMS": self.plan.layout.items, "OWN": (self.plan.dbias or ())[:2]}


def call_of(static: Static, arrays: Arrays, **fixed: object) -> Call:
    """The options of pointwise_attention."""
    arguments = {**arguments_of(static, arrays), **fixed}
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
    return Call(inputs, plan, arguments)


class Views(NamedTuple):
    """Arrays, and STRIDES of each, None for an absent one in whose place any other array is passed."""

    arrays: tuple[Array, ...]
    strides: tuple[tuple[int, ...] | None, ...]


def views(c: Call, arrays: Mapping[str, Array | None], names: Mapping[str, str]) -> Views:
    """The arrays with these names and shapes."""
    pairs = [view(c.plan.layout, what, arrays.get(name)) for name, what in names.items()]
    return Views(tuple(c.arrays["q"] if x is None else x for x, _ in pairs), tuple(strides for _, strides in pairs))


View = tuple[Array | None, tuple[int, ...] | None]


def view(a: Layout, what: str, x: Array | None) -> View:
    """x and its strides as (items, heads, ...); a seed has one."""
    if x is None or not what:
        return x, None if x is None else (1,)
    shape, outer = a.shape_of(what), len(a.leading)
    return view_of(x, shape[:outer], *shape[outer:])


def view_of(x: Array, leading: tuple[int, ...], *rest: int) -> tuple[Array, tuple[int, ...] | None]:
    """x and its strides as (items, heads, *rest), x being broadcast to (*leading, *rest)."""
    strides = as_items(x.shape, row_major(x.shape), leading, *rest)
    if strides is None:
        x = jnp.broadcast_to(x, (*leading, *rest))
        strides = as_items(x.shape, row_major(x.shape), leading, *rest)
    return x, strides


def strides(x: Array | Output | None) -> tuple[int, ...] | None:
    """Strides (items, heads, rows, columns) of matrices that have all leading axes."""
    return None if x is None else as_items(x.shape, row_major(x.shape), x.shape[:-2], *x.shape[-2:])


def constants(c: Call, inputs: Views, outputs: Sequence[Output]) -> Keywords:
    """Compile-time arguments of all kernels."""
    from attnkit.kernels.triton.sizes import padded

    a, limits, n, *_ = c.plan
    values: Keywords = {"d": a.d, "e": a.e, "D": padded(a.d), "E": padded(a.e), "LAST_KEPT": n.last_kept}
    values |= {"STRIDES": (*inputs.strides, *map(strides, outputs)), "HEADS": (a.heads, a.groups)}
    values |= {"LIMITS": (a.queries, limits.keys, limits.left, limits.right)}
    return values | {"PRECISION": "tf32x3" if dtype_name(c.arrays["q"]) == "float32" else "ieee"}


def bytes_of_pairs(c: Call) -> int:
    """The bytes per pair of a call's arrays of pairs."""
    return sum(c.arrays[name].dtype.itemsize for name, what in INPUTS.items() if what == "pairs" and name in c.arrays)


# ---------------------------------------------------------------------------------------------- results


def output(c: Call) -> Output:
    """o."""
    return Output(c.plan.layout.shape_of("o"), c.arrays["q"].dtype)


def room(c: Call, name: str) -> Output:
    """A gradient before it is summed over broadcast axes: float32 if it has any."""
    like, shape = c.arguments[name], c.plan.layout.shape_of(name)
    return Output(shape, like.dtype if like.shape == shape else jnp.float32)


def room_for_bias(c: Call) -> Output:
    """(items, heads, L, S), 1 for shared axes."""
    return Output(c.plan.dbias or (), jnp.float32)


def reduced(c: Call, grads: Arrays) -> Arrays:
    """Gradients summed over broadcast axes and rounded once."""
    leading = c.plan.layout.leading
    if "bias" in grads and grads["bias"].shape[0] > 1:
        grads = grads | {"bias": grads["bias"].reshape(*leading[:-1], *grads["bias"].shape[1:])}
    like = {name: c.arguments[name] for name in grads}
    return {name: quadratic.sum_to(jnp, x, like[name].shape).astype(like[name].dtype) for name, x in grads.items()}


# ---------------------------------------------------------------------------------------------- transformations


def with_axis(arrays: Arrays, batched: dict[str, bool], size: int, own: tuple[str, ...]) -> Arrays:
    """The arrays with the axis of vmap as first leading axis; those in `own` always have it, and some of q, k and v."""
    own = own if any(batched[name] for name in "qkv") else (*own, "q")
    leading = max(arrays[name].ndim - batched[name] - 2 for name in "qkv")
    result = {}
    for name, x in arrays.items():
        missing = leading + TRAILING.get(name, 0) - (x.ndim - batched[name])
        if batched[name]:
            result[name] = x.reshape(size, *(1,) * missing, *x.shape[1:])
        else:
            result[name] = jnp.broadcast_to(x, (size, *(1,) * missing, *x.shape)) if name in own else x
    return result


def element(x: Array, batched: bool) -> Output:
    """The shape and dtype of one element of an argument of vmap."""
    return Output(x.shape[batched:], x.dtype)


def of_every_element(size: int, x: Array, one: Output) -> Array:
    """A result of all elements together as (size, *shape of one); what no mapped array reaches is the same for all."""
    if x.size == math.prod(one.shape):
        return jnp.broadcast_to(x.reshape(one.shape), (size, *one.shape))
    return x.reshape(size, *one.shape)


def mapped(function: AnyFunction, static: Static, own: tuple[str, ...]) -> AnyFunction:
    """`function(static, arrays, ...)` with a rule for vmap: one more leading axis, or a loop if there is dropout.

    Arrays in `own` get that axis even if they are the same for all elements: results are their gradients.
    """

    @custom_vmap
    def run(arrays: Arrays, *rest: object) -> Results:
        return function(static, arrays, *rest)

    def rule(size: int, batched: list[OfLibrary], arrays: Arrays, *rest: object) -> tuple[object, object]:
        def repeated(x: Array, batched: bool) -> Array:
            return x if batched else jnp.broadcast_to(x, (size, *x.shape))

        if SEED in arrays or any(name == "dropout" for name, _ in static.options):
            wide = jax.tree.map(repeated, [arrays, *rest], batched)
            result = jax.lax.map(lambda arguments: run(*arguments), wide)
        else:
            shapes = jax.eval_shape(partial(function, static), *jax.tree.map(element, [arrays, *rest], batched))
            wide = jax.tree.map(repeated, [*rest], batched[1:])
            result = run(with_axis(arrays, batched[0], size, own), *wide)
            result = jax.tree.map(partial(of_every_element, size), result, shapes)
        return result, jax.tree.map(lambda x: True, result)

    run.def_vmap(rule)
    return run


class Explicit(NamedTuple):
    """Kernels of an op with explicit gradients.

    `forward(static, arrays)` is (outputs, saved); `backward(static, arrays, cotangents, saved)` are gradients by name.
    """

    forward: AnyFunction
    backward: Callable[..., Arrays]

    def pull(self, static: Static, arrays: Arrays, cotangents: object, saved: object) -> Arrays:
        """Gradients of the arguments that have one, with an error when they are differentiated."""
        name = f"{static.op}: impl='triton'"
        once = transforms.differentiated_once(name, mapped(self.backward, static, DIFFERENTIABLE))
        grads: Arrays = once(arrays, cotangents, saved)
        return grads


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attended(op: Explicit, static: Static, arrays: Arrays) -> tuple[OfLibrary, OfLibrary]:
    """The outputs, with explicit gradients, and what is saved for these."""
    results: tuple[object, object] = mapped(op.forward, static, ())(arrays)
    return results


def _attended_fwd(op: Explicit, static: Static, arrays: Arrays) -> tuple[tuple[object, object], object]:
    results = attended(op, static, arrays)
    return results, (arrays, results[1])


def _attended_bwd(
    op: Explicit, static: Static, residuals: tuple[Arrays, object], cotangents: tuple[object, object]
) -> tuple[dict[str, Array | None]]:
    arrays, saved = residuals
    grads = op.pull(static, arrays, cotangents[0], saved)
    return ({name: grads.get(name) for name in arrays},)


attended.defvjp(_attended_fwd, _attended_bwd)


# ---------------------------------------------------------------------------------------------- what is supported


def unsupported_options(q: Array, k: Array, v: Array, *rest: Array, **options: Unpack[Options]) -> str | None:
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


def unsupported_device(*arrays: Array | None, **options: object) -> str | None:
    """Why the kernels do not run on JAX's device, or not under these transformations."""
    return gpu.unsupported(*arrays, options) or missing()


def unsupported(*arrays: Array, **options: Unpack[Options]) -> str | None:
    """Why a call is not supported."""
    return unsupported_device(*arrays, **options) or unsupported_options(*arrays, **options)
