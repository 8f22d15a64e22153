"""Numbers that are arrays (semantics A15), for kernels that read numbers.

A kernel takes some arrays itself (`Kernel.learned`), and of the numbers that softmax is without unless a call has them
(`Family.not_of_kernels`), plain ones too. A learned scale of products multiplies q before any other kernel,
in float32 and float64, where that is what the generic body does. All else the generic body serves.
"""

import math

from attnkit._core import check, quadratic
from attnkit._core.dispatch import Kernel, always, namespace
from attnkit._core.family import RECORDS
from attnkit._core.library import library
from attnkit._core.special import stop_gradient, times
from attnkit._core.typing import (
    Array,
    Arrays,
    Bindings,
    Factor,
    Keywords,
    Namespace,
    Option,
    OptionalFunction,
)


def served(op: str, kernel: Kernel) -> Kernel:
    """A kernel of an op or its gradients that also serves a learned scale, or says why it does not."""
    backward = op.endswith("_vjp")

    def left(options: Bindings) -> tuple[str, ...]:
        names = numbers(op, options)
        return tuple([name for name in names if name not in kernel.learned]) if names else ()

    def unsupported(*arrays: Array, **options: object) -> str | None:
        names = left(options)
        reason = _refusal(op, names, arrays[0], options) if names else None
        return reason or kernel.unsupported(*arrays, **_without(names, options))

    def is_faster(*arrays: Array, **options: object) -> bool:
        return kernel.is_faster(*arrays, **_without(left(options), options))

    def prepared(arrays: Arrays, options: Keywords) -> OptionalFunction:
        return None if left(options) else kernel.prepared(arrays, options)

    def call(q: Array, *arrays: Array, **options: Option) -> object:
        names = left(options)
        if not names:
            return kernel.call(q, *arrays, **options)
        xp = namespace(q)
        scale = quadratic.number(xp, options["scale"], q.dtype)
        result = kernel.call(scaled(xp, q, scale), *arrays, **_without(names, options))
        return _pulled(xp, q, scale, options["scale"], result) if backward else result

    asked = kernel if kernel.is_faster is always else kernel._replace(is_faster=is_faster)
    return asked._replace(call=call, unsupported=unsupported, prepared=prepared)


def numbers(op: str, options: Bindings) -> tuple[str, ...]:
    """The numbers of a call of an op, its gradients or its statistics that are arrays, or that few kernels know."""
    if not options:
        return ()
    record = RECORDS.get(options.get("op", op.removesuffix("_vjp")))
    names = () if record is None else ("scale", *record.family.numbers)
    given = [(name, options[name]) for name in names if name in options]
    found = [name for name, x in given if not isinstance(x, float) and check.is_learned(x)]
    if record is not None and record.family.not_of_kernels:
        found += [name for name in record.family.not_of_kernels if name not in found and options.get(name) is not None]
    return tuple(found)


def _refusal(op: str, names: tuple[str, ...], q: Array, options: Bindings) -> str | None:
    """Why a scale in q is not what a call with these arrays means."""
    family = RECORDS[options.get("op", op.removesuffix("_vjp"))].family
    products = family.prepare is quadratic.prepare and family.scores is quadratic.scores
    if names != ("scale",) or not products:
        name = next((x for x in names if x != "scale"), "scale")
        array = "" if name in family.not_of_kernels else " as an array"
        return f"{name}{array} is served by the generic implementation"
    if q.dtype != quadratic.compute_dtype(namespace(q), q):
        return "scale as an array in half types is served by the generic implementation"
    return None


def _without(names: tuple[str, ...], options: Bindings) -> Bindings:
    """The options with scale 1 in the place of an array."""
    return {**options, "scale": 1.0} if names else options


def finite(xp: Namespace, q: Array) -> Array:
    """q with 0 for NaN and infinities: padding may hold them, where its gradient 0 times NaN must not reach dscale."""
    return xp.where(_is_finite(xp, q), q, 0.0)


def _is_finite(xp: Namespace, q: Array) -> Array:
    """torch's isfinite takes four passes over q."""
    return q - q == 0 if library(q) == "torch" else xp.isfinite(q)


def scaled(xp: Namespace, q: Array, scale: float | Array) -> Array:
    """q·scale, where a NaN or an infinity of q does not reach the gradient of the scale.

    Padding may hold infinities; of their product with 0 NumPy would warn.
    """
    if not check.is_learned(scale) and scale != 0:
        return q * scale
    inside = _is_finite(xp, q)
    # a factor of NaN in place of 0 would make the gradient of q NaN: what is not chosen has one of 0 times the factor
    beyond = times(q, stop_gradient(scale)) if check.is_learned(scale) else math.nan
    return xp.where(inside, xp.where(inside, q, 0.0) * scale, beyond)


def _pulled(xp: Namespace, q: Array, scale: Factor, like: Array, grads: dict[str, Array]) -> dict[str, Array]:
    """Gradients of q and of scale from those of their product."""
    of_product = grads["q"]
    of_q = quadratic.sum_to(xp, of_product * scale, tuple(q.shape))
    of_scale = quadratic.number_gradient(xp, of_product * finite(xp, q), like)
    return {**grads, "q": of_q, "scale": quadratic.cast(xp, of_scale, like.dtype)}
