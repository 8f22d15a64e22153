"""reformer-pytorch's LSHAttention, with the rotations of the call instead of its own.

Supported are lsh_attention in whole chunks, an even number of them, one feature size for qk and v (the adapter pads
with zeros and crops), masks of tokens, and causality. Scores are divided by √d, which the definition does not do: the
adapter multiplies qk by √d. float32 only: keys are divided by their norms, where the definition divides by
√(‖x‖² + 10⁻⁶ d).
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from reformer_pytorch.reformer_pytorch import LSHAttention
from torch.nn.functional import pad

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import equal_tokens, refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer

TAKEN = ("qk", "v", "rotations", "chunk_size", "mask", "causal")


class Reformer(TorchPeer):
    """lsh_attention."""

    ops = ("lsh_attention",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: an odd number of chunks, or partial ones."""
        reason = refusal(arrays, params, TAKEN) or equal_tokens(arrays["qk"].shape, arrays["v"].shape)
        tokens = arrays["qk"].shape[-2]
        if reason is None and (not tokens or tokens % (2 * option(params, "chunk_size", 1))):
            return "takes an even number of whole chunks"
        return reason

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One module."""
        qk, v, rotations = (arrays[name] for name in ("qk", "v", "rotations"))
        batch, heads, tokens, own = qk.shape
        width = max(own, v.shape[-1])
        module = LSHAttention(
            bucket_size=params["chunk_size"], n_hashes=rotations.shape[-2], causal=bool(params.get("causal"))
        )
        buckets = self.hashed(qk, rotations)
        module.hash_vectors = lambda *_, **__: buckets
        mask = None
        if "mask" in arrays:  # (T,) or (B, 1, 1, T)
            mask = arrays["mask"].expand(batch, 1, 1, tokens)[:, 0].expand(batch, heads, tokens).flatten(0, 1)
        qk = pad(qk * width**0.5, (0, width - own)).flatten(0, 1)  # it divides scores by √width, keys by their norms
        o = module(qk, pad(v, (0, width - v.shape[-1])).flatten(0, 1), input_mask=mask)[0]
        return {"o": o.unflatten(0, (batch, heads))[..., : v.shape[-1]]}

    def hashed(self, qk: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """(B·H, rounds·T): the first argmax of [x R, -x R], with different numbers in every round."""
        directions = rotations.to(qk.dtype).expand(qk.shape[1], *rotations.shape[-3:])
        projected = torch.einsum("bhtd,hdrm->bhrtm", qk.detach(), directions)
        buckets = torch.cat([projected, -projected], -1).argmax(-1)
        rounds = 2 * rotations.shape[-1] * torch.arange(rotations.shape[-2])
        return (buckets + rounds[:, None]).flatten(2).flatten(0, 1)

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same module."""
        rounds, half = arrays["rotations"].shape[-2:]
        width = max(arrays["qk"].shape[-1], arrays["v"].shape[-1])
        masked = "mask" in arrays
        lines = (
            f"module = LSHAttention(bucket_size={params['chunk_size']}, n_hashes={rounds},",
            f"                      causal={bool(params.get('causal'))})",
            'projected = torch.einsum("bhtd,hdrm->bhrtm", qk, rotations.expand(qk.shape[1], *rotations.shape[-3:]))',
            "buckets = torch.cat([projected, -projected], -1).argmax(-1)",
            f"buckets = (buckets + {2 * half} * torch.arange({rounds})[:, None]).flatten(2).flatten(0, 1)",
            "module.hash_vectors = lambda *_, **__: buckets",
            f"wide = lambda x: torch.nn.functional.pad(x, (0, {width} - x.shape[-1])).flatten(0, 1)",
            *(("mask = mask.expand(qk.shape[0], 1, 1, qk.shape[2])[:, 0].expand(qk.shape[:3]).flatten(0, 1)",)
              if masked else ()),
        )  # fmt: skip
        call = f"module(wide(qk * {width**0.5!r}), wide(v), input_mask={'mask' if masked else 'None'})[0]"
        result = f"{call}.unflatten(0, qk.shape[:2])[..., : v.shape[3]]"
        imports = ("import importlib.metadata", "from reformer_pytorch.reformer_pytorch import LSHAttention")
        return Source("torch", imports, lines, result, 'importlib.metadata.version("reformer-pytorch")')


def adapters() -> list[Adapter]:
    """The module."""
    about = f"reformer-pytorch {version('reformer-pytorch')}, LSHAttention, CPU, autograd"
    return [Reformer("reformer_pytorch", ("float32",), about)]
