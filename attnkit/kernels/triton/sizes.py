"""Tile sizes by kernel, bits of the inputs and head size: no search when a kernel is launched.

Those for compute capability 8, and for 9 where no other was faster, are chosen from compiler reports; for 9 an H100
compared most of head size 64 with tiles like them (`python -m benchmarks tiles`; benchmarks/results has the times, and
counts decided for softmax's and sigmoid's gradients, which were not reached). No call needs more memory than a
multiprocessor has (`AMPLE`). In float32 a tile whose warps own 16 queries each takes more registers than there are from
head size 128 on, and is still predicted to take a third to an eighth of the clocks of smaller tiles that spill none.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


def _version() -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return None


TRITON = _version()
"""The first numbers of the version that is installed, None without one."""
BEFORE_3_9 = TRITON is not None and TRITON < (3, 9)
"""Whether it is older than that for which tiles are chosen."""


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and pipeline stages."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


def padded(width: int) -> int:
    """The smallest power of two, at least 16, that holds `width` features."""
    return max(16, 1 << (width - 1).bit_length())


def with_pairs(sizes: Tile, beside: int) -> Tile:
    """The tile of a call whose arrays of pairs take `beside` bytes per pair, which are pipelined too."""
    stages = sizes.num_stages if beside == 0 else 2 if beside <= 4 else 1
    return sizes._replace(num_stages=min(sizes.num_stages, stages))


# ---------------------------------------------------------------------------------------------- pointwise
# Causal calls without arrays of pairs spill no registers in a loop in half types up to head size 128, and next to none
# in their main loops in float32 up to 64. `backward_whole`, for 9 alone, spills a few addresses, of groups more, and
# `backward_together` up to 384 bytes: a larger tile asks for fewer additions.

POINTWISE = {
    ("forward", 16, 64): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    ("forward", 16, 128): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3)),
    ("forward", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("forward", 32, 64): (Tile(64, 16, 4, 1), Tile(128, 32, 4, 2)),
    ("forward", 32, 128): (Tile(32, 32, 8, 1), Tile(64, 16, 4, 1)),
    ("forward", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_queries", 16, 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("backward_queries", 16, 128): (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 16, 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_queries", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 1)),
    ("backward_queries", 32, 128): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_queries", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 16, 64): (Tile(32, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(32, 128, 8, 2)),
    ("backward_keys", 16, 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, 64): (Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)),
    ("backward_keys", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 64, 4, 1)),
    ("backward_keys", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_whole", 16, 64): (Tile(32, 64, 4, 1), Tile(32, 64, 4, 1)),
    ("backward_together", 16, 64): (Tile(32, 64, 4, 1), Tile(64, 64, 4, 1)),
    ("backward_together", 16, 128): (Tile(32, 64, 4, 1), Tile(32, 64, 4, 1)),
    ("backward_together", 16, 256): (Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
    ("backward_together", 32, 64): (Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)),
    ("backward_together", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 64, 4, 1)),
    ("backward_together", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
"""By kernel, bits and head size (the larger of d and e, rounded up): tiles for compute capability 8 and 9 (`AMPLE`)."""

SEQUENCES = {("backward_keys", 16, 64): (Tile(32, 128, 8, 2), Tile(32, 128, 8, 2))}
DISTANCES = {
    ("forward", 16, 64): (Tile(128, 32, 8, 3), Tile(128, 64, 8, 3)),
    ("forward", 16, 256): (Tile(64, 16, 8, 2), Tile(64, 16, 8, 2)),
    ("backward_queries", 16, 128): (Tile(64, 32, 4, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 32, 128): (Tile(16, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
}
STATISTICS = {
    ("rows", 16, 64): (Tile(128, 32, 4, 3), Tile(128, 128, 8, 2)),
    ("rows", 16, 128): (Tile(128, 32, 4, 3), Tile(128, 64, 8, 3)),
    ("rows", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("rows", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 2)),
    ("rows", 32, 128): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("rows", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("forward", 16, 64): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3)),
    ("forward", 16, 128): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3)),
    ("forward", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 2)),
    ("forward", 32, 128): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_queries", 16, 64): (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_queries", 16, 128): (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
    ("backward_queries", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 16, 4, 1)),
    ("backward_queries", 32, 128): (Tile(16, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_keys", 16, 64): (Tile(16, 128, 8, 2), Tile(16, 128, 8, 2)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
    ("backward_keys", 32, 64): (Tile(16, 64, 4, 1), Tile(16, 128, 8, 1)),
}
LEAN = {("forward", 16, 64): (Tile(128, 32, 4, 3), Tile(128, 64, 4, 3))}
LEAN_SHARING = {("forward", 16, 64): (Tile(128, 32, 4, 3), Tile(64, 32, 4, 3))}
LEAN_PIECES = {
    ("backward_queries", 16, 64): (Tile(128, 64, 8, 2), Tile(128, 64, 4, 2)),
    ("backward_keys", 16, 64): (Tile(32, 128, 8, 2), Tile(64, 64, 4, 2)),
}
SHARING = {
    ("backward_queries", 16, 64): (Tile(128, 32, 8, 2), Tile(64, 64, 4, 2)),
    ("backward_keys", 16, 128): (Tile(16, 64, 8, 2), Tile(16, 128, 8, 2)),
}
"""Exceptions for packed sequences, whose bounds take registers; for calls with distances; with statistics of rows,
`rows` being those without o; for functions that share reciprocals; and for `lean` calls, in bfloat16 without
statistics, arrays of pairs and dropout, where four warps have registers for a tile of eight: forward, and in gradients
of polynomials in pieces where causality alone hides pairs."""


def pointwise(kernel: str, bits: int, d: int, e: int, capability: int, *forms: str) -> Tile:
    """The tile of a kernel for head sizes d and e; `capability` is the major number."""
    tile: Tile = entry((kernel, bits, max(64, padded(d), padded(e))), capability, "pointwise", *forms)
    return tile


# ---------------------------------------------------------------------------------------------- rows
# No registers are spilled by half types up to head size 128, and next to none in main loops by float32 up to 64, but 72
# bytes of `forward_online`, which is a quarter faster with them on an H100.

ROWS = {
    ("forward_online", 16, 64): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    ("forward_online", 16, 128): (Tile(128, 32, 8, 3), Tile(64, 64, 4, 3)),
    ("forward_online", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("forward_online", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 64, 4, 2)),
    ("forward_online", 32, 128): (Tile(32, 32, 8, 1), Tile(64, 16, 4, 1)),
    ("forward_online", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("forward_tiled", 16, 64): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    ("forward_tiled", 16, 128): (Tile(128, 32, 8, 2), Tile(128, 64, 8, 3)),
    ("forward_tiled", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("forward_tiled", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 2)),
    ("forward_tiled", 32, 128): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("forward_tiled", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("statistics_of_rows", 16, 64): (Tile(128, 32, 4, 3), Tile(128, 64, 8, 3)),
    ("statistics_of_rows", 16, 128): (Tile(128, 32, 4, 3), Tile(128, 64, 8, 3)),
    ("statistics_of_rows", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("statistics_of_rows", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 2)),
    ("statistics_of_rows", 32, 128): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("statistics_of_rows", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("softmax_alone", 16, 64): (Tile(128, 32, 4, 3), Tile(64, 128, 4, 2)),
    ("softmax_alone", 16, 128): (Tile(128, 32, 4, 3), Tile(64, 128, 4, 2)),
    ("softmax_alone", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("softmax_alone", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 2)),
    ("softmax_alone", 32, 128): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("softmax_alone", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("softmax_beside", 16, 64): (Tile(128, 32, 8, 3), Tile(64, 64, 4, 3)),
    ("softmax_beside", 16, 128): (Tile(128, 32, 8, 3), Tile(64, 64, 4, 3)),
    ("softmax_beside", 16, 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("softmax_beside", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 64, 4, 2)),
    ("softmax_beside", 32, 128): (Tile(32, 32, 8, 1), Tile(64, 16, 4, 1)),
    ("softmax_beside", 32, 256): (Tile(32, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_tiled", 16, 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("backward_tiled", 16, 128): (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
    ("backward_tiled", 16, 256): (Tile(64, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("backward_tiled", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 32, 4, 1)),
    ("backward_tiled", 32, 128): (Tile(16, 16, 8, 1), Tile(64, 16, 4, 1)),
    ("backward_tiled", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("backward_keys", 16, 64): (Tile(32, 128, 8, 2), Tile(16, 128, 4, 2)),
    ("backward_keys", 16, 128): (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("backward_keys", 16, 256): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("backward_keys", 32, 64): (Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)),
    ("backward_keys", 32, 128): (Tile(16, 16, 8, 1), Tile(16, 64, 4, 1)),
    ("backward_keys", 32, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
"""The same for softmax and thresholds; `backward_bias` has those of `backward_tiled`."""

LEAN_ROWS = {
    ("forward_online", 16, 64): (Tile(128, 32, 4, 3), Tile(128, 64, 8, 3)),
    ("forward_tiled", 16, 64): (Tile(128, 32, 4, 3), Tile(128, 64, 4, 2)),
}
STATISTICS_OF_ROWS = {
    ("backward_tiled", 16, 64): (Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_tiled", 16, 128): (Tile(128, 16, 8, 2), Tile(128, 32, 8, 2)),
    ("backward_tiled", 32, 64): (Tile(64, 16, 4, 1), Tile(64, 16, 4, 1)),
    ("backward_keys", 16, 64): (Tile(16, 128, 8, 2), Tile(16, 128, 8, 2)),
    ("backward_keys", 16, 128): (Tile(16, 64, 8, 2), Tile(16, 64, 8, 2)),
}
GATES_OF_ROWS = {
    ("backward_tiled", 16, 64): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("backward_tiled", 32, 64): (Tile(32, 16, 4, 1), Tile(64, 16, 4, 1)),
}
"""Exceptions for `lean` calls, in bfloat16 without masks, arrays of pairs and dropout, as for point-wise attention, for
gradients with those of statistics, and for calls with gates, of whose `backward_tiled` no tile has more keys than
queries; by counts of the compiler, no device has timed them."""

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
"""The tile with the most keys for kernels that keep whole rows of scores in registers; calls with more keys are tiled,
and so are gradients with those of statistics.

