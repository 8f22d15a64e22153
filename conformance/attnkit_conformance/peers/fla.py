"""flash-linear-attention's reference functions in plain torch, from the distribution fla-core.

`fla.ops` imports Triton, which needs a GPU. The files `naive.py` need only torch and einops, and are loaded by path
from the installed distribution.

Supported, causal and with as many queries as keys: linear_attention by naive_recurrent_linear_attn, which computes in
float32 for any input, and by naive_chunk_linear_attn (`fla-chunk`: the dtype of the inputs, whole chunks of 64 tokens,
no states). Both take features: the adapter applies φ, and sets φ(k) and v of hidden keys to 0, as the functions take no
masks. Their denominators use 1e-10 instead of `eps` = 1e-6, so calls with another `eps` are unsupported. Half types are
not judged, because features would be rounded to the inputs' dtype. Functions with gates are made of `recurrent`, those
of attention by pairs are in fla_attention.
"""

from __future__ import annotations

from importlib.metadata import version

import torch

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Keyword, Keywords, Params, option
from attnkit_conformance.peers import fla_attention
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.fla_attention import IMPORTS, VERSION, layout_reason, loading, naive, time_first
from attnkit_conformance.peers.recurrent import (
    DELTA,
    FEATURE_TEXTS,
    FEATURES,
    GATED,
    LINEAR,
    NOTHING,
    NUMBER,
    VECTOR,
    Recurrence,
    Recurrent,
    normalizes,
)  # fmt: skip
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

TAKEN = (
    "q", "k", "v", "mask", "key_lengths", "causal", "enable_gqa", "feature_map", "normalize", "scale", "chunk_size",
)  # fmt: skip
STATES = ("initial_S", "initial_z", "return_state")
CHUNK = 64
State = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None  # S, with z where there is a denominator


class Linear(TorchPeer):
    """linear_attention by one of two functions."""

    ops = ("linear_attention",)

    def __init__(self, name: str, chunks: bool) -> None:
        self.chunks = chunks
        self.function = getattr(naive("linear_attn"), f"naive_{'chunk' if chunks else 'recurrent'}_linear_attn")
        self.without = ("return_state",) if chunks else ()
        dtypes = ("float64", "float32") if chunks else ("float32",)
        super().__init__(name, dtypes, f"fla-core {version('fla-core')}, {self.function.__name__}, CPU, autograd")

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Arguments and shapes beyond those of the function."""
        reason = refusal(arrays, params, TAKEN if self.chunks else (*TAKEN, *STATES))
        reason = reason or layout_reason(arrays, params)
        length, mask = arrays["q"].shape[-2], arrays.get("mask")
        if reason is None and (not params.get("causal") or length != arrays["k"].shape[-2]):
            return "causal self-attention only"
        if reason is None and mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
            return "takes no mask of pairs"
        if reason is None and self.chunks and length % CHUNK:
            return f"takes whole chunks of {CHUNK} tokens"
        if reason is None and params.get("return_state") and not normalizes(params):
            return "keeps no sum of keys without normalize"
        return reason

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call on features."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        pairs = visible_keys(arrays, params)
        valid = torch.ones((), dtype=torch.bool) if pairs is None else pairs.expand(*pairs.shape[:-2], 1, k.shape[2]).mT
        phi = FEATURES[option(params, "feature_map", "elu_plus_one")]
        fq, fk, v = phi(q), torch.where(valid, phi(torch.where(valid, k, 0)), 0), torch.where(valid, v, 0)
        if pairs is not None and "initial_S" not in arrays:  # for rows that see nothing
            live = valid.expand(*k.shape[:-1], 1).any(1, keepdim=True).cumsum(2) > 0
            fq = torch.where(live, phi(torch.where(live, q, 0)), 0)
        groups = q.shape[1] // k.shape[1]
        fk, v = (x.repeat_interleave(groups, 1) for x in (fk, v))
        options: Keywords = {"scale": params.get("scale", 1.0), "normalize": normalizes(params)}
        if not self.chunks:
            options |= {"initial_state": self.first(arrays, options["normalize"], groups), "output_final_state": True}
        answer = self.function(time_first(fq), time_first(fk), time_first(v), **options)
        if self.chunks:
            return {"o": time_first(answer)}
        o, state = answer
        if not params.get("return_state"):
            return {"o": time_first(o)}
        return {"o": time_first(o), "S": state[0][:, ::groups], "z": state[1][:, 0, ::groups]}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The function on features of q and k."""
        phi = FEATURE_TEXTS[option(params, "feature_map", "elu_plus_one")]
        lines = (*loading("linear_attn"), f"phi = lambda x: ({phi}).transpose(1, 2)")
        options = f"scale={params.get('scale', 1.0)!r}, normalize={normalizes(params)}"
        call = f"naive.{self.function.__name__}(phi(q), phi(k), v.transpose(1, 2), {options})"
        result = f"{call if self.chunks else call + '[0]'}.transpose(1, 2)"
        return Source("torch", IMPORTS, lines, result, VERSION)

    def first(self, arrays: Tensors, normalize: bool, groups: int) -> State:
        """The state before the first token in fla's layout."""
        if "initial_S" not in arrays:
            return None
        S, z = (arrays[name].repeat_interleave(groups, 1) for name in ("initial_S", "initial_z"))
        return (S, z[:, None]) if normalize else S


