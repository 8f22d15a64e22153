"""Softpick attention and its gradients, one sweep forward, like softmax with a running maximum.

With m_i = max(0, max_j s_ij), p_ij = exp(s_ij - m_i) and a_ij = p_ij - exp(-m_i), sums over the keys that i sees,

    D_i = Σ_j |a_ij| + eps       w_ij = relu(a_ij)/D_i       o_i = gain Σ_j r_ij w_ij v_j
    dp_ij = r_ij do_i·v_j        c_i = Σ_j w_ij dp_ij        dv_j = gain Σ_i r_ij w_ij do_i
    ds_ij = gain (p_ij ([s_ij > 0] dp_ij - sign(s_ij) c_i) - [j = f_i] eps c_i)/D_i

f_i is the first key with the largest score of a row, -1 where none is above 0: m depends on it, which cancels
everywhere but beside eps. A score of 0 has neither weight nor slope: hidden pairs are given it. Tuples are those of
`rows`, except

    numbers = (scale, gain, eps)
    stats = (m, None, None, 1/D)
    delta = (c, f)                  views without columns, which the kernel of dq stores and the others read

One kernel finds c and f, so that all have the same f, however the products of their tiles are rounded.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import LOG2_E, exp, relu
from attnkit.kernels.triton.rows import (
    add_values,
    begin,
    bounds_of,
    load_stats,
    scores,
    standing_scores,
    store_output,
    store_stats,
    unscaled,
)
from attnkit.kernels.triton.rows_gradients import through_output
from attnkit.kernels.triton.special import fast_exp2
from attnkit.kernels.triton.tiles import (
    add_product,
    after_dropout,
    first_key,
    key_blocks,
    key_ends,
    left_of,
    load_of_rows,
    load_rows,
    nothing,
    numbered,
    place,
    placed,
    queries_of_a_tile,
    query_blocks,
    right_of,
    store_of_rows,
    store_rows,
    sums_of,
    valid_keys,
    visible_pairs,
    whole_sum,
)

BEYOND = tl.constexpr(2**31 - 1)  # all keys


@triton.jit
def expm1(x):
    """exp(x) - 1 for |x| ≤ ½, to one unit: x + x² q(x), q by interpolation at Chebyshev nodes."""
    q = x * 0.000199448739 + 0.00139821856
    q = q * x + 0.00833323598
    q = q * x + 0.0416657925
    q = q * x + 0.166666672
    q = q * x + 0.5
    return tl.fma(x * x, q, x)


@triton.jit
def falling(x, dtype):
    """exp(x) for x ≤ 0, to 2^-22 and in few instructions for inputs of half types."""
    return exp(x) if dtype == tl.float32 else fast_exp2(x * LOG2_E)


@triton.jit
def excess(s, top, dtype):
    """p and a from scores and the m of their rows; a has the digits of scores near 0, where p and exp(-m) are near."""
    p, base = falling(s - top, dtype), falling(-top, dtype)
    return p, tl.where(tl.abs(s) < 0.5, expm1(s) * base, p - base)


@triton.jit
def add_tile(
    top, total, sums, q_tile, k, v, scale, pairs, at, i0, bounds, j0, queries,
    EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running m, Σ |a| and, if there is a v, Σ r relu(a) v with the keys of one more tile."""
    s, inside, seen = unscaled(
        q_tile, k, scale, pairs, at, i0, bounds, j0, queries, False, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    higher = tl.maximum(top, tl.max(s, 1))
    if EDGE:
        s = tl.where(inside, s, 0.0)
    _, a = excess(s, higher[:, None], q_tile.dtype)
    shrink = falling(top - higher, q_tile.dtype)
    total = total * shrink[:, None] + sums_of(tl.abs(a))
    if v is not None:
        sums = (sums[0] * shrink[:, None], sums[1])
        values = load_rows(v, at[3], at[2], j0, tl.arange(0, KEYS), seen if EDGE else None, e, E)
        sums = add_values(sums, relu(a), inside, values, pairs, at, i0, j0, ROWS, KEYS, PRECISION)
    return higher, total, sums


@triton.jit
def forward_online(
    q, k, v, o, stats, pairs, rows, limits, numbers, heads, groups,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o, unless it is None, and the numbers of ROWS queries of a head."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries = own[0]
    top, total = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, 4), tl.float32)
    sums, sequences = nothing(ROWS, E, False), numbered(blocks, KEYS, MASKED)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            top, total, sums = add_tile(
                top, total, sums, q_tile, k, None if o is None else v, numbers[0], pairs, at, i0, bounds, j0, queries,
                EDGE, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
    total = tl.sum(total, 1) + numbers[2]
    if o is not None:
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    store_stats(stats, None, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, None, None, total, None)


# ---------------------------------------------------------------------------------------------- gradients


@triton.jit
def slopes(s, p, dp, c, share, of_first):
    """ds/gain from p/D, and at first maxima less share·c, share = eps/D."""
    ds = p * tl.where(s > 0.0, dp - c, tl.where(s < 0.0, c, 0.0))
    return tl.where(of_first, ds - share * c, ds)


@triton.jit
def first_maximum(highest, first, s, j):
    """The largest score above 0 so far, and the first key that has it, with one more tile of later keys."""
    top = tl.max(s, 1)
    key = tl.min(tl.where(s == top[:, None], j, BEYOND), 1)
    return tl.maximum(highest, top), tl.where(top > highest, key, first)


@triton.jit
def standing_slopes(
    q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
    MASKED: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s, p/D, w and dp of a standing tile, and its keys."""
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    s, inside, seen, keys = standing_scores(
        q_tile, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    values = load_rows(v, at[3], at[2], j0, columns, seen, e, E)
    s = tl.where(inside, s, 0.0)
    p, a = excess(s, row[0][:, None], q_tile.dtype)
    dp = through_output(do_tile, values, pairs, at, i0, i, j0, columns[None, :], inside, PRECISION)
    return s, p * row[3][:, None], relu(a) * row[3][:, None], tl.where(inside, dp, 0.0), keys


@triton.jit
def backward_tiled(
    q, k, v, do, dq, stats, delta, pairs, rows, limits, numbers, heads, groups,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """c and f of ROWS queries of one head, and dq unless it is None, each in a pass over the keys."""
    stats, pairs, rows, delta = stats[:], pairs[:], rows[:], delta[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, bounds = own[0], bounds_of(at, i0, limits, own, rows, blocks, ROWS)
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    row = load_stats(stats, at, i0 + beside, queries)
    do_tile = load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    c, highest, first = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), -1, tl.int32)
    for j0 in range(blocks[0], blocks[3], KEYS):
        s, _, w, dp, _ = standing_slopes(
            q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
            MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        c += tl.sum(w * dp, 1)
        highest, first = first_maximum(highest, first, s, j0 + columns[None, :])
    store_of_rows(delta[0], at[0], at[1], i0 + beside, queries, c)
    store_of_rows(delta[1], at[0], at[1], i0 + beside, queries, first)
    if dq is not None:
        sums, share = nothing(ROWS, D, False), row[3] * numbers[2]
        for j0 in range(blocks[0], blocks[3], KEYS):
            s, p, _, dp, keys = standing_slopes(
                q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
                MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            ds = slopes(s, p, dp, c[:, None], share[:, None], j0 + columns[None, :] == first[:, None])
            sums = add_product(sums, ds, keys, PRECISION)
        total = whole_sum(sums, None, k[0].dtype.element_ty) * (numbers[0] * numbers[1])
        store_rows(dq, at[0], at[1], i0, beside, i0 + beside < queries, total, d, D)


@triton.jit
def backward_keys(
    q, k, v, do, dk, dv, stats, delta, pairs, rows, limits, numbers, stored, heads, groups,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for KEYS of the `stored` keys of one of `heads` heads, which `groups` query heads share."""
    stats, pairs, rows, delta = stats[:], pairs[:], rows[:], delta[:]
    block, shared, item, key_item, queries, keys = placed(limits, stored, heads, KEYS, True)
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    j0, columns, beside = block * KEYS, tl.arange(0, KEYS), tl.arange(0, ROWS)
    i, j = beside[None, :], columns[:, None]
    dk_sums, dv_sums = nothing(KEYS, D, False), nothing(KEYS, E, False)
    k_tile = load_rows(k, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    v_tile = load_rows(v, key_item, shared, j0, columns, j0 + columns < keys, e, E)
    for member in range(groups):
        at = (item, shared * groups + member, shared, key_item)
        valid = valid_keys(rows[0], keys, item, at[1])
        first, _, _, stop = query_blocks(j0, queries, valid, left, right, ROWS, KEYS)
        for i0 in range(first, stop, ROWS):
            hi = key_ends(i0 + beside, queries, valid, right, rows[1], item, at[1])
            inside = visible_pairs(pairs[1], left, hi[None, :], item, at[1], i0, i, j0, j)
            seen = queries_of_a_tile(inside, i0 + beside, left, hi, j0, KEYS, pairs[1] is not None)
            q_tile = load_rows(q, item, at[1], i0, beside, seen, d, D)
            do_tile = load_rows(do, item, at[1], i0, beside, seen, e, E)
            row = load_stats(stats, at, i0 + beside, queries)
            c = load_of_rows(delta[0], item, at[1], i0 + beside, queries, 0.0)
            key = load_of_rows(delta[1], item, at[1], i0 + beside, queries, -1)
            products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            s = tl.where(inside, scores(products, pairs, numbers, at, i0, i, j0, j, inside), 0.0)
            p, a = excess(s, row[0][None, :], q_tile.dtype)
            dp = through_output(v_tile, do_tile, pairs, at, i0, i, j0, j, inside, PRECISION)
            share, inverse = row[3] * numbers[2], row[3][None, :]
            ds = slopes(s, p * inverse, dp, c[None, :], share[None, :], j0 + j == key[None, :])
            w = after_dropout(relu(a) * inverse, pairs[2], pairs[3], pairs[4], item, at[1], i0, i, j0, j, inside)
            dv_sums = add_product(dv_sums, w, do_tile, PRECISION)
            dk_sums = add_product(dk_sums, tl.where(inside, ds, 0.0), q_tile, PRECISION)
    in_range = j0 + columns < stored
    dk_total = whole_sum(dk_sums, None, q[0].dtype.element_ty) * (numbers[0] * numbers[1])
    store_rows(dk, key_item, shared, j0, columns, in_range, dk_total, d, D)
    dv_total = whole_sum(dv_sums, None, do[0].dtype.element_ty) * numbers[1]
    store_rows(dv, key_item, shared, j0, columns, in_range, dv_total, e, E)


@triton.jit
def backward_bias(
    q, k, v, do, dbias, stats, delta, pairs, rows, limits, numbers, stored, items, heads, groups, bias_items,
    bias_heads, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (bias_items, bias_heads, L, S) for one tile, summed over the items and heads that share it."""
    stats, pairs, rows, delta = stats[:], pairs[:], rows[:], delta[:]
    queries, keys, left, right = limits[:4]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    across = tl.cdiv(stored, KEYS)
    block, first_head, first_item = place(tl.cdiv(queries, ROWS) * across, bias_heads)
    i0, j0 = block // across * ROWS, block % across * KEYS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    in_range, j = i0 + beside < queries, j0 + columns[None, :]
    sums = tl.zeros((ROWS, KEYS), tl.float32)
    for item in range(first_item, items, bias_items):
        for head in range(first_head, heads, bias_heads):
            at = (item, head, head // groups, item)
            valid = valid_keys(rows[0], keys, item, head)
            hi = key_ends(i0 + beside, queries, valid, right, rows[1], item, head)
            first, _, _, stop = key_blocks(i0, queries, valid, left, right, ROWS, KEYS)
            if (j0 < stop) & (j0 + KEYS > first):
                q_tile = load_rows(q, item, head, i0, beside, in_range, d, D)
                do_tile = load_rows(do, item, head, i0, beside, in_range, e, E)
                row = load_stats(stats, at, i0 + beside, queries)
                c = load_of_rows(delta[0], item, head, i0 + beside, queries, 0.0)
                key = load_of_rows(delta[1], item, head, i0 + beside, queries, -1)
                bounds = (hi, stop) if left is None else (hi, stop, left, i0 - left)
                s, p, _w, dp, _keys = standing_slopes(
                    q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
                    MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
                )  # fmt: skip
                share = row[3] * numbers[2]
                sums += slopes(s, p, dp, c[:, None], share[:, None], j == key[:, None])
    at_pairs = dbias[0] + first_item * dbias[1] + first_head * dbias[2]
    at_pairs += (i0 + beside[:, None]).to(tl.int64) * dbias[3] + j
    tl.store(at_pairs, sums * numbers[1], mask=in_range[:, None] & (j < stored))
