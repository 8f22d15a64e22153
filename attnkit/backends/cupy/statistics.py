"""Statistics of the rows of point-wise and Gaussian weights by a CUDA kernel, alone or beside the output of the same
call."""

import ctypes
from collections.abc import Sequence
from typing import Any

from attnkit._core.family import RECORDS, base_op
from attnkit.backends.cupy import pointwise
from attnkit.backends.cupy.launch import Launch, Pointwise, View
from attnkit.backends.cupy.pointwise import Array, Device, layout_of
from attnkit.ops import gaussian
from attnkit.ops.pointwise import POINTWISE

FIELDS = ("total", "entropy", "sum_squares", "maximum", "nonzero", "visible")
OPTIONS: dict[str, dict[str, Any]] = {POINTWISE.name: {}, gaussian.GAUSSIAN.name: pointwise.GAUSSIAN}
"""What the ops, and their special cases, add to their options to make these those of point-wise attention."""


class Statistics(Pointwise):
    """The argument of the kernel: `Statistics` of statistics.cuh."""

    _fields_ = (
        *((name, View) for name in FIELDS),
        ("weight_gain", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("exact", "output")),
    )


class StatisticsCall(pointwise.Call):
    """One call of `row_statistics` or `attention_with_statistics` with the options of point-wise attention."""

    structure = Statistics

    def __init__(
        self, device: Device, q: Array, k: Array, v: Array, o: Array, *, output: bool, exact: bool,
        rows: dict[str, Array], **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(device, q, k, v, o, **options)
        s = self.arguments
        p = options["dropout"][0] if options.get("dropout") is not None else 0.0
        s.weight_gain, s.exact, s.output = s.gain * (1.0 - p), exact, output
        for name, x in rows.items():
            self.view(name, "rows", x)

    def launches(self) -> list[Launch]:
        """The launches: n^-alpha and log n if needed, then the statistics."""
        launches = (*self.rows(), self.by_queries("statistics_forward"))
        return [launch._replace(source="statistics.cuh") for launch in launches]


def unsupported_options(q: Array, k: Array, v: Array | None = None, *, op: str, **options: Any) -> str | None:
    """Why a call is not served, on any device."""
    if base_op(op) not in OPTIONS:
        return f"statistics of {op} are served by the generic implementation"
    return pointwise.unsupported_options(q, k, k if v is None else v)


def forward(
    device: Device, q: Array, k: Array, v: Array | None = None, *, op: str, fields: Sequence[str] = FIELDS,
    **options: Any,
) -> dict[str, Array]:  # fmt: skip
    """{"o": o if there is a v, field: (..., L) in the compute dtype}; the options are those of point-wise attention, or
    of Gaussian attention.
    """
    base = RECORDS[base_op(op)].family
    exact = base.exact_zeros(**base.split(options)[0])
    options |= OPTIONS[base.name]
    a = layout_of(q, k, k if v is None else v, options)
    compute = "float64" if q.dtype.name == "float64" else "float32"
    rows = {name: device.empty(a.shape_of("rows"), compute) for name in fields}
    o = {} if v is None else {"o": device.empty(a.shape_of("o"), q.dtype)}
    if a.items * a.heads * a.queries:
        output = v is not None and bool(o["o"].size)
        written = o.get("o", q)
        call = StatisticsCall(
            device, q, k, k if v is None else v, written, output=output, exact=exact, rows=rows, **options
        )
        for launch in call.launches():
            device.run(launch)
    return o | rows
