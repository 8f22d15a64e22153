"""Attention as it is commonly written: the few lines found everywhere, rewritten here, pitfalls included.

No library's code. Each function is the plain formula with the usual treatment of masks and lengths:

    softmax_fill     hidden scores become -1e9
    softmax_inf      hidden scores become -inf
    relu             hidden scores become the least float; then relu, and a division by the number of all keys
    relu_clamp       without masks, and clamp for relu
    softplus_zeroed  scores are multiplied by a mask of 0 and 1
    linear_mask_v    elu + 1, padding hidden in v only
    efficient        softmax over features of q, softmax over tokens of k
    softpick         eq 2 of Zuhri, Fuadi and Aji 2025, with the maximum and the ε of the authors' formula in torch
    softpick_kernel  the same as their kernels compute it: another ε, and gradients for which the maximum is a constant
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import einops
import torch

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.bases.arguments import refusal
from attnkit_conformance.adapters.bases.torch import Tensors
from attnkit_conformance.model.types import Params, option
from attnkit_conformance.peers.base import Source
from attnkit_conformance.peers.torch_base import TorchPeer, visible

Tensor = torch.Tensor
Function = Callable[..., Tensor]
QKV = ("q", "k", "v")
PAIRS = ("mask", "key_lengths", "query_mask", "causal", "window")
KEYS = ("mask", "key_lengths")
OWN = ("eps",)  # what else a function takes by name
RELU: Params = {"activation": "relu", "alpha": 1.0, "gain": 1.0, "shift": 0.0, "length": "visible"}


def softmax_fill(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    if seen is not None:
        s = s.masked_fill(~seen, -1e9)
    return einops.einsum(s.softmax(-1), v, "b h i j, b h j e -> b h i e")


def softmax_inf(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    return einops.einsum(s.softmax(-1), v, "b h i j, b h j e -> b h i e")


def relu(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    if seen is not None:
        s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
    return einops.einsum(s.relu() / k.shape[2], v, "b h i j, b h j e -> b h i e")


def relu_clamp(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    return einops.einsum(s.clamp(min=0) / k.shape[2], v, "b h i j, b h j e -> b h i e")


def softplus_zeroed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    if seen is not None:
        s = s * seen
    return einops.einsum(torch.nn.functional.softplus(s), v, "b h i j, b h j e -> b h i e")


def linear_mask_v(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    if seen is not None:  # (b, h, 1, j)
        v = v.masked_fill(~seen.mT, 0)
    memory = einops.einsum(k, v, "b h j d, b h j e -> b h d e")
    total = einops.einsum(q, k.sum(2), "b h i d, b h d -> b h i")
    return einops.einsum(q, memory, "b h i d, b h d e -> b h i e") / (total + 1e-6)[..., None]


def efficient(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    if seen is not None:  # (b, h, 1, j)
        k = k.masked_fill(~seen.mT, torch.finfo(k.dtype).min)
    memory = einops.einsum(k.softmax(2), v, "b h j d, b h j e -> b h d e")
    return einops.einsum(q.softmax(-1), memory, "b h i d, b h d e -> b h i e")


def softpick(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, eps: float = 1e-8) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    m = s.max(-1, keepdim=True).values
    a = (s - m).exp() - (-m).exp()
    total = a.abs().where(s.isfinite(), 0).sum(-1, keepdim=True)
    return einops.einsum(a.relu() / (total + eps), v, "b h i j, b h j e -> b h i e")


def softpick_kernel(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    s = einops.einsum(q, k, "b h i d, b h j d -> b h i j") * scale
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    m = s.max(-1, keepdim=True).values.detach()
    a = (s - m).exp() - (-m).exp()
    total = torch.where(s > 0, a, -a).where(s.isfinite(), 0).sum(-1, keepdim=True)
    return einops.einsum(a.relu() / (total + 1e-6), v, "b h i j, b h j e -> b h i e")


class Written(TorchPeer):
    """One function of an op: `about` are the parameters that it implements, `options` the others that it takes."""

    without = ("return_lse", "return_state")

    def __init__(self, function: Function, op: str, about: Params, options: tuple[str, ...]) -> None:
        self.function, self.ops, self.about, self.options = function, (op,), about, options
        summary = f"torch {torch.__version__}, einops {einops.__version__}, CPU, autograd"
        super().__init__(f"commonly_written-{function.__name__}", ("float64", "float32"), summary)
        self.of_keys = options == KEYS  # masks of keys only: (b, h, 1, j)

    def unsupported(self, op: str, arrays: Tensors, params: Params) -> str | None:
        """Other shapes than (b, h, i, d), and parameters that the lines do not support."""
        shapes = [arrays[name].shape for name in QKV]
        if any(len(shape) != 4 or shape[:2] != shapes[0][:2] for shape in shapes) or shapes[1][2] != shapes[2][2]:
            return "takes (b, h, i, d) arrays with the same heads"
        if 0 in (shapes[0][2], shapes[1][2]):
            return "takes no empty inputs"
        options = {**RELU, **params} if op == "pointwise_attention" else params
        if any(options.get(name) != value for name, value in self.about.items()) or "length" in arrays:
            return "is about other parameters"
        if self.of_keys and "mask" in arrays and arrays["mask"].ndim > 1 and arrays["mask"].shape[-2] != 1:
            return "takes no mask of pairs"
        return refusal(arrays, params, (*QKV, *self.about, *self.options))

    def outputs(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        q, k, v = (arrays[name] for name in QKV)
        pairs = visible(arrays, params)
        rows = 1 if self.of_keys else q.shape[2]
        seen = None if pairs is None else pairs.expand(*q.shape[:2], rows, k.shape[2])
        given = {name: params[name] for name in OWN if name in params}
        return {"o": self.function(q, k, v, seen, option(params, "scale", q.shape[-1] ** -0.5), **given)}

    def source(self, op: str, arrays: Tensors, params: Params) -> Source:
        """The function itself, on its arguments."""
        text = inspect.getsource(self.function).replace(": Tensor | None", "").replace(": Tensor", "")
        lines = text.replace(": float = ", "=").replace(": float", "").replace(" -> Tensor", "").rstrip().splitlines()
        seen = "None" if visible(arrays, params) is None else "seen"
        if self.of_keys and seen != "None":
            seen = "seen.expand(*q.shape[:2], 1, k.shape[2])"
        scale = repr(params["scale"]) if "scale" in params else "q.shape[-1] ** -0.5"
        given = "".join(f", {name}={params[name]!r}" for name in OWN if name in params)
        call = f"{self.function.__name__}(q, k, v, {seen}, {scale}{given})"
        return Source("torch", ("import einops",), (*lines, ""), call, "torch.__version__")


def adapters() -> list[Adapter]:
    """One per function."""
    softplus: Params = {**RELU, "activation": "softplus", "alpha": 0.0}
    return [
        Written(softmax_fill, "softmax_attention", {}, (*PAIRS, "scale")),
        Written(softmax_inf, "softmax_attention", {}, (*PAIRS, "scale")),
        Written(relu, "pointwise_attention", RELU, (*PAIRS, "scale")),
        Written(relu_clamp, "pointwise_attention", RELU, ("scale",)),
        Written(softplus_zeroed, "pointwise_attention", softplus, (*PAIRS, "scale")),
        Written(linear_mask_v, "linear_attention", {}, KEYS),
        Written(efficient, "efficient_attention", {}, KEYS),
        Written(softpick, "softpick_attention", {}, (*PAIRS, "scale", *OWN)),
        Written(softpick_kernel, "softpick_attention", {}, (*PAIRS, "scale")),
    ]
