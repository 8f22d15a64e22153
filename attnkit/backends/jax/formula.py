"""The generic body of a call of the CPU library: for its second derivatives, and for programs that cannot have it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from attnkit._core.quadratic import leading_shape
from attnkit._core.typing import AnyFunction, Bindings, FullName, Keywords
from attnkit.backends.native import linear, lower, packed, rows
from attnkit.backends.native.served import further
from attnkit.ops.entmax import ENTMAX, entmax_attention
from attnkit.ops.forgetting import FORGETTING, forgetting_attention
from attnkit.ops.gaussian import GAUSSIAN, gaussian_attention
from attnkit.ops.pointwise import POINTWISE, pointwise_attention
from attnkit.ops.softmax import SOFTMAX, softmax_attention
from attnkit.ops.softpick import SOFTPICK, softpick_attention
from attnkit.ops.statistics import RowStatistics, attention_with_statistics, row_statistics
from attnkit.ops.stick_breaking import STICK_BREAKING, stick_breaking_attention

Arrays = dict[str, Array]
FUNCTIONS: dict[str, AnyFunction] = {
    SOFTMAX.name: softmax_attention,
    POINTWISE.name: pointwise_attention,
    ENTMAX.name: entmax_attention,
    GAUSSIAN.name: gaussian_attention,
    SOFTPICK.name: softpick_attention,
    STICK_BREAKING.name: stick_breaking_attention,
    FORGETTING.name: forgetting_attention,
}
COTANGENTS = tuple(f"d{name}" for name in ("o", "lse", "r", *RowStatistics._fields, *linear.FINAL))
SAVED = ("o", "rows")
"""Arguments of the backward pass that the forward pass returned."""


class Call(NamedTuple):
    """A custom call: the names of its arguments and results, and how many of the leading axes are those of vmap."""

    op: str
    backward: bool
    plain: lower.Plain
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    mapped: int = 0

    def leading(self, shapes: Mapping[str, lower.Shape]) -> lower.Shape:
        """The leading axes of a call on arrays of these shapes."""
        return leading_shape(shapes["q"], shapes["k"], shapes.get("v"), bool(dict(self.plain).get("enable_gqa", False)))

    def shapes(self, arrays: Sequence[Array]) -> dict[str, lower.Shape]:
        """Those of the arguments."""
        return {name: tuple(x.shape) for name, x in zip(self.names, arrays, strict=True)}


def served(call: Call, specs: Mapping[str, jax.ShapeDtypeStruct], *arrays: Array) -> list[Array]:
    """The results of a call; for the numbers of rows, which the library alone understands, NaN."""
    by_name = dict(zip(call.names, arrays, strict=True))
    if call.mapped and "seed" in by_name:
        return _one_axis_less(call, specs, by_name)
    if call.backward:
        cotangents = {name: x for name, x in by_name.items() if name in COTANGENTS}
        inputs = {name: x for name, x in by_name.items() if name not in (*COTANGENTS, *SAVED)}
        found = {f"d{name}": x for name, x in gradients(call.op, call.plain, inputs, cotangents).items()}
    else:
        found = outputs(call.op, {**by_name, **dict(call.plain)}, call.outputs)
        found |= {"rows": jnp.full(specs["rows"].shape, jnp.nan, specs["rows"].dtype)} if "rows" in specs else {}
    return [found[name] for name in call.outputs]


def _one_axis_less(call: Call, specs: Mapping[str, jax.ShapeDtypeStruct], arrays: Arrays) -> list[Array]:
    """By vmap, because the counter of dropout does not count axes that are mapped."""
    leading = len(call.leading({name: x.shape for name, x in arrays.items()}))
    has_axis = {name: name != "seed" and x.ndim == leading + lower.trailing_axes(name) for name, x in arrays.items()}
    axes = {name: 0 if has_axis[name] and x.shape[0] != 1 else None for name, x in arrays.items()}
    parts = [x[0] if has_axis[name] and axes[name] is None else x for name, x in arrays.items()]
    inner = {name: jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype) for name, spec in specs.items()}

    def one(*parts: Array) -> list[Array]:
        return served(call._replace(mapped=call.mapped - 1), inner, *parts)

    if all(axis is None for axis in axes.values()):
        return [x[None] for x in one(*parts)]
    return list(jax.vmap(one, tuple(axes.values()))(*parts))


def options_of(arguments: Bindings) -> Keywords:
    """The arguments of the op, with dropout=(p, key) for p and the words of a key, or a seed."""
    options = {name: x for name, x in arguments.items() if name != "exact_zeros"}
    if "seed" in options:
        seed = options.pop("seed")
        if seed.ndim:
            seed = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")
        options["dropout"] = (options["dropout"], seed)
    return options


def outputs(op: str, arguments: Bindings, names: Sequence[str]) -> dict[str, Array]:
    """The named outputs of an op, but not numbers of rows."""
    if op in linear.OPS and lower.EDGES[0] not in arguments:
        return linear.formula(op, arguments, names)
    options = options_of(arguments)
    fields = tuple(name for name in names if name in RowStatistics._fields)
    if "v" not in options:
        return _of_fields(row_statistics(cast(FullName, op), **options, fields=fields, impl="generic"))
    if fields:
        o, measured = attention_with_statistics(cast(FullName, op), **options, fields=fields, impl="generic")
        return {"o": o} | _of_fields(measured)
    is_packed = lower.EDGES[0] in options
    function = packed.OPS[op][0] if is_packed else FUNCTIONS[op]
    if is_packed:
        options |= {f"cu_seqlens_{end}": options.pop(f"edges_{end}") for end in "qk"}
    asks, beside = further(op)
    if beside not in names:
        return {"o": function(**options, impl="generic")}
    return dict(zip(("o", beside), function(**options, **{asks: True}, impl="generic"), strict=True))


def _of_fields(measured: RowStatistics) -> dict[str, Array]:
    return {name: x for name, x in measured._asdict().items() if x is not None}


def gradients(op: str, plain: lower.Plain, arrays: Arrays, cotangents: Arrays) -> Arrays:
    """Those of the arguments by name; they can be differentiated."""
    arguments: Keywords = {**arrays, **dict(plain)}
    if lower.EDGES[0] in arrays:
        return packed.formula(op, arguments, cotangents)
    if op in linear.OPS:
        return _gradients_of_linear(op, arguments, arrays, cotangents)
    return rows.formula(op, options_of(arguments), cotangents)


def _gradients_of_linear(op: str, arguments: Keywords, arrays: Arrays, cotangents: Arrays) -> Arrays:
    """The same for linear attention: the generic body differentiated."""
    moved = {name: x for name, x in arrays.items() if name in lower.DIFFERENTIABLE}
    names = [name[1:] for name in cotangents]

    def results(moved: Arrays) -> list[Array]:
        found = linear.formula(op, arguments | moved, names)
        return [found[name] for name in names]

    primals_out, pull_back = jax.vjp(results, moved)
    grads: Arrays = pull_back(
        [cotangents[f"d{name}"].astype(x.dtype) for name, x in zip(names, primals_out, strict=True)]
    )[0]
    return grads
