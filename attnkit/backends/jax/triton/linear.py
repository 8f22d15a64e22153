"""Linear attention on JAX arrays by the same Triton kernels as for torch.

Gradients compute the sums of keys again, then 1/den and δ = do·o of every query, then dq in order and dk, dv from the
end, by two sweeps where products have a half type. The running sums of segments take the memory of the sums of each.
"""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jax import Array

from attnkit._core import quadratic
from attnkit._core.check import dtype_name
from attnkit._core.dispatch import with_gradients
from attnkit._core.typing import Keywords, OfLibrary, Option, Options, Results
from attnkit.backends.jax import gpu
from attnkit.backends.jax.blocked import Arrays, Static, arguments_of, divided
from attnkit.backends.jax.triton import launch
from attnkit.backends.jax.triton.launch import Launch, Output, Outputs, View, view_of
from attnkit.kernels import linear_calls, predicted
from attnkit.kernels.linear_calls import Setting, setting, span
from attnkit.kernels.plan import blocks_of, state_axes
from attnkit.ops.linear import states
from attnkit.ops.linear.attention import LINEAR, linear_attention
from attnkit.ops.linear.states import INITIAL

OP = LINEAR.name
INPUTS = (
    "q", "k", "v", "do", "inverses", "deltas", "states", "key_mask", "firsts", "stops", "query_mask",
)  # fmt: skip
"""The inputs of all kernels but `running`."""
OPTIONAL = dict.fromkeys(("SLOPE", "SLOPE_OF", "TWICE", "NORMALIZE", "FLOOR", "D", "E", "BLOCK"))
"""Constants that only some kernels have."""
State = tuple[Array, Array]
Arguments = Keywords


# ---------------------------------------------------------------------------------------------- a call


class Call(NamedTuple):
    """A call as the kernels take it; `like` stands in for absent arrays."""

    s: Setting
    like: Array  # q (..., L, d) or, for keys alone, k (..., S, d)
    views: dict[str, View]


class Rows(NamedTuple):
    """1/den, and δ in parts; none without a denominator."""

    views: dict[str, View]
    parts: int


class Sums(NamedTuple):
    """The sums before every segment (after it, for queries), None for one segment that starts from 0; and S and z of
    the whole sum (states, ...) if it was asked for."""

    states: Array | None  # (items·states, segments, d·e + d)
    segments: int | None
    total: Outputs


NO_ROWS, NO_SUMS = Rows({}, 0), Sums(None, None, ())


def call_of(s: Setting, like: Array, **arrays: Array) -> Call:
    """`arrays` are some of q, k, v and do."""
    a = s.a
    views = {name: launch.view(a, "o" if name == "do" else name, x) for name, x in arrays.items()}
    for name, x in (("firsts", s.firsts), ("stops", s.stops)):
        views |= {} if x is None else {name: view_of(x, a.leading)}
    for name, x, tokens in (("key_mask", s.key_mask, a.keys), ("query_mask", s.query_mask, a.queries)):
        views |= {} if x is None else {name: view_of(x.astype(jnp.uint8), a.leading, tokens)}
    return Call(s, like, views)


def initial_of(arguments: Arguments) -> State | None:
    """The state that a call starts from."""
    return (arguments[INITIAL[0]], arguments[INITIAL[1]]) if INITIAL[0] in arguments else None


def axes_of_state(arguments: Arguments) -> tuple[int, ...]:
    """The leading axes of the state that a call returns."""
    return state_axes(OP, arguments["k"], arguments["v"], initial_of(arguments), arguments)


def placed(x: Array, tail: int, leading: tuple[int, ...]) -> Array:
    """x (..., `tail` axes) with these leading axes: at index 0 of the axes that it broadcasts along, 0 elsewhere."""
    own = (*(1,) * (len(leading) + tail - x.ndim), *x.shape)
    return jnp.pad(x.reshape(own), [*((0, n - m) for n, m in zip(leading, own, strict=False)), *((0, 0),) * tail])


# ---------------------------------------------------------------------------------------------- launches


