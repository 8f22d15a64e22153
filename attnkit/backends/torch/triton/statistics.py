"""Statistics of rows of point-wise and Gaussian weights by Triton kernels, alone or beside the output.

`attnkit::triton_statistics` gives o, if there is a v, the statistics, and the key of the first maximum of each row (-1
where all weights are 0), which `attnkit::triton_statistics_vjp` reads again beside the total and the entropy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel
from attnkit.backends.torch.custom import map_one_by_one, refuse_second_derivatives
from attnkit.backends.torch.triton import launch, pointwise
from attnkit.backends.torch.triton.launch import Setting
from attnkit.backends.torch.triton.pointwise import DIFFERENTIABLE, GAUSSIAN, TENSORS, is_faster, setting
from attnkit.ops.statistics import RowStatistics

FIELDS = RowStatistics._fields
WITH_GRADIENT = FIELDS[:4]
SAVED = ("total", "entropy", "first")
OPTIONS: dict[str, dict[str, Any]] = {
    "pointwise_attention": {},
    "reluformer_attention": {},
    "sigmoid_attention": {},
    "gaussian_attention": GAUSSIAN,
}
"""What the ops add to their options, once these are those of pointwise_attention."""
ARGUMENTS = pointwise.ARGUMENTS.replace("Tensor v", "Tensor? v")


def outputs(fields: str) -> tuple[str, ...]:
    """Names of the rows that are computed for fields separated by commas; entropy needs the total again."""
    found = {*fields.split(","), *(("total",) if "entropy" in fields else ())}
    return (*(name for name in FIELDS if name in found), "first")


def _room(q: Tensor, k: Tensor, v: Tensor | None, s: Setting, fields: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Memory for o, if there is a v, and for the rows."""
    leading = launch.leading_axes(q, k, v, s.enable_gqa)
    o = [] if v is None else [q.new_empty((*leading, q.shape[-2], v.shape[-1]))]
    shape, dtypes = (*leading, q.shape[-2]), {"first": torch.int32}
    rows = {name: q.new_empty(shape, dtype=dtypes.get(name, torch.float32)) for name in outputs(fields)}
    return o, rows


def _forward(fields: str, q: Tensor, k: Tensor, v: Tensor | None, *options: Any) -> list[Tensor]:
    s = Setting(*options)
    o, rows = _room(q, k, v, s, fields)
    if rows["first"].numel():
        wanted = tuple(rows.get(name) for name in (*FIELDS, "first"))
        launches = launch.forward_launches(q, k, v, o[0] if o else None, s, wanted)
        launch.run(q, launches)
    return [*o, *rows.values()]


