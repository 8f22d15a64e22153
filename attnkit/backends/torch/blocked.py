"""Quadratic attention on the CPU in blocks: the custom ops `attnkit::blocked` and `attnkit::blocked_vjp`.

Custom ops take tensors and plain values. The options of a call that are not tensors travel as one text, `name=value;…`
in Python's notation, beside the names of the tensors.
"""

import math
import numbers
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import array_api_compat
import torch
from torch import Tensor

from attnkit import _blocks
from attnkit._dispatch import Kernel
from attnkit.backends.torch import in_place
from attnkit.statistics_families import FAMILIES

OPS = ("softmax_attention", "pointwise_attention", "entmax_attention", "gaussian_attention")
DIFFERENTIABLE = ("q", "k", "v", "bias", "alpha")
SMALL = 1 << 14  # scores: below, the custom op takes as long as the generic body
SEED = "dropout_seed"


def _written(options: dict[str, Any]) -> tuple[list[str], list[Tensor], str]:
    """Names and values of the tensors among the options, and a text of the others."""
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    if "dropout" in options and isinstance(options["dropout"][1], Tensor):
        p, options[SEED] = options.pop("dropout")
        options["dropout_rate"] = p
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    plain = [f"{name}={_plain(value)!r}" for name, value in options.items() if name not in tensors]
    return list(tensors), list(tensors.values()), ";".join(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(x) for x in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


@lru_cache(maxsize=1024)
def _read(names: str, text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The inverse for what is not a tensor."""
    pairs = (item.partition("=")[::2] for item in text.split(";") if item)
    return tuple(names.split(",")), {name: literal_eval(value) for name, value in pairs}


def _call(op: str, arrays: Sequence[Tensor], names: str, text: str) -> _blocks.Call:
    order, options = _read(names, text)
    given: dict[str, Any] = {**options, **dict(zip(order, arrays, strict=True))}
    if SEED in given:
        given["dropout"] = (given.pop("dropout_rate"), given.pop(SEED))
    q, k, v = (given.pop(name) for name in "qkv")
    return _blocks.call(FAMILIES[op], q, k, v, given)


@torch.library.custom_op("attnkit::blocked", mutates_args=())
def blocked(op: str, arrays: list[Tensor], names: str, text: str) -> Tensor:
    """o of an op; `names` are those of `arrays`, separated by commas."""
    xp = array_api_compat.array_namespace(arrays[0])
    block = in_place.forward_block if op == "pointwise_attention" else _blocks.forward_block
    return _blocks.forward(xp, _call(op, arrays, names, text), block)


@blocked.register_fake
def _(op: str, arrays: list[Tensor], names: str, text: str) -> Tensor:
    c = _call(op, arrays, names, text)
    return arrays[0].new_empty((*c.leading, c.arrays["q"].shape[-2], c.arrays["v"].shape[-1]))


@torch.library.custom_op("attnkit::blocked_vjp", mutates_args=())
def blocked_vjp(op: str, arrays: list[Tensor], names: str, text: str, do: Tensor) -> list[Tensor]:
    """Gradients of those arrays that can have one, in their order."""
    c = _call(op, arrays, names, text)
    xp = array_api_compat.array_namespace(do)
    block = in_place.backward_block if op == "pointwise_attention" else _blocks.backward_block
    wanted = tuple(name for name in names.split(",") if name in DIFFERENTIABLE)
    grads = _blocks.backward(xp, c, do, wanted, block)
    return [grads[name] for name in wanted]


@blocked_vjp.register_fake
def _(op: str, arrays: list[Tensor], names: str, text: str, do: Tensor) -> list[Tensor]:
    named = zip(names.split(","), arrays, strict=True)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in named if name in DIFFERENTIABLE]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    op, arrays, names, text = inputs[:4]
    ctx.save_for_backward(*arrays)
    ctx.call = (op, names, text)


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    op, names, text = ctx.call
    found = iter(torch.ops.attnkit.blocked_vjp(op, list(ctx.saved_tensors), names, text, do))
    return None, [next(found) if name in DIFFERENTIABLE else None for name in names.split(",")], None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("attnkit: impl='blocked' has no second derivatives; impl='generic' has")


blocked.register_autograd(_backward, setup_context=_keep)
blocked_vjp.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)


def _one_by_one(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """vmap as a loop: the counters of dropout are those of every single call."""
    made = []
    for i in range(info.batch_size):
        made.append(op(*(_picked(x, dims, i) for x, dims in zip(arguments, in_dims, strict=True))))
    if isinstance(made[0], Tensor):
        return torch.stack(made), 0
    return [torch.stack(column) for column in zip(*made, strict=True)], [0] * len(made[0])


def _picked(x: Any, dims: Any, i: int) -> Any:
    if isinstance(x, list | tuple) and dims is not None:
        return [_picked(one, dim, i) for one, dim in zip(x, dims, strict=True)]
    return x if dims is None else x.select(dims, i)


blocked.register_vmap(partial(_one_by_one, blocked))
blocked_vjp.register_vmap(partial(_one_by_one, blocked_vjp))


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """An op of `OPS` through the custom op."""
    names, tensors, text = _written(options)
    return blocked(op, [q, k, v, *tensors], ",".join(("q", "k", "v", *names)), text)


def pull(op: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *rest: None, **options: Any) -> dict[str, Tensor]:
    """Its explicit gradients."""
    names, tensors, text = _written(options)
    order = ("q", "k", "v", *names)
    grads = blocked_vjp(op, [q, k, v, *tensors], ",".join(order), text, do)
    return dict(zip((name for name in order if name in DIFFERENTIABLE), grads, strict=True))


def unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> str | None:
    """Why a call is not served in blocks."""
    if q.device.type != "cpu":
        return "blocks are for the CPU"
    if options.get("return_lse") or any(x is not None for x in rest[1:]):
        return "lse is served by the generic implementation"
    if rest and rest[0] is None:
        return "no cotangent of the output was given"
    return None


def pays(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> bool:
    """Whether there are enough scores."""
    return max(math.prod(q.shape[:-1]) * k.shape[-2], math.prod(k.shape[:-1]) * q.shape[-2]) >= SMALL


KERNELS = {op: Kernel("blocked", partial(attend, op), unsupported, pays) for op in OPS}
KERNELS |= {f"{op}_vjp": Kernel("blocked", partial(pull, op), unsupported, pays) for op in OPS}