def constants(c: Call, name: str, by_values: bool) -> Keywords:
    return linear_calls.constants(name, c.s, dtype_name(c.like), by_values, launch.capability())


def run(
    c: Call, name: str, tokens: int, by_values: bool, by_states: bool, sums: Sums, rows: Rows, *outputs: Output
) -> Outputs:
    """The outputs of a kernel with the programs of `attnkit.kernels.linear_calls.parts`."""
    from attnkit.kernels.triton import flat_linear

    s, values = c.s, constants(c, name, by_values)
    parts = linear_calls.parts(s, tokens, values.get("BLOCK"), by_values, by_states)
    if not parts.programs:
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)
    views = c.views | rows.views | {"states": launch.view(s.a, "", sums.states)}
    inputs = [views.get(name, (None, None)) for name in INPUTS]
    strides = (*(strides for _, strides in inputs), *map(launch.strides, outputs))
    values = OPTIONAL | values | {"KERNEL": name, "STRIDES": strides, "PARTS": rows.parts, "STATEFUL": s.stateful}
    values |= {"SEGMENTS": parts.span.segments if name in linear_calls.SUMS else sums.segments}
    values |= {"LIMITS": s.limits, "NUMBERS": (s.plan.scale, s.plan.eps), "HEADS": s.heads}
    values |= {"SPAN": parts.span[:4], "BLOCKS": parts.blocks}
    arrays = tuple(c.like if x is None else x for x, _ in inputs)
    entry = (flat_linear.one, flat_linear.two, flat_linear.three)[len(outputs) - 1]
    return launch.call(Launch(entry, parts.programs, arrays, outputs, values))


def sums_of(
    c: Call, name: str, tokens: int, initial: State | None = None, final: bool = False, rows: Rows = NO_ROWS
) -> Sums:
    """Those of `key_sums` or `query_sums`, which start from `initial`; with `final` also the whole sum."""
    s, steps = c.s, span(c.s, tokens)
    passes = linear_calls.passes(s, steps, initial is not None, final)
    if not any(passes):
        return NO_SUMS
    shape = (s.a.items * s.plan.num_states, steps.segments, s.a.d * s.a.e + s.a.d)
    own = jnp.zeros(shape, jnp.float32)
    if passes.sums:
        (own,) = run(c, name, tokens, True, True, NO_SUMS, rows, Output(shape, jnp.float32))
    results: Outputs = (own,)
    if passes.running:
        results = running(c, own, tokens, initial, final, name == "query_sums")
    return Sums(results[0], steps.segments, results[1:])


def running(c: Call, own: Array, tokens: int, initial: State | None, final: bool, reverse: bool) -> Outputs:
    """The running sums of those of segments and, with `final`, S and z of the whole sum."""
    from attnkit.kernels.triton import flat_linear

    a, steps = c.s.a, span(c.s, tokens)
    values, blocks, programs = linear_calls.running(c.s, steps, reverse)
    outputs = [Output(own.shape, own.dtype)]
    if final:
        outputs += [Output((own.shape[0], *width), own.dtype) for width in ((a.d, a.e), (a.d,))]
    if not programs:
        return own, *(jnp.zeros(x.shape, x.dtype) for x in outputs[1:])
    values |= {"STRIDES": None, "SEGMENTS": steps.segments, "HEADS": c.s.heads, "SPAN": steps[:4], "BLOCKS": blocks}
    arrays = (own, own, own)
    if initial is not None:
        (S, of_S), (z, of_z) = view_of(initial[0], a.shared, a.d, a.e), view_of(initial[1], a.shared, a.d)
        arrays, values["STRIDES"] = (own, S, z), (of_S, of_z)
    entry = flat_linear.totals if final else flat_linear.running
    return launch.call(Launch(entry, programs, arrays, tuple(outputs), values, ((0, 0),)))


