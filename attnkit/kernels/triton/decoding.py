"""Few queries on many keys: the keys of a head are shared out among programs, and what these find is then added up.

A program has one of `count` parts of the keys of one head of k and v, and all queries of its group of heads, whose
rows it packs into tiles: row r of a group is query r % queries of its head r // queries, so that keys and values are
read once for a group. Keys are shared out in whole tiles, those that some query of the tile may see in equal parts, the
last of which may be smaller or empty. `combine` adds the parts of a query in their order: sums have a fixed order.

The tuples are those of `pointwise` and `rows`, but `head`, and i0, are numbers of every row here. A view of parts has
the stride of parts as a sixth number. With a single part the programs write results themselves, and `combine` is not
launched.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton import pointwise
from attnkit.kernels.triton.activations import exp
from attnkit.kernels.triton.normalisers import lift_of, unit_of
from attnkit.kernels.triton.rows import add_tile, beside_sink, divisor, finite, rising_scale, sink_of, store_stats
from attnkit.kernels.triton.tiles import (
    corner,
    key_ends,
    load_of_rows,
    load_rows,
    nothing,
    place,
    store_of_rows,
    store_rows,
    valid_keys,
    whole_sum,
)


@triton.jit
def packed_rows(limits, heads, groups, count, ROWS: tl.constexpr):
    """The part of keys of this program, the head of keys, the item, and the head and the query of each of its rows;
    rows without any have the query `queries`. Neighbouring programs share keys."""
    queries = limits[0]
    blocks = tl.cdiv(groups * queries, ROWS)
    n, shared, item = place(blocks * count, heads // groups)
    row = n % blocks * ROWS + tl.arange(0, ROWS)
    i = tl.where(row < groups * queries, row % queries, queries)
    head = shared * groups + tl.minimum(row // queries, groups - 1)
    return n // blocks, shared, item, head, i


@triton.jit
def own_keys(part, count, hi, left, KEYS: tl.constexpr):
    """The first key of this part, and where it ends."""
    first = 0 if left is None else tl.maximum(-left, 0) // KEYS * KEYS
    stop = tl.max(hi, 0)
    each = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0), KEYS), count) * KEYS
    first += part * each
    return first, tl.minimum(stop, first + each)


@triton.jit
def of_part(view, part):
    """The view of one part."""
    return view[0] + tl.cast(part, tl.int64) * view[5], view[1], view[2], view[3], view[4]


@triton.jit
def of_query(view, item, head, i):
    """The view of the parts of one query, as rows."""
    start = view[0] + item * view[1] + head * view[2] + tl.cast(i, tl.int64) * view[3]
    return start, 0, 0, view[5], view[4]


@triton.jit
def pointwise_parts(
    q, k, v, parts, pairs, rows, limits, numbers, heads, groups, count,
    H: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of o of point-wise attention."""
    pairs, rows = pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    part, shared, item, head, i = packed_rows(limits, heads, groups, count, ROWS)
    queries, keys, left, right = limits[0], limits[1], limits[2], limits[3]
    hi = key_ends(i, queries, valid_keys(rows[0], keys, item, head), right, rows[1], item, head)
    own = (queries, keys, left, right)
    factor, log_length = pointwise.row_settings(i, hi, own, rows, numbers, (item, head), LOG_LENGTH)
    beside = tl.arange(0, ROWS)
    at, i0 = (item, head[:, None], shared, item), (i - beside)[:, None]
    q_tile = load_rows(q, item, at[1], i0, beside, i < queries, d, D)
    first, stop = own_keys(part, count, hi, left, KEYS)
    low = None if left is None else -left
    sums, _ = pointwise.attend(
        nothing(ROWS, E, False), (), q_tile, None, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, None, low,
        stop, first, stop, H, None, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    total = whole_sum(sums, None, v[0].dtype.element_ty) * numbers[2] * factor[:, None]
    store_rows(of_part(parts, part), item, at[1], i0, beside, i < queries, total, e, E)


@triton.jit
def softmax_parts(
    q, k, v, parts, tops, totals, stats, lse, pairs, rows, limits, numbers, heads, groups, count,
    WEIGH: tl.constexpr, NEGATIVE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of Σ u v of softmax attention, their maxima and their Σ u; or o and the numbers of rows, if `totals` is
    None."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    part, shared, item, head, i = packed_rows(limits, heads, groups, count, ROWS)
    queries, left = limits[0], limits[2]
    hi = key_ends(i, queries, valid_keys(rows[0], limits[1], item, head), limits[3], rows[1], item, head)
    beside = tl.arange(0, ROWS)
    at, i0 = (item, head[:, None], shared, item), (i - beside)[:, None]
    q_tile = load_rows(q, item, at[1], i0, beside, i < queries, d, D)
    q_tile, scale = rising_scale(q_tile, numbers[0], NEGATIVE)
    FOLD: tl.constexpr = (pairs[0] is None and pairs[5] is None) and q_tile.dtype != tl.float32
    unit = scale if FOLD else 1.0
    first, stop = own_keys(part, count, hi, left, KEYS)
    bounds = (hi, stop) if left is None else (hi, stop, left, -left)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
    sums = nothing(ROWS, E, False)
    for j0 in range(first, stop, KEYS):
        top, total, sums = add_tile(
            top, total, sums, q_tile, k, v, scale, unit * unit_of(WEIGH), pairs, at, i0, bounds, j0, queries,
            WEIGH, FOLD, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    total, top = tl.sum(total, 1), top * unit
    sum_of_values = whole_sum(sums, None, v[0].dtype.element_ty)
    if totals is None:
        rest = None
        if rows[2] is not None:
            top, total, shrink, rest = beside_sink(top, total, sink_of(rows, item, head), WEIGH)
            sum_of_values *= shrink[:, None]
        sum_of_values *= (numbers[1] / divisor(total))[:, None]
        store_stats(stats, lse, item, head, i, queries, finite(top), None, None, total * 2.0 ** -lift_of(WEIGH), rest)
    else:
        store_of_rows(of_part(tops, part), item, head, i, queries, top)
        store_of_rows(of_part(totals, part), item, head, i, queries, total)
    store_rows(of_part(parts, part), item, at[1], i0, beside, i < queries, sum_of_values, e, E)


@triton.jit
def combine(
    parts, tops, totals, o, stats, lse, rows, gain, queries, heads, count,
    WEIGH: tl.constexpr, e: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """o of one query, and its numbers, of which `stats` has the first and the last, if `totals` is not None; PARTS are
    read at a time."""
    i, head, item = place(queries, heads)
    beside, columns = tl.arange(0, PARTS), tl.arange(0, E)
    of_sums, sums, top, total = of_query(parts, item, head, i), tl.zeros((E,), tl.float32), 0.0, 0.0
    if totals is not None:
        of_tops, of_totals, top = of_query(tops, item, head, i), of_query(totals, item, head, i), float("-inf")
        for first in range(0, count, PARTS):
            top = tl.maximum(top, tl.max(load_of_rows(of_tops, 0, 0, first + beside, count, float("-inf")), 0))
    for first in range(0, count, PARTS):
        x = load_rows(of_sums, 0, 0, first, beside, first + beside < count, e, E)
        if totals is not None:
            weight = exp(load_of_rows(of_tops, 0, 0, first + beside, count, float("-inf")) - finite(top))
            total += tl.sum(load_of_rows(of_totals, 0, 0, first + beside, count, 0.0) * weight, 0)
            x *= weight[:, None]
        sums += tl.sum(x, 0)
    if totals is not None:
        rest = None
        if rows[2] is not None:
            top, total, shrink, rest = beside_sink(top, total, sink_of(rows, item, head), WEIGH)
            sums *= shrink
        sums *= gain / divisor(total)
        stats = (stats[0], None, None, stats[1])
        store_stats(stats, lse, item, head, i, queries, finite(top), None, None, total * 2.0 ** -lift_of(WEIGH), rest)
    tl.store(corner(o, item, head, i, 0) + columns * o[4], sums.to(o[0].dtype.element_ty), mask=columns < e)
