"""Adapters of JAX functions: gradients by jax.vjp, derivatives beyond them by JAX's transformations."""

from __future__ import annotations

import jax
import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.derivatives import Transformed, differentiable
from attnkit_conformance.adapters.derivatives import jax as transformations
from attnkit_conformance.adapters.derivatives.jax import Arrays
from attnkit_conformance.model.layout import MAKERS
from attnkit_conformance.model.types import Params
from attnkit_conformance.opdb import BY_NAME


class JaxAdapter:
    """A function of JAX arrays.

    A subclass has `call(op, arrays, params)`, which returns {output name: array}, and a `name`; jit is its own. `ops`
    are all by default, `dtypes` those of single precision and below: float64 needs JAX_ENABLE_X64=1. Gradients are
    those of jax.vjp through `call`. One whose function has none sets `forward_only`, and they are refused.
    """

    name = "mine"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    forward_only = False
    compiles = True
    copied = tuple(MAKERS)  # arrays have no strides

    def array(self, x: np.ndarray, dtype: str) -> jax.Array:
        """An array on the default device."""
        return device_array(x)

    def numpy(self, x: object) -> np.ndarray:
        """The content of an array; TypeError for anything else."""
        return array_of(x, self.name)

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """Outputs by name: yours."""
        raise NotImplementedError(f"{type(self).__name__} has no call")

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        """jax.vjp of the outputs that have a cotangent."""
        if self.forward_only:
            raise Unsupported("no gradients")
        leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}

        def outputs(leaves: Arrays) -> Arrays:
            answer = self.call(op, {**arrays, **leaves}, params)
            return {name: answer[name] for name in cotangents}

        grads: Arrays = jax.vjp(outputs, leaves)[1](dict(cotangents))[0]
        return grads


class JaxDerivatives(Transformed, JaxAdapter):
    """The same with `jvp`, `hvp` and `vmap_grad`: they are judged too, in float64."""

    def derivatives(self, kind: str, op: str, arrays: Arrays, params: Params, *others: Arrays) -> Arrays:
        """By the transformation of this name."""
        function = differentiable(self.forward, op, arrays, params)
        answer: Arrays = getattr(transformations, kind)(function, arrays, *map(dict, others))
        return answer

    def forward(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        """The outputs of the call."""
        return dict(self.call(op, arrays, params))


def device_array(x: np.ndarray) -> jax.Array:
    """An array on the default device. JAX would cut integers of 64 bits: they become what it has."""
    own = jax.dtypes.canonicalize_dtype(x.dtype)
    if x.dtype.kind in "iu" and own != x.dtype:
        x = np.clip(x, np.iinfo(own).min, np.iinfo(own).max).astype(own)
    placed: jax.Array = jax.device_put(x)  # jax.numpy.asarray would compile a copy for each shape
    return placed


def array_of(x: object, name: str) -> np.ndarray:
    """The content of a JAX array; TypeError, with the name of an adapter, for anything else."""
    if not isinstance(x, jax.Array):
        raise TypeError(f"{name}: expected a jax.Array, got {type(x).__module__}.{type(x).__name__}")
    return np.asarray(x)
