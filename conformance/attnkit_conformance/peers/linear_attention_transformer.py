"""linear-attention-transformer: linear_attn, which is efficient attention, and causal_linear_attn, a causal sum.

`linear_attn` multiplies q by d^-½ after its softmax: the adapter undoes that factor of the output. It takes masks of
keys. `causal_linear_attn` has features softmax(q) and exp(k): with log φ for q and k it is linear_attention, since
the normaliser of q cancels; the adapter calls it so with buckets of one token. Both take as many features in v as in q:
the adapter calls them for so many at a time, zeros behind the last. float32 only for the sum, which has no eps where
the definition has 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from linear_attention_transformer.linear_attention_transformer import causal_linear_attn, linear_attn
from torch.nn.functional import pad

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import equal_heads, of_keys, refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import is_of_keys
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

IMPORT = "from linear_attention_transformer.linear_attention_transformer import "
VERSION = 'importlib.metadata.version("linear-attention-transformer")'


def keys_reason(arrays: Tensors) -> str | None:
    """Shapes that do not suit, and masks of pairs."""
    shapes = [arrays[name].shape for name in ("q", "k", "v")]
    if reason := equal_heads(*shapes):
        return reason
    if not is_of_keys(arrays, shapes[0]):
        return "takes no mask of pairs"
    return None


def by_parts(function: Callable[[torch.Tensor], torch.Tensor], v: torch.Tensor, features: int) -> torch.Tensor:
    """The function of so many features of v at a time."""
    parts = [pad(part, (0, features - part.shape[3])) for part in v.split(features, -1)]
    return torch.cat([function(part) for part in parts], -1)[..., : v.shape[3]]


MASK = "mask = seen.expand(*q.shape[:3], k.shape[2])[:, 0, -1]"
BY_PARTS = (
    "parts = [torch.nn.functional.pad(x, (0, q.shape[3] - x.shape[3])) for x in v.split(q.shape[3], -1)]",
    "o = torch.cat([attend(part) for part in parts], -1)[..., : v.shape[3]]",
)


def mask_of(arrays: Tensors, params: Params) -> torch.Tensor | None:
    """(B, S)."""
    seen = visible_keys(arrays, params)
    return None if seen is None else seen.expand(arrays["k"].shape[0], 1, 1, arrays["k"].shape[2])[:, 0, 0]


class Efficient(TorchPeer):
    """efficient_attention."""

    ops = ("efficient_attention",)
    without = ("return_state",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported."""
        return refusal(arrays, params, ("q", "k", "v", "mask", "key_lengths")) or keys_reason(arrays)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        q, k, v = (arrays[name].clone() if arrays[name].requires_grad else arrays[name] for name in ("q", "k", "v"))
        mask = mask_of(arrays, params)  # linear_attn overwrites k and v in place, which autograd refuses for leaves
        return {"o": by_parts(lambda part: linear_attn(q, k, part, mask) * q.shape[3] ** 0.5, v, q.shape[3])}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        hides = of_keys(arrays, params) is not None
        lines = (MASK,) if hides else ()
        call = f"linear_attn(q, k, part{', mask' if hides else ''}) * q.shape[3] ** 0.5"
        lines = (*lines, f"attend = lambda part: {call}", *BY_PARTS)
        return Source("torch", ("import importlib.metadata", f"{IMPORT}linear_attn"), lines, "o", VERSION)


def log_features(x: torch.Tensor) -> torch.Tensor:
    """log(elu(x) + 1)."""
    return torch.where(x > 0, torch.log1p(x.clamp(min=0)), x)


class Causal(TorchPeer):
    """linear_attention by buckets of one token."""

    ops = ("linear_attention",)
    without = ("return_state",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported."""
        names = ("q", "k", "v", "mask", "key_lengths", "causal", "feature_map", "normalize", "chunk_size", "scale")
        if reason := refusal(arrays, params, names) or keys_reason(arrays):
            return reason
        tokens = arrays["q"].shape[2]
        if not params.get("causal") or tokens != arrays["k"].shape[2]:
            return "causal self-attention only"
        if params.get("feature_map", "elu_plus_one") != "elu_plus_one" or params.get("normalize") is False:
            return "is about positive features with a denominator"
        if option(params, "scale", 1.0) <= 0:  # a positive one cancels
            return "is about positive weights"
        return None

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call on logarithms of features."""
        q, k = (log_features(arrays[name]) for name in ("q", "k"))
        mask = mask_of(arrays, params)
        attend = partial(causal_linear_attn, q, k, kv_mask=mask, bucket_size=1)
        return {"o": by_parts(lambda part: attend(v=part), arrays["v"], q.shape[3])}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        hides = of_keys(arrays, params) is not None
        lines = ["log_features = lambda x: torch.where(x > 0, torch.log1p(x.clamp(min=0)), x)  # of elu(x) + 1"]
        lines += [MASK] if hides else []
        arguments = f"log_features(q), log_features(k), part, {'mask' if hides else 'None'}, bucket_size=1"
        lines += [f"attend = lambda part: causal_linear_attn({arguments})", *BY_PARTS]
        imports = ("import importlib.metadata", f"{IMPORT}causal_linear_attn")
        return Source("torch", imports, tuple(lines), "o", VERSION)


def adapters() -> list[Adapter]:
    """Both functions."""
    about = f"linear-attention-transformer {version('linear-attention-transformer')}"
    family = "linear_attention_transformer"
    return [
        Efficient(f"{family}-efficient", ("float64", "float32"), f"{about}, linear_attn, CPU, autograd"),
        Causal(f"{family}-causal", ("float32",), f"{about}, causal_linear_attn(bucket_size=1), CPU, autograd"),
    ]
