"""attnkit on JAX arrays under jit, gradients by jax.vjp. Double precision is a process-wide setting: use a worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import ClassVar

import jax
import numpy as np

from attnkit_conformance.adapter import refusing
from attnkit_conformance.adapters.base import AttnkitAdapter, implementations, in_surroundings, refusing_by_name
from attnkit_conformance.adapters.bases.jax import array_of, device_array
from attnkit_conformance.adapters.derivatives import Transformed, differentiable
from attnkit_conformance.adapters.derivatives import jax as transformations
from attnkit_conformance.model.layout import MAKERS
from attnkit_conformance.model.types import Arrays, Foreign, Params, Results
from attnkit_conformance.opdb import BY_NAME

CACHE_SIZE = 60  # jitted functions of a process: each holds memory maps, whose number is limited
# Every case is a separate program, run once or twice, so compiling takes nearly all of the time: this halves it.
LIGHT = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
Options = dict[str, bool | int]


def light() -> Options:
    """Options that reduce XLA's compile time on the CPU, if this version has them; none on other devices."""
    return (
        {name: value for name, value in LIGHT.items() if has_option(name, value)}
        if jax.default_backend() == "cpu"
        else {}
    )


def has_option(name: str, value: object) -> bool:
    """Whether this XLA has an option: jaxlib 0.11 dropped one of them."""
    try:
        jax.jit(jax.numpy.negative, compiler_options={name: value})(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Jax(Transformed, AttnkitAdapter):
    """Every call is jitted; jitted functions are cached, so that a shape is compiled once."""

    compiles = True
    copied = tuple(MAKERS)  # arrays have no strides
    jitted: ClassVar[dict[tuple[int, str, str, str], Foreign]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self, name: str, impl: str, dtypes: tuple[str, ...], ops: tuple[str, ...] | None, options: Options
    ) -> None:
        described = ", ".join(f"{option}={value}" for option, value in options.items())
        super().__init__(name, dtypes, impl, "; ".join(filter(None, ("jit, jax.vjp", described))), ops)
        self.options, self.number = options, next(Jax.numbers)

    def array(self, x: np.ndarray, dtype: str) -> jax.Array:
        """On the default device."""
        return device_array(x)

    def numpy(self, x: object) -> np.ndarray:
        """Refuses anything that is not a JAX array."""
        return array_of(x, self.name)

    def compiled(
        self, kind: str, op: str, params: Params, make: Callable[[], Callable[..., Foreign]]
    ) -> Callable[..., Foreign]:
        """The jitted function of an op with these parameters."""
        key = (self.number, kind, op, repr(sorted(params.items())))
        if key not in self.jitted:
            if len(self.jitted) >= CACHE_SIZE:
                self.jitted.pop(next(iter(self.jitted))).clear_cache()  # what was traced of its parts stays
            self.jitted[key] = jax.jit(make(), compiler_options=self.options)
        function: Callable[..., Foreign] = self.jitted[key]
        return function

    def forward(self, op: str, arrays: Arrays, params: Params) -> Results:
        """The outputs under jit."""
        outputs: Results = self.compiled("call", op, params, lambda: lambda a: self.answer(op, a, params))(dict(arrays))
        return outputs

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        """jax.vjp of the outputs that have a cotangent, under jit."""
        leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}
        rest = {name: x for name, x in arrays.items() if name not in leaves}

        def pull(leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Results:
            def outputs(leaves: Arrays) -> Results:
                results = self.answer(op, {**leaves, **rest}, params)
                return {name: results[name] for name in cotangents}

            grads: Results = jax.vjp(outputs, leaves)[1](cotangents)[0]
            return grads

        with refusing():
            answer: Results = self.compiled("vjp", op, params, lambda: pull)(leaves, rest, dict(cotangents))
        return answer

    def derivatives(self, kind: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Results:
        """By the transformation of this name, under jit."""

        def transform(arrays: Arrays, *others: Arrays) -> Results:
            function = differentiable(self.answer, op, arrays, params)
            tangents: Results = getattr(transformations, kind)(function, arrays, *others)
            return tangents

        with refusing_by_name(op, self.impl):
            answer: Results = self.compiled(kind, op, params, lambda: transform)(dict(arrays), *map(dict, others))
        return answer


def adapters(options: Options | None = None) -> list[AttnkitAdapter]:
    """One adapter per implementation, in single precision and below; compiled with `options`, by default `light()`."""
    dtypes, options = ("float32", "bfloat16", "float16"), light() if options is None else options
    return [*in_surroundings(lambda name, ops: Jax(f"jax-{name}", name, dtypes, ops, options), "jax")]


def double_precision() -> Jax:
    """The adapter for a worker with JAX_ENABLE_X64 set."""
    return in_double("jax_x64", "auto", ("float64", "float32"))


def native_in_double() -> Jax:
    """The same for the CPU library."""
    return in_double("jax_x64-native", "native", ("float64",))


def blocked_in_double() -> Jax:
    """The same for attention block by block."""
    return in_double("jax_x64-blocked", "blocked", ("float64",))


def in_double(name: str, impl: str, dtypes: tuple[str, ...]) -> Jax:
    if jax.numpy.zeros(0).dtype != np.float64:
        raise RuntimeError("set JAX_ENABLE_X64=1 before the process starts")
    return Jax(name, impl, dtypes, implementations("jax").get(impl), light())
