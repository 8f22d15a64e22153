"""nystrom-attention's NystromAttention with its projections replaced by the identity, and without its convolution.

Its input is [q, k, v] of one feature size (the adapter pads with zeros and crops), with masks of tokens. Supported are
`init="batch_max"`, any number of steps, and tokens that are a multiple of the landmarks.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from nystrom_attention import NystromAttention
from torch.nn.functional import pad

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import equal_tokens, of_keys, refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

TAKEN = ("q", "k", "v", "num_landmarks", "inverse_steps", "init", "mask", "key_lengths", "scale")
STEPS = 6


class Nystrom(TorchPeer):
    """nystrom_attention."""

    ops = ("nystrom_attention",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: another start of the inverse, no tokens."""
        reason = refusal(arrays, params, TAKEN) or equal_tokens(*(arrays[name].shape for name in ("q", "k", "v")))
        if reason is None and params.get("init") != "batch_max":
            return "the inverse starts with the norms of the whole batch"
        tokens = arrays["q"].shape[-2]
        if reason is None and (not tokens or tokens % option(params, "num_landmarks", 1)):
            return "tokens are a multiple of the landmarks"
        return reason

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One module."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        heads, own, width = q.shape[1], q.shape[3], max(q.shape[3], v.shape[3])
        steps = params.get("inverse_steps", STEPS)
        module = NystromAttention(
            1, dim_head=width, heads=heads, num_landmarks=params["num_landmarks"], pinv_iterations=steps, residual=False
        )
        module.to_qkv = module.to_out = torch.nn.Identity()
        q = q * (params.get("scale", own**-0.5) * width**0.5)  # the module divides by √width
        parts = [pad(x, (0, width - x.shape[3])).transpose(1, 2).flatten(2) for x in (q, k, v)]
        seen = visible_keys(arrays, params)
        mask = None if seen is None else seen.expand(q.shape[0], 1, 1, q.shape[2])[:, 0, 0]
        o = module(torch.cat(parts, -1), mask=mask)
        return {"o": o.unflatten(-1, (heads, -1)).transpose(1, 2)[..., : v.shape[3]]}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same module; q, k and v with the same features."""
        own, width = arrays["q"].shape[3], max(arrays["q"].shape[3], arrays["v"].shape[3])
        factor = params.get("scale", own**-0.5) * width**0.5
        lines = [
            f"heads, width = q.shape[1], {width}",
            "module = NystromAttention(",
            f"    1, dim_head=width, heads=heads, num_landmarks={params['num_landmarks']},",
            f"    pinv_iterations={params.get('inverse_steps', STEPS)}, residual=False,",
            ")",
            "module.to_qkv = module.to_out = torch.nn.Identity()",
            "wide = lambda x: torch.nn.functional.pad(x, (0, width - x.shape[3]))",
            f"parts = [wide(x).transpose(1, 2).flatten(2) for x in (q * {factor!r}, k, v)]",
        ]
        mask = ""
        if of_keys(arrays, params) is not None:
            lines.append("mask = seen.expand(*q.shape[:3], k.shape[2])[:, 0, 0]")
            mask = ", mask=mask"
        result = f"module(torch.cat(parts, -1){mask}).unflatten(-1, (heads, -1)).transpose(1, 2)[..., : v.shape[3]]"
        imports = ("import importlib.metadata", "from nystrom_attention import NystromAttention")
        return Source("torch", imports, tuple(lines), result, 'importlib.metadata.version("nystrom-attention")')


def adapters() -> list[Adapter]:
    """The module."""
    about = f"nystrom-attention {version('nystrom-attention')}, NystromAttention without projections, CPU, autograd"
    return [Nystrom("nystrom_attention", ("float64", "float32"), about)]
