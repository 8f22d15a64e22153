"""Softmax, sparsemax and entmax attention by CUDA kernels: lowers a call to launches.

Every option is handled as in point-wise attention. The numbers of each row, 2 for softmax and 4 with a threshold, are
stored in arrays of the compute dtype between the launches of a gradient; the forward call saves nothing.
"""

import ctypes
from functools import partial

from attnkit._core.typing import Option
from attnkit.backends.cupy import pointwise
from attnkit.backends.cupy.launch import WIDEST, Launch, Pointwise, Tiles, View, fitting, tiles_of, width_of
from attnkit.backends.cupy.pointwise import Array, Device, layout_of
from attnkit.kernels.plan import blocks_of, is_array

EXACT = {1.0: "Softmax", 1.5: "EntmaxOneHalf", 2.0: "Sparsemax"}
NORMALISERS = (*EXACT.values(), "Entmax")
"""The structures of normalisers.cuh: by α, and the one for any α."""

RESIDENT = 256
"""The maximal number of keys for which the scores of a row stay in shared memory: 64 KiB for 64 rows."""

STEPS = {"float32": 12, "float64": 27}
"""A sufficient number of Newton steps, less log2 of the number of keys: half the bits of a number."""

LIKE = {
    "rows_gradient_of_keys": "pointwise_gradient_of_keys",
    "rows_gradient_of_bias": "pointwise_gradient_of_bias",
}
"""Kernels that use the tiles of another kernel with the same sums; the others use those of the forward kernel."""


class Rows(Pointwise):
    """The argument of every kernel: `Rows` of rows.cuh."""

    _fields_ = (
        *((name, View) for name in ("top", "tau", "step", "inverse", "delta", "lse", "dlse")),
        *((name, ctypes.c_double) for name in ("above", "power")),
        *((name, ctypes.c_int) for name in ("steps", "output")),
    )


class RowsCall(pointwise.Call):
    """One call of softmax_attention or entmax_attention, or of its gradient; softmax is α = 1.

    `rows` are views by name: the output `lse`, or its cotangent `dlse`. A call with `output` computes o; `keep`
    leaves the numbers of rows to further launches.
    """

    structure = Rows
    family = "rows"

    def __init__(
        self, device: Device, q: Array, k: Array, v: Array, o: Array, *, alpha: float | Array, output: bool,
        rows: dict[str, Array], **options: object,
    ) -> None:  # fmt: skip
        super().__init__(device, q, k, v, o, **options, activation="identity", alpha=0.0)
        alpha = float(alpha)
        self.normaliser = EXACT.get(alpha, "Entmax")
        s, a = self.arguments, self.layout
        s.above, s.power = (0.0, 0.0) if alpha == 1.0 else (alpha - 1.0, 1.0 / (alpha - 1.0))
        s.steps, s.output = STEPS[self.compute] + max(a.keys, 1).bit_length(), output
        for name, x in rows.items():
            self.view(name, "rows", x)

    def keep(self, *others: str) -> None:
        """Memory for the numbers of rows that `rows` finds, and for others."""
        found = ("top", "inverse") if self.normaliser == "Softmax" else ("top", "tau", "step", "inverse")
        for name in (*found, *others):
            self.view(name, "rows", self.device.empty(self.layout.shape_of("rows"), self.compute))

    def rows(self) -> list[Launch]:
        """The launches for o, or for the numbers of rows that gradients need."""
        if self.normaliser == "Softmax":
            return [self.by_queries("rows_softmax")]
        return [self.by_queries("rows_threshold")]

    def tiles(self, kernel: str) -> Tiles:
        tiles = tiles_of(LIKE.get(kernel, kernel), self.dtype, width_of(self.layout.d, self.layout.e))
        return fitting(kernel, tiles, partial(self.shared_bytes, kernel), self.device.shared_bytes)

    def is_resident(self, kernel: str) -> bool:
        """Whether a kernel keeps the scores of its rows."""
        return kernel == "rows_threshold" and self.layout.keys <= RESIDENT

    def shared_bytes(self, kernel: str, tiles: Tiles) -> int:
        size = 8 if self.compute == "float64" else 4
        if "gradient" in kernel:
            queries = tiles.stages * tiles.columns if kernel == "rows_gradient_of_keys" else tiles.rows
            return tiles.shared_bytes(2, queries) + queries * 5 * size
        columns = blocks_of(self.layout.keys, tiles.columns) * tiles.columns
        return tiles.shared_bytes(1, tiles.rows) + 16 + self.is_resident(kernel) * tiles.rows * columns * size

    def fit(self, tiles: Tiles) -> bool:
        """Arrays of pairs need further registers."""
        return tiles.plain or tiles.width < (WIDEST // 2 if self.pairs else WIDEST)

    def launch(self, kernel: str, blocks: int, *flags: bool) -> Launch:
        """A kernel on tiles; its template arguments are the normaliser, except for softmax, and `flags`."""
        tiles = self.tiles(kernel)
        if kernel == "rows_threshold":
            flags = (*flags, self.is_resident(kernel))
        normaliser = () if kernel == "rows_softmax" else (f"attnkit::{self.normaliser}",)
        template = (str(tiles), *normaliser, *(str(flag).lower() for flag in flags), *self.packed)
        shared = self.shared_bytes(kernel, tiles)
        return Launch(kernel, template, blocks, tiles.threads, shared, self.arguments, "rows_gradients.cuh")


# ---------------------------------------------------------------------------------------------- what a library calls


def unsupported_options(q: Array, k: Array, v: Array, **options: Option) -> str | None:
    """Why a call is not supported on any device."""
    if is_array(options.get("alpha")):
        return "an array alpha is served by the generic implementation"
    return pointwise.unsupported_options(q, k, v, **options)


def forward(
    device: Device, q: Array, k: Array, v: Array, *, alpha: float | Array, return_lse: bool = False, **options: object
) -> Array | tuple[Array, Array]:
    """o (..., L, e), and with `return_lse` also log Σ exp(s) (..., L) in the compute dtype; softmax is α = 1."""
    a = layout_of(q, k, v, options)
    o = device.empty(a.shape_of("o"), q.dtype)
    compute = "float64" if q.dtype.name == "float64" else "float32"
    rows = {"lse": device.empty(a.shape_of("rows"), compute)} if return_lse else {}
    if o.size or (return_lse and rows["lse"].size):
        call = RowsCall(device, q, k, v, o, alpha=alpha, output=bool(o.size), rows=rows, **options)
        for launch in call.rows():
            device.run(launch)
    return (o, rows["lse"]) if return_lse else o


def backward(
    device: Device, q: Array, k: Array, v: Array, do: Array | None, dlse: Array | None = None, *, alpha: float | Array,
    **options: object,
) -> dict[str, Array]:  # fmt: skip
    """Gradients {"q", "k", "v"} and, if a bias was passed, "bias", for the cotangents do and dlse (None = 0)."""
    if do is None:
        do = pointwise.zeros(device, pointwise.layout_of(q, k, v, options).shape_of("o"), q.dtype)
    rows = {} if dlse is None else {"dlse": dlse}

    def call() -> RowsCall:
        pulled = RowsCall(device, q, k, v, do, alpha=alpha, output=False, rows=rows, **options)
        pulled.keep("delta")
        return pulled

    return pointwise.gradients(call, q, k, v, do, **options)
