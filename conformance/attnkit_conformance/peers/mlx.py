"""mlx.core.fast.scaled_dot_product_attention on the CPU; gradients by mlx.core.vjp.

Takes (B, heads, tokens, features), masks of pairs, of booleans or added, a scale, grouped heads, and "causal", lower
right. A bias beside a mask is passed as one, with -inf at hidden pairs.
"""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx
import numpy as np

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.model.case import numpy_dtype
from attnkit_conformance.model.types import Arrays, Foreign, Params, Results
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.numpy_base import NumpyHeads

LINES = (
    "mask, bias = {mask}, {bias}",
    "if bias is not None:",
    "    mask = bias if mask is None else mx.where(mask, bias, -mx.inf).astype(bias.dtype)",
    'mask = "causal" if {causal} else mask',
)


def attend(call: Call) -> mx.array:
    seen = None if call.seen is None else mx.array(call.seen)
    if call.bias is not None:
        seen = call.bias if seen is None else mx.where(seen, call.bias, -np.inf).astype(call.bias.dtype)
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    mask = "causal" if call.causal else seen
    return mx.fast.scaled_dot_product_attention(call.q, call.k, call.v, scale=scale, mask=mask)


class Mlx(NumpyHeads):
    """MLX's arrays and gradients."""

    library = mx
    copied = ("negative", "read_only", "unaligned")

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self.description = f"{function.description}, CPU, mx.vjp"

    def array(self, x: np.ndarray, dtype: str) -> Foreign:
        if dtype == "bfloat16":
            return mx.array(x.astype(np.float32)).astype(mx.bfloat16)
        return mx.array(x)

    def numpy(self, x: object) -> np.ndarray:
        if not isinstance(x, mx.array):
            raise TypeError(f"{self.name}: expected an mlx.core.array, got {type(x).__name__}")
        if x.dtype == mx.bfloat16:
            return np.array(x.astype(mx.float32)).astype(numpy_dtype("bfloat16"))
        return np.array(x)

    def source(self, op: str, arrays: Arrays, params: Params) -> Source:
        """The same call."""
        return self.function.source("mlx", arrays, params)

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        names = [name for name in BY_NAME[op].differentiable if name in arrays]

        def outputs(*leaves: object) -> list[object]:
            return [self.call(op, {**arrays, **dict(zip(names, leaves, strict=True))}, params)["o"]]

        grads = mx.vjp(outputs, [arrays[name] for name in names], [cotangents["o"]])[1]
        return dict(zip(names, grads, strict=True))


def adapters() -> list[Adapter]:
    """One."""
    function = Function(
        "mlx", f"mlx {version('mlx')}, core.fast.scaled_dot_product_attention", ("float32", "bfloat16", "float16"),
        Takes("pairs", "lower_right", bias=True, scale=True, grouped=True), attend,
        "mx.fast.scaled_dot_product_attention({q}, {k}, {v}, scale={factor}, mask=mask)",
        ("import importlib.metadata", "import mlx.core as mx"),
        'importlib.metadata.version("mlx")', LINES,
    )  # fmt: skip
    return [Mlx(function)]
