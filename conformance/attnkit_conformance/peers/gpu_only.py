"""Implementations that need a GPU: what they would be judged on, and why they are not judged here.

None has a CPU path. An adapter for one of them is written like the others of this package and judged by `run
package.module:ADAPTER` on a suitable machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.model.case import DTYPES


@dataclass(frozen=True)
class OnGpu:
    """A library's functions for an op, and the hardware they need."""

    name: str
    distribution: str
    functions: str
    op: str
    needs: str

    @property
    def version(self) -> str:
        """What is installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return "not installed"

    @property
    def reason(self) -> str:
        """Why it is not judged."""
        return f"needs a GPU: {self.needs}"


class AbsentFor(Absent):
    """An absent library for some ops only."""

    def __init__(self, name: str, reason: str, ops: tuple[str, ...]) -> None:
        super().__init__(name, reason, DTYPES)
        self.ops = ops


TRITON, CUDA = "Triton kernels", "CUDA kernels"
GPU_ONLY = (
    OnGpu("fla_triton-chunk", "fla-core", "chunk_linear_attn", "linear_attention", TRITON),
    OnGpu("fla_triton-fused_chunk", "fla-core", "fused_chunk_linear_attn", "linear_attention", TRITON),
    OnGpu("fla_triton-recurrent", "fla-core", "fused_recurrent_linear_attn", "linear_attention", TRITON),
    OnGpu("fla_triton-attn", "fla-core", "parallel_attn", "softmax_attention", TRITON),
    OnGpu("fla_triton-simple_gla", "fla-core", "chunk_simple_gla", "linear_attention", TRITON),
    OnGpu("fla_triton-gla", "fla-core", "chunk_gla", "gated_linear_attention", TRITON),
    OnGpu("fla_triton-delta", "fla-core", "chunk_delta_rule", "delta_attention", TRITON),
    OnGpu("fla_triton-gated_delta", "fla-core", "chunk_gated_delta_rule", "delta_attention", TRITON),
    OnGpu("fla_triton-kda", "fla-core", "chunk_kda", "delta_attention", TRITON),
    OnGpu("fla_triton-forgetting", "fla-core", "parallel_forgetting_attn", "forgetting_attention", TRITON),
    OnGpu("fla_triton-stickbreaking", "fla-core", "parallel_stickbreaking_attn", "stick_breaking_attention", TRITON),
    OnGpu("adasplash", "adasplash", "adasplash", "entmax_attention", TRITON),
    OnGpu("flash_attn", "flash-attn", "flash_attn_func", "softmax_attention", CUDA),
    OnGpu("flash_sigmoid", "flash-sigmoid", "flash_attn_func", "sigmoid_attention", CUDA),
    OnGpu("fast_transformers", "pytorch-fast-transformers", "causal_linear", "linear_attention", CUDA),
)  # fmt: skip


def absent(item: OnGpu) -> Adapter:
    """An adapter that supports nothing, with the reason."""
    return AbsentFor(item.name, item.reason, (item.op,))
