"""Statistics of the rows of weights by CUDA kernels, alone or beside the output of the same call.

Those of point-wise and Gaussian weights take one sweep over the keys. Where the weights of a row sum to 1, the kernels
of `rows` find its numbers, and o if it is wanted, and a sweep for the statistics follows.
"""

import ctypes
from collections.abc import Sequence
from typing import Unpack

from attnkit._core.family import RECORDS, base_op
from attnkit._core.typing import Keywords, Option, Options
from attnkit.backends.cupy import pointwise, rows
from attnkit.backends.cupy.launch import Launch, View
from attnkit.backends.cupy.pointwise import Array, Device, layout_of
from attnkit.backends.cupy.rows import Rows, RowsCall
from attnkit.ops.entmax import ENTMAX
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX

FIELDS = ("total", "entropy", "sum_squares", "maximum", "nonzero", "visible")


class Statistics(Rows):
    """The argument of the kernels: `Statistics` of statistics.cuh."""

    _fields_ = (
        *((name, View) for name in FIELDS),
        ("weight_gain", ctypes.c_double),
        ("exact", ctypes.c_int),
    )


class StatisticsOfPairs(pointwise.Call):
    """One call with the options of point-wise attention; `rows` are views by name."""

    structure = Statistics

    def __init__(
        self, device: Device, *inputs: Array, output: bool, rows: dict[str, Array], **options: Unpack[Options]
    ) -> None:
        super().__init__(device, *inputs, **options)
        self.arguments.output = output
        for name, x in rows.items():
            self.view(name, "rows", x)

    def launches(self) -> list[Launch]:
        """The launches: n^-alpha and log n if needed, then the statistics, and o."""
        return [*self.rows(), self.by_queries("statistics_forward")]


class StatisticsOfRows(RowsCall):
    """One call with the options of `rows`."""

    structure = Statistics

    def launches(self) -> list[Launch]:
        """The launches: the numbers of rows, and o, then the statistics."""
        self.keep()
        return [*self.rows(), self.by_queries("statistics_of_rows")]


SERVED: dict[str, tuple[type[StatisticsOfPairs] | type[StatisticsOfRows], Keywords]] = {
    POINTWISE.name: (StatisticsOfPairs, {}),
    GAUSSIAN.name: (StatisticsOfPairs, pointwise.GAUSSIAN),
    SOFTMAX.name: (StatisticsOfRows, {"alpha": 1.0}),
    ENTMAX.name: (StatisticsOfRows, {"alpha": 1.5}),
}
"""The ops, of which others are special cases, and what is added to their options."""


def unsupported_options(q: Array, k: Array, v: Array | None = None, *, op: str, **options: Option) -> str | None:
    """Why a call is not served, on any device."""
    if base_op(op) not in SERVED:
        return f"statistics of {op} are served by the generic implementation"
    return rows.unsupported_options(q, k, k if v is None else v, **options)


def forward(
    device: Device, q: Array, k: Array, v: Array | None = None, *, op: str, fields: Sequence[str] = FIELDS,
    **options: Option,
) -> dict[str, Array]:  # fmt: skip
    """{"o": o if there is a v, field: (..., L) in the compute dtype}. The options are those of a served op."""
    family = RECORDS[base_op(op)].family
    made, added = SERVED[family.name]
    a = layout_of(q, k, k if v is None else v, options)
    compute = "float64" if q.dtype.name == "float64" else "float32"
    found = {name: device.empty(a.shape_of("rows"), compute) for name in fields}
    o = {} if v is None else {"o": device.empty(a.shape_of("o"), q.dtype)}
    if a.items * a.heads * a.queries:
        output = v is not None and bool(o["o"].size)
        inputs = (device, q, k, k if v is None else v, o.get("o", q))
        call = made(*inputs, output=output, rows=found, **{**added, **options})
        s, p = call.arguments, options["dropout"][0] if options.get("dropout") is not None else 0.0
        s.weight_gain, s.exact = s.gain * (1.0 - p), family.exact_zeros(**family.split_options(options)[0])
        for launch in call.launches():
            device.run(launch._replace(source="statistics.cuh"))
    return o | found
