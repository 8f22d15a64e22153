"""Sizes of tiles, chosen by kernel, bits of the inputs and head size: no search when a kernel is launched.

They are chosen from what compilers say, not from measurements: causal calls without arrays of pairs spill no registers
up to head size 128 (float32 with head size 256 does), and no call needs more memory than compute capability 8.0 or 9.0
has. Where registers allow it a warp has 16 queries (keys, for the gradients of keys) of its own: warps that share them
compute the same scores.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and tiles that are on their way from memory."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


TILES = {
    ("forward", 16, 64): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    ("forward", 16, 128): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3)),
    ("forward", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("forward", 32, 64): (Tile(128, 16, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 32, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("forward", 32, 256): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("backward_queries", 16, 64): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 16, 128): (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 16, 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_queries", 32, 64): (Tile(32, 32, 4, 1), Tile(64, 16, 4, 1)),
    ("backward_queries", 32, 128): (Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_queries", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 16, 64): (Tile(32, 128, 8, 2), Tile(32, 128, 8, 2)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(32, 128, 8, 2)),
    ("backward_keys", 16, 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, 64): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_together", 16, 64): (Tile(32, 64, 8, 2), Tile(32, 128, 8, 2)),
    ("backward_together", 16, 128): (Tile(32, 64, 8, 2), Tile(32, 32, 8, 1)),
    ("backward_together", 16, 256): (Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
    ("backward_together", 32, 64): (Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
    ("backward_together", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_together", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
"""By kernel, bits and head size (the larger of d and e, rounded up): tiles for compute capability 8 and from 9 on."""

DISTANCES = {
    ("forward", 16, 64): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3)),
    ("backward_queries", 16, 128): (Tile(64, 32, 4, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2)),
}
STATISTICS = {
    ("forward", 16, 64): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3)),
    ("forward", 16, 128): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3)),
    ("forward", 32, 128): (Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    ("backward_queries", 16, 64): (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 16, 128): (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
    ("backward_queries", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 16, 64): (Tile(16, 128, 8, 2), Tile(16, 128, 8, 2)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
    ("backward_keys", 32, 64): (Tile(16, 32, 8, 1), Tile(32, 32, 8, 1)),
}
"""Where calls with distances, and those with statistics of rows, need smaller ones."""


def padded(width: int) -> int:
    """The power of two, at least 16, that holds a row of `width` features."""
    return max(16, 1 << (width - 1).bit_length())


def tile(
    kernel: str, bits: int, d: int, e: int, capability: int, distances: bool = False, statistics: bool = False
) -> Tile:
    """The tile of a kernel for head sizes d and e; `capability` is the major number."""
    table = TILES | STATISTICS if statistics else TILES | DISTANCES if distances else TILES
    return table[kernel, bits, max(64, padded(d), padded(e))][capability >= 9]


def with_pairs(sizes: Tile, beside: int) -> Tile:
    """The tile of a call whose arrays of pairs take `beside` bytes for each pair: they are on their way as well."""
    stages = sizes.num_stages if beside == 0 else 2 if beside <= 4 else 1
    return sizes._replace(num_stages=min(sizes.num_stages, stages))
