"""Quadratic attention on the CPU in blocks of heads and queries (`attnkit._core.blocks`)."""

import math
from functools import partial
from typing import Any

from torch import Tensor

from attnkit._core import blocks
from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS, made_of_scores
from attnkit._core.library import namespace
from attnkit.backends import in_place
from attnkit.backends.torch import workspace
from attnkit.backends.torch.custom import Given, register

ENOUGH = {"pointwise_attention": 1 << 20}
"""Scores of a call from which forward and backward together took less time than by automatic differentiation."""
OTHERS = 1 << 22
"""The same of the other ops; of new ones nobody has timed it."""
OPS = made_of_scores()


def _call(op: str, given: Given) -> blocks.Call:
    q, k, v = (given[name] for name in "qkv")
    options = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    call = blocks.call(RECORDS[op].family, q, k, v, options)
    return in_place.sized(call) if op == "pointwise_attention" else call


def _forward(op: str, given: Given) -> Tensor:
    xp = namespace(given["q"])
    block = partial(in_place.forward_block, workspace.empty()) if op == "pointwise_attention" else blocks.forward_block
    o: Tensor = blocks.forward(xp, _call(op, given), block)
    return o


def _backward(op: str, given: Given, do: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    xp = namespace(do)
    block = (
        partial(in_place.backward_block, workspace.empty()) if op == "pointwise_attention" else blocks.backward_block
    )
    return blocks.backward(xp, _call(op, given), do, wanted, block)


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


def is_faster(op: str, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> bool:
    """Whether there are enough scores."""
    return max(math.prod(q.shape[:-1]) * k.shape[-2], math.prod(k.shape[:-1]) * q.shape[-2]) >= ENOUGH.get(op, OTHERS)


KERNELS = {op: Kernel("blocked", partial(attend, op), unsupported, partial(is_faster, op)) for op in OPS}
KERNELS |= {f"{op}_vjp": Kernel("blocked", partial(pull, op), unsupported, partial(is_faster, op)) for op in OPS}
