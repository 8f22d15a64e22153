"""The package entmax: its sparsemax, entmax15 and entmax_bisect on the scores of attention.

entmax is a function of logits. The adapter forms scale·q kᵀ + bias in the dtype of the inputs, gives hidden pairs -inf,
and multiplies the result with v, all in torch. entmax has no answer for rows that see nothing (sparsemax and entmax15
raise, entmax_bisect returns NaN), so the adapter writes 0 there; padding is set to 0 as well. Half types are not
judged: their logits are rounded before entmax sees them, which changes the support of a row.

`entmax-exact` calls sparsemax for α = 2 and entmax15 for α = 1.5, `entmax-bisect` entmax_bisect for every α, with 30
steps, and 60 in float64.
"""

from __future__ import annotations

from importlib.metadata import version

import entmax
import torch

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Option, Params
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible

TAKEN = (
    "q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa", "alpha",
    "dropout_mask",
)  # fmt: skip
STEPS = {torch.float64: 60}


class Entmax(TorchPeer):
    """Sparse weights of scores."""

    ops = (
        "sparsemax_attention", "sparsemax_attention_weights", "entmax_attention", "entmax_attention_weights",
    )  # fmt: skip

    def __init__(self, name: str, bisects: bool) -> None:
        functions = "entmax_bisect" if bisects else "sparsemax and entmax15"
        super().__init__(
            name, ("float64", "float32"), f"entmax {version('entmax')}, {functions}, CPU, its own gradients"
        )
        self.bisects = bisects

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: dropout by a seed, and α without an exact function."""
        if not self.bisects and ("alpha" in arrays or params.get("alpha", 1.5) not in (1.5, 2.0)):
            return "exact for alpha = 1.5 and 2 only"
        if 0 in (arrays["q"].shape[-2], arrays["k"].shape[-2]):
            return "empty logits have no maximum"
        return refusal(arrays, params, TAKEN)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """Scores, weights by entmax, and their product with v."""
        q, k, v = arrays["q"], arrays["k"], arrays.get("v")
        groups = q.shape[-3] // k.shape[-3] if params.get("enable_gqa") else 1
        if groups > 1:
            k, v = k.repeat_interleave(groups, -3), v if v is None else v.repeat_interleave(groups, -3)
        others = [x.shape[:-2] for x in (q, k, v) if x is not None]
        shape = (*torch.broadcast_shapes(*others), q.shape[-2], k.shape[-2])
        pairs = visible(arrays, params)
        mask = torch.ones(shape, dtype=torch.bool) if pairs is None else pairs.expand(shape)
        q = torch.where(mask.any(-1)[..., None], q, 0)
        k = torch.where(mask.any(-2)[..., None], k, 0)
        s = (q @ k.mT) * params.get("scale", q.shape[-1] ** -0.5)
        if "bias" in arrays:
            s = s + arrays["bias"].to(s.dtype)
        mask = mask & (s.detach() != -torch.inf)
        alive = mask.any(-1, keepdim=True)
        s = torch.where(alive, torch.where(mask, s, -torch.inf), 0)
        w = torch.where(alive, self.weights(op, s, arrays.get("alpha", params.get("alpha", 1.5))), 0)
        if v is None:
            return {"w": w}
        dropped = w * torch.where(mask, arrays["dropout_mask"], 0).to(w.dtype) if "dropout_mask" in arrays else w
        o = dropped @ torch.where(mask.any(-2)[..., None], v, 0)
        return {"o": torch.where(alive, o, 0)}  # for gradients, where cotangents of such rows are NaN

    def weights(self, op: str, s: torch.Tensor, alpha: torch.Tensor | Option) -> torch.Tensor:
        """The function of entmax."""
        if op.startswith("sparsemax"):
            alpha = 2.0
        if self.bisects:
            exponent = alpha.to(s.dtype) if isinstance(alpha, torch.Tensor) else alpha
            weights: torch.Tensor = entmax.entmax_bisect(s, exponent, n_iter=STEPS.get(s.dtype, 30))
            return weights
        exact: torch.Tensor = (entmax.sparsemax if alpha == 2.0 else entmax.entmax15)(s, dim=-1)
        return exact

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The function on scores."""
        scale = repr(params["scale"]) if "scale" in params else "q.shape[-1] ** -0.5"
        lines = [f"s = q @ k.mT * {scale}"]
        lines += ["s = s + bias"] if "bias" in arrays else []
        lines += ["s = torch.where(seen, s, -torch.inf)"] if visible(arrays, params) is not None else []
        alpha = (
            "2.0" if op.startswith("sparsemax") else "alpha" if "alpha" in arrays else repr(params.get("alpha", 1.5))
        )
        call = f"entmax.{'sparsemax' if alpha == '2.0' else 'entmax15'}(s, dim=-1)"
        if self.bisects:
            call = f"entmax.entmax_bisect(s, {alpha}, n_iter={STEPS.get(arrays['q'].dtype, 30)})"
        result = call if op.endswith("weights") else f"{call} @ v"
        version = 'importlib.metadata.version("entmax")'
        return Source("torch", ("import importlib.metadata", "import entmax"), tuple(lines), result, version)


def adapters() -> list[Adapter]:
    """Both."""
    return [Entmax("entmax-exact", False), Entmax("entmax-bisect", True)]
