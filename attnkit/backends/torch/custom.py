"""Custom ops for functions with explicit gradients: opaque to torch.compile, only the arguments kept for backward.

Custom ops take tensors and plain values. The options of a call that are not tensors travel as one text, `name=value;…`
in Python's notation, beside the names of the tensors.
"""

import numbers
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import _quadratic as quadratic

SEED, RATE = "dropout_seed", "dropout_rate"
Given = dict[str, Any]  # every argument of a call by its name
Outputs = Tensor | tuple[Tensor, ...]
Forward = Callable[[str, Given], Outputs]
Backward = Callable[[str, Given, Any, tuple[str, ...]], dict[str, Tensor]]  # of as many cotangents as outputs


class Custom(NamedTuple):
    """The custom ops `attnkit::NAME` and `attnkit::NAME_vjp`, and which arguments have gradients."""

    forward: Any
    vjp: Any
    differentiable: tuple[str, ...]

    def attend(self, op: str, **given: Any) -> Any:
        """The output of `op`, or a tuple of several."""
        names, tensors, text = written(given)
        return _alone(self.forward(op, tensors, names, text))

    def pull(self, op: str, do: Outputs, **given: Any) -> dict[str, Tensor]:
        """Explicit gradients of the arguments that have one."""
        names, tensors, text = written(given)
        grads = self.vjp(op, tensors, names, text, _several(do))
        return dict(zip((name for name in names.split(",") if name in self.differentiable), grads, strict=True))


def written(given: Given) -> tuple[str, list[Tensor], str]:
    """Names of the tensors of a call separated by commas, the tensors, and a text of the other arguments."""
    given = {name: value for name, value in given.items() if value is not None}
    if "dropout" in given and isinstance(given["dropout"][1], Tensor):
        given[RATE], given[SEED] = given.pop("dropout")
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    plain = [f"{name}={_plain(value)!r}" for name, value in given.items() if name not in tensors]
    return ",".join(tensors), list(tensors.values()), ";".join(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(x) for x in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


@lru_cache(maxsize=1024)
def _options(text: str) -> Given:
    pairs = (item.partition("=")[::2] for item in text.split(";") if item)
    return {name: literal_eval(value) for name, value in pairs}


def read(tensors: Sequence[Tensor], names: str, text: str) -> Given:
    """The inverse of `written`."""
    given: Given = {**_options(text), **dict(zip(names.split(","), tensors, strict=True))}
    if SEED in given:
        given["dropout"] = (given.pop(RATE), given.pop(SEED))
    return given


def _several(outputs: Outputs) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _alone(outputs: Sequence[Tensor]) -> Any:
    """The inverse of `_several`."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _output(op: str, given: Given) -> Tensor:
    q, k, v = (given[name] for name in "qkv")
    return q.new_empty((*quadratic.leading_axes(q, k, v, given.get("enable_gqa", False)), q.shape[-2], v.shape[-1]))


def register(
    name: str, forward: Forward, backward: Backward, differentiable: tuple[str, ...], room: Forward = _output
) -> Custom:
    """Register both ops for functions of (op, arguments) and (op, arguments, do, names of the gradients wanted).

    `forward` returns a tensor, or a tuple of tensors whose cotangents `do` then is; `room` is forward without content.
    """

    @torch.library.custom_op(f"attnkit::{name}", mutates_args=())
    def run(op: str, arrays: list[Tensor], names: str, text: str) -> list[Tensor]:
        return _several(forward(op, read(arrays, names, text)))

    @torch.library.custom_op(f"attnkit::{name}_vjp", mutates_args=())
    def vjp(op: str, arrays: list[Tensor], names: str, text: str, do: list[Tensor]) -> list[Tensor]:
        wanted = tuple(name for name in names.split(",") if name in differentiable)
        grads = backward(op, read(arrays, names, text), _alone(do), wanted)
        return [grads[name] for name in wanted]

    def made_room(op: str, arrays: list[Tensor], names: str, text: str) -> list[Tensor]:
        return _several(room(op, read(arrays, names, text)))

    def like_arguments(op: str, arrays: list[Tensor], names: str, text: str, do: list[Tensor]) -> list[Tensor]:
        named = zip(names.split(","), arrays, strict=True)
        return [x.new_empty(x.shape) for name, x in named if name in differentiable]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        op, arrays, names, text = inputs
        ctx.save_for_backward(*arrays)
        ctx.call = (op, names, text)

    def pull(ctx: Any, do: list[Tensor]) -> tuple[Any, ...]:
        op, names, text = ctx.call
        found = iter(vjp(op, list(ctx.saved_tensors), names, text, do))
        return None, [next(found) if name in differentiable else None for name in names.split(",")], None, None

    run.register_fake(made_room)
    vjp.register_fake(like_arguments)
    run.register_autograd(pull, setup_context=keep)
    refuse_second_derivatives(vjp, name)
    map_one_by_one(run)
    map_one_by_one(vjp)
    return Custom(run, vjp, differentiable)


def refuse_second_derivatives(vjp: Any, name: str) -> None:
    """Have a custom op that gives gradients raise NotImplementedError where they are differentiated."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"attnkit::{name} has no second derivatives; impl='generic' has")

    vjp.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)


def map_one_by_one(op: Any) -> None:
    """Register vmap as a loop: the counters of dropout are those of every single call."""
    op.register_vmap(partial(_one_by_one, op))


def _one_by_one(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
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