def _vjp(
    do: Tensor | None,
    cotangents: list[Tensor | None],
    saved: list[Tensor | None],
    wanted: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    names, (total, entropy, first) = tuple(wanted.split(",")), saved
    of_entropy = cotangents[1] is not None
    given = (first, *cotangents, total if of_entropy else None, entropy if of_entropy else None)
    grads = launch.backward(q, k, v, do, Setting(*options), names, given if any_of(cotangents) else None)
    return [grads[name] for name in names]


def any_of(cotangents: list[Tensor | None]) -> bool:
    return any(x is not None for x in cotangents)


forward = torch.library.custom_op(
    "attnkit::triton_statistics", _forward, mutates_args=(), schema=f"(str fields, {ARGUMENTS}) -> Tensor[]"
)
vjp = torch.library.custom_op(
    "attnkit::triton_statistics_vjp",
    _vjp,
    mutates_args=(),
    schema=f"(Tensor? do, Tensor?[] cotangents, Tensor?[] saved, str wanted, {ARGUMENTS}) -> Tensor[]",
)


@forward.register_fake
def _(fields: str, q: Tensor, k: Tensor, v: Tensor | None, *options: Any) -> list[Tensor]:
    o, rows = _room(q, k, v, Setting(*options), fields)
    return [*o, *rows.values()]


@vjp.register_fake
def _(do: Any, cotangents: Any, saved: Any, wanted: str, *arguments: Any) -> list[Tensor]:
    like = dict(zip(DIFFERENTIABLE, arguments, strict=False))
    return [like[name].new_empty(like[name].shape) for name in wanted.split(",")]


def _named(fields: str, v: Tensor | None, found: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    return dict(zip((*(() if v is None else ("o",)), *outputs(fields)), found, strict=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.fields = inputs[0]
    rows = _named(ctx.fields, inputs[3], output)
    ctx.save_for_backward(*inputs[1 : 1 + TENSORS], *(rows.get(name) for name in SAVED))
    ctx.plain = inputs[1 + TENSORS :]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, given: list[Tensor | None]) -> tuple[Any, ...]:
    arrays, saved = ctx.saved_tensors[:TENSORS], list(ctx.saved_tensors[TENSORS:])
    wanted = [name for name, needed in zip(DIFFERENTIABLE, ctx.needs_input_grad[1:], strict=False) if needed]
    cotangents = _named(ctx.fields, arrays[2], given)
    rows = [cotangents.get(name) for name in WITH_GRADIENT]
    found = vjp(cotangents.get("o"), rows, saved, ",".join(wanted), *arrays, *ctx.plain)
    grads = dict(zip(wanted, found, strict=True))
    rest = TENSORS - len(DIFFERENTIABLE) + len(ctx.plain)
    return None, *(grads.get(name) for name in DIFFERENTIABLE), *(None,) * rest


forward.register_autograd(_backward, setup_context=_keep)
refuse_second_derivatives(vjp, "triton_statistics")
map_one_by_one(forward)
map_one_by_one(vjp)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(
    q: Tensor, k: Tensor, v: Tensor | None, *, op: str, fields: tuple[str, ...], **options: Any
) -> dict[str, Tensor]:
    """{"o": o if there is a v, field: rows} for an op, its options being those of pointwise_attention."""
    text = ",".join(fields)
    found = forward(text, q, k, v, *setting(q, k, **OPTIONS[op], **options))
    named: dict[str, Any] = _named(text, v, found)
    named |= {name: named[name].detach() for name in ("nonzero", "visible") if name in named}
    return {name: x for name, x in named.items() if name in ("o", *fields)}


def pull(
    q: Tensor, k: Tensor, v: Tensor | None, do: Tensor | None, dstats: dict[str, Tensor], *, op: str, **options: Any
) -> dict[str, Tensor]:
    """Gradients of q, k, v and bias, those that there are, for cotangents of o and of statistics."""
    arguments = setting(q, k, **OPTIONS[op], **options)
    like = {"q": q, "k": k, "v": v, "bias": arguments.bias}
    names = tuple(name for name in DIFFERENTIABLE if like[name] is not None)
    cotangents = [dstats.get(name) for name in WITH_GRADIENT]
    fields = ",".join(name for name, x in zip(WITH_GRADIENT, cotangents, strict=True) if x is not None)
    rows = dict.fromkeys(SAVED)
    if fields:
        rows = _named(fields, None, forward(fields, q, k, None, *arguments))
    found = vjp(do, cotangents, [rows.get(name) for name in SAVED], ",".join(names), q, k, v, *arguments)
    return dict(zip(names, found, strict=True))


def unsupported_options(op: str) -> str | None:
    """Why the rows of an op have no statistics here on any device."""
    return None if op in OPTIONS else f"statistics of {op} are served by the generic implementation"


def unsupported(q: Tensor, k: Tensor, v: Tensor | None = None, *, op: str, **options: Any) -> str | None:
    """Why a call is not served by Triton."""
    return pointwise.unsupported(q, k, q if v is None else v) or unsupported_options(op)


def _rows(q: Tensor, k: Tensor, **options: Any) -> RowStatistics:
    return RowStatistics(**attend(q, k, None, **options))


def _rows_vjp(q: Tensor, k: Tensor, *, dstats: RowStatistics, fields: Any, **options: Any) -> dict[str, Tensor]:
    return pull(q, k, None, None, dstats._asdict(), **options)


def _both(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, RowStatistics]:
    found = attend(q, k, v, **options)
    return found.pop("o"), RowStatistics(**found)


def _both_vjp(
    q: Tensor, k: Tensor, v: Tensor, *, do: Tensor | None, dstats: RowStatistics, fields: Any, **options: Any
) -> dict[str, Tensor]:
    return pull(q, k, v, do, dstats._asdict(), **options)


KERNELS = {
    "row_statistics": Kernel("triton", _rows, unsupported, is_faster),
    "row_statistics_vjp": Kernel("triton", _rows_vjp, unsupported, is_faster),
    "attention_with_statistics": Kernel("triton", _both, unsupported, is_faster),
    "attention_with_statistics_vjp": Kernel("triton", _both_vjp, unsupported, is_faster),
}
