"""A launch of a CUDA kernel, described independently of the device that runs it: the struct of its arguments, the name
of its template instance, threads, blocks and shared memory.

Tile sizes depend on the bits of the inputs and the head size, so that tiles fit into the registers of compute
capability 8.0, and on the shared memory that the device lends a block: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6, 8.9 and
12.0. They have not been tuned on a GPU yet.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

OPEN = 1 << 30  # an unbounded window, and the maximal number of tokens
WIDEST = 256  # larger head sizes do not fit into the registers of a block
NUMBERS = {"float16": "attnkit::half", "bfloat16": "attnkit::bfloat16", "float32": "float", "float64": "double"}
KINDS = {"bool": 0, "int64": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}
"""By dtype: the C++ type that a kernel computes with, and the `Kind` of arrays that it only reads."""

ACTIVATIONS = {
    "relu": "Relu",
    "relu_squared": "ReluSquared",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "softplus": "Softplus",
    "identity": "Identity",
    "relu6": "Relu6",
    "sigmoid": "Sigmoid",
    "silu": "Silu",
}
FEATURE_MAPS = {"elu_plus_one": "EluPlusOne", "relu": "Relu", "identity": "Identity"}
OF_DISTANCES = {"exp": "Exponential"}
"""The structures of activations.cuh by the names that ops use; the last with distances instead of products."""


class View(ctypes.Structure):
    """An array (items, heads, rows, columns): address, strides in bytes, kind. All zeros if absent."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("item", "head", "row", "column", "kind")),
    )


VIEWS = (
    "q", "k", "v", "o", "dq", "dk", "dv", "dbias", "bias", "mask", "dropout_mask", "key_lengths", "query_mask",
    "lengths", "factors", "logs",
)  # fmt: skip


class Pointwise(ctypes.Structure):
    """The argument of every kernel of point-wise attention: `Pointwise` of pairs.cuh."""

    _fields_ = (
        *((name, View) for name in VIEWS),
        ("seed", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("scale", "shift", "gain", "alpha")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "queries", "keys", "valid", "left", "right", "d", "e")),
        ("last_kept", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("items", "bias_items", "bias_heads")),
        *((name, ctypes.c_void_p) for name in ("edges_q", "edges_k")),
        *((name, ctypes.c_int) for name in ("sequences", "after")),
    )


class Tiles(NamedTuple):
    """The matrix arithmetic of a block, `TensorTiles`, `PlainTiles` or `DistanceTiles`, and its sizes."""

    name: str
    number: str
    rows: int
    columns: int
    width: int
    stages: int

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self[2:]))
        return f"attnkit::{self.name}<{self.number}, {sizes}>"

    @property
    def plain(self) -> bool:
        return self.name != "TensorTiles"

    @property
    def size(self) -> int:
        """The bytes of a number of a tile, which is float32 at least without tensor cores."""
        size = {"float": 4, "double": 8}.get(self.number, 2)
        return max(size, 4) if self.plain else size

    @property
    def threads(self) -> int:
        """128 = 8 × 16, or a warp for each 16 rows."""
        return 128 if self.plain else self.rows // 16 * 32

    def shared_bytes(self, own: int, queries: int) -> int:
        """The size of `Shared<Tiles, own>` of pointwise.cuh."""
        compute = max(self.size, 4)
        tiles = (own * self.rows + 2 * self.stages * self.columns) * (self.width + self.plain) * self.size
        scratch = self.rows * (self.columns + 1) * compute if self.plain else 0
        return -(-(tiles + scratch) // 16) * 16 + queries * (8 + 2 * compute)


def width_of(*head_sizes: int) -> int:
    """The smallest power of two, at least 32, that holds a row of each."""
    return max(32, *(1 << (size - 1).bit_length() for size in head_sizes if size))


@cache
def tiles_of(kernel: str, dtype: str, width: int, distances: bool = False) -> tuple[Tiles, ...]:
    """The tiles of a kernel for inputs of `dtype`, with `distances` instead of products: the best, then those that need
    less shared memory."""
    number = NUMBERS[dtype]
    if dtype in ("float16", "bfloat16") and not distances:
        wide = width >= 128 or kernel in ("pointwise_gradient_of_keys", "pointwise_gradient_of_bias")
        best = Tiles("TensorTiles", number, 64, 32 if wide else 64, width, 2)
        return (best, best._replace(stages=1), best._replace(rows=32, columns=32, stages=1))
    size = 8 if dtype == "float64" else 4
    rows = 16 if width * size > 1024 else 32
    best = Tiles(
        "DistanceTiles" if distances else "PlainTiles", number, rows, rows, width, 2 if width * size <= 512 else 1
    )
    smaller = [best._replace(rows=rows, columns=16, stages=1) for rows in (16, 8)]
    return (best, best._replace(stages=1), *smaller)


def fitting(kernel: str, tiles: tuple[Tiles, ...], shared_bytes: Callable[[Tiles], int], room: int) -> Tiles:
    """The first of the tiles with which a block needs no more shared memory than there is room."""
    for each in tiles:
        if shared_bytes(each) <= room:
            return each
    least = shared_bytes(tiles[-1])
    raise NotImplementedError(f"{kernel} needs {least} bytes of shared memory; the device lends a block {room}")


class Launch(NamedTuple):
    """`blocks` blocks of `threads` threads of a kernel with `arguments`, by value, and dynamic shared memory, which
    needs an attribute above 48 KiB."""

    kernel: str
    template: tuple[str, ...]
    blocks: int
    threads: int
    shared_bytes: int
    arguments: ctypes.Structure  # its class has the name of the C++ struct
    source: str = "pointwise_gradients.cuh"  # the header in `SOURCES` to compile

    @property
    def name(self) -> str:
        """The C++ name of the instance, as a name expression for NVRTC."""
        return f"attnkit::{self.kernel}<{', '.join(self.template)}>"