def recurrences() -> list[Recurrence]:
    """Gated linear attention, the delta rule, and linear attention that fades, token by token and in chunks."""

    def of(
        name: str, family: str, function: str, op: str, gate: str, gate_name: str = "g", **own: Keyword
    ) -> Recurrence:
        told: Keywords = {
            "text": f"naive.{function}",
            "imports": IMPORTS,
            "lines": loading(family),
            "version": VERSION,
        }
        return Recurrence(f"fla-{name}", getattr(naive(family), function), op, gate, gate_name, **told, **own)

    gla, rule, gated = "simple_gla", "delta_rule", "gated_delta_rule"
    stateless: Keywords = {"begins": False, "ends": False}
    sized: Keywords = {"chunks": ("chunk_size",)}
    divided = sized | {"divides": True}
    blocks: Keywords = {"chunks": ("BM", "BN"), "divides": True, "chunk": 32}
    first: Keywords = {"heads_first": True}
    return [
        of("simple_gla", gla, "naive_recurrent_simple_gla", LINEAR, NUMBER, scales=True),
        of("simple_gla_chunk", gla, "naive_chunk_simple_gla", LINEAR, NUMBER, scales=True, **sized),
        of("simple_gla_parallel", gla, "naive_parallel_simple_gla", LINEAR, NUMBER, scales=True, **stateless),
        of("gla", "gla", "naive_recurrent_gla", GATED, VECTOR, "gk"),
        of("delta", rule, "delta_rule_recurrence", DELTA, NOTHING, **first),
        of("delta_chunk", rule, "delta_rule_chunkwise", DELTA, NOTHING, begins=False, chunk=32, **first, **divided),
        of("delta_parallel", rule, "delta_rule_parallel", DELTA, NOTHING, **first, **stateless, **blocks),
        of("gated_delta", gated, "naive_recurrent_gated_delta_rule", DELTA, NUMBER, scales=True),
        of("gated_delta_chunk", gated, "naive_chunk_gated_delta_rule", DELTA, NUMBER, scales=True, **sized),
        of("kda", "kda", "naive_recurrent_kda", DELTA, VECTOR, scales=True),
        of("kda_chunk", "kda", "naive_chunk_kda", DELTA, VECTOR, scales=True, **divided),
    ]


def adapters() -> list[Adapter]:
    """Plain linear attention, recurrences with gates, attention by pairs."""
    package = f"fla-core {version('fla-core')}"
    return [
        Linear("fla-recurrent", False), Linear("fla-chunk", True),
        *(Recurrent(one, DTYPES[:2] if one.op == LINEAR else DTYPES, package) for one in recurrences()),
        *fla_attention.adapters(),
    ]  # fmt: skip
