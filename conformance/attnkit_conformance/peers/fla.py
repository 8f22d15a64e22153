"""flash-linear-attention's reference functions in plain torch, from the distribution fla-core.

`fla.ops` imports Triton, which needs a GPU. The files `naive.py` need only torch and einops, and are loaded by path
from the installed distribution.

Supported, causal and with as many queries as keys: linear_attention by naive_recurrent_linear_attn, which computes in
float32 for any input, and by naive_chunk_linear_attn (`fla-chunk`: the dtype of the inputs, whole chunks of 64 tokens,
no states); softmax_attention by naive_parallel_attn. Both linear functions take features: the adapter applies φ, and
sets φ(k) and v of hidden keys to 0, as the functions take no masks. Their denominators use 1e-10 instead of `eps` =
1e-6, so calls with another `eps` are unsupported. Half types are not judged, because features would be rounded to the
inputs' dtype.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

Arrays = Mapping[str, Any]
FEATURES = {
    "elu_plus_one": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": torch.nn.functional.relu,
    "identity": lambda x: x,
}
LINEAR = (
    "q", "k", "v", "mask", "key_lengths", "causal", "enable_gqa", "feature_map", "normalize", "scale", "chunk_size",
)  # fmt: skip
STATES = ("initial_S", "initial_z", "return_state")
SOFTMAX = ("q", "k", "v", "causal", "window", "scale", "enable_gqa")
CHUNK = 64


def naive(family: str) -> ModuleType:
    """fla/ops/<family>/naive.py."""
    package = importlib.util.find_spec("fla")
    folder = Path(str(package and package.origin)).parent / "ops" / family
    spec = importlib.util.spec_from_file_location(f"fla_naive_{family}", folder / "naive.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} has no naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layout_reason(arrays: Arrays, params: Arrays) -> str | None:
    """Shapes that are not (B, T, H, K), or not causal self-attention."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    if any(x.ndim != 4 or x.shape[0] != q.shape[0] for x in (q, k, v)) or k.shape[1] != v.shape[1]:
        return "takes (B, T, H, K) arrays"
    if q.shape[1] != k.shape[1] and not params.get("enable_gqa"):
        return "heads do not broadcast"
    return None


def time_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


