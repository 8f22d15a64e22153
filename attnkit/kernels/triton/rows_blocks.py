"""Sizes of tiles of the kernels in `rows`, chosen like those in `blocks`.

No registers are spilled by half types up to head size 128 and by float32 up to 64; a few bytes by float32 with 128.

Of a resident kernel a tile has the keys of a whole row; where no tile of that many keys is listed, the call is tiled.
`forward_power` is `forward_resident` for any α: logarithms take registers.
"""

from attnkit.kernels.triton.blocks import Tile, padded

RESIDENT = {
    ("forward_resident", 16, 64): (Tile(32, 256, 8, 1), Tile(64, 256, 8, 1)),
    ("forward_resident", 16, 128): (Tile(64, 256, 8, 1), Tile(64, 256, 8, 1)),
    ("forward_resident", 32, 64): (Tile(16, 256, 8, 1), Tile(16, 256, 8, 1)),
    ("forward_power", 16, 64): (Tile(32, 256, 4, 1), Tile(32, 256, 4, 1)),
    ("forward_power", 16, 128): (Tile(32, 256, 8, 1), Tile(32, 256, 8, 1)),
    ("forward_power", 32, 64): (Tile(16, 256, 8, 1), Tile(16, 256, 8, 1)),
    ("backward_resident", 16, 64): (Tile(32, 256, 8, 1), Tile(32, 256, 8, 1)),
    ("backward_resident", 16, 128): (Tile(16, 256, 8, 1), Tile(16, 256, 8, 1)),
}
"""By kernel, bits and head size: the tile with most keys, for compute capability 8 and from 9 on."""

TILES = {
    ("forward_online", 16, 64): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    ("forward_online", 16, 128): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3)),
    ("forward_online", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("forward_online", 32, 64): (Tile(128, 16, 8, 2), Tile(64, 32, 4, 2)),
    ("forward_online", 32, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("forward_online", 32, 256): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("forward_tiled", 16, 64): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    ("forward_tiled", 16, 128): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3)),
    ("forward_tiled", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("forward_tiled", 32, 64): (Tile(128, 16, 8, 2), Tile(64, 32, 4, 2)),
    ("forward_tiled", 32, 128): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("forward_tiled", 32, 256): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("backward_tiled", 16, 64): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_tiled", 16, 128): (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
    ("backward_tiled", 16, 256): (Tile(64, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("backward_tiled", 32, 64): (Tile(32, 16, 4, 1), Tile(64, 16, 4, 1)),
    ("backward_tiled", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_tiled", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 16, 64): (Tile(32, 128, 8, 2), Tile(32, 128, 8, 2)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("backward_keys", 16, 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, 64): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
"""The same for tiles of some of the keys; `backward_bias` has those of `backward_tiled`."""


def tile(kernel: str, bits: int, d: int, e: int, capability: int) -> Tile:
    """The tile of a kernel for head sizes d and e; `capability` is the major number."""
    return TILES[kernel, bits, max(64, padded(d), padded(e))][capability >= 9]


def resident(kernel: str, bits: int, d: int, e: int, keys: int, capability: int) -> Tile | None:
    """The tile of a resident kernel for rows of a number of keys, None where registers do not hold it."""
    found = RESIDENT.get((kernel, bits, max(64, padded(d), padded(e))))
    if found is None or keys > found[capability >= 9].KEYS:
        return None
    return found[capability >= 9]._replace(KEYS=padded(keys))
