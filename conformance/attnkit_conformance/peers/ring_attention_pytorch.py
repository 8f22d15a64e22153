"""ring-attention-pytorch in one process: its plain attention, and its blocks with their own gradient.

Both take (B, tokens, heads, features), masks of keys, a causal flag, and grouped heads. `ring_flash_attn` needs as many
features in v as in k, and raises RuntimeError in float64: its row maxima are a float32 array, filled with the lowest
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import torch
from ring_attention_pytorch.ring_attention import default_attention
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.torch_base import TorchHeads

NAME = "ring_attention_pytorch"
VERSION = 'importlib.metadata.version("ring-attention-pytorch")'
TURNED = ("turned = lambda x: x.swapaxes(1, 2)",)


def attend(function: Callable[..., torch.Tensor], call: Call) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    return function(q, k, v, mask=call.seen, causal=call.causal).transpose(1, 2)


def text(function: str) -> str:
    return f"turned({function}(turned({{q}}), turned({{k}}), turned({{v}}), mask={{mask}}, causal={{causal}}))"


def adapters() -> list[Adapter]:
    """Both."""
    about, dated = f"ring-attention-pytorch {version('ring-attention-pytorch')}", "import importlib.metadata"
    functions = (
        Function(
            f"{NAME}-default", f"{about}, default_attention", ("float64", "float32"),
            Takes("keys", "lower_right", grouped=True), lambda call: attend(default_attention, call),
            text("default_attention"), (dated, f"from {NAME}.ring_attention import default_attention"), VERSION, TURNED,
        ),
        Function(
            f"{NAME}-flash", f"{about}, ring_flash_attn", ("float32",),
            Takes("keys", "lower_right", grouped=True, equal_features=True),
            lambda call: attend(ring_flash_attn, call), text("ring_flash_attn"),
            (dated, f"from {NAME}.ring_flash_attention import ring_flash_attn"), VERSION, TURNED,
        ),
    )  # fmt: skip
    return [TorchHeads(function) for function in functions]
