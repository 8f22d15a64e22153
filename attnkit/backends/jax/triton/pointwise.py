"""Point-wise and Gaussian attention on JAX arrays by the same Triton kernels as for torch.

Queries and keys of Gaussian attention are centred by JAX (`attnkit.kernels.triton.distances` says how and why).
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array

from attnkit._core.activations import is_in_pieces, lacking
from attnkit._core.dispatch import Kernel, with_gradients
from attnkit._core.typing import DType, Keywords, Option, Options
from attnkit.backends.jax import gpu
from attnkit.backends.jax.blocked import Arrays, Static, divided
from attnkit.backends.jax.rows import bounds
from attnkit.backends.jax.triton import launch
from attnkit.backends.jax.triton.launch import INPUTS, Call, Launch, Output, Outputs, Views
from attnkit.ops.gaussian import gaussian_attention
from attnkit.ops.pointwise import POINTWISE, pointwise_attention

FIXED: dict[str, Keywords] = {
    POINTWISE.name: {},
    gaussian_attention.__name__: {"activation": "exp", "alpha": 0.0},
}
"""The options of ops as point-wise attention."""


def call_of(static: Static, arrays: Arrays) -> Call:
    return launch.call_of(static, arrays, **FIXED[static.op])


def activation(c: Call) -> str:
    return str(c.arguments.get("activation", "relu"))


# ---------------------------------------------------------------------------------------------- distances


def rounded(x: Array, dtype: DType) -> Array:
    """float32 numbers as this dtype has them, which XLA may not leave out."""
    kind = jnp.finfo(dtype)
    return x if kind.bits == 32 else jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def within_range(x: Array, dtype: DType) -> Array:
    """x, but float16's largest numbers instead of those beyond them: what is missing is left to the rest."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest) if dtype == jnp.float16 else x


def centre(c: Call) -> Array:
    """The mean of the keys visible to the first query with a key (..., 1, d), for each head of keys."""
    a, k, mask = c.plan.layout, c.arguments["k"], c.arguments.get("mask")
    j, heads = jnp.arange(a.keys), (*a.shared, a.groups)
    first, limit = (
        jnp.broadcast_to(x, a.shape_of("rows")).reshape(*heads, a.queries) for x in bounds(c.plan, c.arguments)
    )
    live = limit > first
    if mask is not None:
        mask = jnp.broadcast_to(mask, a.shape_of("pairs")).reshape(*heads, a.queries, a.keys)
        live = jnp.any((j >= first[..., None]) & (j < limit[..., None]) & mask, -1)
    i = jnp.argmax(jnp.any(live, -2), -1)[..., None, None]
    first, limit = (jnp.take_along_axis(x, i, -1) for x in (first, limit))
    visible = (j >= first) & (j < limit)
    if mask is not None:
        visible &= jnp.take_along_axis(mask, i[..., None], -2)[..., 0, :]
    visible = jnp.any(visible, -2)[..., None]
    share = visible / jnp.maximum(jnp.sum(visible, -2, keepdims=True), 1).astype(jnp.float32)
    keys = jnp.where(visible, k.astype(jnp.float32), 0.0)
    mean = jnp.matmul(share.mT, keys, precision=jax.lax.Precision.HIGHEST)
    return rounded(mean, k.dtype)


def near_and_rest(x: Array, centre: Array, half: bool) -> tuple[Array, Array, Array]:
    """x̂ as the sum of two arrays in the dtype of x, and its norms as the identity of `distances` has them."""
    moved = x.astype(jnp.float32) - centre
    if not half:
        return moved, jnp.zeros_like(moved), 0.5 * jnp.sum(moved * moved, -1)
    near = rounded(within_range(moved, x.dtype), x.dtype)
    rest = rounded(moved - near, x.dtype)
    moved = near + rest
    return near.astype(x.dtype), rest.astype(x.dtype), jnp.sum(moved * (0.5 * moved + centre), -1)


def scored(c: Call, owner: str) -> Arrays:
    """What programs that own queries ("q") or keys ("k") read: for distances the centred tokens and norms."""
    if activation(c) != "exp":
        return c.arrays
    a, centres = c.plan.layout, {"k": centre(c)}
    centres["q"] = jnp.repeat(centres["k"], a.groups, -3) if a.groups > 1 else centres["k"]
    near, rest, norms = {}, {}, {}
    for name in "qk":
        x, own = c.arrays[name], c.half and name == owner
        near[name], rest[name], norms[name] = near_and_rest(x, centres[name], own)
    operands = {owner: near[owner], "rest": rest[owner], "whole": c.arrays[owner]} if c.half else near
    return c.arrays | operands | {"logs": norms["q"], "key_norms": norms["k"]}


# ---------------------------------------------------------------------------------------------- launches


