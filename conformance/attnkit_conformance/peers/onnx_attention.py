"""A model of ONNX's Attention alone, opset 23, for whoever runs one, and the same as a program.

Its inputs are (B, heads, tokens, features) and masks of pairs, of booleans or added; its attributes a scale, which is a
float32, and is_causal, upper left. A bias beside a mask is passed as one, with -inf at hidden pairs. Heads may be
grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx

from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.numpy_base import NumpyHeads

OPSET, IR = 23, 10
TAKES = Takes("pairs", "upper_left", bias=True, scale=True, grouped=True)
LINES = (
    "mask, bias, scale = {mask}, {bias}, {scale}",
    "if bias is not None:",
    "    mask = bias if mask is None else np.where(mask, bias, -np.inf).astype(bias.dtype)",
    "inputs = dict(Q={q}, K={k}, V={v}) | (dict(attn_mask=mask) if mask is not None else dict())",
    "options = dict(is_causal=int({causal})) | (dict(scale=scale) if scale is not None else dict())",
    "kind = lambda x: onnx.helper.np_dtype_to_tensor_dtype(x.dtype)",
    "info = onnx.helper.make_tensor_value_info",
    'node = onnx.helper.make_node("Attention", list(inputs), ["Y"], **options)',
    "of_inputs = [info(name, kind(x), x.shape) for name, x in inputs.items()]",
    'of_output = info("Y", kind(q), (*q.shape[:3], v.shape[3]))',
    'graph = onnx.helper.make_graph([node], "attention", of_inputs, [of_output])',
    f'opset = onnx.helper.make_opsetid("", {OPSET})',
    f"model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version={IR})",
)


def feeds(call: Call) -> dict[str, np.ndarray]:
    """The inputs by name."""
    mask = call.seen
    if call.bias is not None:
        mask = call.bias if mask is None else np.where(mask, call.bias, -np.inf).astype(call.bias.dtype)
    arrays = {"Q": call.q, "K": call.k, "V": call.v, "attn_mask": mask}
    return {name: np.ascontiguousarray(x) for name, x in arrays.items() if x is not None}


def model(call: Call) -> onnx.ModelProto:
    """The model of the options of a call, for inputs of any size."""
    kinds = tuple((name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype)) for name, x in feeds(call).items())
    return build_model(kinds, call.scale, call.causal)


@cache
def build_model(kinds: tuple[tuple[str, int], ...], scale: float | None, causal: bool) -> onnx.ModelProto:
    names = [name for name, _ in kinds]
    options = {"is_causal": int(causal), **({} if scale is None else {"scale": scale})}
    node = onnx.helper.make_node("Attention", names, ["Y"], **options)
    info = onnx.helper.make_tensor_value_info
    inputs = [info(name, kind, [f"{name}{axis}" for axis in range(4)]) for name, kind in kinds]
    output = info("Y", kinds[0][1], [f"Y{axis}" for axis in range(4)])
    graph = onnx.helper.make_graph([node], "attention", inputs, [output])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR)


def runner(
    name: str, about: str, run: Callable[[Call], object], text: str, imports: tuple[str, ...], version: str
) -> NumpyHeads:
    """The adapter of what runs the model; `text` is how, with `model` and `inputs`."""
    dtypes = ("float64", "float32", "float16")
    return NumpyHeads(Function(name, about, dtypes, TAKES, run, text, ("import onnx", *imports), version, LINES))