`forward_power` is `forward_resident` for any α: logarithms take registers.
"""


def rows(kernel: str, bits: int, d: int, e: int, capability: int, form: str = "") -> Tile:
    """The tile of a kernel for head sizes d and e; `form` is "lean", "statistics", "gates" or none."""
    key = kernel, bits, max(64, padded(d), padded(e))
    tile: Tile = entry(key, capability, "rows", *([f"{form} of rows"] if form else []))
    return tile


def resident(kernel: str, bits: int, d: int, e: int, keys: int, capability: int) -> Tile | None:
    """The tile of a resident kernel for rows of this many keys, None if they do not fit into registers."""
    key = kernel, bits, max(64, padded(d), padded(e))
    if key not in RESIDENT:
        return None
    tile: Tile = entry(key, capability, "resident")
    return None if keys > tile.KEYS else tile._replace(KEYS=padded(keys))


def normalised(
    name: str, normaliser: str, bits: int, d: int, e: int, keys: int, capability: int, beside: int, form: str
) -> Tile | None:
    """The tile of a kernel of rows for calls with `beside` bytes of arrays per pair; None for a resident kernel if a
    row does not fit into registers, or has statistics."""
    if name.endswith("_resident"):
        kind = "forward_power" if name == "forward_resident" and normaliser == "entmax" else name
        return None if form == "statistics" else resident(kind, bits, d, e, keys, capability)
    form = "" if form == "lean" and normaliser == "entmax" else form  # logarithms take registers
    return with_pairs(rows("backward_tiled" if name == "backward_bias" else name, bits, d, e, capability, form), beside)


# ---------------------------------------------------------------------------------------------- few queries

FEW = 16  # queries, or fewer, whose keys are shared out among programs
RESIDENT_PROGRAMS = 2  # of a multiprocessor
MOST_PARTS = 256

DECODING = {
    (16, 64): (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    (16, 128): (Tile(64, 32, 4, 4), Tile(64, 64, 4, 3)),
    (16, 256): (Tile(32, 32, 4, 3), Tile(32, 32, 4, 3)),
    (32, 64): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (32, 128): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)),
    (32, 256): (Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
}
"""By bits and head size: tiles with the most rows that are packed into one. They spill no registers, but for float32
with head size 256. A loop over keys waits for memory: with sixteen rows it asks for half of a multiprocessor's time."""


