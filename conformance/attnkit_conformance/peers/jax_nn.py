"""jax.nn.dot_product_attention on the CPU (implementation "xla").

Supported: softmax_attention with its lse, with masks, bias, scale, grouped heads, windows and causal; the layout is (B,
T, N, H), with exactly two leading axes. Lengths, causality and windows are passed as one mask. The function needs as
many features in v as in k: the adapter pads the shorter one with zeros, which changes nothing, and crops the output.
Unsupported: dropout. Not judged: float64, since its softmax computes in float32, and float16.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.bases.arguments import refusal, visible_pairs
from attnkit_conformance.adapters.bases.jax import JaxAdapter
from attnkit_conformance.adapters.derivatives.jax import Arrays
from attnkit_conformance.model.types import Foreign, Params
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.base import Source

TAKEN = (
    "q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa", "return_lse",
)  # fmt: skip
FLOATS = ("q", "k", "v", "bias")


class JaxNn(JaxAdapter):
    """A function with the signature of JAX's; JAX's by default. Gradients by jax.vjp."""

    ops: tuple[str, ...] = ("softmax_attention",)
    compiles = False

    def __init__(
        self, name: str, dtypes: tuple[str, ...], function: Callable[..., Foreign] = jax.nn.dot_product_attention
    ) -> None:
        self.name, self.dtypes, self.function = name, dtypes, function
        self.description = f"jax {jax.__version__}, jax.nn.dot_product_attention, CPU, jit, jax.vjp"

    def unsupported(self, op: str, arrays: Arrays, params: Params) -> str | None:
        """Other than two leading axes, heads that broadcast, and dropout."""
        shapes = [arrays[name].shape for name in ("q", "k", "v")]
        if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes) or shapes[1][1] != shapes[2][1]:
            return "takes (B, T, N, H) arrays"
        if shapes[0][1] != shapes[1][1] and not params.get("enable_gqa"):
            return "heads do not broadcast"
        if params.get("return_lse") and arrays["q"].dtype.itemsize < 4:
            return "the lse of half types is a half type"
        return refusal(arrays, params, TAKEN)

    def options(self, arrays: Arrays, params: Params) -> Arrays:
        """The keyword arguments of a call, but for the bias."""
        seen = visible_pairs(arrays, params)
        mask = None if seen is None else jax.numpy.asarray(np.broadcast_to(seen, pairs_of(arrays)))
        scale = params.get("scale", arrays["q"].shape[-1] ** -0.5)
        residual = {"return_residual": True} if params.get("return_lse") else {}
        return {"mask": mask, "scale": scale, "implementation": "xla", **residual}

    def outputs(self, arrays: Arrays, params: Params) -> Callable[[Arrays], Arrays]:
        """The outputs as a function of q, k, v and bias."""
        options, residual = self.options(arrays, params), bool(params.get("return_lse"))
        features, values = arrays["q"].shape[-1], arrays["v"].shape[-1]

        def outputs(leaves: Arrays) -> Arrays:
            q, k, v = (pad_features(leaves[name], max(features, values)) for name in ("q", "k", "v"))
            bias = {"bias": broadcast(leaves["bias"], pairs_of(arrays))} if "bias" in leaves else {}
            answer = self.function(q, k, v, **bias, **options)
            o: Foreign = answer[0] if residual else answer
            results = {"o": jax.numpy.swapaxes(o, 1, 2)[..., :values]}
            return {**results, "lse": jax.numpy.swapaxes(answer[1], 1, 2)} if residual else results

        return outputs

    def call(self, op: str, arrays: Arrays, params: Params) -> Arrays:
        reason = self.unsupported(op, arrays, params)
        if reason is not None:
            raise Unsupported(reason)
        floats = {name: arrays[name] for name in FLOATS if name in arrays}
        outputs: Arrays = jax.jit(self.outputs(arrays, params))(floats)
        return outputs

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Arrays:
        if params.get("return_lse"):
            raise Unsupported("lse passes no gradient on")
        leaves = {name: arrays[name] for name in BY_NAME[op].differentiable if name in arrays}
        function = self.outputs(arrays, params)
        pull = jax.jit(lambda leaves, cotangents: jax.vjp(function, leaves)[1](cotangents)[0])
        grads: Arrays = pull(leaves, dict(cotangents))
        return grads

    def source(self, op: str, arrays: Arrays, params: Params) -> Source:
        """The same call; if q and v differ in features, the shorter one is padded with zeros and the output cropped."""
        shape = "(*q.shape[:3], k.shape[2])"
        options = [f"bias=jax.numpy.broadcast_to(bias, {shape})"] if "bias" in arrays else []
        options += [f"mask=jax.numpy.broadcast_to(seen, {shape})"] if visible_pairs(arrays, params) is not None else []
        features, values = arrays["q"].shape[-1], arrays["v"].shape[-1]
        turn, cut = "x.swapaxes(1, 2)", ""
        if features != values:
            width = max(features, values)
            turn = f"jax.numpy.pad({turn}, ((0, 0), (0, 0), (0, 0), (0, {width} - x.shape[-1])))"
            cut = f"[..., :{values}]"
        if "scale" in params or features != values:
            options.append(f"scale={params.get('scale', features**-0.5)!r}")
        call = f"jax.nn.dot_product_attention({', '.join(('turned(q)', 'turned(k)', 'turned(v)', *options))})"
        return Source("jax", (), (f"turned = lambda x: {turn}",), f"{call}.swapaxes(1, 2){cut}", "jax.__version__")


def pairs_of(arrays: Arrays) -> tuple[int, ...]:
    """The shape of all pairs of queries and keys."""
    return (*arrays["q"].shape[:-1], arrays["k"].shape[-2])


def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array broadcast; by way of float32, so that the gradient, which is a sum, is not rounded on the way."""
    wide = x if x.dtype.itemsize > 2 else x.astype("float32")
    return jax.numpy.broadcast_to(wide, shape).astype(x.dtype)


def pad_features(x: jax.Array, features: int) -> jax.Array:
    """(B, N, T, H) as (B, T, N, features), padded with zeros."""
    x = jax.numpy.swapaxes(x, 1, 2)
    return jax.numpy.pad(x, ((0, 0), (0, 0), (0, 0), (0, features - x.shape[-1])))


def adapters() -> list[Adapter]:
    """Single precision and bfloat16: not every CPU supports the float16 dot product that the function needs."""
    return [JaxNn("jax_nn", ("float32", "bfloat16"))]
