"""The delta rule of transformers' Qwen3-Next (a number per token) and Kimi Linear (a vector per token), in torch.

The library replaces each of these functions by fla's, which needs a GPU, wherever that can be imported: what is judged
is the torch function beneath (`inspect.unwrap`). OLMo Hybrid, Qwen3.5 and Bailing have copies of the same functions.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import transformers
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.peers.recurrent import DELTA, NUMBER, VECTOR, Recurrence, Recurrent


def recurrence(name: str, module: ModuleType, function: str, gate: str, *chunks: str) -> Recurrence:
    """One function of a module."""
    imports = ("import inspect", "import transformers", f"from {module.__name__} import {function}")
    return Recurrence(
        f"transformers-{name}", inspect.unwrap(getattr(module, function)), DELTA, gate, chunks=chunks,
        text=f"inspect.unwrap({function})", imports=imports, version="transformers.__version__",
    )  # fmt: skip


def adapters() -> list[Adapter]:
    """Token by token and in chunks."""
    qwen, kimi = modeling_qwen3_next, modeling_kimi_linear
    functions = (
        recurrence("qwen3_next", qwen, "torch_recurrent_gated_delta_rule", NUMBER),
        recurrence("qwen3_next_chunk", qwen, "torch_chunk_gated_delta_rule", NUMBER, "chunk_size"),
        recurrence("kimi_linear", kimi, "recurrent_kimi_delta_attention", VECTOR),
        recurrence("kimi_linear_chunk", kimi, "chunk_kimi_delta_attention", VECTOR, "chunk_size"),
    )
    return [Recurrent(one, DTYPES, f"transformers {transformers.__version__}") for one in functions]
