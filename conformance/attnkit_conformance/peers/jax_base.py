"""Shared by adapters of JAX functions: conversion, and gradients by jax.vjp."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.adapters.derivatives.jax import Arrays
from attnkit_conformance.model.types import Foreign, Params
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import Function

FLOATS = ("q", "k", "v", "bias")


class JaxHeads:
    """softmax_attention by a function of JAX arrays on the CPU."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(self, function: Function) -> None:
        self.function, self.name, self.dtypes = function, function.name, function.dtypes
        self.known: dict[tuple[object, ...], Callable[..., object]] = {}
        self.description = f"{function.description}, CPU, jit, jax.vjp"

    def array(self, x: np.ndarray, dtype: str) -> jax.Array:
        placed: jax.Array = jax.device_put(x)
        return placed

    def numpy(self, x: object) -> np.ndarray:
        if not isinstance(x, jax.Array):
            raise TypeError(f"{self.name}: expected a jax.Array, got {type(x).__name__}")
        return np.asarray(x)

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Why a call is not supported."""
        return self.function.reason(arrays, params)

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        floats, others = parts(arrays)
        seen = self.function.mask(arrays, params)
        outputs: Arrays = self.compiled("call", floats, others, seen, params)(floats, seen)
        return outputs

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        leaves, others = parts(arrays)
        seen = self.function.mask(arrays, params)
        every = self.compiled("vjp", leaves, others, seen, params)(leaves, seen, dict(cotangents))
        return {name: every[name] for name in BY_NAME[op].differentiable if name in every}

    def compiled(
        self, kind: str, floats: Arrays, others: Arrays, seen: np.ndarray | None, params: Params
    ) -> Callable[..., Foreign]:
        """The outputs or gradients as a function of q, k, v, bias and the mask, compiled once for all calls alike."""
        shapes = tuple((name, x.shape, x.dtype.name) for name, x in floats.items())
        key = (kind, shapes, tuple(others), seen is None, repr(sorted(params.items())))
        if key not in self.known:

            def outputs(some: Arrays, mask: jax.Array | None) -> Arrays:
                arrays = {**some, **others}  # of the others only what there is counts
                return {"o": self.function.answer(arrays, params, mask, pad_features, jax.numpy.broadcast_to)}

            def gradients(some: Arrays, mask: jax.Array | None, cotangents: Arrays) -> Arrays:
                grads: Arrays = jax.vjp(lambda leaves: outputs(leaves, mask), some)[1](cotangents)[0]
                return grads

            self.known[key] = jax.jit(outputs if kind == "call" else gradients)
        return self.known[key]

    def source(self, op: str, arrays: Arrays, params: Params) -> Source:
        """The same call."""
        return self.function.source("jax", arrays, params)


def parts(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """q, k, v and bias, and the other arrays."""
    floats = {name: x for name, x in arrays.items() if name in FLOATS}
    return floats, {name: x for name, x in arrays.items() if name not in FLOATS}


def pad_features(x: jax.Array, features: int) -> jax.Array:
    """x with so many zeros as further features."""
    return jax.numpy.pad(x, (*((0, 0),) * (x.ndim - 1), (0, features)))