def rows_of(c: Call, sums: Sums) -> Rows:
    """1/den and δ of a call with do."""
    if not c.s.plan.normalize:
        return NO_ROWS
    parts = blocks_of(c.s.a.e, constants(c, "outputs", True)["BLOCK"])
    ends = outputs_of_rows(c, parts)
    return rows_from(run(c, "outputs", c.s.a.queries, True, False, sums, Rows({}, parts), *ends), parts)


def outputs_of_rows(c: Call, parts: int) -> tuple[Output, ...]:
    """Those of 1/den and of δ in parts."""
    a = c.s.a
    shapes = [(a.items, n, a.queries, 1) for n in (a.heads, parts * a.heads)]
    return tuple(Output(shape, jnp.float32) for shape in shapes) if c.s.plan.normalize else ()


def rows_from(found: Outputs, parts: int) -> Rows:
    """1/den and δ as they were written."""
    return Rows({name: (x, launch.strides(x)) for name, x in zip(("inverses", "deltas"), found, strict=False)}, parts)


# ---------------------------------------------------------------------------------------------- outputs and gradients


def output(s: Setting, initial: State | None, q: Array, k: Array, v: Array) -> Array:
    """o (..., L, e) in the dtype of q."""
    o = Output(s.a.shape_of("o"), q.dtype)
    if 0 in o.shape or (not s.a.keys and initial is None):
        return jnp.zeros(o.shape, o.dtype)
    c = call_of(s, q, q=q, k=k, v=v)
    return run(c, "outputs", s.a.queries, True, False, sums_of(c, "key_sums", s.a.keys, initial), NO_ROWS, o)[0]


def forward(static: Static, arrays: Arrays) -> tuple[Array | tuple[Array, tuple[Array, ...]], None]:
    """o, or o and the state (S, z) in float32; nothing is saved."""
    arguments = arguments_of(static, arrays)
    q, k, v = (arguments[name] for name in "qkv")
    s, initial = setting(jnp, **arguments), initial_of(arguments)
    o = output(s, initial, q, k, v)
    if not arguments.get("return_state"):
        return o, None
    leading, widths = axes_of_state(arguments), states.widths_of(k, v)
    total = sums_of(call_of(s.of_keys_alone(leading), k, k=k, v=v), "key_sums", s.a.keys, initial, True).total
    return (o, tuple(x.reshape(*leading, *width) for x, width in zip(total, widths.values(), strict=True))), None


def backward(static: Static, arrays: Arrays, cotangents: OfLibrary, saved: None) -> Arrays:
    """Gradients of q, k, v and of the parts of the initial state, in their dtypes."""
    arguments = arguments_of(static, arrays)
    q, k, v = (arguments[name] for name in "qkv")
    s, initial, dstate, do = setting(jnp, **arguments), initial_of(arguments), None, cotangents
    if arguments.get("return_state"):
        (do, parts), leading, widths = cotangents, axes_of_state(arguments), states.widths_of(k, v)
        dS, dz = (x.reshape(*leading, *width) for x, width in zip(parts, widths.values(), strict=True))
        dstate = placed(dS, 2, s.a.shared), placed(dz, 1, s.a.shared)
        s = s.of_valid_keys()
    if initial is None and dstate is None and not (do.size and s.a.keys):
        return {name: jnp.zeros_like(arguments[name]) for name in "qkv"}
    c = call_of(s.of_gradients(dtype_name(v)), q, q=q, k=k, v=v, do=do)
    return reduced(gradients(c, arguments, initial, dstate), arguments)


