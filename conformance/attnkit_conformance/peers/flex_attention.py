"""torch.nn.attention.flex_attention on the CPU, eager, outputs only: on a CPU it has no gradient.

Supported: softmax_attention with its lse, by a score_mod that adds the bias and hides pairs; pointwise_attention for
non-negative activations (`flex_attention-score_mod`), by the score_mod commonly suggested for them: log(h(s) + shift)
as the score makes softmax's numerator h(s) + shift, exp(lse) undoes its denominator, and shift·Σv is subtracted. The
compiled function takes 41 s per shape on one core, and is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Foreign, Keywords, Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible

COMMON = ("q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")
POINTWISE = (*COMMON, "activation", "alpha", "gain", "shift")
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu_squared": lambda s: torch.relu(s) ** 2,
    "relu6": torch.nn.functional.relu6,
    "sigmoid": torch.sigmoid,
}
LIFT = 1.0  # added to h(s) so that its logarithm exists: the commonly suggested value


class Flex(TorchPeer):
    """softmax_attention."""

    ops: tuple[str, ...] = ("softmax_attention",)
    parameters: tuple[str, ...] = (*COMMON, "return_lse")

    def __init__(self, name: str, what: str) -> None:
        function = f"flex_attention, CPU, eager{what}, outputs only"
        super().__init__(name, ("float64", "float32"), f"torch {torch.__version__}, {function}")

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: other than two leading axes, and unknown arguments."""
        shapes = [arrays[name].shape for name in ("q", "k", "v")]
        if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes) or shapes[1][1] != shapes[2][1]:
            return "takes (B, H, L, D) arrays"
        if shapes[0][1] != shapes[1][1] and not params.get("enable_gqa"):
            return "heads do not broadcast"
        if 0 in (shapes[0][2], shapes[1][2]):
            return "takes no empty inputs"
        return refusal(arrays, params, self.parameters)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        o, lse = self.attend(arrays, params, lambda s: s)
        return {"o": o, "lse": lse} if params.get("return_lse") else {"o": o}

    def attend(
        self, arrays: Tensors, params: Params, score: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, Foreign]:
        """Outputs and lse under a function of the biased scores; hidden pairs get -inf."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        shape = (*q.shape[:-1], k.shape[-2])
        pairs, bias = visible(arrays, params), arrays.get("bias")
        seen = None if pairs is None else pairs.expand(shape)
        bias = None if bias is None else bias.to(q.dtype).expand(shape)

        def score_mod(
            s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
        ) -> torch.Tensor:
            biased = score(s if bias is None else s + bias[b, h, i, j])
            return biased if seen is None else torch.where(seen[b, h, i, j], biased, -torch.inf)

        options: Keywords = {"scale": params.get("scale"), "enable_gqa": bool(params.get("enable_gqa"))}
        o, aux = flex_attention(q, k, v, score_mod=score_mod, return_aux=AuxRequest(lse=True), **options)
        return o, aux.lse

    def vjp(self, op: str, arrays: Tensors, params: Params, cotangents: Tensors) -> Tensors:
        raise Unsupported("no gradient on a CPU")

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        hides = visible(arrays, params) is not None
        score = "s + bias.expand(shape)[b, h, i, j]" if "bias" in arrays else "s"
        score = f"torch.where(seen.expand(shape)[b, h, i, j], {score}, -torch.inf)" if hides else score
        options = [f"{name}={params[name]!r}" for name in ("scale", "enable_gqa") if name in params]
        lines = ("shape = (*q.shape[:3], k.shape[2])", f"score = lambda s, b, h, i, j: {score}")
        call = f"flex_attention({', '.join(('q', 'k', 'v', 'score_mod=score', *options))})"
        imports = ("from torch.nn.attention.flex_attention import flex_attention",)
        return Source("torch", imports, lines, call, "torch.__version__")


class ScoreMod(Flex):
    """pointwise_attention by a score_mod."""

    ops = ("pointwise_attention",)
    parameters = POINTWISE

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Signed activations, and shifts that depend on the length."""
        if params.get("activation", "relu") not in ACTIVATIONS:
            return "the logarithm takes no activation that is negative somewhere"
        if isinstance(params.get("shift", 0.0), str):
            return "the shift depends on the number of visible keys"
        return super().unsupported(op, arrays, params)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """softmax of log(h(s) + LIFT), undone; n^-alpha afterwards."""
        h, shift = ACTIVATIONS[option(params, "activation", "relu")], option(params, "shift", 0.0)
        o, lse = self.attend(arrays, params, lambda s: torch.log(h(s + shift) + LIFT))
        v = arrays["v"]
        v = v.repeat_interleave(o.shape[1] // v.shape[1], 1)
        pairs = visible(arrays, params)
        shape = (*o.shape[:-1], v.shape[-2])
        seen = torch.ones(shape, dtype=v.dtype) if pairs is None else pairs.expand(shape).to(v.dtype)
        total = o * torch.exp(lse)[..., None].to(o.dtype) - LIFT * (seen @ v)
        length = seen.sum(-1, keepdim=True).clamp(min=1)
        return {"o": option(params, "gain", 1.0) * total * length ** -option(params, "alpha", 1.0)}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same steps, for the first activation."""
        lines = (
            "seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)" if visible(arrays, params) is None
            else "seen = seen.expand(*q.shape[:3], k.shape[2])",
            "score = lambda s, b, h, i, j: torch.where(seen[b, h, i, j], torch.log(torch.relu(s) + 1), -torch.inf)",
            "o, aux = flex_attention(q, k, v, score_mod=score, return_aux=AuxRequest(lse=True))",
            "n = seen.sum(-1, keepdim=True).clamp(min=1)",
        )  # fmt: skip
        imports = ("from torch.nn.attention.flex_attention import AuxRequest, flex_attention",)
        result = "(o * aux.lse.exp()[..., None] - seen.to(v.dtype) @ v) / n"
        return Source("torch", imports, lines, result, "torch.__version__")


def adapters() -> list[Adapter]:
    """Both adapters."""
    return [Flex("flex_attention-eager", ""), ScoreMod("flex_attention-score_mod", ", h by a score_mod")]
