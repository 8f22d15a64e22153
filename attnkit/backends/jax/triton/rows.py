"""Softmax, sparsemax and entmax attention on JAX arrays by the same Triton kernels as for torch.

Forward leaves the numbers of its rows for the gradients, one array (..., 3 or 4, L): top and 1/Σ, and lse of softmax
or τ and c of the others. Explicit gradients compute it first.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Unpack

import jax.numpy as jnp
from jax import Array

from attnkit._core.dispatch import Kernel
from attnkit._core.typing import Keywords, Options, Results
from attnkit.backends.jax import gpu
from attnkit.backends.jax.blocked import Arrays, Static, divided
from attnkit.backends.jax.triton import launch
from attnkit.backends.jax.triton.launch import INPUTS, Call, Launch, Output, Outputs, Views
from attnkit.kernels.plan import Normaliser, is_array, newton_steps, normaliser
from attnkit.ops import ssmax
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.softmax import SOFTMAX


def call_of(static: Static, arrays: Arrays) -> tuple[Call, Normaliser]:
    """The options of softmax_attention or entmax_attention."""
    alpha = dict(static.options).get("alpha", 1.0 if static.op == SOFTMAX.name else 1.5)
    return launch.call_of(static, arrays, activation="identity", alpha=0.0), normaliser(float(alpha))


# ---------------------------------------------------------------------------------------------- launches


def constants(c: Call, of: Normaliser, names: tuple[str, ...], inputs: Views, outputs: tuple[Output, ...]) -> Keywords:
    """The compile-time arguments of the first of the kernels for which a row fits into registers."""
    from attnkit.kernels.triton import normalisers, rows, rows_gradients, sizes

    a, q, beside = c.plan.layout, c.arrays["q"], launch.bytes_of_pairs(c)
    lean = q.dtype == jnp.bfloat16 and not beside and not c.plan.numbers.drops and "query_mask" not in c.arrays
    of_call = of.name, q.dtype.itemsize * 8, a.d, a.e, a.keys, launch.capability(), beside, "lean" if lean else ""
    tiles = ((name, sizes.normalised(name, *of_call)) for name in names)
    name, tile = next((name, tile) for name, tile in tiles if tile is not None)
    kernel = getattr(rows if name.startswith("forward") else rows_gradients, name)
    functions = normalisers.functions(kernel, of.name, c.half, c.plan.numbers.scale < 0.0)
    values = {"KERNEL": name, "NUMBERS": of.numbers(c.plan.numbers)} | functions | tile._asdict()
    return launch.constants(c, inputs, outputs) | values


def forward(static: Static, arrays: Arrays) -> tuple[Array | tuple[Array, Array], Array]:
    """o (..., L, e) in the dtype of q, or o and lse; and the numbers of rows."""
    from attnkit.kernels.triton import flat_rows

    c, of = call_of(static, arrays)
    a, o = c.plan.layout, launch.output(c)
    numbers = Output((*a.leading, 3 if of.above is None else 4, a.queries), jnp.float32)
    results: Outputs
    if 0 in (*o.shape, a.keys):
        results = jnp.zeros(o.shape, o.dtype), jnp.full(numbers.shape, -jnp.inf, jnp.float32)
    else:
        names = ("forward_online",) if of.above is None else ("forward_resident", "forward_tiled")
        inputs = launch.views(c, c.arrays, INPUTS)
        values: Keywords = {"SLOPE": None, "NEGATIVE": False, **constants(c, of, names, inputs, (o, numbers))}
        values["STEPS"] = newton_steps(a.keys)
        programs = c.blocks_of_queries(values["ROWS"], values["KEYS"])
        results = launch.call(Launch(flat_rows.forward, programs, inputs.arrays, (o, numbers), values))
    lse = dict(static.options).get("return_lse", False)
    return (results[0], results[1][..., 2, :]) if lse else results[0], results[1]


def backward(static: Static, arrays: Arrays, cotangents: Array | tuple[Array, Array], numbers: Array) -> Arrays:
    """Gradients of the arguments that have one, in their dtypes."""
    do, dlse = cotangents if isinstance(cotangents, tuple) else (cotangents, None)
    c, of = call_of(static, arrays)
    a = c.plan.layout
    if 0 in (*a.leading, *do.shape, a.keys):
        return {name: jnp.zeros_like(arrays[name]) for name in launch.DIFFERENTIABLE if name in arrays}
    inputs = c.arrays | {"do": do, "dlse": dlse, "saved": numbers}
    delta = Output((*a.leading, 1, a.queries), jnp.float32)
    first = ("backward_resident", "backward_tiled"), c.blocks_of_queries
    grads: Arrays = {}
    grads["q"], inputs["delta"] = run(c, of, inputs, *first, launch.room(c, "q"), delta)
    of_keys = launch.room(c, "k"), launch.room(c, "v")
    grads["k"], grads["v"] = run(c, of, inputs, ("backward_keys",), c.blocks_of_keys, *of_keys, **c.of_keys)
    if "bias" in arrays:
        dbias = launch.room_for_bias(c)
        (grads["bias"],) = run(c, of, inputs, ("backward_bias",), c.blocks_of_bias, dbias, **c.of_bias)
    return launch.reduced(c, grads)


def run(
    c: Call,
    of: Normaliser,
    arrays: Mapping[str, Array | None],
    names: tuple[str, ...],
    programs: Callable[..., int],
    *outputs: Output,
    **own: object,
) -> Outputs:
    """The outputs of the first of the kernels for which a row fits; `own` are its constants."""
    from attnkit.kernels.triton import flat_rows

    inputs = launch.views(c, arrays, INPUTS | {"do": "o", "dlse": "rows", "saved": "", "delta": ""})
    strides = (*inputs.strides[:-2], *(launch.strides(arrays.get(name)) for name in ("saved", "delta")))
    values = constants(c, of, names, inputs._replace(strides=strides), outputs) | launch.OF_GRADIENTS | own
    entry = flat_rows.one if len(outputs) == 1 else flat_rows.two
    return launch.call(Launch(entry, programs(values["ROWS"], values["KEYS"]), inputs.arrays, outputs, values))


# ---------------------------------------------------------------------------------------------- what the library calls

EXPLICIT = launch.Explicit(forward, backward)


def attend(op: str, q: Array, k: Array, v: Array, **options: object) -> Results:
    """softmax_attention or entmax_attention."""
    return launch.attended(EXPLICIT, *divided(op, {"q": q, "k": k, "v": v, **options}))[0]


def pull(op: str, q: Array, k: Array, v: Array, do: Array, dlse: Array | None = None, **options: object) -> Arrays:
    """The explicit gradients of softmax_attention or entmax_attention."""
    static, arrays = divided(op, {"q": q, "k": k, "v": v, **options})
    numbers = launch.attended(EXPLICIT, static, arrays)[1]
    return EXPLICIT.pull(static, arrays, do if dlse is None else (do, dlse), numbers)


def unsupported_options(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None = None,
    dlse: Array | None = None,
    *,
    vjp: bool = False,
    **options: Unpack[Options],
) -> str | None:
    """Why the kernels do not support a call on any device."""
    if is_array(options.get("alpha")):
        return "an array alpha is served by the generic implementation"
    return launch.unsupported_options(q, k, v, *((do,) if vjp else ()), **options)


def unsupported(*arrays: Array, vjp: bool, **options: Unpack[Options]) -> str | None:
    """Why a call is not supported."""
    return launch.unsupported_device(*arrays, **options) or unsupported_options(*arrays, vjp=vjp, **options)


KERNELS: dict[str, Kernel] = {
    f"{op}{suffix}": gpu.kernel(
        partial(serve, op), partial(unsupported, vjp=bool(suffix)), partial(gpu.is_faster, kind)
    )
    for op, kind in ((SOFTMAX.name, "softmax"), (ENTMAX.name, "entmax"))
    for suffix, serve in (("", attend), ("_vjp", pull))
}
KERNELS |= ssmax.kernels(KERNELS)
