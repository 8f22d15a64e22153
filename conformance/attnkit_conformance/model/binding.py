"""How a public function is called: the same for the reference and attnkit, whose signatures are equal.

A `Binding` turns (arrays, params) into a call and the answer into a dict of outputs, and the same for the explicit
`*_vjp` function. An op names its binding in the op database.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from attnkit_conformance.model.types import Arrays, Foreign, Keywords, Params, Results

FIELDS = ("total", "entropy", "sum_squares", "maximum", "nonzero", "visible")


class Signature(Protocol):
    """What a binding needs to know about an op."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> Callable[[Params], tuple[str, ...]]: ...

    @property
    def vjp(self) -> bool: ...


@dataclass(frozen=True)
class Binding:
    """`forward(module, op, arrays, params) -> outputs`; `backward` also takes cotangents and returns gradients.

    `backward` calls `<op><suffix>`: `_vjp`, or `_magnitudes`, which has the same arguments.
    """

    forward: Callable[[object, Signature, Arrays, Params], Results]
    backward: Callable[[object, Signature, Arrays, Params, Arrays, str], Results]

    def vjp(self, module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        """Explicit gradients."""
        return self.backward(module, op, arrays, params, cotangents, "_vjp")


def arguments_by_kind(op: Signature, arrays: Arrays, params: Params) -> tuple[list[Foreign], Keywords]:
    """Positional arguments in the order of the op, and everything else by keyword."""
    values = {**arrays, **params}
    return [values.pop(name) for name in op.arguments], values


def name_outputs(op: Signature, params: Params, answer: object) -> Results:
    """The answer of a function under the op's output names."""
    names = op.outputs(params)
    values = answer if isinstance(answer, tuple) else (answer,)
    if len(values) != len(names):
        raise ValueError(f"{op.name}: returned {len(values)} outputs; expected {len(names)}: {', '.join(names)}")
    return dict(zip(names, values, strict=True))


def plain_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    """op(*arrays, **params) -> output or tuple of outputs."""
    args, keywords = arguments_by_kind(op, arrays, params)
    return name_outputs(op, params, getattr(module, op.name)(*args, **keywords))


def plain_backward(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    """op_vjp(*arrays, *cotangents, **params) -> gradients."""
    args, keywords = arguments_by_kind(op, arrays, params)
    keywords.pop("return_lse", None)
    keywords.pop("return_remainder", None)
    of_outputs = [cotangents.get(name) for name in op.outputs(params)] if op.vjp else []  # weights have none
    return dict(getattr(module, op.name + suffix)(*args, *of_outputs, **keywords))


def row_statistics(module: Foreign, values: Arrays) -> Foreign:
    """A RowStatistics of `module` with the given fields, None elsewhere."""
    return module.RowStatistics(**{name: values.get(name) for name in FIELDS})


def fields_of(stats: Foreign) -> Results:
    """The requested fields of a RowStatistics."""
    return {name: value for name, value in stats._asdict().items() if value is not None}


def statistics_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    """row_statistics(op, q, k, ...) or attention_with_statistics(op, q, k, v, ...)."""
    args, keywords = arguments_by_kind(op, arrays, params)
    answer = getattr(module, op.name)(keywords.pop("op"), *args, **keywords)
    if "v" not in op.arguments:
        return fields_of(answer)
    o, stats = answer
    return {"o": o, **fields_of(stats)}


def statistics_backward(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    """The same with cotangents: `do` if the op has o, and a RowStatistics."""
    args, keywords = arguments_by_kind(op, arrays, params)
    of_outputs = [cotangents.get("o")] if "v" in op.arguments else []
    dstats = row_statistics(module, cotangents)
    return dict(getattr(module, op.name + suffix)(keywords.pop("op"), *args, *of_outputs, dstats, **keywords))


def regulariser_forward(module: object, op: Signature, arrays: Arrays, params: Params) -> Results:
    """attention_regulariser(stats, ...): the arrays are the fields of the statistics."""
    rest = {name: x for name, x in arrays.items() if name not in FIELDS}
    return name_outputs(op, params, getattr(module, op.name)(row_statistics(module, arrays), **rest, **params))


def regulariser_backward(
    module: object, op: Signature, arrays: Arrays, params: Params, cotangents: Arrays, suffix: str
) -> Results:
    """attention_regulariser_vjp(stats, dloss, dsum_term, dentropy_term, ...)."""
    rest = {name: x for name, x in arrays.items() if name not in FIELDS}
    of_outputs = [cotangents.get(name) for name in op.outputs(params)]
    return dict(getattr(module, op.name + suffix)(row_statistics(module, arrays), *of_outputs, **rest, **params))


PLAIN = Binding(plain_forward, plain_backward)
STATISTICS = Binding(statistics_forward, statistics_backward)
REGULARISER = Binding(regulariser_forward, regulariser_backward)
