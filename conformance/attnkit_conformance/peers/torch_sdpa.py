"""torch.nn.functional.scaled_dot_product_attention on the CPU, with the kernel that torch chooses and by its formula.

Served: softmax_attention, with masks, biases, causal and window handed over as one attn_mask (is_causal where nothing
else is asked, and as many queries as keys), scale and grouped heads. Not served: lse, which it does not return;
dropout, whose random numbers are its own; a bias in another dtype than q.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnkit_conformance.case import DTYPES
from attnkit_conformance.peers.base import refusal
from attnkit_conformance.peers.torch_base import TorchPeer, visible

Arrays = Mapping[str, Any]
TAKEN = ("q", "k", "v", "mask", "bias", "key_lengths", "query_mask", "causal", "window", "scale", "enable_gqa")


class Sdpa(TorchPeer):
    """One adapter per kernel."""

    ops = ("softmax_attention",)

    def __init__(self, name: str, kernel: SDPBackend | None) -> None:
        chosen = "the kernel that torch chooses" if kernel is None else f"kernel {kernel.name}"
        function = "scaled_dot_product_attention"
        super().__init__(name, DTYPES, f"torch {torch.__version__}, {function}, CPU, {chosen}, autograd")
        self.kernel = kernel

    def unsupported(self, op: str, arrays: Arrays, params: Arrays) -> str | None:
        """Arguments that torch does not take."""
        if "bias" in arrays and arrays["bias"].dtype != arrays["q"].dtype:
            return "attn_mask has the dtype of q"
        return refusal((*arrays, *params), TAKEN)

    def outputs(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, Any]:
        """One call."""
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        plain = not {"mask", "bias", "key_lengths", "query_mask"} & {*arrays} and "window" not in params
        causal = bool(params.get("causal")) and plain and q.shape[-2] == k.shape[-2]
        mask = None if causal else attn_mask(arrays, params)
        given = {name: params[name] for name in ("scale", "enable_gqa") if name in params}
        with contextlib.nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return {"o": scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **given)}


def attn_mask(arrays: Arrays, params: Arrays) -> torch.Tensor | None:
    """Masks, or a bias that is -inf where nothing may be seen."""
    seen = visible(arrays, params)
    if "bias" not in arrays or seen is None:
        return arrays.get("bias", seen)
    return torch.where(seen, arrays["bias"], -torch.inf)


def adapters() -> list[Any]:
    """Both."""
    return [Sdpa("torch_sdpa-auto", None), Sdpa("torch_sdpa-math", SDPBackend.MATH)]
