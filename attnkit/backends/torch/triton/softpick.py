"""Softpick attention on torch tensors: memory, launches and registration of the Triton kernels.

Memory, tiles and the order of launches are those of softmax (`attnkit.backends.torch.triton.rows`). Few queries take
the kernels of many.
"""

import torch
from torch import Tensor

from attnkit._core.dispatch import with_gradients
from attnkit._core.typing import Keywords
from attnkit.backends.torch import layout
from attnkit.backends.torch.custom import Arguments, Outputs, only_o
from attnkit.backends.torch.triton import decoding, launch, pointwise, recorded, rows
from attnkit.backends.torch.triton.launch import Group, Launch, view
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.softpick import EPS, SOFTPICK, softpick_attention

OP = SOFTPICK.name
DIFFERENTIABLE = ("q", "k", "v", "bias")


def call_of(arguments: Arguments) -> tuple[rows.Call, Group]:
    """A call with softmax's tiles, and the tuples pairs, rows, limits and numbers of softpick."""
    options = {name: x for name, x in arguments.items() if name != "eps"}
    call = rows.call_of(SOFTMAX.name, options)
    *tuples, (scale, gain, *_) = rows.tuples(call)
    return call, (*tuples, (scale, gain, float(arguments.get("eps", EPS))))


def shape_of_numbers(leading: tuple[int, ...], queries: int) -> tuple[int, ...]:
    """The shape of m and 1/D: (2, items, heads, L)."""
    return rows.row_numbers(leading, queries, 1.0)


def forward_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, numbers: Tensor, arguments: Arguments) -> Launch:
    """The launch for o, unless it is None, and the numbers of rows."""
    from attnkit.kernels.triton import softpick as kernels

    call, tuples = call_of(arguments)
    a, sizes = call.a, rows.sizes_of("forward_online", q, call)
    assert sizes is not None
    views = (view(a, "q", q), view(a, "k", k), view(a, "v", v), view(a, "o", o), rows.views_of_numbers(a, numbers))
    programs = a.blocks(a.queries, sizes["ROWS"]) * a.heads * a.items
    return Launch(kernels.forward_online, programs, (*views, *tuples, a.heads, a.groups), sizes)


def backward_launches(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, numbers: Tensor, grads: dict[str, Tensor], arguments: Arguments
) -> list[Launch]:
    """The launches for those of dq, (dk, dv) and dbias that are in `grads`."""
    from attnkit.kernels.triton import softpick as kernels

    call, tuples = call_of(arguments)
    a = call.a
    c, first = torch.empty_like(numbers[0]), torch.empty_like(numbers[0], dtype=torch.int32)
    inputs = (view(a, "q", q), view(a, "k", k), view(a, "v", v), view(a, "o", do))
    delta = (rows.view_of_rows(a, c), rows.view_of_rows(a, first))
    read = rows.Read(inputs, (rows.views_of_numbers(a, numbers), delta), (), (), tuples)
    owners = (kernels.backward_tiled, kernels.backward_keys, kernels.backward_bias)
    return rows.gradient_launches(owners, read, grads, q, call)


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, arguments: Arguments) -> Outputs:
    """o and the numbers of rows."""
    o = only_o(op, arguments)
    (*leading, queries, _), _ = o["o"]
    return o | {"rows": (shape_of_numbers((*leading,), queries), torch.float32)}


def _forward(op: str, arguments: Arguments) -> list[Tensor]:
    q, k, v = (arguments[name] for name in "qkv")
    outputs = layout.rooms(q, _outputs(op, arguments))
    if not k.shape[-2]:
        return [x.zero_() for x in outputs.values()]
    launch.run(q, [forward_launch(q, k, v, outputs["o"], outputs["rows"], arguments)])
    return list(outputs.values())


def _backward(op: str, arguments: Arguments, do: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    numbers = arguments.pop("rows", None)
    like = {name: arguments[name] for name in DIFFERENTIABLE if arguments.get(name) is not None}
    q, k, v = (arguments[name] for name in "qkv")
    call, _ = call_of(arguments)
    a, launches = call.a, []
    if not a.keys or not a.queries * a.heads * a.items:
        return {name: like[name].new_zeros(like[name].shape) for name in names}
    computed = {*names, "k", "v"} if {"k", "v"} & {*names} else {*names}
    grads = {name: launch.room_for(call.of_pairs.plan, name, like[name]) for name in computed}
    if numbers is None:
        numbers = q.new_empty(shape_of_numbers(a.leading, a.queries), dtype=torch.float32)
        launches.append(forward_launch(q, k, v, None, numbers, arguments))
    launch.run(q, [*launches, *backward_launches(q, k, v, do, numbers, grads, arguments)])
    return {name: launch.reduced_to(grads[name], a, like[name]) for name in names}


CUSTOM = recorded.register("triton_softpick", _forward, _backward, DIFFERENTIABLE, _outputs)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """softpick_attention."""
    return CUSTOM.attend(OP, q=q, k=k, v=v, **options)


def pull(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: object) -> dict[str, Tensor]:
    """softpick_attention_vjp."""
    return CUSTOM.pull(OP, do, q=q, k=k, v=v, **options)


def prepare(arrays: tuple[Tensor, ...], options: Keywords) -> recorded.Repeated:
    """o of calls with the same signature."""
    return recorded.prepared(CUSTOM, OP, dict(zip("qkv", arrays, strict=True)) | options)


def is_faster(q: Tensor, k: Tensor, *rest: Tensor | None, **options: object) -> bool:
    """By the clocks that were counted; of few queries, which leave most of a tile empty, where the generic body would
    keep too much."""
    return pointwise.is_faster(None if decoding.few(q) else "softpick", q, k, *rest, **options)


KERNELS = with_gradients(
    softpick_attention, pointwise.kernel(None, attend, pointwise.unsupported)._replace(is_faster=is_faster), pull
)
KERNELS[OP] = KERNELS[OP]._replace(prepared=prepare)
