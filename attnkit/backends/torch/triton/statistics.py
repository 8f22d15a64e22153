"""Statistics of rows of weights by Triton kernels, alone or beside the output.

`attnkit::triton_statistics` returns o, if there is a v, the statistics, and which rows have a weight that is not 0 (0,
else -1), which `attnkit::triton_statistics_vjp` reads together with the total and the entropy; of weights that sum to 1
also the numbers of the rows. The gradient of the maximum finds the key of the first one itself: to keep track of it
costs more than all other statistics together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.family import base_op
from attnkit._core.typing import Keywords, Option
from attnkit.backends.torch.custom import Arguments, Outputs, only_o
from attnkit.backends.torch.triton import launch, pointwise, recorded, rows, rows_statistics
from attnkit.backends.torch.triton.pointwise import DIFFERENTIABLE, GAUSSIAN
from attnkit.kernels import predicted
from attnkit.ops import gaussian, statistics
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.statistics import RowStatistics

FIELDS = RowStatistics._fields
WITH_GRADIENT = FIELDS[:4]
SAVED = ("total", "entropy", "first")
OPTIONS: dict[str, Keywords] = {POINTWISE.name: {}, gaussian.GAUSSIAN.name: GAUSSIAN}
"""What the ops, and their special cases, add to their options to make these those of pointwise_attention."""
SERVED = (*OPTIONS, *rows_statistics.OPS)


def outputs(fields: str) -> tuple[str, ...]:
    """Names of the rows that are computed for fields separated by commas; entropy also needs the total."""
    names = {*fields.split(","), *(("total",) if "entropy" in fields else ())}
    return (*(name for name in FIELDS if name in names), "first")


def normalised(op: str) -> bool:
    """Whether the weights of an op sum to 1."""
    return base_op(op) in rows_statistics.OPS


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, args: Arguments) -> Outputs:
    """o, empty if there is no v, and the rows."""
    q = args["q"]
    leading = quadratic.leading_axes(q, args["k"], args.get("v"), args.get("enable_gqa", False))
    o = only_o(op, args) if "v" in args else {"o": ((0,), q.dtype)}
    dtypes = {"first": torch.int32}
    found = {name: ((*leading, q.shape[-2]), dtypes.get(name, torch.float32)) for name in outputs(args["fields"])}
    if normalised(op):
        found["numbers"] = (rows_statistics.shape_of_numbers(op, args, leading), torch.float32)
    return o | found


def _forward(op: str, args: Arguments) -> list[Tensor]:
    results = {name: args["q"].new_empty(shape, dtype=dtype) for name, (shape, dtype) in _outputs(op, args).items()}
    statistics, o = tuple(results.get(name) for name in (*FIELDS, "first")), results["o"] if "v" in args else None
    if results["first"].numel() and normalised(op):
        rows_statistics.forward(op, args, o, statistics, results["numbers"])
    elif results["first"].numel():
        q, k, v = args.pop("q"), args.pop("k"), args.pop("v", None)
        launch.run(q, launch.forward_launches(q, k, v, o, launch.call_of(q, k, v, **args), statistics))
    return [*results.values()]


def _backward(op: str, args: Arguments, do: Tensor | None, names: tuple[str, ...]) -> dict[str, Tensor]:
    saved = {name: args.pop(name, None) for name in (*FIELDS, "first", "numbers")}
    cotangents = [args.pop(f"d{name}", None) for name in WITH_GRADIENT]
    of_entropy = (saved["total"], saved["entropy"]) if cotangents[1] is not None else (None, None)
    of_rows = (saved["first"], *cotangents, *of_entropy) if any(x is not None for x in cotangents) else None
    if normalised(op):
        do = None if do is None or not do.numel() else do
        return rows_statistics.backward(op, args, do, saved["numbers"], of_rows, names)
    q, k, v = args.pop("q"), args.pop("k"), args.pop("v", None)
    call = launch.call_of(q, k, v, **args)
    if of_rows is not None and cotangents[3] is not None:
        of_rows = (_first_maximum(q, k, call, cotangents[3]), *of_rows[1:])
    return launch.backward(q, k, v, do, call, names, of_rows)


def _first_maximum(q: Tensor, k: Tensor, call: launch.Call, like: Tensor) -> Tensor:
    """The key of the first maximum of each row, -1 where all weights are 0."""
    first = torch.empty(like.shape, dtype=torch.int32, device=q.device)
    if first.numel() and call.plan.layout.keys:
        launch.run(q, launch.forward_launches(q, k, None, None, call, (*(None for _ in FIELDS), first), True))
    return first


CUSTOM = recorded.register("triton_statistics", _forward, _backward, DIFFERENTIABLE, _outputs, needs_do=False)


# ---------------------------------------------------------------------------------------------- what the library calls


def _names(op: str, fields: str) -> tuple[str, ...]:
    """Of what the custom op returns."""
    return ("o", *outputs(fields), *(("numbers",) if normalised(op) else ()))


def attend(
    q: Tensor, k: Tensor, v: Tensor | None, *, op: str, fields: tuple[str, ...], **options: object
) -> dict[str, Tensor]:
    """{"o": o if there is a v, field: rows} for an op, its options being those of pointwise_attention."""
    text = ",".join(fields)
    found = CUSTOM.outputs(op, q=q, k=k, v=v, fields=text, **OPTIONS.get(base_op(op), {}), **options)
    return _select(dict(zip(_names(op, text), found, strict=True)), fields, v is not None)


def _select(found: dict[str, Tensor], fields: tuple[str, ...], with_output: bool) -> dict[str, Tensor]:
    """What was asked for among the outputs; counts have no gradients."""
    found |= {name: found[name].detach() for name in ("nonzero", "visible") if name in found}
    return {name: x for name, x in found.items() if name in fields or (name == "o" and with_output)}


def pull(
    q: Tensor, k: Tensor, v: Tensor | None, do: Tensor | None, dstats: dict[str, Tensor], *, op: str, **options: object
) -> dict[str, Tensor]:
    """Gradients of q, k, v and bias, those that there are, for cotangents of o and of statistics."""
    args = {"q": q, "k": k, **OPTIONS.get(base_op(op), {}), **options}
    cotangents = {f"d{name}": dstats[name] for name in WITH_GRADIENT if dstats.get(name) is not None}
    if fields := ",".join(name[1:] for name in cotangents if name != "dmaximum"):
        found = dict(zip(_names(op, fields), CUSTOM.outputs(op, fields=fields, **args), strict=True))
        args |= {name: found[name].detach() for name in SAVED if name in found}
    args |= cotangents
    return CUSTOM.pull(op, do, **args, v=v)


def prepare(arrays: tuple[Tensor, ...], options: Keywords) -> recorded.Repeated:
    """The answers to calls with the same signature, with o if there is a v."""
    op, fields, rest = options["op"], options["fields"], {n: x for n, x in options.items() if n not in ("op", "fields")}
    text, with_output = ",".join(fields), len(arrays) > 2
    arguments = dict(zip("qkv", arrays, strict=False)) | OPTIONS.get(base_op(op), {}) | rest | {"fields": text}
    names = ("o", *outputs(text)[:-1])

    def answer(found: Sequence[Tensor]) -> RowStatistics | tuple[Tensor, RowStatistics]:
        results = _select(dict(zip(names, found, strict=False)), fields, with_output)
        return (results.pop("o"), RowStatistics(**results)) if with_output else RowStatistics(**results)

    return recorded.prepared(CUSTOM, op, arguments, names[1:], answer)


def unsupported_options(op: str, **options: object) -> str | None:
    """Why the rows of an op have no statistics here on any device."""
    if base_op(op) not in SERVED:
        return f"statistics of {op} are served by the generic implementation"
    return (rows if normalised(op) else pointwise).unsupported_options(**options)


def unsupported(q: Tensor, k: Tensor, v: Tensor | None = None, *, op: str, **options: object) -> str | None:
    """Why Triton does not support a call."""
    return pointwise.unsupported(q, k, q if v is None else v) or unsupported_options(op, **options)


def is_faster(q: Tensor, k: Tensor, v: Tensor | None = None, *, op: str, **options: object) -> bool:
    """Whether a call is predicted not to be slower; of weights that sum to 1, whether the generic body would keep too
    much."""
    if normalised(op):
        return predicted.keeps(predicted.pairs(q.shape, k.shape), q.dtype.itemsize)
    return pointwise.is_faster("statistics", q, k, v)


def _rows(q: Tensor, k: Tensor, **options: Option) -> RowStatistics:
    return RowStatistics(**attend(q, k, None, **options))


def _rows_vjp(q: Tensor, k: Tensor, *, dstats: RowStatistics, fields: object, **options: Option) -> dict[str, Tensor]:
    return pull(q, k, None, None, dstats._asdict(), **options)


def _both(q: Tensor, k: Tensor, v: Tensor, **options: Option) -> tuple[Tensor, RowStatistics]:
    results = attend(q, k, v, **options)
    return results.pop("o"), RowStatistics(**results)


def _both_vjp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    do: Tensor | None,
    dstats: RowStatistics,
    fields: object,
    **options: Option,
) -> dict[str, Tensor]:
    return pull(q, k, v, do, dstats._asdict(), **options)


KERNEL = pointwise.kernel("", _rows, unsupported)._replace(is_faster=is_faster)
KERNELS = statistics.kernels(
    KERNEL._replace(prepared=prepare),
    KERNEL._replace(call=_both, prepared=prepare),
    KERNEL._replace(call=_rows_vjp),
    KERNEL._replace(call=_both_vjp),
)
