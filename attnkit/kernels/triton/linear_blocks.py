"""Sizes of tiles of linear attention by bits of the inputs and contracted head size: no search at a launch.

Every row compiles for compute capability 8.0 and 9.0 within the memory of a multiprocessor.
"""

from typing import NamedTuple

UNIT = 64  # tokens: segments are multiples of it, and every CHUNK divides it


class Tile(NamedTuple):
    """Tokens of a chunk, columns of a program, its warps, and chunks that are on their way from memory."""

    CHUNK: int
    BLOCK: int
    num_warps: int
    num_stages: int


TILES = {
    (16, 64): Tile(64, 64, 8, 2),
    (16, 128): Tile(64, 64, 8, 2),
    (16, 256): Tile(32, 32, 8, 1),
    (32, 64): Tile(32, 64, 8, 1),
    (32, 128): Tile(32, 32, 8, 1),
    (32, 256): Tile(16, 16, 8, 1),
}
"""By bits of the inputs, and head size rounded up to a power of two."""


def tile(bits: int, contracted: int, produced: int) -> Tile:
    """The tile of a kernel that sums over `contracted` features (a power of two) for `produced` others."""
    found = TILES[bits, max(64, contracted)]
    return found._replace(BLOCK=min(found.BLOCK, produced))
