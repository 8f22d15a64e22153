"""Sizes of tiles of linear attention, chosen by kernel, dtype and contracted head size: no search at a launch.

No row spills registers in a call without masks, and none needs more memory of a multiprocessor than compute capability
8.0 or 9.0 has.
"""

from typing import NamedTuple

import triton.language as tl

PRODUCTS = {"bfloat16": (tl.bfloat16, "ieee"), "float16": (tl.float32, "tf32"), "float32": (tl.float32, "tf32x3")}
"""By dtype, that of the operands of matrix products, and their precision.

Features and sums of float16 inputs may leave its range; TF32 has as many digits.
"""

UNIT = 64  # tokens: segments are multiples of it, and every CHUNK divides it


class Tile(NamedTuple):
    """Tokens of a chunk, columns of a program, its warps, and chunks that are on their way from memory."""

    CHUNK: int
    BLOCK: int
    num_warps: int
    num_stages: int


TILES = {
    ("sums", "bfloat16", 64): (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sums", "bfloat16", 128): (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sums", "bfloat16", 256): (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sums", "float16", 64): (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sums", "float16", 128): (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sums", "float16", 256): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("sums", "float32", 64): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("sums", "float32", 128): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("sums", "float32", 256): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("sweep", "bfloat16", 64): (Tile(32, 64, 4, 1), Tile(64, 64, 8, 2)),
    ("sweep", "bfloat16", 128): (Tile(32, 32, 4, 1), Tile(64, 32, 8, 2)),
    ("sweep", "bfloat16", 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("sweep", "float16", 64): (Tile(32, 32, 4, 1), Tile(64, 32, 8, 2)),
    ("sweep", "float16", 128): (Tile(32, 16, 4, 1), Tile(32, 32, 8, 1)),
    ("sweep", "float16", 256): (Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
    ("sweep", "float32", 64): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)),
    ("sweep", "float32", 128): (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
    ("sweep", "float32", 256): (Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
}
"""By sums of segments or sweeps over them, dtype, and head size rounded up: for compute capability 8 and from 9 on."""


def tile(kind: str, dtype: str, capability: int, contracted: int, produced: int) -> Tile:
    """The tile of a kernel that contracts so many features to produce others, both powers of two."""
    found = TILES[kind, dtype, max(64, contracted)][capability >= 9]
    return found._replace(BLOCK=min(found.BLOCK, produced))
