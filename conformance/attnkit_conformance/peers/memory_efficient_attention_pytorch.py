"""memory-efficient-attention-pytorch: its plain attention, the one in blocks, and that with its own gradient.

All have a causal flag. `attention` takes masks of pairs, `memory_efficient_attention` masks of keys, both a bias;
`FlashAttentionFunction` masks of pairs and as many features in v as in k. In float64 the latter raises RuntimeError:
its row maxima are a float32 array, filled with the lowest float64.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version

import torch
from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction
from memory_efficient_attention_pytorch.memory_efficient_attention import attention, memory_efficient_attention

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.model.types import Arrays, Params, Results
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers.heads import Call, Function, Takes
from attnkit_conformance.peers.torch_base import TorchHeads

NAME = "memory_efficient_attention_pytorch"
VERSION = 'importlib.metadata.version("memory-efficient-attention-pytorch")'
BUCKETS = (512, 1024)  # of queries and of keys, the defaults of its modules
BLOCKED = f"from {NAME}.memory_efficient_attention import "


class Backward(TorchHeads):
    """Gradients by `backward`: it recomputes under a checkpoint that torch.autograd.grad refuses."""

    def vjp(self, op: str, arrays: Arrays, params: Params, cotangents: Arrays) -> Results:
        names = [name for name in BY_NAME[op].differentiable if name in arrays]
        leaves = {name: arrays[name].detach().requires_grad_() for name in names}
        self.call(op, {**arrays, **leaves}, params)["o"].backward(cotangents["o"])
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def plain(call: Call) -> torch.Tensor:
    o: torch.Tensor = attention(call.q, call.k, call.v, mask=call.seen, causal=call.causal, attn_bias=call.bias)
    return o


def attend_in_blocks(call: Call) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a checkpoint without use_reentrant
        o: torch.Tensor = memory_efficient_attention(
            call.q, call.k, call.v, mask=call.seen, causal=call.causal, attn_bias=call.bias
        )
    return o


def flash(call: Call) -> torch.Tensor:
    o: torch.Tensor = FlashAttentionFunction.apply(call.q, call.k, call.v, call.seen, call.causal, *BUCKETS)
    return o


def adapters() -> list[Adapter]:
    """All three."""
    about = f"memory-efficient-attention-pytorch {version('memory-efficient-attention-pytorch')}"
    options = "mask={mask}, causal={causal}, attn_bias={bias}"
    functions = (
        Function(
            f"{NAME}-plain", f"{about}, attention", ("float64", "float32"), Takes("pairs", "lower_right", bias=True),
            plain, f"attention({{q}}, {{k}}, {{v}}, {options})",
            ("import importlib.metadata", f"{BLOCKED}attention"), VERSION,
        ),
        Function(
            f"{NAME}-blocked", f"{about}, memory_efficient_attention", ("float64", "float32"),
            Takes("keys", "lower_right", bias=True), attend_in_blocks,
            f"memory_efficient_attention({{q}}, {{k}}, {{v}}, {options})",
            ("import importlib.metadata", f"{BLOCKED}memory_efficient_attention"), VERSION,
        ),
        Function(
            f"{NAME}-flash", f"{about}, FlashAttentionFunction", ("float32",),
            Takes("pairs", "lower_right", equal_features=True), flash,
            f"FlashAttentionFunction.apply({{q}}, {{k}}, {{v}}, {{mask}}, {{causal}}, {BUCKETS[0]}, {BUCKETS[1]})",
            ("import importlib.metadata", f"from {NAME}.flash_attention import FlashAttentionFunction"), VERSION,
        ),
    )  # fmt: skip
    return [(Backward if function.run is attend_in_blocks else TorchHeads)(function) for function in functions]
