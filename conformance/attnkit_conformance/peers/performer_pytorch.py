"""performer-pytorch: its FastAttention with the projection of the call, and the functions that it calls.

Supported: performer_attention with one projection for all heads, kernel "softmax", and for the functions "relu" too;
with as many queries as keys where it is causal. The module adds 1e-4 to every feature and 1e-6 to sums of keys, or 1e-3
for other kernels; the functions take these numbers, and get those of the definition: 0, and 1e-3. By default they
divide q and k by d^¼ for any kernel; here only for "softmax".
"""

from __future__ import annotations

from importlib.metadata import version

from performer_pytorch.performer_pytorch import (
    FastAttention,
    causal_linear_attention_noncuda,
    generalized_kernel,
    linear_attention,
    softmax_kernel,
)

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import equal_heads, refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Params
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer

TAKEN = ("q", "k", "v", "projection", "kernel", "causal", "chunk_size", "enable_gqa")
RELU_EPS = 1e-3
DATED = "import importlib.metadata"
MODULE = "from performer_pytorch.performer_pytorch import "
VERSION = 'importlib.metadata.version("performer-pytorch")'


class Performer(TorchPeer):
    """performer_attention without masks."""

    ops = ("performer_attention",)
    without = ("return_state",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: masks, states, a projection for each head."""
        reason = refusal(arrays, params, TAKEN) or equal_heads(*(arrays[name].shape for name in ("q", "k", "v")))
        if reason is None and arrays["projection"].ndim != 2:
            return "takes one projection"
        if reason is None and params.get("causal") and arrays["q"].shape[2] != arrays["k"].shape[2]:
            return "causal self-attention only"
        return reason


class Module(Performer):
    """FastAttention."""

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Also other kernels."""
        other = params.get("kernel", "softmax") != "softmax"
        return super().unsupported(op, arrays, params) or ("is for the softmax kernel" if other else None)

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One module."""
        projection = arrays["projection"]
        module = FastAttention(projection.shape[1], projection.shape[0])
        module.projection_matrix = projection
        if params.get("causal"):  # what it chooses, and says so, where the CUDA kernel is not installed
            module.causal, module.causal_linear_fn = True, causal_linear_attention_noncuda
        return {"o": module(arrays["q"], arrays["k"], arrays["v"])}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same module."""
        features, own = arrays["projection"].shape
        lines = (
            f"module = FastAttention({own}, {features}, causal={bool(params.get('causal'))})",
            "module.projection_matrix = projection",
        )
        return Source("torch", (DATED, f"{MODULE}FastAttention"), lines, "module(q, k, v)", VERSION)


class Functions(Performer):
    """Its kernels and sums."""

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """Features by its kernel, and its sums."""
        q, k, v, projection = (arrays[name] for name in ("q", "k", "v", "projection"))
        if params.get("kernel", "softmax") == "softmax":
            q = softmax_kernel(q, projection_matrix=projection, is_query=True, eps=0.0)
            k = softmax_kernel(k, projection_matrix=projection, is_query=False, eps=0.0)
        else:
            eps = RELU_EPS * projection.shape[0] ** 0.5  # its features are √m times those of the definition
            options = {"projection_matrix": projection, "kernel_epsilon": eps, "normalize_data": False}
            q, k = (generalized_kernel(x, **options) for x in (q, k))
        if params.get("causal"):
            return {"o": causal_linear_attention_noncuda(q, k, v, eps=0.0)}
        return {"o": linear_attention(q, k, v)}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same functions."""
        kernel = "projection_matrix=projection, "
        eps = RELU_EPS * arrays["projection"].shape[0] ** 0.5
        lines = tuple(
            f"f{x} = generalized_kernel({x}, {kernel}kernel_epsilon={eps!r}, normalize_data=False)" for x in "qk"
        )
        if params.get("kernel", "softmax") == "softmax":
            lines = tuple(f"f{x} = softmax_kernel({x}, {kernel}is_query={x == 'q'}, eps=0.0)" for x in "qk")
        function = "causal_linear_attention_noncuda" if params.get("causal") else "linear_attention"
        call = f"{function}(fq, fk, v{', eps=0.0' if params.get('causal') else ''})"
        names = f"{MODULE}generalized_kernel, softmax_kernel, {function}"
        return Source("torch", (DATED, names), lines, call, VERSION)


def adapters() -> list[Adapter]:
    """The module, and its functions."""
    about = f"performer-pytorch {version('performer-pytorch')}"
    return [
        Module("performer_pytorch-module", ("float64", "float32"), f"{about}, FastAttention, CPU, autograd"),
        Functions(
            "performer_pytorch-functions", ("float64", "float32"),
            f"{about}, softmax_kernel, generalized_kernel, linear_attention, CPU, autograd",
        ),
    ]  # fmt: skip