def views(c: Call, owner: str, do: Array | None = None) -> Views:
    """The inputs of the kernels for programs that own queries or keys."""
    names = INPUTS | {"factors": "rows", "logs": "rows", "key_norms": "columns"}
    names |= {"rest": owner, "whole": owner, "do": "o"}
    return launch.views(c, scored(c, owner) | {"do": do}, names)


def run(c: Call, kernel: str, inputs: Views, programs: Callable[..., int], *outputs: Output, **of: object) -> Outputs:
    """The outputs of a kernel; `programs` takes the queries and keys of its tile, `of` are constants of its own."""
    from attnkit.kernels.triton import activations, flat, sizes

    a, n = c.plan.layout, c.plan.numbers
    h, dh = activations.functions(activation(c), c.half and kernel != "backward_bias", kernel != "forward")
    lean = c.arrays["q"].dtype.name == "bfloat16" and not launch.bytes_of_pairs(c) and launch.SEED not in c.arrays
    open_rows = c.plan.limits.left is None and not {"key_lengths", "query_mask"} & {*c.arrays}
    forms = activations.forms(activation(c), is_in_pieces(activation(c)), c.half, False, lean, open_rows)
    name, bits = "backward_queries" if kernel == "backward_bias" else kernel, c.arrays["q"].dtype.itemsize * 8
    tile = sizes.pointwise(name, bits, a.d, a.e, launch.capability(), *forms)
    values = launch.constants(c, inputs, outputs) | sizes.with_pairs(tile, launch.bytes_of_pairs(c))._asdict()
    values |= {"KERNEL": kernel, "H": h, "DH": None if kernel == "forward" else dh}
    values |= {"NUMBERS": (n.scale, n.shift or None, n.gain, n.alpha or None)} | launch.OF_GRADIENTS | of
    entry = flat.one if len(outputs) == 1 else flat.two
    return launch.call(Launch(entry, programs(values["ROWS"], values["KEYS"]), inputs.arrays, outputs, values))


def forward(static: Static, arrays: Arrays) -> tuple[Array, None]:
    """o (..., L, e) in the dtype of q; nothing is saved."""
    c = call_of(static, arrays)
    o = launch.output(c)
    if 0 in (*o.shape, c.plan.layout.keys):
        return jnp.zeros(o.shape, o.dtype), None
    return run(c, "forward", views(c, "q"), c.blocks_of_queries, o)[0], None


def backward(static: Static, arrays: Arrays, do: Array, saved: None) -> Arrays:
    """Gradients of the arguments that have one, in their dtypes."""
    c = call_of(static, arrays)
    if 0 in (*c.plan.layout.leading, *do.shape, c.plan.layout.keys):
        return {name: jnp.zeros_like(arrays[name]) for name in launch.DIFFERENTIABLE if name in arrays}
    by_queries, by_keys = views(c, "q", do), views(c, "k", do)
    grads = dict(
        zip("q", run(c, "backward_queries", by_queries, c.blocks_of_queries, launch.room(c, "q")), strict=True)
    )
    of_keys = launch.room(c, "k"), launch.room(c, "v")
    grads |= zip("kv", run(c, "backward_keys", by_keys, c.blocks_of_keys, *of_keys, **c.of_keys), strict=True)
    if "bias" in arrays:
        dbias = launch.room_for_bias(c)
        (grads["bias"],) = run(c, "backward_bias", by_queries, c.blocks_of_bias, dbias, **c.of_bias)
    return launch.reduced(c, grads)


# ---------------------------------------------------------------------------------------------- what the library calls

EXPLICIT = launch.Explicit(forward, backward)


def attend(op: str, q: Array, k: Array, v: Array, **options: object) -> Array:
    """pointwise_attention or gaussian_attention."""
    o: Array = launch.attended(EXPLICIT, *divided(op, {"q": q, "k": k, "v": v, **options}))[0]
    return o


def pull(op: str, q: Array, k: Array, v: Array, do: Array, **options: object) -> Arrays:
    """The explicit gradients of pointwise_attention or gaussian_attention."""
    return EXPLICIT.pull(*divided(op, {"q": q, "k": k, "v": v, **options}), do, None)


def unsupported_options(*arrays: Array, activation: str = "relu", **options: Option) -> str | None:
    """Why the kernels do not support a call on any device."""
    from attnkit.kernels.triton.activations import ACTIVATIONS  # needs triton

    return lacking("triton", ACTIVATIONS, activation) or launch.unsupported_options(*arrays, **options)


def unsupported(*arrays: Array, **options: Unpack[Options]) -> str | None:
    """Why a call is not supported."""
    return launch.unsupported_device(*arrays, **options) or unsupported_options(*arrays, **options)


KERNELS: dict[str, Kernel] = {}
for op, kind in ((pointwise_attention, "pointwise"), (gaussian_attention, "gaussian")):
    row = gpu.kernel(partial(attend, op.__name__), unsupported, partial(gpu.is_faster, kind))
    KERNELS |= with_gradients(op, row, partial(pull, op.__name__))
