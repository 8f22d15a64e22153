"""transformers on the CPU: eager attention of LLaMA and BERT, its path over SDPA, and modules with approximations.

Supported: softmax_attention by functions that take an additive mask, which the adapter builds as the library does: 0 or
the lowest float, plus the bias. LLaMA's softmax is always in float32, so it is not judged in float64; it repeats the
heads of keys itself. gpt-oss's and Granite's take a sink, which is a parameter of their module. Nyströmformer and
Reformer are in transformers_modules, the delta rule of Qwen3-Next and Kimi Linear in transformers_recurrent.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import eager_attention_forward as bert_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward as granite_swa_eager
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Params
from attnkit_conformance.peers import transformers_modules, transformers_recurrent
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible
from attnkit_conformance.peers.transformers_modules import hiding

TAKEN = ("q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")
Eager = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Forward(TorchPeer):
    """softmax_attention by a function of (module, query, key, value, attention_mask)."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(self, name: str, function: Eager, dtypes: tuple[str, ...], repeats: bool) -> None:
        path = f"{function.__module__.removeprefix('transformers.')}.{function.__name__}"
        super().__init__(name, dtypes, f"transformers {transformers.__version__}, {path}, CPU, autograd")
        self.function, self.repeats = function, repeats

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: other than two leading axes, grouped heads without repetition, empty inputs."""
        shapes = [arrays[name].shape for name in ("q", "k", "v")]
        if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes) or shapes[1][1] != shapes[2][1]:
            return "takes (batch, heads, tokens, features) arrays"
        if shapes[0][1] != shapes[1][1] and not (params.get("enable_gqa") and self.repeats):
            return "heads do not broadcast"
        if "bias" in arrays and arrays["bias"].dtype != arrays["q"].dtype:
            return "attention_mask has the dtype of query"
        return refusal(arrays, params, TAKEN)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, is_causal=False)
        self.prepare(module, arrays, params)
        scaling = params.get("scale", q.shape[-1] ** -0.5)
        return {"o": self.function(module, q, k, v, additive(arrays, params), scaling=scaling)[0].transpose(1, 2)}

    def prepare(self, module: SimpleNamespace, arrays: Tensors, params: Params) -> None:
        """What the function reads of its module beside that."""

    def preparation(self, arrays: Tensors, params: Params) -> list[str]:
        """The same in a program."""
        return []

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        lines = [
            "module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, is_causal=False)",
            *self.preparation(arrays, params),
        ]
        mask = "None"
        if visible(arrays, params) is not None:
            bias = "bias" if "bias" in arrays else "torch.zeros(seen.shape, dtype=q.dtype)"
            mask = f"{bias}.masked_fill(~seen, torch.finfo(q.dtype).min)"
        elif "bias" in arrays:
            mask = "bias"
        lines.append(f"mask = {mask}")
        scaling = repr(params["scale"]) if "scale" in params else "q.shape[-1] ** -0.5"
        name = self.function.__name__
        imports = (
            "import transformers",
            "from types import SimpleNamespace",
            f"from {self.function.__module__} import {name}",
        )
        result = f"{name}(module, q, k, v, mask, scaling={scaling})[0].transpose(1, 2)"
        return Source("torch", imports, tuple(lines), result, "transformers.__version__")


class Sinks(Forward):
    """The same with a sink for each head, which is a parameter of the module."""

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: without a sink; and as above."""
        if arrays.get("sink", params.get("sink")) is None:
            return "has a sink"
        numbers = {name: x for name, x in params.items() if name != "sink"}
        return super().unsupported(op, {name: x for name, x in arrays.items() if name != "sink"}, numbers)

    def prepare(self, module: SimpleNamespace, arrays: Tensors, params: Params) -> None:
        """A parameter of every head, in the dtype of q as in the models."""
        q = arrays["q"]
        sink = torch.tensor(params["sink"]) if "sink" in params else arrays["sink"]
        module.sinks = sink.to(q.dtype).expand(q.shape[1])

    def preparation(self, arrays: Tensors, params: Params) -> list[str]:
        """The same in a program."""
        sink = f"torch.tensor({params['sink']!r})".replace("-inf", "-torch.inf") if "sink" in params else "sink"
        return [f"module.sinks = {sink}.to(q.dtype).expand(q.shape[1])"]


def additive(arrays: Tensors, params: Params) -> torch.Tensor | None:
    """The additive mask: the bias, and the lowest float at hidden pairs."""
    seen, bias = visible(arrays, params), arrays.get("bias")
    if seen is None:
        return bias
    return hiding(seen, arrays["q"].dtype, bias)


def adapters() -> list[Adapter]:
    """Functions for softmax, two of them with sinks, modules, and recurrences."""
    return [
        Forward("transformers-llama_eager", llama_eager, DTYPES[1:], True),
        Forward("transformers-bert_eager", bert_eager, DTYPES, False),
        Forward("transformers-sdpa", sdpa_attention_forward, DTYPES, True),
        Sinks("transformers-gpt_oss_eager", gpt_oss_eager, DTYPES, True),
        Sinks("transformers-granite_swa_eager", granite_swa_eager, DTYPES[1:], True),
        *transformers_modules.adapters(),
        *transformers_recurrent.adapters(),
    ]