class Linear(TorchPeer):
    """linear_attention by one of two functions."""

    ops = ("linear_attention",)

    def __init__(self, name: str, chunks: bool) -> None:
        self.chunks = chunks
        self.function = getattr(naive("linear_attn"), f"naive_{'chunk' if chunks else 'recurrent'}_linear_attn")
        self.without = ("return_state",) if chunks else ()
        dtypes = ("float64", "float32") if chunks else ("float32",)
        super().__init__(name, dtypes, f"fla-core {version('fla-core')}, {self.function.__name__}, CPU, autograd")

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Arguments and shapes beyond those of the function."""
        reason = refusal(arrays, params, LINEAR if self.chunks else (*LINEAR, *STATES))
        reason = reason or layout_reason(arrays, params)
        length, mask = arrays["q"].shape[-2], arrays.get("mask")
        if reason is None and (not params.get("causal") or length != arrays["k"].shape[-2]):
            return "causal self-attention only"
        if reason is None and mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
            return "takes no mask of pairs"
        if reason is None and self.chunks and length % CHUNK:
            return f"takes whole chunks of {CHUNK} tokens"
        if reason is None and params.get("return_state") and not self.normalizes(params):
            return "keeps no sum of keys without normalize"
        return reason

    def normalizes(self, params: Arrays) -> bool:
        """The default of semantics B."""
        normalize = params.get("normalize")
        return params.get("feature_map") != "identity" if normalize is None else bool(normalize)

    def outputs(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """One call on features."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        pairs = visible_keys(arrays, params)
        valid = torch.ones((), dtype=torch.bool) if pairs is None else pairs.expand(*pairs.shape[:-2], 1, k.shape[2]).mT
        phi = FEATURES[params.get("feature_map", "elu_plus_one")]
        fq, fk, v = phi(q), torch.where(valid, phi(torch.where(valid, k, 0)), 0), torch.where(valid, v, 0)
        if pairs is not None and "initial_S" not in arrays:  # for rows that see nothing
            live = valid.expand(*k.shape[:-1], 1).any(1, keepdim=True).cumsum(2) > 0
            fq = torch.where(live, phi(torch.where(live, q, 0)), 0)
        groups = q.shape[1] // k.shape[1]
        fk, v = (x.repeat_interleave(groups, 1) for x in (fk, v))
        options: dict[str, Any] = {"scale": params.get("scale", 1.0), "normalize": self.normalizes(params)}
        if not self.chunks:
            options |= {"initial_state": self.first(arrays, options["normalize"], groups), "output_final_state": True}
        answer = self.function(time_first(fq), time_first(fk), time_first(v), **options)
        if self.chunks:
            return {"o": time_first(answer)}
        o, state = answer
        if not params.get("return_state"):
            return {"o": time_first(o)}
        return {"o": time_first(o), "S": state[0][:, ::groups], "z": state[1][:, 0, ::groups]}

    def source(self, op: str, arrays: Arrays, params: Arrays) -> Source:
        """The function on features of q and k."""
        name = params.get("feature_map", "elu_plus_one")
        phi = {"elu_plus_one": "torch.nn.functional.elu(x) + 1", "relu": "torch.relu(x)", "identity": "x"}[name]
        imports = ("import importlib.metadata", "import importlib.util", "from pathlib import Path")
        lines = (
            'path = Path(importlib.util.find_spec("fla").origin).parent / "ops" / "linear_attn" / "naive.py"',
            'spec = importlib.util.spec_from_file_location("naive", path)  # fla itself imports Triton',
            "naive = importlib.util.module_from_spec(spec)",
            "spec.loader.exec_module(naive)",
            f"phi = lambda x: ({phi}).transpose(1, 2)",
        )
        options = f"scale={params.get('scale', 1.0)!r}, normalize={self.normalizes(params)}"
        call = f"naive.{self.function.__name__}(phi(q), phi(k), v.transpose(1, 2), {options})"
        result = f"{call if self.chunks else call + '[0]'}.transpose(1, 2)"
        return Source("torch", imports, lines, result, 'importlib.metadata.version("fla-core")')

    def first(self, arrays: Arrays, normalize: bool, groups: int) -> Any:
        """The state before the first token in fla's layout."""
        if "initial_S" not in arrays:
            return None
        S, z = (arrays[name].repeat_interleave(groups, 1) for name in ("initial_S", "initial_z"))
        return (S, z[:, None]) if normalize else S


class Softmax(TorchPeer):
    """softmax_attention by naive_parallel_attn."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(self, name: str) -> None:
        self.function = naive("attn").naive_parallel_attn
        super().__init__(name, DTYPES, f"fla-core {version('fla-core')}, naive_parallel_attn, CPU, autograd")

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Masks, biases, and windows that are not causal."""
        reason = refusal(arrays, params, SOFTMAX) or layout_reason(arrays, params)
        same = arrays["q"].shape[-2] == arrays["k"].shape[-2]
        if reason is None and not arrays["k"].shape[-2]:
            return "no keys have no maximum"
        if reason is None and "causal" in params and not same:
            return "causal self-attention only"
        window = params.get("window")
        if reason is None and window is not None and not (params.get("causal") and window[1] == 0):
            return "windows are causal"
        return reason

    def outputs(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """One call."""
        window = params.get("window")
        size = None if window is None or window[0] is None else window[0] + 1
        q, k, v = (time_first(arrays[name]) for name in ("q", "k", "v"))
        causal = bool(params.get("causal"))
        o = self.function(q, k, v, scale=params.get("scale"), window_size=size, causal=causal)[0]
        return {"o": time_first(o)}


def adapters() -> list[Any]:
    """Three functions."""
    return [Linear("fla-recurrent", False), Linear("fla-chunk", True), Softmax("fla-softmax")]
