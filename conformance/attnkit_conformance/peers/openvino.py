"""OpenVINO's scaled_dot_product_attention (opset 13) on its CPU plugin, with float32 as the precision of inference.

Takes (B, heads, tokens, features), masks of pairs, of booleans or added, a scale, and a causal flag, upper left.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import openvino
from openvino import opset13

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.model.types import Foreign
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.numpy_base import NumpyHeads

PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
LINES = (
    "mask, bias = {mask}, {bias}",
    "if bias is not None:",
    "    mask = bias if mask is None else np.where(mask, bias, -np.inf).astype(bias.dtype)",
    "inputs = [x for x in ({q}, {k}, {v}, mask, {scale}) if x is not None]",
    "inputs = [np.asarray(x, bool if np.asarray(x).dtype == bool else np.float32) for x in inputs]",
    "nodes = [opset13.parameter(x.shape, x.dtype) for x in inputs]",
    "names = ['query', 'key', 'value', *(['attention_mask'] if mask is not None else []), 'scale']",
    "node = opset13.scaled_dot_product_attention(**dict(zip(names, nodes)), causal={causal})",
    'compiled = openvino.compile_model(openvino.Model([node], nodes), "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})',
)


def attend(call: Call) -> np.ndarray:
    mask = call.seen
    if call.bias is not None:
        mask = call.bias if mask is None else np.where(mask, call.bias, -np.inf).astype(call.bias.dtype)
    scale = None if call.scale is None else np.asarray(call.scale, np.float32)
    arrays = {"query": call.q, "key": call.k, "value": call.v, "attention_mask": mask, "scale": scale}
    inputs = {name: x for name, x in arrays.items() if x is not None}
    compiled = build_model(tuple((name, x.dtype.name, x.ndim) for name, x in inputs.items()), call.causal)
    o: np.ndarray = compiled([np.array(x, order="C") for x in inputs.values()])[0].copy()
    return o


@cache
def build_model(inputs: tuple[tuple[str, str, int], ...], causal: bool) -> Foreign:
    """The compiled model of arguments of any size: mask and scale have to be in their places."""
    nodes = {name: opset13.parameter([-1] * axes, np.dtype(dtype)) for name, dtype, axes in inputs}
    node = opset13.scaled_dot_product_attention(**nodes, causal=causal)
    return openvino.Core().compile_model(openvino.Model([node], list(nodes.values())), "CPU", PRECISE)


def adapters() -> list[Adapter]:
    """One; float32 alone, in which the plugin is told to compute."""
    version = openvino.__version__.partition("-")[0]
    function = Function(
        "openvino", f"openvino {version}, opset13.scaled_dot_product_attention", ("float32",),
        Takes("pairs", "upper_left", bias=True, scale=True), attend, "compiled(inputs)[0]",
        ("import openvino", "from openvino import opset13"), "openvino.__version__", LINES,
    )  # fmt: skip
    return [NumpyHeads(function)]