def gradients(c: Call, arguments: Arguments, initial: State | None, dstate: State | None) -> Arrays:
    """Before they are summed over the query heads of a group and over broadcast axes."""
    a, leading = c.s.a, c.s.plan.state_leading
    shapes = {"q": a.shape_of("q"), "k": (*leading, a.keys, a.d), "v": (*leading, a.keys, a.e)}
    dq, dk, dv = (
        Output(shape, arguments[name].dtype if arguments[name].shape == shape else jnp.float32)
        for name, shape in shapes.items()
    )
    grads: Arrays = {}
    keys = sums_of(c, "key_sums", a.keys, initial)
    if c.s.sweeps:
        ends = outputs_of_rows(c, 1)
        grads["q"], *found = run(c, "sweep_queries", a.queries, True, False, keys, Rows({}, 1), dq, *ends)
        rows = rows_from(tuple(found), 1)
    else:
        rows = rows_of(c, keys)
        (grads["q"],) = run(c, "gradient_queries", a.queries, False, False, keys, rows, dq)
    queries = sums_of(c, "query_sums", a.queries, dstate, initial is not None, rows)
    if c.s.sweeps:
        grads["k"], grads["v"] = run(c, "sweep_keys", a.keys, True, True, queries, rows, dk, dv)
    else:
        (grads["k"],) = run(c, "gradient_keys", a.keys, False, True, queries, rows, dk)
        (grads["v"],) = run(c, "gradient_values", a.keys, True, True, queries, rows, dv)
    return grads | {name: x.reshape(*leading, *x.shape[1:]) for name, x in zip(INITIAL, queries.total, strict=False)}


def reduced(grads: Arrays, like: Arguments) -> Arrays:
    """Gradients in the shapes and dtypes of their arguments, rounded once."""
    return {name: sum_to(name, x, like[name].shape).astype(like[name].dtype) for name, x in grads.items()}


def sum_to(name: str, grad: Array, shape: tuple[int, ...]) -> Array:
    """z has no axis behind that of its features: its heads are found with one."""
    if name == INITIAL[1]:
        return quadratic.sum_to(jnp, grad[..., None], (*shape, 1))[..., 0]
    return quadratic.sum_to(jnp, grad, shape)


# ---------------------------------------------------------------------------------------------- what the library calls

EXPLICIT = launch.Explicit(forward, backward)


def attend(q: Array, k: Array, v: Array, **options: Unpack[Options]) -> Results:
    """linear_attention."""
    return launch.attended(EXPLICIT, *divided(OP, states.with_parts(OP, q, k, v, **options)))[0]


def pull(q: Array, k: Array, v: Array, do: Array, dstate: State | None = None, **options: Unpack[Options]) -> Keywords:
    """linear_attention_vjp."""
    op = f"{OP}_vjp"
    arguments = states.with_parts(op, q, k, v, **options)
    if dstate is not None:
        leading, widths = axes_of_state(arguments), states.widths_of(k, v)
        states.check_parts(op, "dstate", dstate, q, widths, leading, True)
        shapes = ((*leading, *width) for width in widths.values())
        parts = (jnp.zeros(shape, jnp.float32) if x is None else x for x, shape in zip(dstate, shapes, strict=True))
        arguments["return_state"] = True
        grads: Keywords = EXPLICIT.pull(*divided(OP, arguments), (do, tuple(parts)), None)
    else:
        grads = EXPLICIT.pull(*divided(OP, arguments), do, None)
    if INITIAL[0] in grads:
        grads["initial_state"] = tuple(grads.pop(name) for name in INITIAL)
    return grads


def unsupported_options(*arrays: Array, **options: Option) -> str | None:
    """Why the kernels do not support a call on any device."""
    if options.get("log_decay") is not None:
        return "log_decay is served by the generic implementation"
    return launch.unsupported_options(*arrays, **options) or linear_calls.unsupported_options(*arrays, **options)


def unsupported(*arrays: Array, **options: Option) -> str | None:
    """Why a call is not supported."""
    return launch.unsupported_device(*arrays, **options) or unsupported_options(*arrays, **options)


def is_faster(q: Array, k: Array, v: Array, *rest: Array, **options: object) -> bool:
    """Whether a call is predicted not to be slower; the generic body keeps no weights either."""
    kind, width = linear_calls.kind("linear", options), max(q.shape[-1], v.shape[-1])
    units = linear_calls.units(q, k)
    return predicted.takes(kind, q.dtype.itemsize, 0, width, units, compiled=True, major=gpu.major())


KERNEL = gpu.kernel(attend, unsupported, is_faster)
KERNELS = with_gradients(linear_attention, KERNEL, pull)
