"""Statistics of the rows of softmax, sparsemax and entmax on torch tensors: those of softmax come with the numbers of
the rows, and with the output; for the others the kernels of `rows` leave these, and a sweep over the keys follows."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit._core.typing import Keywords
from attnkit.backends.torch.custom import Arguments
from attnkit.backends.torch.triton import launch, rows
from attnkit.backends.torch.triton.launch import Launch, view
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.statistics import RowStatistics

if TYPE_CHECKING:
    from attnkit.kernels.triton.sizes import Tile

OPS = (SOFTMAX.name, ENTMAX.name)
NONE = (None,) * len(RowStatistics._fields)
Rows = tuple[Tensor | None, ...]
"""`outputs` of `attnkit.kernels.triton.statistics`."""


def shape_of_numbers(op: str, arguments: Arguments, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Of the numbers of the rows, which the gradients need."""
    return rows.row_numbers(leading, arguments["q"].shape[-2], rows.alpha_of(op, arguments))


def statistics_launch(
    q: Tensor, k: Tensor, outputs: Rows, numbers: Tensor, call: rows.Call, first: bool = False
) -> Launch:
    """The launch for the statistics from the numbers of the rows; `first`: the key of the first maximum of each row is
    among them."""
    from attnkit.kernels.triton import rows_statistics as kernels
    from attnkit.kernels.triton import sizes
    from attnkit.kernels.triton.statistics import kind

    a, kernel = call.a, kernels.statistics_of_rows
    tile = sizes.rows("statistics_of_rows", q.dtype.itemsize * 8, a.d, a.d, launch.capability(q.device))
    constants = _constants(kernel, q, call, tile) | {"KIND": kind(outputs, call.above is not None, False, first)}
    programs = a.blocks(a.queries, tile.ROWS) * a.heads * a.items
    of_rows = (launch.contiguous_rows(outputs, a), rows.views_of_numbers(a, numbers))
    arguments = (view(a, "q", q), view(a, "k", k), *of_rows, *rows.tuples(call), a.heads, a.groups)
    return Launch(kernel, programs, arguments, constants)


def softmax_launch(
    q: Tensor, k: Tensor, v: Tensor | None, o: Tensor | None, outputs: Rows, numbers: Tensor, call: rows.Call
) -> Launch:
    """The launch for the statistics of softmax, the numbers of the rows, and o, unless it is None."""
    from attnkit.kernels.triton import rows_statistics as kernels
    from attnkit.kernels.triton import sizes
    from attnkit.kernels.triton.statistics import kind

    a, kernel = call.a, kernels.statistics_of_softmax
    e, name = (a.d, "softmax_alone") if o is None else (a.e, "softmax_beside")
    tile = sizes.rows(name, q.dtype.itemsize * 8, a.d, e, launch.capability(q.device))
    constants = _constants(kernel, q, call, tile) | {"KIND": kind(outputs, False, False, False)}
    constants |= {"e": e, "E": sizes.padded(e)}
    programs = a.blocks(a.queries, tile.ROWS) * a.heads * a.items
    views = (view(a, "q", q), view(a, "k", k), None if o is None else view(a, "v", v), view(a, "o", o))
    of_rows = (launch.contiguous_rows(outputs, a), rows.views_of_numbers(a, numbers))
    return Launch(kernel, programs, (*views, *of_rows, *rows.tuples(call), a.heads, a.groups), constants)


def _constants(kernel: object, q: Tensor, call: rows.Call, tile: "Tile") -> Keywords:
    """Compile-time arguments of both kernels."""
    from attnkit.kernels.triton.sizes import padded, with_pairs

    a = call.a
    widths = {"d": a.d, "D": padded(a.d), "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee"}
    sizes = with_pairs(tile, launch.bytes_of_pairs(call.of_pairs))._asdict()
    return widths | rows.functions(kernel, call, q.dtype) | sizes


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor | None, o: Tensor | None, outputs: Rows, numbers: Tensor, call: rows.Call
) -> list[Launch]:
    """The launches for o, unless it is None, the statistics, and the numbers of the rows."""
    if call.above is None:
        return [softmax_launch(q, k, v, o, outputs, numbers, call)]
    of_numbers = rows.forward_launch(q, k, v, o, None, numbers, call)
    return [of_numbers, statistics_launch(q, k, outputs, numbers, call)]


def forward(op: str, arguments: Arguments, o: Tensor | None, outputs: Rows, numbers: Tensor) -> None:
    """Compute o, unless it is None, the statistics, and the numbers of the rows."""
    q, k, v = arguments["q"], arguments["k"], arguments.get("v")
    call = rows.call_of(op, {"v": None, **arguments})
    if not call.a.keys:
        for x in (o, *outputs, numbers):
            if x is not None:
                x.fill_(-1 if x.dtype == torch.int32 else 0.0)
        return
    launch.run(q, forward_launches(q, k, v, o, outputs, numbers, call))


def backward(
    op: str,
    arguments: Arguments,
    do: Tensor | None,
    numbers: Tensor | None,
    of_rows: Rows | None,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """The named gradients. `of_rows` is `dstats` of `attnkit.kernels.triton.statistics`; a cotangent of the maximum
    takes a sweep for the key of the first one."""
    arguments = {"v": None, **arguments}
    call = rows.call_of(op, arguments)
    if of_rows is None or not call.a.keys:
        return rows.gradients(op, arguments, do, None, numbers, names)
    q, k, v = (arguments[name] for name in "qkv")
    first, *cotangents = of_rows[:5]
    if numbers is None:
        numbers = q.new_empty(shape_of_numbers(op, arguments, call.a.leading), dtype=torch.float32)
        launch.run(q, [rows.forward_launch(q, k, v, None, None, numbers, call)])
    if cotangents[3] is not None:
        first = torch.empty(call.a.shape_of("rows"), dtype=torch.int32, device=q.device)
        launch.run(q, [statistics_launch(q, k, (*NONE, first), numbers, call, True)])
    keep = call.of_pairs.keep
    cotangents = [x if x is None or keep == 1.0 else x * keep for x in cotangents]
    return rows.gradients(op, arguments, do, None, numbers, names, (first, *cotangents, *of_rows[5:]))
