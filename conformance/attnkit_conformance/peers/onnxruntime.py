"""onnxruntime on a model of ONNX's Attention alone, by its CPU provider."""

from __future__ import annotations

import numpy as np
import onnxruntime

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.peers.heads import Call
from attnkit_conformance.peers.onnx_attention import feeds, model, runner

CPU = ["CPUExecutionProvider"]
SILENT = 4  # severity of what is logged: an exception says the same
sessions: dict[bytes, onnxruntime.InferenceSession] = {}


def attend(call: Call) -> np.ndarray:
    text = model(call).SerializeToString()
    if text not in sessions:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = SILENT
        options.intra_op_num_threads = 1
        sessions[text] = onnxruntime.InferenceSession(text, options, providers=CPU)
    o: np.ndarray = sessions[text].run(None, feeds(call))[0]
    return o


def adapters() -> list[Adapter]:
    """One."""
    session = f"onnxruntime.InferenceSession(model.SerializeToString(), providers={CPU})"
    about = f"onnxruntime {onnxruntime.__version__}, Attention of opset 23"
    imports = ("import onnxruntime",)
    return [runner("onnxruntime", about, attend, f"{session}.run(None, inputs)[0]", imports, "onnxruntime.__version__")]
