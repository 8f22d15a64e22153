"""Statistics of rows of point-wise and Gaussian weights by Triton kernels, alone or beside the output.

`attnkit::triton_statistics` gives o, if there is a v, the statistics, and the key of the first maximum of each row (-1
where all weights are 0), which `attnkit::triton_statistics_vjp` reads again beside the total and the entropy.
"""

from typing import Any

import torch
from torch import Tensor

from attnkit._core import quadratic
from attnkit._core.dispatch import Kernel
from attnkit.backends.torch.custom import Given, Outputs, only_o, register
from attnkit.backends.torch.triton import launch, pointwise
from attnkit.backends.torch.triton.pointwise import DIFFERENTIABLE, GAUSSIAN, is_faster
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


def outputs(fields: str) -> tuple[str, ...]:
    """Names of the rows that are computed for fields separated by commas; entropy needs the total again."""
    names = {*fields.split(","), *(("total",) if "entropy" in fields else ())}
    return (*(name for name in FIELDS if name in names), "first")


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, given: Given) -> Outputs:
    """o, empty if there is no v, and the rows."""
    q = given["q"]
    leading = quadratic.leading_axes(q, given["k"], given.get("v"), given.get("enable_gqa", False))
    o = only_o(op, given) if "v" in given else {"o": ((0,), q.dtype)}
    dtypes = {"first": torch.int32}
    rows = {name: ((*leading, q.shape[-2]), dtypes.get(name, torch.float32)) for name in outputs(given["fields"])}
    return o | rows


def _forward(op: str, given: Given) -> list[Tensor]:
    made = {name: given["q"].new_empty(shape, dtype=dtype) for name, (shape, dtype) in _outputs(op, given).items()}
    if made["first"].numel():
        q, k, v = given.pop("q"), given.pop("k"), given.pop("v", None)
        wanted, o = tuple(made.get(name) for name in (*FIELDS, "first")), None if v is None else made["o"]
        launch.run(q, launch.forward_launches(q, k, v, o, launch.call_of(q, k, v, **given), wanted))
    return [*made.values()]


def _backward(op: str, given: Given, do: Tensor | None, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    q, k, v = given.pop("q"), given.pop("k"), given.pop("v", None)
    rows = {name: given.pop(name, None) for name in (*FIELDS, "first")}
    cotangents = [given.pop(f"d{name}", None) for name in WITH_GRADIENT]
    of_entropy = (rows["total"], rows["entropy"]) if cotangents[1] is not None else (None, None)
    of_rows = (rows["first"], *cotangents, *of_entropy) if any(x is not None for x in cotangents) else None
    return launch.backward(q, k, v, do, launch.call_of(q, k, v, **given), wanted, of_rows)


CUSTOM = register("triton_statistics", _forward, _backward, DIFFERENTIABLE, _outputs, needs_do=False)


# ---------------------------------------------------------------------------------------------- what the library calls


def attend(
    q: Tensor, k: Tensor, v: Tensor | None, *, op: str, fields: tuple[str, ...], **options: Any
) -> dict[str, Tensor]:
    """{"o": o if there is a v, field: rows} for an op, its options being those of pointwise_attention."""
    text = ",".join(fields)
    rows = CUSTOM.outputs(op, q=q, k=k, v=v, fields=text, **OPTIONS[op], **options)
    named = dict(zip(("o", *outputs(text)), rows, strict=True))
    named |= {name: named[name].detach() for name in ("nonzero", "visible") if name in named}
    return {name: x for name, x in named.items() if name in fields or (name == "o" and v is not None)}


def pull(
    q: Tensor, k: Tensor, v: Tensor | None, do: Tensor | None, dstats: dict[str, Tensor], *, op: str, **options: Any
) -> dict[str, Tensor]:
    """Gradients of q, k, v and bias, those that there are, for cotangents of o and of statistics."""
    given = {"q": q, "k": k, **OPTIONS[op], **options}
    cotangents = {f"d{name}": dstats[name] for name in WITH_GRADIENT if dstats.get(name) is not None}
    if cotangents:
        fields = ",".join(name[1:] for name in cotangents)
        rows = dict(zip(outputs(fields), CUSTOM.outputs(op, fields=fields, **given)[1:], strict=True))
        given |= cotangents | {name: rows[name].detach() for name in SAVED if name in rows}
    return CUSTOM.pull(op, do, **given, v=v)


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
