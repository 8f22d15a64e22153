"""Quadratic attention on the CPU in blocks of heads and queries (`attnkit._blocks`)."""

import math
from functools import partial
from typing import Any

from torch import Tensor

from attnkit import _blocks, _in_place
from attnkit._dispatch import Kernel
from attnkit._library import namespace
from attnkit.backends.torch import in_place
from attnkit.backends.torch.custom import Given, register
from attnkit.statistics_families import FAMILIES

ENOUGH = {
    "softmax_attention": 1 << 22,
    "pointwise_attention": 1 << 20,
    "entmax_attention": 1 << 22,
    "gaussian_attention": 1 << 22,
}
"""Scores of a call from which forward and backward together took less time than by automatic differentiation."""
OPS = tuple(ENOUGH)


def _call(op: str, given: Given) -> _blocks.Call:
    q, k, v = (given[name] for name in "qkv")
    options = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    call = _blocks.call(FAMILIES[op], q, k, v, options)
    return _in_place.sized(call) if op == "pointwise_attention" else call


def _forward(op: str, given: Given) -> Tensor:
    xp = namespace(given["q"])
    block = partial(_in_place.forward_block, in_place.room()) if op == "pointwise_attention" else _blocks.forward_block
    o: Tensor = _blocks.forward(xp, _call(op, given), block)
    return o


def _backward(op: str, given: Given, do: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    xp = namespace(do)
    block = (
        partial(_in_place.backward_block, in_place.room()) if op == "pointwise_attention" else _blocks.backward_block
    )
    return _blocks.backward(xp, _call(op, given), do, wanted, block)


CUSTOM = register("blocked", _forward, _backward, ("q", "k", "v", "bias", "alpha"))


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """An op of `OPS`."""
    return CUSTOM.attend(op, q=q, k=k, v=v, **options)


def pull(op: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *rest: None, **options: Any) -> dict[str, Tensor]:
    """Its explicit gradients."""
    return CUSTOM.pull(op, do, q=q, k=k, v=v, **options)


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> str | None:
    """Why a call is not served in blocks."""
    if q.device.type != "cpu":
        return "blocks are for the CPU"
    if options.get("return_lse") or any(x is not None for x in rest[1:]):
        return "lse is served by the generic implementation"
    if rest and rest[0] is None:
        return "no cotangent of the output was given"
    return None


def pays(op: str, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> bool:
    """Whether there are enough scores."""
    return max(math.prod(q.shape[:-1]) * k.shape[-2], math.prod(k.shape[:-1]) * q.shape[-2]) >= ENOUGH[op]


KERNELS = {op: Kernel("blocked", partial(attend, op), unsupported, partial(pays, op)) for op in OPS}
KERNELS |= {f"{op}_vjp": Kernel("blocked", partial(pull, op), unsupported, partial(pays, op)) for op in OPS}
