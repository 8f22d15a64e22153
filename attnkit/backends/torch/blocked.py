"""Quadratic attention in blocks of heads and queries (`attnkit._core.blocks`), where the compiled kernels are not."""

from functools import partial
from typing import Unpack

from torch import Tensor

from attnkit._core import blocks
from attnkit._core.family import RECORDS, score_ops
from attnkit._core.library import namespace
from attnkit._core.typing import Options
from attnkit.backends.torch.custom import Arguments, register

OPS = score_ops()


def _call(op: str, arguments: Arguments) -> blocks.Call:
    q, k, v = (arguments[name] for name in "qkv")
    options = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
    return blocks.call(RECORDS[op].family, q, k, v, options)


def _forward(op: str, arguments: Arguments) -> Tensor:
    o: Tensor = blocks.forward(namespace(arguments["q"]), _call(op, arguments))
    return o


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    return blocks.backward(namespace(do), _call(op, arguments), do, names)


CUSTOM = register("blocked", _forward, _backward, blocks.DIFFERENTIABLE)


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """An op of `OPS`."""
    return CUSTOM.attend(op, q=q, k=k, v=v, **options)


def pull(op: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *rest: None, **options: object) -> dict[str, Tensor]:
    """The explicit gradients of an op of `OPS`."""
    return CUSTOM.pull(op, do, q=q, k=k, v=v, **options)


def unsupported(q: Tensor, *arrays: Tensor, **options: Unpack[Options]) -> str | None:
    """Why a call is not served in blocks."""
    return "blocks are for the CPU" if q.device.type != "cpu" else blocks.unsupported(q, *arrays, **options)


KERNELS = {op: blocks.kernel(partial(attend, op), unsupported) for op in OPS}
KERNELS |= {f"{op}_vjp": blocks.kernel(partial(pull, op), unsupported) for op in OPS}
