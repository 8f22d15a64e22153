"""Functions with the signature of torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from attnkit_conformance.adapter import Unsupported, refusing
from attnkit_conformance.adapters.bases import HIDING, NUMBERS, declaration_of
from attnkit_conformance.adapters.bases.torch import Tensors, TorchAdapter
from attnkit_conformance.model.types import Foreign, Params
from attnkit_conformance.peers.like import describe, function_at, keywords_of
from attnkit_conformance.peers.like.axes import FourAxes
from attnkit_conformance.peers.torch_sdpa import KEYWORDS, Sdpa

PROBED = ("float32", "float16", "bfloat16")  # dtypes of the plain call that tells whether there are gradients


class Like(TorchAdapter):
    """A function that is called as torch documents it: tensors of four axes, one batch size, and as many heads of q
    as of k without enable_gqa. Keyword arguments that it does not have are not asked for, and a NotImplementedError is
    a refusal. One whose plain call gives an output without a gradient is judged without. If it is not `biased`, its
    attn_mask is boolean.
    """

    without = Sdpa.without

    def __init__(self, name: str, what: str, function: Callable[..., Foreign], takes: Collection[str],
                 device: str = "cpu", op: str = "", biased: bool = True) -> None:  # fmt: skip
        self.name, self.device = name, device
        self.ops = (op,) if op else Sdpa.ops
        self.peer = Sdpa(name, None, function, takes)
        self.biased, self.serves = biased, declaration_of(self.ops[0], *levels(takes, biased), self.without)
        self.forward_only = self.gives_no_gradient(function)
        self.description = describe(what, takes, KEYWORDS, self.forward_only)

    def call(self, op: str, arrays: Tensors, params: Params) -> Tensors:
        """One call."""
        if params.get("causal") not in (None, False, "upper_left") and "attn_mask" not in self.peer.takes:
            raise Unsupported("takes no attn_mask")
        if "bias" in arrays and not self.biased:
            raise Unsupported("takes no bias")
        axes = FourAxes(torch.broadcast_to, arrays, params)
        with refusing():
            return axes.outputs(self.peer.call(op, axes.arrays(arrays), params))

    def gives_no_gradient(self, function: Callable[..., Foreign]) -> bool:
        """Whether a plain call gives an output without a gradient. One that raises tells nothing."""
        for dtype in PROBED:
            x = torch.ones((1, 1, 64, 64), dtype=getattr(torch, dtype), device=self.device, requires_grad=True)
            try:
                return not function(x, x, x).requires_grad
            except Exception:
                continue
        return False


def levels(takes: Collection[str], biased: bool) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The factors of which functions with these arguments take every level, and of others some."""
    every, some = ["batch"], dict[str, tuple[str, ...]]()
    if "scale" in takes:
        some["scale"] = NUMBERS
    if "enable_gqa" in takes:
        every.append("heads")
    if "attn_mask" in takes:
        every += [*HIDING, *(["bias"] if biased else [])]
    elif "is_causal" in takes:
        some["causal"] = ("upper_left",)
    return every, some


def adapter(target: str, device: str = "cpu") -> Like:
    """The adapter of a function at "package.module:function"."""
    function = function_at(target)
    return Like(
        target, "called like torch's scaled_dot_product_attention", function, keywords_of(function, KEYWORDS), device
    )
