"""torch.nn.functional.scaled_dot_product_attention on the CPU, with each of its kernels and with torch's choice.

Supported: softmax_attention, with masks, biases, causal and window passed as one attn_mask (is_causal if there is
nothing else, and as many queries as keys), scale and grouped heads. lse, which it does not return, is not requested.
Unsupported: dropout, which uses torch's random numbers; a bias in another dtype than q. The flash attention kernel
needs two leading axes and as many features in v as in k (the adapter pads the shorter one with zeros and crops the
output), and has no gradient with a bias.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from attnkit_conformance.adapter import Unsupported
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.peers.base import Source, refusal
from attnkit_conformance.peers.torch_base import TorchPeer, visible

Arrays = Mapping[str, Any]
TAKEN = ("q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")


class Sdpa(TorchPeer):
    """One adapter per kernel."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def __init__(self, name: str, kernel: SDPBackend | None) -> None:
        which = "the kernel that torch chooses" if kernel is None else f"kernel {kernel.name}"
        function = "scaled_dot_product_attention"
        super().__init__(name, DTYPES, f"torch {torch.__version__}, {function}, CPU, {which}, autograd")
        self.kernel = kernel

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Why a call is unsupported: arguments that torch does not take."""
        if "bias" in arrays and arrays["bias"].dtype != arrays["q"].dtype:
            return "attn_mask has the dtype of q"
        return refusal(arrays, params, TAKEN)

    def outputs(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """One call."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        plain = not {"mask", "bias", "key_lengths", "query_mask", "window"} & {*arrays, *params}
        causal = bool(params.get("causal")) and plain and q.shape[-2] == k.shape[-2]
        mask = None if causal else attn_mask(arrays, params)
        options = {name: params[name] for name in ("scale", "enable_gqa") if name in params}
        with contextlib.nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return {"o": scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)}

    def source(self, op: str, arrays: Arrays, params: Arrays) -> Source:
        """The same call."""
        options = [f"{name}={params[name]!r}" for name in ("scale", "enable_gqa") if name in params]
        mask = ["attn_mask=seen"] if visible(arrays, params) is not None else []
        if "bias" in arrays:
            mask = ["attn_mask=torch.where(seen, bias, -torch.inf)"] if mask else ["attn_mask=bias"]
        call = f"scaled_dot_product_attention({', '.join(('q', 'k', 'v', *mask, *options))})"
        function = "from torch.nn.functional import scaled_dot_product_attention"
        if self.kernel is None:
            return Source("torch", (function,), (), call, "torch.__version__")
        kernel = f"SDPBackend.{self.kernel.name}"
        lines = (f"with sdpa_kernel({kernel}):", f"    o = {call}")
        imports = ("from torch.nn.attention import SDPBackend, sdpa_kernel", function)
        return Source("torch", imports, lines, "o", "torch.__version__")


class Flash(Sdpa):
    """The flash attention kernel, which supports less."""

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Also other than two leading axes."""
        shapes = [arrays[name].shape for name in ("q", "k", "v")]
        if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes):
            return "takes four axes and one batch size"
        if shapes[0][1] != shapes[1][1] and not params.get("enable_gqa"):
            return "heads do not broadcast"
        if 0 in (shapes[0][2], shapes[1][2]):
            return "has no kernel for empty inputs"
        return super().unsupported(op, arrays, params)

    def outputs(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """One call with equal features everywhere."""
        features, values = arrays["q"].shape[-1], arrays["v"].shape[-1]
        wide = {
            name: pad(arrays[name], (0, max(features, values) - arrays[name].shape[-1])) for name in ("q", "k", "v")
        }
        o = super().outputs(op, {**arrays, **wide}, {"scale": features**-0.5, **params})["o"]
        return {"o": o[..., :values]}

    def vjp(self, op: str, arrays: Arrays, params: Arrays, cotangents: Arrays) -> dict[str, Any]:
        if "bias" in arrays:
            raise Unsupported("attn_mask has no gradient")
        return super().vjp(op, arrays, params, cotangents)


def attn_mask(arrays: Arrays, params: Arrays) -> torch.Tensor | None:
    """Masks, or a bias with -inf at hidden pairs."""
    seen = visible(arrays, params)
    if "bias" not in arrays or seen is None:
        return arrays.get("bias", seen)
    return torch.where(seen, arrays["bias"], -torch.inf)


def adapters() -> list[Any]:
    """One adapter per CPU kernel."""
    return [
        Sdpa("torch_sdpa-auto", None),
        Sdpa("torch_sdpa-math", SDPBackend.MATH),
        Flash("torch_sdpa-flash", SDPBackend.FLASH_ATTENTION),
    ]
