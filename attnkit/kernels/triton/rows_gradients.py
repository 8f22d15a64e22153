"""Gradients of attention by rows of weights that sum to 1, from the numbers that the kernels in `rows` leave.

Every program owns its results, so that sums have one order: dq and δ by queries, dk and dv by keys, dbias by tiles.
Formulas and tuples are those of `rows`.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.rows import begin, divisor, relative, scores, standing_scores, weights
from attnkit.kernels.triton.tiles import (
    add_product,
    after_dropout,
    key_blocks,
    key_ranges,
    load_of_rows,
    load_rows,
    lying,
    nothing,
    place,
    placed_limits,
    queries_of_a_tile,
    query_blocks,
    standing,
    store_of_rows,
    store_rows,
    valid_keys,
    visible_pairs,
    whole_sum,
)


@triton.jit
def load_found(found, at, i, queries):
    """The numbers of the queries i."""
    top = load_of_rows(found[0], at[0], at[1], i, queries, 0.0)
    tau, step = None, None
    if found[1] is not None:
        tau = load_of_rows(found[1], at[0], at[1], i, queries, 0.0)
        step = load_of_rows(found[2], at[0], at[1], i, queries, 0.0)
    return top, tau, step, load_of_rows(found[3], at[0], at[1], i, queries, 0.0)


@triton.jit
def standing_slopes(
    queried, pulled, k, v, row, pairs, numbers, at, i0, bounds, j0,
    WEIGH: tl.constexpr, TILT: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u and dp of a standing tile, and its keys."""
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    s, inside, seen, keys = standing_scores(
        queried, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    values = load_rows(v, at[3], at[2], j0, columns, seen, e, E)
    x = relative(s, row[0][:, None], numbers)
    p = weights(x, standing(row[1]), standing(row[2]), numbers, WEIGH) * row[3][:, None]
    dp = tl.dot(pulled, tl.trans(values), input_precision=PRECISION)
    dp = after_dropout(dp, pairs[2], pairs[3], pairs[4], at[0], at[1], i0, i, j0, columns[None, :], inside)
    return TILT(p, numbers[2]), tl.where(inside, dp, 0.0), keys


@triton.jit
def means(products, total, dlse, gain, at, i, queries):
    """δ from Σ u dp and Σ u, 0 on null rows."""
    delta = products / divisor(total)
    if dlse is not None:
        delta -= load_of_rows(dlse, at[0], at[1], i, queries, 0.0).to(tl.float32) / gain
    return tl.where(total == 0.0, 0.0, delta)


@triton.jit
def backward_resident(
    q, k, v, do, dq, found, delta, dlse, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, unless it is None, and δ for ROWS queries of one head that has at most KEYS keys."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, queries, queried, bounds, _ = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    beside = tl.arange(0, ROWS)
    row = load_found(found, at, i0 + beside, queries)
    pulled = load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    u, dp, keys = standing_slopes(
        queried, pulled, k, v, row, pairs, numbers, at, i0, bounds, 0,
        WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    mean = means(tl.sum(u * dp, 1), tl.sum(u, 1), dlse, numbers[1], at, i0 + beside, queries)
    store_of_rows(delta, at[0], at[1], i0 + beside, queries, mean)
    if dq is not None:
        sums = nothing(ROWS, D, False)
        sums = add_product(sums, u * (dp - mean[:, None]), keys, PRECISION)
        total = whole_sum(sums, None, k[0].dtype.element_ty) * (numbers[0] * numbers[1])
        store_rows(dq, at[0], at[1], i0, beside, i0 + beside < queries, total, d, D)


@triton.jit
def backward_tiled(
    q, k, v, do, dq, found, delta, dlse, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for any number of keys: a pass for δ and one for dq."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, queries, queried, bounds, first = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    beside = tl.arange(0, ROWS)
    row = load_found(found, at, i0 + beside, queries)
    pulled = load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    products, totals = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for j0 in range(first, bounds[3], KEYS):
        u, dp, _ = standing_slopes(
            queried, pulled, k, v, row, pairs, numbers, at, i0, bounds, j0,
            WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        products += tl.sum(u * dp, 1)
        totals += tl.sum(u, 1)
    mean = means(products, totals, dlse, numbers[1], at, i0 + beside, queries)
    store_of_rows(delta, at[0], at[1], i0 + beside, queries, mean)
    if dq is not None:
        sums = nothing(ROWS, D, False)
        for j0 in range(first, bounds[3], KEYS):
            u, dp, keys = standing_slopes(
                queried, pulled, k, v, row, pairs, numbers, at, i0, bounds, j0,
                WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            sums = add_product(sums, u * (dp - mean[:, None]), keys, PRECISION)
        total = whole_sum(sums, None, k[0].dtype.element_ty) * (numbers[0] * numbers[1])
        store_rows(dq, at[0], at[1], i0, beside, i0 + beside < queries, total, d, D)


@triton.jit
def backward_keys(
    q, k, v, do, dk, dv, found, delta, pairs, rows, limits, numbers, stored, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for KEYS of the `stored` keys of one of `heads` heads, which `groups` query heads share."""
    block, shared, item, key_item, own = placed_limits(limits, stored, heads, KEYS, True)
    queries, keys, left, right = own
    if limits[4] is not None:
        stored = keys
    j0, columns, beside = block * KEYS, tl.arange(0, KEYS), tl.arange(0, ROWS)
    i, j = beside[None, :], columns[:, None]
    dk_sums = nothing(KEYS, D, False)
    dv_sums = nothing(KEYS, E, False)
    keyed = load_rows(k, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    valued = load_rows(v, key_item, shared, j0, columns, j0 + columns < keys, e, E)
    for member in range(groups):
        at = (item, shared * groups + member, shared, key_item)
        valid = valid_keys(rows[0], keys, item, at[1])
        first, _, _, stop = query_blocks(j0, queries, valid, left, right, ROWS, KEYS)
        for i0 in range(first, stop, ROWS):
            lo, hi = key_ranges(i0 + beside, queries, valid, left, right, rows[1], item, at[1])
            inside = visible_pairs(pairs[1], lying(lo), lying(hi), item, at[1], i0, i, j0, j)
            seen = queries_of_a_tile(inside, lo, hi, j0, KEYS, pairs[1] is not None)
            queried = load_rows(q, item, at[1], i0, beside, seen, d, D)
            pulled = load_rows(do, item, at[1], i0, beside, seen, e, E)
            row = load_found(found, at, i0 + beside, queries)
            mean = load_of_rows(delta, item, at[1], i0 + beside, queries, 0.0)
            products = tl.dot(keyed, tl.trans(queried), input_precision=PRECISION)
            s = scores(products, pairs[0], numbers, at, i0, i, j0, j, inside)
            x = relative(s, row[0][None, :], numbers)
            p = weights(x, lying(row[1]), lying(row[2]), numbers, WEIGH) * row[3][None, :]
            dp = tl.dot(valued, tl.trans(pulled), input_precision=PRECISION)
            dp = after_dropout(dp, pairs[2], pairs[3], pairs[4], item, at[1], i0, i, j0, j, inside)
            ds = tl.where(inside, TILT(p, numbers[2]) * (dp - mean[None, :]), 0.0)
            p = after_dropout(p, pairs[2], pairs[3], pairs[4], item, at[1], i0, i, j0, j, inside)
            dv_sums = add_product(dv_sums, p, pulled, PRECISION)
            dk_sums = add_product(dk_sums, ds, queried, PRECISION)
    kept = j0 + columns < stored
    dk_total = whole_sum(dk_sums, None, q[0].dtype.element_ty) * (numbers[0] * numbers[1])
    dv_total = whole_sum(dv_sums, None, do[0].dtype.element_ty) * numbers[1]
    store_rows(dk, key_item, shared, j0, columns, kept, dk_total, d, D)
    store_rows(dv, key_item, shared, j0, columns, kept, dv_total, e, E)


@triton.jit
def backward_bias(
    q, k, v, do, dbias, found, delta, pairs, rows, limits, numbers, stored, items, heads, groups, bias_items,
    bias_heads, WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (bias_items, bias_heads, L, S) for one tile, summed over the items and heads that share it."""
    queries, keys, left, right, _packed = limits
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    across = tl.cdiv(stored, KEYS)
    block, first_head, first_item = place(tl.cdiv(queries, ROWS) * across, bias_heads)
    i0, j0 = block // across * ROWS, block % across * KEYS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    kept = i0 + beside < queries
    sums = tl.zeros((ROWS, KEYS), tl.float32)
    for item in range(first_item, items, bias_items):
        for head in range(first_head, heads, bias_heads):
            at = (item, head, head // groups, item)
            valid = valid_keys(rows[0], keys, item, head)
            lo, hi = key_ranges(i0 + beside, queries, valid, left, right, rows[1], item, head)
            first, _, _, stop = key_blocks(i0, queries, valid, left, right, ROWS, KEYS)
            if (j0 < stop) & (j0 + KEYS > first):
                queried = load_rows(q, item, head, i0, beside, kept, d, D)
                pulled = load_rows(do, item, head, i0, beside, kept, e, E)
                row = load_found(found, at, i0 + beside, queries)
                mean = load_of_rows(delta, item, head, i0 + beside, queries, 0.0)
                bounds = (lo, hi, None if left is None else i0 - left, stop)
                u, dp, _keys = standing_slopes(
                    queried, pulled, k, v, row, pairs, numbers, at, i0, bounds, j0,
                    WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
                )  # fmt: skip
                sums += u * (dp - mean[:, None])
    at_pairs = dbias[0] + first_item * dbias[1] + first_head * dbias[2]
    at_pairs += (i0 + beside[:, None]).to(tl.int64) * dbias[3] + (j0 + columns[None, :])
    tl.store(at_pairs, sums * numbers[1], mask=kept[:, None] & (j0 + columns[None, :] < stored))
