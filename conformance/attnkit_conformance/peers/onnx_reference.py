"""onnx.reference.ReferenceEvaluator, in NumPy, on a model of ONNX's Attention alone."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.peers.heads import Call
from attnkit_conformance.peers.onnx_attention import feeds, model, runner


def attend(call: Call) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the square root of a negative scale: the result says so
        o: np.ndarray = ReferenceEvaluator(model(call)).run(None, feeds(call))[0]
    return o


def adapters() -> list[Adapter]:
    """One."""
    about = f"onnx {onnx.__version__}, reference.ReferenceEvaluator, Attention of opset 23"
    imports = ("from onnx.reference import ReferenceEvaluator",)
    text = "ReferenceEvaluator(model).run(None, inputs)[0]"
    return [runner("onnx_reference", about, attend, text, imports, "onnx.__version__")]
