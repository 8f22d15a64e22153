"""Shared by adapters of JAX functions: conversion, and gradients by jax.vjp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import Function

Arrays = Mapping[str, Any]
FLOATS = ("q", "k", "v", "bias")


class JaxHeads:
    """softmax_attention by a function of JAX arrays on the CPU."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(self, function: Function) -> None:
        self.function, self.name, self.dtypes = function, function.name, function.dtypes
        self.description = f"{function.description}, CPU, jit, jax.vjp"

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return jax.device_put(x)

    def numpy(self, x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array):
            raise TypeError(f"{self.name}: expected a jax.Array, got {type(x).__name__}")
        return np.asarray(x)

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Why a call is not supported."""
        return self.function.reason(arrays, params)

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        floats = {name: arrays[name] for name in FLOATS if name in arrays}
        outputs: dict[str, Any] = jax.jit(self.outputs(arrays, params))(floats)
        return outputs

    def outputs(self, arrays: Arrays, params: Arrays) -> Callable[[Arrays], dict[str, Any]]:
        """The outputs as a function of q, k, v and bias."""
        return lambda some: {"o": self.function.answer({**arrays, **some}, params, padded, jax.numpy.broadcast_to)}

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}
        function = self.outputs(arrays, params)
        pull = jax.jit(lambda leaves, cotangents: jax.vjp(function, leaves)[1](cotangents)[0])
        grads: dict[str, Any] = pull(leaves, dict(cotangents))
        return grads

    def source(self, op: str, arrays: Arrays, params: Arrays) -> Source:
        """The same call."""
        return self.function.source("jax", arrays, params)


def padded(x: Any, features: int) -> Any:
    """x with so many zeros as further features."""
    return jax.numpy.pad(x, (*((0, 0),) * (x.ndim - 1), (0, features)))
