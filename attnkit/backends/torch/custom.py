"""Custom ops for functions with explicit gradients: opaque to torch.compile, only what they ask for kept for backward.

Custom ops take tensors and plain values. The options of a call that are not tensors travel as one text, `name=value;…`
in Python's notation, beside the names of the tensors. What a function gives beside its output has a name as well, and
its gradients get it as one more argument: numbers that need not be computed again under that name, the cotangent of a
second output under the name with a d before it.
"""

import numbers
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.special import without_autocast

SEED, RATE = "dropout_seed", "dropout_rate"
Given = dict[str, Any]  # every argument of a call by its name
Outputs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes by name
Forward = Callable[[str, Given], Tensor | list[Tensor]]
Backward = Callable[[str, Given, Any, tuple[str, ...]], dict[str, Tensor]]


class Custom(NamedTuple):
    """The custom ops `attnkit::NAME` and `attnkit::NAME_vjp`, and which arguments have gradients."""

    forward: Any
    vjp: Any
    differentiable: tuple[str, ...]

    def outputs(self, op: str, **given: Any) -> list[Tensor]:
        """o of `op`, and what it gives beside it. Tensors without a gradient are constants to autograd."""
        names, tensors, text = written(given)
        pairs = zip(names.split(","), tensors, strict=True)
        tensors = [x if name in self.differentiable else x.detach() for name, x in pairs]
        found: list[Tensor] = self.forward(op, tensors, names, text)
        return found

    def attend(self, op: str, **given: Any) -> Tensor:
        """o of `op`."""
        return self.outputs(op, **given)[0]

    def pull(self, op: str, do: Tensor | None, **given: Any) -> dict[str, Tensor]:
        """Explicit gradients of the arguments that have one."""
        names, tensors, text = written(given)
        wanted = [name for name in names.split(",") if name in self.differentiable]
        return dict(zip(wanted, self.vjp(op, tensors, names, text, do, ",".join(wanted)), strict=True))


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


def only_o(op: str, given: Given) -> Outputs:
    """The output of an attention op alone."""
    q, k, v = (given[name] for name in "qkv")
    leading = quadratic.leading_axes(q, k, v, given.get("enable_gqa", False))
    return {"o": ((*leading, q.shape[-2], v.shape[-1]), q.dtype)}


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    differentiable: tuple[str, ...],
    outputs: Callable[[str, Given], Outputs] = only_o,
    needs_do: bool = True,
) -> Custom:
    """Register both ops for functions of (op, arguments) and (op, arguments, do, names of the gradients wanted).

    `forward` returns what `outputs` tells the shapes and dtypes of: a tensor, or a list of several, the first of which
    has the cotangent do: zeros where autograd has none, or None unless the gradients need it. Autocast is off in both,
    whoever calls them: gradients may be asked for where it is on.
    """

    @torch.library.custom_op(f"attnkit::{name}", mutates_args=())
    def run(op: str, arrays: list[Tensor], names: str, text: str) -> list[Tensor]:
        with without_autocast(arrays[0]):
            found = forward(op, read(arrays, names, text))
        return [x.contiguous() for x in ([found] if isinstance(found, Tensor) else found)]

    @torch.library.custom_op(f"attnkit::{name}_vjp", mutates_args=())
    def vjp(op: str, arrays: list[Tensor], names: str, text: str, do: Tensor | None, wanted: str) -> list[Tensor]:
        asked = tuple(wanted.split(","))
        with without_autocast(arrays[0]):
            grads = backward(op, read(arrays, names, text), do, asked)
        return [grads[name].contiguous() for name in asked]

    def like_outputs(op: str, arrays: list[Tensor], names: str, text: str) -> list[Tensor]:
        found = outputs(op, read(arrays, names, text))
        return [arrays[0].new_empty(shape, dtype=dtype) for shape, dtype in found.values()]

    def like_arguments(op: str, arrays: list[Tensor], names: str, text: str, do: Any, wanted: str) -> list[Tensor]:
        like = dict(zip(names.split(","), arrays, strict=True))
        return [like[name].new_empty(like[name].shape) for name in wanted.split(",")]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        op, arrays, names, text = inputs
        others = tuple(outputs(op, read(arrays, names, text)))[1:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, *output[1:])
        ctx.call = (op, names.split(","), others, text)
        ctx.like = (output[0].shape, output[0].dtype)

    def pull(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        op, names, others, text = ctx.call
        do, *rest = grads
        shape, dtype = ctx.like
        if do is None and needs_do:
            do = ctx.saved_tensors[0].new_zeros(shape, dtype=dtype)
        given = dict(zip((*names, *others), ctx.saved_tensors, strict=True))
        given |= {f"d{name}": grad for name, grad in zip(others, rest, strict=True) if grad is not None}
        needed = zip(names, ctx.needs_input_grad[1], strict=True)
        wanted = [name for name, need in needed if need and name in differentiable]
        found = vjp(op, list(given.values()), ",".join(given), text, do, ",".join(wanted)) if wanted else []
        gradients = dict(zip(wanted, found, strict=True))
        return None, [gradients.get(name) for name in names], None, None

    run.register_fake(like_outputs)
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
