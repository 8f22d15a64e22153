"""dq, dk and dv of point-wise attention by one program for a head of few queries: five products for a tile.

Gradients of queries sum over keys, those of keys over queries. A program that sees all pairs of a head has both: it
walks the keys, whose dk and dv it finishes, and keeps dq of every query in registers. Kernels that own queries or keys
compute q·k, do·v and the slopes twice. Sums have a fixed order.

    to_queries[part] (D, ROWS)   += kᵀ ds         one for each part of the queries, so that every product has 64 rows
    to_keys, to_values (KEYS, D) += ds q, u do

Registers hold 256 queries with head size 64 of a type whose sums need no sizes (`add_product`). A loop over keys
would keep the addresses of all parts, too: they are computed where they are used.

Tuples are those of `attnkit.kernels.triton.pointwise`. Without masks and bias the keys that no query sees are those
before the first window and after the last.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.pointwise import weights_and_slopes
from attnkit.kernels.triton.tiles import (
    key_ends,
    key_starts,
    load_rows,
    place,
    query_blocks,
    store_rows,
    valid_keys,
    visible_pairs,
)


@triton.jit
def and_one(tiles, x):
    """A tuple and one more."""
    return tiles + (x,)  # noqa: RUF005 - Triton unpacks none


@triton.jit
def member_of(shared, member, groups):
    """The query head of a member of a group."""
    return shared * groups + member


@triton.jit
def seen_keys(j, queries, keys, left, right):
    """Which of the keys j some query sees."""
    seen = j < keys
    if left is not None:
        seen = seen & (j >= -left)
    if right is not None:
        seen = seen & (j < queries + right)
    return seen


@triton.jit
def gathered(total, ds, k_tile):
    """dqᵀ of a part with the keys of one more tile."""
    return tl.dot(tl.trans(k_tile), ds, total)


@triton.jit
def backward_whole(
    q, k, v, do, dq, dk, dv, beside, pairs, rows, limits, numbers, stored, heads, groups,
    H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of one of `heads` heads of `stored` keys, which `groups` query heads share.

    `beside` are views of float32 memory like dk and dv, in which groups of several heads are summed.
    """
    rows = rows[:]
    queries, left, right = limits[0], limits[2], limits[3]
    EDGE: tl.constexpr = left is not None or right is not None or rows[0] is not None
    dstats = (None,)
    _, shared, item = place(1, heads)
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    for member in range(groups):
        head = member_of(shared, member, groups)
        at = (item, head, shared, item)
        keys = valid_keys(rows[0], limits[1], item, head)
        own = (queries, keys, left, right)
        q_tiles, do_tiles, to_queries = (), (), ()
        for part in tl.static_range(PARTS):
            rows_of_part = part * ROWS + i
            live = rows_of_part < queries
            if EDGE:
                live = key_ends(rows_of_part, queries, keys, right, None, item, head) > key_starts(rows_of_part, left)
            q_tiles = and_one(q_tiles, load_rows(q, item, head, part * ROWS, i, live, d, D))
            do_tiles = and_one(do_tiles, load_rows(do, item, head, part * ROWS, i, live, e, E))
            to_queries = and_one(to_queries, tl.zeros((D, ROWS), tl.float32))
        for j0 in tl.range(0, stored, KEYS, disable_licm=True):
            seen = seen_keys(j0 + j, queries, keys, left, right)
            k_tile = load_rows(k, item, shared, j0, j, seen, d, D)
            v_tile = load_rows(v, item, shared, j0, j, seen, e, E)
            to_keys, to_values = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, E), tl.float32)
            first, _, _, stop = query_blocks(j0, queries, keys, left, right, ROWS, KEYS)
            later = ()
            for part in tl.static_range(PARTS):
                i0 = part * ROWS + tl.minimum(j0, 0)  # of the loop: what belongs to these queries is not kept over it
                total = to_queries[part]  # type: ignore[var-annotated]
                # a loop instead of a branch, through which Triton carries sums in other layouts
                for _ in range(tl.where((i0 + ROWS > first) & (i0 < stop), 1, 0) if EDGE else 1):
                    hi = key_ends(i0 + i, queries, keys, right, None, item, head)
                    inside = (j0 + j < keys)[:, None]
                    if EDGE:
                        inside = visible_pairs(None, left, hi[None, :], item, head, i0, i[None, :], j0, j[:, None])
                    u, ds = weights_and_slopes(
                        k_tile, None, v_tile, None, q_tiles[part], do_tiles[part], dstats, pairs, rows, own, numbers,
                        at, heads * groups, i0, hi, j0, inside, H, DH, EDGE, LOG_LENGTH, ROWS, KEYS, PRECISION,
                    )  # fmt: skip
                    u, ds = u.to(do_tiles[part].dtype), ds.to(k_tile.dtype)
                    to_values = tl.dot(u, do_tiles[part], to_values)
                    to_keys = tl.dot(ds, q_tiles[part], to_keys)
                    total = gathered(total, ds, k_tile)
                later = and_one(later, total)
            to_queries = later
            in_range = j0 + j < stored
            to_keys *= numbers[0] * numbers[2]
            to_values = tl.where(seen[:, None], to_values * numbers[2], 0.0)  # h(0) of other keys is none
            if beside is not None:
                before = in_range & (member > 0)
                to_keys += load_rows(beside[0], item, shared, j0, j, before, d, D)
                to_values += load_rows(beside[1], item, shared, j0, j, before, e, E)
                store_rows(beside[0], item, shared, j0, j, in_range, to_keys, d, D)
                store_rows(beside[1], item, shared, j0, j, in_range, to_values, e, E)
            store_rows(dk, item, shared, j0, j, in_range, to_keys, d, D)  # that of the last member remains
            store_rows(dv, item, shared, j0, j, in_range, to_values, e, E)
        for part in tl.static_range(PARTS):
            total = tl.trans(to_queries[part]) * (numbers[0] * numbers[2])
            store_rows(dq, item, head, part * ROWS, i, part * ROWS + i < queries, total, d, D)
        if beside is not None:
            tl.debug_barrier()  # the next member reads what other threads wrote
