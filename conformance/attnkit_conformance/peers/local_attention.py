"""local-attention's LocalAttention(exact_windowsize=True): softmax in windows of as many keys on each side.

Supported are `window=(w, w)`, and `window=(w, 0)` with `causal`, w of 1 to all tokens, which is what it gets without a
window; with masks of keys and as many queries as keys. Numbers of tokens that are not a multiple of w are padded by its
own option `autopad`.
"""

from __future__ import annotations

from importlib.metadata import version

from local_attention import LocalAttention

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import of_keys, refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Params, window_sides
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.heads import is_of_keys
from attnkit_conformance.peers.torch_base import TorchPeer, visible_keys

TAKEN = ("q", "k", "v", "mask", "key_lengths", "causal", "window", "scale")


class Local(TorchPeer):
    """softmax_attention in windows."""

    ops = ("softmax_attention",)
    without = ("return_lse",)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Why a call is unsupported: other windows, and masks of pairs."""
        shapes = [arrays[name].shape for name in ("q", "k", "v")]
        if any(len(shape) != 4 or shape[:3] != shapes[0][:3] for shape in shapes) or 0 in shapes[0]:
            return "takes (B, H, T, d) arrays with the same heads and tokens"
        if reason := refusal(arrays, params, TAKEN):
            return reason
        left, right = self.window(arrays, params)
        if not left or left > shapes[0][2] or right != (0 if params.get("causal") else left):
            return "takes windows of as many keys on each side, or causal ones"
        if not is_of_keys(arrays, shapes[0]):
            return "takes no mask of pairs"
        return None

    def window(self, arrays: Tensors, params: Params) -> tuple[int | None, int | None]:
        """The window of a call; all tokens without one."""
        tokens = arrays["q"].shape[2]
        return window_sides({"window": (tokens, 0 if params.get("causal") else tokens), **params})

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One module."""
        q = arrays["q"]
        seen = visible_keys(arrays, params)
        mask = None if seen is None else seen.expand(q.shape[0], 1, 1, q.shape[2])[:, 0, 0]
        causal = bool(params.get("causal"))
        size = self.window(arrays, params)[0]
        module = LocalAttention(size, causal=causal, exact_windowsize=True, autopad=True, scale=params.get("scale"))
        return {"o": module(q, arrays["k"], arrays["v"], mask=mask)}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The same module."""
        options = f"causal={bool(params.get('causal'))}, exact_windowsize=True, autopad=True"
        options += f", scale={params['scale']!r}" if "scale" in params else ""
        lines = [f"module = LocalAttention({self.window(arrays, params)[0]}, {options})"]
        mask = ""
        if of_keys(arrays, params) is not None:
            lines.append("mask = seen.expand(*q.shape[:3], k.shape[2])[:, 0, -1]")
            mask = ", mask=mask"
        imports = ("import importlib.metadata", "from local_attention import LocalAttention")
        version = 'importlib.metadata.version("local-attention")'
        return Source("torch", imports, tuple(lines), f"module(q, k, v{mask})", version)


def adapters() -> list[Adapter]:
    """The module."""
    about = f"local-attention {version('local-attention')}, LocalAttention(exact_windowsize=True), CPU, autograd"
    return [Local("local_attention", ("float64", "float32"), about)]
