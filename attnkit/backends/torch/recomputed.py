"""Linear attention whose gradients are the explicit ones: sums over the past are made again, not kept for backward.

Training keeps q, k and v, where automatic differentiation of the generic body keeps every chunk. It takes longer for
that, so that `impl="auto"` leaves it to those who ask for it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit.backends.torch.custom import Given, register
from attnkit.ops.linear import attention, cosine, efficient, performer

OPS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "linear_attention": (attention.linear_attention, attention.linear_attention_vjp),
    "cosine_attention": (cosine.cosine_attention, cosine.cosine_attention_vjp),
    "performer_attention": (performer.performer_attention, performer.performer_attention_vjp),
    "efficient_attention": (efficient.efficient_attention, efficient.efficient_attention_vjp),
}


def _forward(op: str, given: Given) -> Tensor:
    o: Tensor = OPS[op][0](**given, impl="generic")
    return o


def _backward(op: str, given: Given, do: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    return OPS[op][1](**given, do=do, impl="generic")


CUSTOM = register("recomputed", _forward, _backward, ("q", "k", "v"))


def unsupported(*arrays: Tensor, **options: Any) -> str | None:
    """Why a call keeps what automatic differentiation needs."""
    if options.get("initial_state") is not None or options.get("return_state"):
        return "states are served by the generic implementation"
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    return None


def attend(op: str, *arrays: Tensor, **options: Any) -> Tensor:
    """An op of `OPS`."""
    names = ("q", "k", "v", "projection")
    return CUSTOM.attend(op, **dict(zip(names, arrays, strict=False)), **options)


def is_faster(*arrays: Tensor, **options: Any) -> bool:
    """It saves memory, not time."""
    return False


KERNELS = {op: Kernel("recomputed", partial(attend, op), unsupported, is_faster) for op in OPS}
