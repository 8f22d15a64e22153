"""The gradients of attention by rows of weights that sum to 1, from the numbers that the kernels of `rows` save.

    u_ij = tilt(p_ij)      dp_ij = r_ij do_i·v_j            δ_i = Σ_j u_ij dp_ij / (p_i + Σ_j u_ij) - dlse_i/gain
    ds_ij = gain·u_ij (dp_ij - δ_i)                         dv_j = gain Σ_i r_ij p_ij do_i

dq, dk and dbias follow from ds: dq and δ by queries, dk and dv by keys, dbias by tiles. Tuples are those of `rows`. p_i
is the weight of the sink, 0 without one, and its gradient is -gain Σ_i p_i δ_i.

`dstats` holds cotangents of statistics (`attnkit.kernels.triton.statistics`) divided by gain, whose gradient of p_ij is
added to dp_ij; without v and do it is all of dp_ij. Without statistics none of this is compiled.

The gate of token l of forgetting attention lies between the pairs i ≥ l > j, i and j being tokens: its gradient is the
sum of their ds, by whose rounding alone it is judged, so that no sum over others may be taken away. The tokens of the
queries of a program of `backward_tiled` are a *group*, and so are as many tokens before the first query. A gate's pairs
are then

    i in its group      `crossing`: row by row the sum over the keys before it, in the tiles of the group
    i behind its group, j before it     sums over whole groups of queries and keys, `tiles`
    i behind its group, j in it         `later`: for each key the sum over the queries behind its group

    gates = (crossing, tiles, later, size, lacking, groups)     (items, heads, S) or (items, heads, groups of queries,
                                                groups); token j is in group (j + lacking) // size
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import exp
from attnkit.kernels.triton.rows import (
    begin,
    bounds_of,
    divisor,
    load_stats,
    relative,
    scores,
    sink_of,
    standing_scores,
    weights,
)
from attnkit.kernels.triton.statistics import addresses, load_cotangents, with_statistics
from attnkit.kernels.triton.tiles import (
    add_product,
    after_dropout,
    key_blocks,
    key_ends,
    left_of,
    load_of_rows,
    load_rows,
    nothing,
    place,
    placed,
    queries_of_a_tile,
    query_blocks,
    right_of,
    store_of_rows,
    store_rows,
    valid_keys,
    visible_pairs,
    whole_sum,
)


@triton.jit
def standing_slopes(
    q_tile, do_tile, dstats, drows, k, v, row, pairs, numbers, at, i0, bounds, j0,
    WEIGH: tl.constexpr, TILT: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u and dp of a standing tile, and its keys."""
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    s, inside, seen, keys = standing_scores(
        q_tile, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    values = None if v is None else load_rows(v, at[3], at[2], j0, columns, seen, e, E)
    x = relative(s, row[0][:, None], numbers)
    p = weights(x, row[1][:, None], row[2][:, None], numbers, WEIGH) * row[3][:, None]
    j = columns[None, :]
    dp = None if v is None else through_output(do_tile, values, pairs, at, i0, i, j0, j, inside, PRECISION)
    if dstats[0] is not None:
        dp = with_statistics(dp, dstats, drows, p, 1.0, j0 + j)
    return TILT(p, numbers[2]), tl.where(inside, dp, 0.0), keys


@triton.jit
def through_output(x_tile, y_tile, pairs, at, i0, i, j0, j, inside, PRECISION: tl.constexpr):
    """r do_i·v_j for a tile."""
    dp = tl.dot(x_tile, tl.trans(y_tile), input_precision=PRECISION)
    return after_dropout(dp, pairs[2], pairs[3], pairs[4], at[0], at[1], i0, i, j0, j, inside)


@triton.jit
def cotangents_of(dstats, at, i0, queries, heads, ROWS: tl.constexpr):
    """The cotangents of statistics for the queries of a standing tile; an empty tuple without any."""
    i, drows = i0 + tl.arange(0, ROWS), ()
    if dstats[0] is not None:
        drows = load_cotangents(dstats, addresses(i, at[0], at[1], heads, queries)[:, None], (i < queries)[:, None])
    return drows


@triton.jit
def means(products, total, dlse, gain, at, i, queries):
    """δ from Σ u dp and Σ u, 0 on null rows."""
    delta = products / divisor(total)
    if dlse is not None:
        delta -= load_of_rows(dlse, at[0], at[1], i, queries, 0.0).to(tl.float32) / gain
    return tl.where(total == 0.0, 0.0, delta)


@triton.jit
def with_sink(total, row, rows, at):
    """Σ u of rows, and the weight of the sink if there is one."""
    if rows[2] is not None:
        total += exp(tl.minimum(sink_of(rows, at[0], at[1]) - row[0], 0.0)) * row[3]
    return total


@triton.jit
def store_crossing(gates, ds, before, fade, at, i0, j0, heads, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """For the gates of the group that stand behind a key of a tile, the sum over the queries from the gate on of ds at
    that key and the ones before it; `before` are the sums over the keys before the tile."""
    first = i0 + fade[5]
    if j0 + KEYS >= first:
        at_keys, at_queries = j0 + tl.arange(0, KEYS), first + tl.arange(0, ROWS)
        until = before[:, None] + tl.cumsum(ds, 1)
        crossing = tl.sum(tl.where(at_queries[:, None] > at_keys[None, :], until, 0.0), 0)
        own = at_keys + 1
        inside = (own >= first) & (own < tl.minimum(first + ROWS, fade[6]))
        tl.store(gates[0] + addresses(own, at[0], at[1], heads, fade[6]), crossing, mask=inside)


@triton.jit
def store_tiles(gates, ds, whole, at, i0, j0, heads, queries, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The sums of ds over the groups that the keys of a tile are in, which are two at most; `whole` is what earlier
    tiles have of the first, and returned for the next tile."""
    tl.static_assert(KEYS <= ROWS)
    group = (j0 + gates[4]) // ROWS
    of_keys, at_keys, end = tl.sum(ds, 0), j0 + tl.arange(0, KEYS), (group + 1) * ROWS - gates[4]
    whole += tl.sum(tl.where(at_keys < end, of_keys, 0.0), 0)
    following = tl.sum(tl.where(at_keys < end, 0.0, of_keys), 0)
    place_of = gates[1] + addresses(i0 // ROWS, at[0], at[1], heads, tl.cdiv(queries, ROWS)) * gates[5] + group
    tl.store(place_of, whole)
    tl.store(place_of + 1, following, mask=group + 1 < gates[5])
    return tl.where(j0 + KEYS >= end, following, whole)


@triton.jit
def backward_resident(
    q, k, v, do, dstats, dq, stats, delta, dlse, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, unless it is None, and δ for ROWS queries of one head that has at most KEYS keys."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, bounds = own[0], bounds_of(at, i0, limits, own, rows, blocks, ROWS)
    beside = tl.arange(0, ROWS)
    row = load_stats(stats, at, i0 + beside, queries)
    do_tile = None if do is None else load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    drows = cotangents_of(dstats, at, i0, queries, heads, ROWS)
    u, dp, keys = standing_slopes(
        q_tile, do_tile, dstats, drows, k, v, row, pairs, numbers, at, i0, bounds, 0,
        WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    total = with_sink(tl.sum(u, 1), row, rows, at)
    mean = means(tl.sum(u * dp, 1), total, dlse, numbers[1], at, i0 + beside, queries)
    store_of_rows(delta, at[0], at[1], i0 + beside, queries, mean)
    if dq is not None:
        sums = nothing(ROWS, D, False)
        sums = add_product(sums, u * (dp - mean[:, None]), keys, PRECISION)
        total = whole_sum(sums, None, k[0].dtype.element_ty) * (numbers[0] * numbers[1])
        store_rows(dq, at[0], at[1], i0, beside, i0 + beside < queries, total, d, D)


@triton.jit
def backward_tiled(
    q, k, v, do, dstats, dq, stats, delta, dlse, gates, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for any number of keys: a pass for δ and one for dq, and for `crossing` and `tiles` of gates."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, bounds = own[0], bounds_of(at, i0, limits, own, rows, blocks, ROWS)
    beside = tl.arange(0, ROWS)
    row = load_stats(stats, at, i0 + beside, queries)
    do_tile = None if do is None else load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    drows = cotangents_of(dstats, at, i0, queries, heads, ROWS)
    products, totals = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for j0 in range(blocks[0], blocks[3], KEYS):
        u, dp, _ = standing_slopes(
            q_tile, do_tile, dstats, drows, k, v, row, pairs, numbers, at, i0, bounds, j0,
            WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        products += tl.sum(u * dp, 1)
        totals += tl.sum(u, 1)
    totals = with_sink(totals, row, rows, at)
    mean = means(products, totals, dlse, numbers[1], at, i0 + beside, queries)
    store_of_rows(delta, at[0], at[1], i0 + beside, queries, mean)
    if dq is not None:
        sums = nothing(ROWS, D, False)
        if gates is not None:
            before, whole = tl.zeros((ROWS,), tl.float32), 0.0
        for j0 in range(blocks[0], blocks[3], KEYS):
            u, dp, keys = standing_slopes(
                q_tile, do_tile, dstats, drows, k, v, row, pairs, numbers, at, i0, bounds, j0,
                WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            ds = u * (dp - mean[:, None])
            sums = add_product(sums, ds, keys, PRECISION)
            if gates is not None:
                store_crossing(gates, ds, before, pairs[5], at, i0, j0, heads, ROWS, KEYS)
                whole = store_tiles(gates, ds, whole, at, i0, j0, heads, queries, ROWS, KEYS)
                before += tl.sum(ds, 1)
        total = whole_sum(sums, None, k[0].dtype.element_ty) * (numbers[0] * numbers[1])
        store_rows(dq, at[0], at[1], i0, beside, i0 + beside < queries, total, d, D)


@triton.jit
def backward_keys(
    q, k, v, do, dstats, dk, dv, stats, delta, gates, pairs, rows, limits, numbers, stored, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv unless do is None, and `later` of gates, for KEYS of the `stored` keys of one of `heads` heads, which
    `groups` query heads share."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    block, shared, item, key_item, queries, keys = placed(limits, stored, heads, KEYS, True)
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    if limits[4] is not None:
        stored = keys
    j0, columns, beside = block * KEYS, tl.arange(0, KEYS), tl.arange(0, ROWS)
    i, j = beside[None, :], columns[:, None]
    dk_sums = nothing(KEYS, D, False)
    dv_sums = () if do is None else nothing(KEYS, E, False)
    k_tile = load_rows(k, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    v_tile = None if v is None else load_rows(v, key_item, shared, j0, columns, j0 + columns < keys, e, E)
    for member in range(groups):
        at = (item, shared * groups + member, shared, key_item)
        valid = valid_keys(rows[0], keys, item, at[1])
        first, _, _, stop = query_blocks(j0, queries, valid, left, right, ROWS, KEYS)
        if gates is not None:
            later = tl.zeros((KEYS,), tl.float32)
            behind = ((j0 + columns + gates[4]) // gates[3] + 1) * gates[3] - gates[4] - pairs[5][5]
        for i0 in range(first, stop, ROWS):
            hi = key_ends(i0 + beside, queries, valid, right, rows[1], item, at[1])
            inside = visible_pairs(pairs[1], left, hi[None, :], item, at[1], i0, i, j0, j)
            seen = queries_of_a_tile(inside, i0 + beside, left, hi, j0, KEYS, pairs[1] is not None)
            q_tile = load_rows(q, item, at[1], i0, beside, seen, d, D)
            do_tile = None if do is None else load_rows(do, item, at[1], i0, beside, seen, e, E)
            row = load_stats(stats, at, i0 + beside, queries)
            mean = load_of_rows(delta, item, at[1], i0 + beside, queries, 0.0)
            products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            s = scores(products, pairs, numbers, at, i0, i, j0, j, inside)
            x = relative(s, row[0][None, :], numbers)
            p = weights(x, row[1][None, :], row[2][None, :], numbers, WEIGH) * row[3][None, :]
            dp = None if do is None else through_output(v_tile, do_tile, pairs, at, i0, i, j0, j, inside, PRECISION)
            if dstats[0] is not None:
                at_rows = addresses(i0 + i, item, at[1], heads * groups, queries)
                dp = with_statistics(dp, dstats, load_cotangents(dstats, at_rows, i0 + i < queries), p, 1.0, j0 + j)
            ds = tl.where(inside, TILT(p, numbers[2]) * (dp - mean[None, :]), 0.0)
            if do is not None:
                p = after_dropout(p, pairs[2], pairs[3], pairs[4], item, at[1], i0, i, j0, j, inside)
                dv_sums = add_product(dv_sums, p, do_tile, PRECISION)
            dk_sums = add_product(dk_sums, ds, q_tile, PRECISION)
            if gates is not None:
                later += tl.sum(tl.where(i0 + i >= behind[:, None], ds, 0.0), 1)
        if gates is not None:
            at_keys = gates[2] + addresses(j0 + columns, item, at[1], heads * groups, stored)
            tl.store(at_keys, later, mask=j0 + columns < stored)
    in_range = j0 + columns < stored
    dk_total = whole_sum(dk_sums, None, q[0].dtype.element_ty) * (numbers[0] * numbers[1])
    store_rows(dk, key_item, shared, j0, columns, in_range, dk_total, d, D)
    if do is not None:
        dv_total = whole_sum(dv_sums, None, do[0].dtype.element_ty) * numbers[1]
        store_rows(dv, key_item, shared, j0, columns, in_range, dv_total, e, E)


@triton.jit
def backward_bias(
    q, k, v, do, dstats, dbias, stats, delta, pairs, rows, limits, numbers, stored, items, heads, groups, bias_items,
    bias_heads, WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (bias_items, bias_heads, L, S) for one tile, summed over the items and heads that share it."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    queries, keys, left, right = limits[:4]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    across = tl.cdiv(stored, KEYS)
    block, first_head, first_item = place(tl.cdiv(queries, ROWS) * across, bias_heads)
    i0, j0 = block // across * ROWS, block % across * KEYS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    in_range = i0 + beside < queries
    sums = tl.zeros((ROWS, KEYS), tl.float32)
    for item in range(first_item, items, bias_items):
        for head in range(first_head, heads, bias_heads):
            at = (item, head, head // groups, item)
            valid = valid_keys(rows[0], keys, item, head)
            hi = key_ends(i0 + beside, queries, valid, right, rows[1], item, head)
            first, _, _, stop = key_blocks(i0, queries, valid, left, right, ROWS, KEYS)
            if (j0 < stop) & (j0 + KEYS > first):
                q_tile = load_rows(q, item, head, i0, beside, in_range, d, D)
                do_tile = None if do is None else load_rows(do, item, head, i0, beside, in_range, e, E)
                drows = cotangents_of(dstats, at, i0, queries, heads, ROWS)
                row = load_stats(stats, at, i0 + beside, queries)
                mean = load_of_rows(delta, item, head, i0 + beside, queries, 0.0)
                bounds = (hi, stop) if left is None else (hi, stop, left, i0 - left)
                u, dp, _keys = standing_slopes(
                    q_tile, do_tile, dstats, drows, k, v, row, pairs, numbers, at, i0, bounds, j0,
                    WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
                )  # fmt: skip
                sums += u * (dp - mean[:, None])
    at_pairs = dbias[0] + first_item * dbias[1] + first_head * dbias[2]
    at_pairs += (i0 + beside[:, None]).to(tl.int64) * dbias[3] + (j0 + columns[None, :])
    tl.store(at_pairs, sums * numbers[1], mask=in_range[:, None] & (j0 + columns[None, :] < stored))
