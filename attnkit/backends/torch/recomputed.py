"""Linear attention with explicit gradients: sums over the past are recomputed, not stored for backward.

Training stores q, k and v, where automatic differentiation of the generic body stores every chunk. That takes longer,
so `impl="auto"` never selects it.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit._core.typing import AnyFunction, Keywords
from attnkit.backends.torch.custom import Arguments, register
from attnkit.ops.linear import attention, cosine, efficient, performer

SERVED: tuple[tuple[AnyFunction, Callable[..., Keywords]], ...] = (
    (attention.linear_attention, attention.linear_attention_vjp),
    (cosine.cosine_attention, cosine.cosine_attention_vjp),
    (performer.performer_attention, performer.performer_attention_vjp),
    (efficient.efficient_attention, efficient.efficient_attention_vjp),
)
OPS = {op.__name__: (op, vjp) for op, vjp in SERVED}


def _forward(op: str, arguments: Arguments) -> Tensor:
    o: Tensor = OPS[op][0](**arguments, impl="generic")
    return o


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    return OPS[op][1](**arguments, do=do, impl="generic")


CUSTOM = register("recomputed", _forward, _backward, ("q", "k", "v"))


def unsupported(*arrays: Tensor, **options: object) -> str | None:
    """Why a call is left to automatic differentiation."""
    if options.get("initial_state") is not None or options.get("return_state"):
        return "states are served by the generic implementation"
    if options.get("log_decay") is not None:
        return "log_decay is served by the generic implementation"
    if callable(options.get("feature_map")):
        return "a feature map of your own is served by the generic implementation"
    return None


def attend(op: str, *arrays: Tensor, **options: object) -> Tensor:
    """An op of `OPS`."""
    names = ("q", "k", "v", "projection")
    return CUSTOM.attend(op, **dict(zip(names, arrays, strict=False)), **options)


def is_faster(*arrays: Tensor, **options: object) -> bool:
    """False: it saves memory, not time."""
    return False


KERNELS = {op: Kernel("recomputed", partial(attend, op), unsupported, is_faster) for op in OPS}
