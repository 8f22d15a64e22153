"""torch.nn.functional.scaled_dot_product_attention on the CPU, with each of its kernels and with torch's choice.

Supported: softmax_attention, with masks, biases, causal and window passed as one attn_mask (is_causal if there is
nothing else, and it means the same), scale and grouped heads. lse, which it does not return, is not requested.
Unsupported: dropout, which uses torch's random numbers; a bias in another dtype than q. The flash attention kernel
needs two leading axes and as many features in v as in k (the adapter pads the shorter one with zeros and crops the
output), and has no gradient with a bias.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.model.types import Keywords, Params
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible

KEYWORDS = ("attn_mask", "is_causal", "scale", "enable_gqa")
TAKEN = ("q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")


class Sdpa(TorchPeer):
    """A function with the signature of torch's, or with the keyword arguments `takes` of it; torch's by default."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(
        self, name: str, kernel: SDPBackend | None = None,
        function: Callable[..., torch.Tensor] = scaled_dot_product_attention, takes: Container[str] = KEYWORDS,
    ) -> None:  # fmt: skip
        which = "the kernel that torch chooses" if kernel is None else f"kernel {kernel.name}"
        description = f"torch {torch.__version__}, scaled_dot_product_attention, CPU, {which}, autograd"
        super().__init__(name, DTYPES, description)
        self.kernel, self.function, self.takes = kernel, function, takes

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: arguments that the function does not take."""
        if "bias" in arrays and arrays["bias"].dtype != arrays["q"].dtype:
            return "attn_mask has the dtype of q"
        lacking = (f"takes no {name}" for name in self.options(arrays, params) if name not in self.takes)
        return refusal(arrays, params, TAKEN) or next(lacking, None)

    def options(self, arrays: Tensors, params: Params) -> Keywords:
        """The keyword arguments of a call: is_causal, which is aligned at the upper left, if there is nothing else."""
        options: Keywords = {name: params[name] for name in ("scale", "enable_gqa") if name in params}
        alone = not {"mask", "bias", "key_lengths", "query_mask", "window"} & {*arrays, *params}
        aligned = params.get("causal") == "upper_left" or arrays["q"].shape[-2] == arrays["k"].shape[-2]
        if params.get("causal") and alone and aligned and "is_causal" in self.takes:
            return {**options, "is_causal": True}
        mask = attn_mask(arrays, params)
        return options if mask is None else {**options, "attn_mask": mask}

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        with contextlib.nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return {"o": self.function(q, k, v, **self.options(arrays, params))}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same call."""
        given = {name: repr(x) for name, x in self.options(arrays, params).items()}
        if "attn_mask" in given:
            seen = visible(arrays, params) is not None
            of_both = "torch.where(seen, bias, -torch.inf)" if seen else "bias"
            given["attn_mask"] = of_both if "bias" in arrays else "seen"
        options = (f"{name}={text}" for name, text in given.items())
        call = f"scaled_dot_product_attention({', '.join(('q', 'k', 'v', *options))})"
        function = "from torch.nn.functional import scaled_dot_product_attention"
        if self.kernel is None:
            return Source("torch", (function,), (), call, "torch.__version__")
        kernel = f"SDPBackend.{self.kernel.name}"
        lines = (f"with sdpa_kernel({kernel}):", f"    o = {call}")
        imports = ("from torch.nn.attention import SDPBackend, sdpa_kernel", function)
        return Source("torch", imports, lines, "o", "torch.__version__")


class Flash(Sdpa):
    """The flash attention kernel, which supports less."""

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Also other than two leading axes."""
        shapes = [arrays[name].shape for name in ("q", "k", "v")]
        if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes):
            return "takes four axes and one batch size"
        if shapes[0][1] != shapes[1][1] and not params.get("enable_gqa"):
            return "heads do not broadcast"
        if 0 in (shapes[0][2], shapes[1][2]):
            return "has no kernel for empty inputs"
        return super().unsupported(op, arrays, params)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call with equal features everywhere."""
        features, values = arrays["q"].shape[-1], arrays["v"].shape[-1]
        wide = {
            name: pad(arrays[name], (0, max(features, values) - arrays[name].shape[-1])) for name in ("q", "k", "v")
        }
        o = super().outputs(op, {**arrays, **wide}, {"scale": features**-0.5, **params})["o"]
        return {"o": o[..., :values]}

    def vjp(self, op: str, arrays: Tensors, params: Params, cotangents: Tensors) -> Tensors:
        if "bias" in arrays:
            raise Unsupported("attn_mask has no gradient")
        return super().vjp(op, arrays, params, cotangents)


def attn_mask(arrays: Tensors, params: Params) -> torch.Tensor | None:
    """Masks, or a bias with -inf at hidden pairs."""
    seen = visible(arrays, params)
    if "bias" not in arrays or seen is None:
        return arrays.get("bias", seen)
    return torch.where(seen, arrays["bias"], -torch.inf)


def adapters() -> list[Adapter]:
    """One adapter per CPU kernel."""
    return [
        Sdpa("torch_sdpa-auto"),
        Sdpa("torch_sdpa-math", SDPBackend.MATH),
        Flash("torch_sdpa-flash", SDPBackend.FLASH_ATTENTION),
    ]