def decoding(bits: int, d: int, e: int, capability: int, queries: int, rows: int) -> Tile | None:
    """The tile of a call with `rows` queries in a group of heads; None for more than a few queries."""
    if queries > FEW:
        return None
    tile: Tile = entry((bits, max(64, padded(d), padded(e))), capability, "decoding")
    return tile._replace(ROWS=min(tile.ROWS, padded(rows)))


def parts(tile: Tile, tiles: int, keys: int, processors: int) -> int:
    """In how many parts the keys of a call with so many tiles of queries are shared out, if these see `keys` of them.

    As many as give every multiprocessor its programs, if each has at least two tiles of keys and eight times as many
    keys as rows, whose sums it writes and `combine` reads.
    """
    wanted = -(-RESIDENT_PROGRAMS * processors // max(tiles, 1))
    return max(1, min(wanted, keys // max(2 * tile.KEYS, 8 * tile.ROWS), MOST_PARTS))


# ---------------------------------------------------------------------------------------------- linear attention
# No row spills registers in a call without masks, but sweeps over keys a few numbers, and of sums that fade more. Of
# packed sequences one spills two.

UNIT = 64  # tokens: segments are multiples of it, and every CHUNK divides it
WIDEST_SWEEP = 64 if BEFORE_3_9 else 128
"""Features and columns of a state that a sweep keeps in registers. Triton 3.6 takes up to 144 KiB of shared memory for
128, where devices lend 99, and spills 0.5 to 2 KiB on 9.0: gradients in float32 precision take their place."""


class Chunk(NamedTuple):
    """Tokens of a chunk, columns of a program, its warps, and pipeline stages."""

    CHUNK: int
    BLOCK: int
    num_warps: int
    num_stages: int


LINEAR = {
    ("sums", "bfloat16", 64): (Chunk(64, 64, 4, 2), Chunk(64, 64, 4, 2)),
    ("sums", "bfloat16", 128): (Chunk(64, 128, 8, 1), Chunk(64, 128, 4, 2)),
    ("sums", "bfloat16", 256): (Chunk(64, 64, 8, 2), Chunk(64, 64, 8, 2)),
    ("sums", "float16", 64): (Chunk(32, 64, 4, 2), Chunk(64, 64, 4, 2)),
    ("sums", "float16", 128): (Chunk(32, 64, 4, 2), Chunk(64, 64, 4, 2)),
    ("sums", "float16", 256): (Chunk(32, 32, 8, 2), Chunk(32, 32, 8, 2)),
    ("sums", "float32", 64): (Chunk(32, 32, 8, 2), Chunk(32, 32, 8, 2)),
    ("sums", "float32", 128): (Chunk(32, 32, 8, 2), Chunk(32, 32, 8, 2)),
    ("sums", "float32", 256): (Chunk(32, 32, 8, 1), Chunk(32, 32, 8, 2)),
    ("exact_sums", "bfloat16", 64): (Chunk(64, 64, 4, 2), Chunk(64, 64, 4, 2)),
    ("exact_sums", "bfloat16", 128): (Chunk(32, 128, 8, 1), Chunk(32, 128, 4, 2)),
    ("exact_sums", "float16", 64): (Chunk(32, 32, 8, 2), Chunk(32, 32, 8, 2)),
    ("exact_sums", "float16", 128): (Chunk(32, 32, 8, 2), Chunk(32, 32, 8, 2)),
    ("columns", "bfloat16", 64): (Chunk(64, 64, 4, 2), Chunk(64, 64, 4, 2)),
    ("columns", "bfloat16", 128): (Chunk(64, 32, 4, 1), Chunk(64, 32, 4, 1)),
    ("columns", "bfloat16", 256): (Chunk(32, 32, 8, 1), Chunk(32, 32, 8, 1)),
    ("columns", "float16", 64): (Chunk(32, 64, 4, 2), Chunk(64, 64, 4, 2)),
    ("columns", "float16", 128): (Chunk(16, 64, 4, 1), Chunk(16, 64, 4, 1)),
    ("columns", "float16", 256): (Chunk(16, 32, 8, 1), Chunk(16, 32, 8, 1)),
    ("columns", "float32", 64): (Chunk(16, 32, 4, 2), Chunk(16, 32, 4, 2)),
    ("columns", "float32", 128): (Chunk(16, 32, 4, 1), Chunk(16, 32, 8, 1)),
    ("columns", "float32", 256): (Chunk(16, 32, 8, 1), Chunk(16, 32, 8, 1)),
    ("gradient_gates", "float32", 64): (Chunk(64, 16, 8, 1), Chunk(64, 32, 8, 1)),
    ("gradient_gates", "float32", 128): (Chunk(64, 16, 8, 1), Chunk(64, 32, 8, 1)),
    ("gradient_gates", "float32", 256): (Chunk(64, 16, 8, 1), Chunk(64, 32, 8, 1)),
    ("sweep_queries", "bfloat16", 64): (Chunk(32, 64, 4, 1), Chunk(64, 64, 4, 1)),
    ("sweep_queries", "bfloat16", 128): (Chunk(32, 128, 8, 1), Chunk(64, 128, 8, 1)),
    ("sweep_queries", "float16", 64): (Chunk(16, 64, 4, 1), Chunk(32, 64, 4, 1)),
    ("sweep_queries", "float16", 128): (Chunk(16, 128, 8, 1), Chunk(16, 128, 8, 1)),
    ("sweep_keys", "bfloat16", 64): (Chunk(32, 64, 4, 1), Chunk(64, 64, 4, 1)),
    ("sweep_keys", "bfloat16", 128): (Chunk(16, 128, 8, 1), Chunk(64, 128, 8, 1)),
    ("sweep_keys", "float16", 64): (Chunk(16, 64, 4, 1), Chunk(32, 64, 4, 1)),
    ("sweep_keys", "float16", 128): (Chunk(16, 128, 8, 1), Chunk(16, 128, 8, 1)),
}
"""By sums of segments (exact ones for gradients of an initial state), sweeps over them for some columns or for a whole
state, dtype, and head size rounded up: for compute capability 8 and 9. A second stage of `sweep_keys` would compute its
features twice. A chunk of `gradient_gates` is a segment: its CHUNK is UNIT."""


def linear(kind: str, dtype: str, capability: int, contracted: int, produced: int) -> Chunk:
    """The tile of a kernel that contracts `contracted` features into `produced` ones, both powers of two."""
    chunk: Chunk = entry((kind, dtype, max(64, contracted)), capability, "linear")
    return chunk._replace(BLOCK=min(chunk.BLOCK, produced))


STEP = 4096  # numbers of a state that a program of a step keeps in registers


# ---------------------------------------------------------------------------------------------- all tables

AMPLE = (9, 10, 11)
"""Major numbers of the compute capability of devices with 227 KiB of shared memory for a program. Those of 8.6, 8.9 and
12.0 have 99 KiB, which the tiles for 8 keep to, and products like those of 8.0; so may newer ones."""

Entry = Any  # each table has its own keys, and tiles of a type of its own
TABLES: dict[str, Entry] = {
    "pointwise": POINTWISE,
    "sequences": SEQUENCES,
    "distances": DISTANCES,
    "statistics": STATISTICS,
    "lean": LEAN,
    "lean sharing": LEAN_SHARING,
    "lean pieces": LEAN_PIECES,
    "sharing": SHARING,
    "rows": ROWS,
    "lean of rows": LEAN_ROWS,
    "statistics of rows": STATISTICS_OF_ROWS,
    "gates of rows": GATES_OF_ROWS,
    "resident": RESIDENT,
    "decoding": DECODING,
    "linear": LINEAR,
}


def table_of(key: tuple[object, ...], *tables: str) -> str:
    """The last of some tables that has an entry for the key."""
    return [name for name in tables if key in TABLES[name]][-1]


def column(capability: int) -> int:
    """Which tiles of the tables a device takes, by the major number of its compute capability."""
    return int(capability in AMPLE)


def entry(key: tuple[object, ...], capability: int, *tables: str) -> Entry:
    """The tile that a call takes from these tables, the later ones exceptions to the earlier. `benchmarks.tiles` tries
    others in its place."""
    return TABLES[table_of(key, *tables)][key][column(capability)]


# ---------------------------------------------------------------------------------------------- the Newton inverse

LARGEST = 64  # rows of a matrix: larger ones do not fit into the registers of a program
SLICE = 16  # columns and rows of operands that are read from memory at a time


def newton(kernel: str, m: int, capability: int) -> dict[str, object]:
    """Compile-time arguments of a kernel, which keeps its matrix in registers if none spills.

    Products of compute capability 9.0 take operands from shared memory, those of 8.0 from registers, which cannot hold
    64 rows and columns of A and X as well.
    """
    M = padded(m)
    values = {"m": m, "M": M, "K": SLICE, "PRECISION": "tf32x3", "num_stages": 1, "num_warps": 4 if M < LARGEST else 8}
    if kernel == "inverse":
        values["HELD"] = M < LARGEST or bool(column(capability))
        values["num_warps"] = 4 if values["HELD"] else 8
    return values
