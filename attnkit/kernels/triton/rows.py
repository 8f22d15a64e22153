"""Attention by rows of weights that sum to 1: softmax, sparsemax and entmax, and their gradients.

With the numbers of a row, top = max s, τ and c (None for softmax) and 1/Σ, and the functions of `normalisers`,

    p_ij = weigh((α-1)(s_ij - top_i) - τ_i - c_i)/Σ_i       o_i = gain Σ_j r_ij p_ij v_j
    u_ij = tilt(p_ij)      dp_ij = r_ij do_i·v_j            δ_i = Σ_j u_ij dp_ij / Σ_j u_ij - dlse_i/gain
    ds_ij = gain·u_ij (dp_ij - δ_i)                         dv_j = gain Σ_i r_ij p_ij do_i

dq, dk and dbias follow from ds, computed from the numbers that the forward kernel saves. Every program owns its
results, so sums have a fixed order: dq and δ by queries, dk and dv by keys, dbias by tiles.

τ is found by Newton's method from -1. The mass Σ weigh is convex and decreasing in τ, so τ only rises, and each step
makes excess mass times slope at least four times smaller: with S keys it lies between S² and 2^-24, so 12 + log2 S
steps are enough. A row that no longer rises keeps its τ, however many steps its neighbours need. c is the last step,
which is too small for the precision of τ.

Up to a number of keys a row of scores is *resident*, in registers; for more keys, each pass recomputes its tiles. The
tuples are those of `pointwise`, except

    numbers = (scale, gain, α - 1, power)       the last two are None for softmax; NEGATIVE: scale < 0
    stats = (top, τ, c, 1/Σ)                    views without columns
    own = (queries, keys, visible)              of a program, and how many keys its key_lengths leave
    bounds = (hi, high) or (hi, high, left, low)     where keys end for each query and for all queries of a tile, and
                                                with a bound `left` where they begin for the latter
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.normalisers import lift_of, unit_of
from attnkit.kernels.triton.special import SMALLEST
from attnkit.kernels.triton.tiles import (
    add_product,
    after_dropout,
    first_key,
    key_blocks,
    key_ends,
    keys_of_a_tile,
    left_of,
    load_of_rows,
    load_pairs,
    load_rows,
    maxima_of,
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


@triton.jit
def begin(
    q, rows, limits, heads, groups, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The position of a program with ROWS queries of one head, these queries, `own`, and the blocks of keys."""
    block, head, item, key_item, queries, keys = placed(limits, limits[0], heads, ROWS, False)
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    i0, visible = block * ROWS, valid_keys(rows[0], keys, item, head)
    blocks = key_blocks(i0, queries, visible, left, right, ROWS, KEYS)
    q_tile = load_rows(q, item, head, i0, tl.arange(0, ROWS), i0 + tl.arange(0, ROWS) < queries, d, D)
    return (item, head, head // groups, key_item), i0, q_tile, (queries, keys, visible), blocks


@triton.jit
def bounds_of(at, i0, limits, own, rows, blocks, ROWS: tl.constexpr):
    """The tuple `bounds` of a program, when it is needed: its numbers take registers."""
    queries, keys, visible = own
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    hi = key_ends(i0 + tl.arange(0, ROWS), queries, visible, right, rows[1], at[0], at[1])
    return (hi, blocks[3]) if left is None else (hi, blocks[3], left, i0 - left)


@triton.jit
def scores(products, bias, numbers, at, i0, i, j0, j, inside):
    """s of a tile, -inf on invisible pairs."""
    s = products * numbers[0]
    if bias is not None:
        s += load_pairs(bias, at[0], at[1], i0, i, j0, j, inside).to(tl.float32)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def standing_products(
    q_tile, k, pairs, at, i0, bounds, j0, queries,
    EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q·k of a standing tile, its visible pairs, a mask of the keys that some query sees, and these keys.

    Without EDGE all queries see all keys: pairs are visible if they have a query.
    """
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    j = columns[None, :]
    seen, inside = columns >= 0, i0 + i < queries
    if EDGE:
        left, low = (None, None) if len(bounds) == 2 else bounds[2:]
        if MASKED:
            inside = visible_pairs(pairs[1], left, bounds[0][:, None], at[0], at[1], i0, i, j0, j)
        seen = keys_of_a_tile(inside, j0 + columns, low, bounds[1], MASKED)
    keys = load_rows(k, at[3], at[2], j0, columns, seen if EDGE else None, d, D)
    products = tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION)
    if EDGE and not MASKED:  # after the product, to take no registers before
        inside = visible_pairs(None, left, bounds[0][:, None], at[0], at[1], i0, i, j0, j)
    return products, inside, seen, keys


@triton.jit
def standing_scores(
    q_tile, k, pairs, numbers, at, i0, bounds, j0,
    MASKED: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """s of a standing tile and the rest of `standing_products`."""
    products, inside, seen, keys = standing_products(
        q_tile, k, pairs, at, i0, bounds, j0, 0, True, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
    return scores(products, pairs[0], numbers, at, i0, i, j0, j, inside), inside, seen, keys


@triton.jit
def rising_scale(q_tile, scale, NEGATIVE: tl.constexpr):
    """The queries and a scale above 0 with the same scores: products are ordered as scores then, and -inf stays."""
    if NEGATIVE:
        q_tile, scale = -q_tile, -scale
    return q_tile, tl.maximum(scale, SMALLEST)


@triton.jit
def unscaled(
    q_tile, k, scale, pairs, at, i0, bounds, j0, queries,
    FOLD: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q·k with FOLD, else s, of a standing tile, -inf on invisible pairs, these pairs, and a mask of keys."""
    s, inside, seen, _ = standing_products(
        q_tile, k, pairs, at, i0, bounds, j0, queries, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    if not FOLD:
        s *= scale
        if pairs[0] is not None:
            i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
            s += load_pairs(pairs[0], at[0], at[1], i0, i, j0, j, inside).to(tl.float32)
    if EDGE:
        s = tl.where(inside, s, float("-inf"))
    return s, inside, seen


@triton.jit
def level_of(x, top, factor, FOLD: tl.constexpr):
    """x, which is to be subtracted from (s - top)·factor, as `above` takes it: with FOLD x + top·factor."""
    return top * factor + x if FOLD else top * 0.0 + x


@triton.jit
def above(level, s, top, factor, FOLD: tl.constexpr):
    """(s - top)·factor - x for a tile, x being that of `level_of`: one instruction with FOLD."""
    return s * factor - level[:, None] if FOLD else (s - top[:, None]) * factor - level[:, None]


@triton.jit
def finite(top):
    """The maximum of a row, 0 where it has no finite score."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def shrinkage(top, higher, factor, WEIGH: tl.constexpr):
    """What sums below one maximum are multiplied by under a higher one."""
    return WEIGH((top - finite(higher)) * factor, None)


@triton.jit
def divisor(total):
    """A sum, 1 where it is 0."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def rising(tau, step, count, steps):
    """Whether some row needs another step and one is left."""
    return (count < steps) & (tl.max((tau + step > tau).to(tl.int32), 0) > 0)


@triton.jit
def threshold(x, power, steps, WEIGH: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr):
    """τ and c of resident rows."""
    tau, step = tl.full((ROWS,), -1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
    count, more = 0, steps > 0
    while more:
        tau = tl.maximum(tau, tau + step)
        t = x - tau[:, None]
        step = (tl.sum(WEIGH(t, power), 1) - 1.0) / divisor(tl.sum(SLOPE(t, power), 1) * power)
        count += 1
        more = rising(tau, step, count, steps)
    return tau, step


@triton.jit
def relative(s, top, numbers):
    """x from scores and the maxima of their rows."""
    x = s - top
    if numbers[2] is not None:
        x *= numbers[2]
    return x


@triton.jit
def weights(x, tau, step, numbers, WEIGH: tl.constexpr):
    """p·Σ."""
    return WEIGH(x - tau - step, numbers[3])


@triton.jit
def store_stats(stats, lse, item, head, i, queries, top, tau, step, total):
    """The numbers of rows, and log Σ exp(s) if requested."""
    store_of_rows(stats[0], item, head, i, queries, top)
    if tau is not None:
        store_of_rows(stats[1], item, head, i, queries, tau)
        store_of_rows(stats[2], item, head, i, queries, step)
    store_of_rows(stats[3], item, head, i, queries, 1.0 / divisor(total))
    if lse is not None:
        value = top + tl.log(divisor(total))
        store_of_rows(lse, item, head, i, queries, tl.where(total == 0.0, float("-inf"), value))


@triton.jit
def store_output(
    o, at, i0, queries, sums, total, gain, dtype,
    e: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """o from Σ u v and Σ u."""
    o_rows = whole_sum(sums, None, dtype) * (gain / divisor(total))[:, None]
    store_rows(o, at[0], at[1], i0, tl.arange(0, ROWS), i0 + tl.arange(0, ROWS) < queries, o_rows, e, E)


@triton.jit
def add_values(
    sums, u, inside, values, pairs, at, i0, j0,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ r u v with the keys of one more tile."""
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    u = after_dropout(u, pairs[2], pairs[3], pairs[4], at[0], at[1], i0, i, j0, columns[None, :], inside)
    return add_product(sums, u, values, PRECISION)


@triton.jit
def forward_resident(
    q, k, v, o, stats, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o, unless it is None, and the numbers of ROWS queries of a head with at most KEYS keys; needs a threshold."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, bounds = own[0], bounds_of(at, i0, limits, own, rows, blocks, ROWS)
    s, inside, seen, _ = standing_scores(
        q_tile, k, pairs, numbers, at, i0, bounds, 0, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    top = finite(tl.max(s, 1))
    if o is not None:
        values = load_rows(v, at[3], at[2], 0, tl.arange(0, KEYS), seen, e, E)
    x = relative(s, top[:, None], numbers)
    tau, step = threshold(x, numbers[3], steps, WEIGH, SLOPE, ROWS)
    u = weights(x, tau[:, None], step[:, None], numbers, WEIGH)
    total = tl.sum(u, 1)
    if o is not None:
        sums = nothing(ROWS, E, False)
        sums = add_values(sums, u, inside, values, pairs, at, i0, 0, ROWS, KEYS, PRECISION)
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    store_stats(stats, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, tau, step, total)


@triton.jit
def add_tile(
    top, total, sums, q_tile, k, v, scale, factor, pairs, at, i0, bounds, j0, queries,
    WEIGH: tl.constexpr, FOLD: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running maxima of softmax, Σ u and, if there is a v, Σ u v with the keys of one more tile."""
    s, inside, seen = unscaled(
        q_tile, k, scale, pairs, at, i0, bounds, j0, queries, FOLD, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    higher = tl.maximum(top, tl.max(s, 1))
    level = level_of(-lift_of(WEIGH), finite(higher), factor, FOLD)
    u = WEIGH(above(level, s, finite(higher), factor, FOLD), None)
    shrink = shrinkage(top, higher, factor, WEIGH)
    total = total * shrink[:, None] + sums_of(u)
    if v is not None:
        sums = (sums[0] * shrink[:, None], sums[1])
        values = load_rows(v, at[3], at[2], j0, tl.arange(0, KEYS), seen if EDGE else None, e, E)
        sums = add_values(sums, u, inside, values, pairs, at, i0, j0, ROWS, KEYS, PRECISION)
    return higher, total, sums


@triton.jit
def forward_online(
    q, k, v, o, stats, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, NEGATIVE: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for softmax and any number of keys, in one pass with a running maximum."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries = own[0]
    q_tile, scale = rising_scale(q_tile, numbers[0], NEGATIVE)
    FOLD: tl.constexpr = pairs[0] is None and q_tile.dtype != tl.float32
    unit = scale if FOLD else 1.0
    factor = unit * unit_of(WEIGH)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
    sums, sequences = nothing(ROWS, E, False), numbered(blocks, KEYS, MASKED)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            top, total, sums = add_tile(
                top, total, sums, q_tile, k, None if o is None else v, scale, factor, pairs, at, i0, bounds, j0,
                queries, WEIGH, FOLD, EDGE, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
    total, top = tl.sum(total, 1), finite(top) * unit
    if o is not None:
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    total *= 2.0 ** -lift_of(WEIGH)
    store_stats(stats, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, None, None, total)


@triton.jit
def forward_tiled(
    q, k, v, o, stats, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, NEGATIVE: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with a threshold: a pass for the maximum, one for each step, and one for the product with v."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries = own[0]
    q_tile, scale = rising_scale(q_tile, numbers[0], NEGATIVE)
    FOLD: tl.constexpr = pairs[0] is None and q_tile.dtype != tl.float32
    unit = scale if FOLD else 1.0
    factor = unit * numbers[2]
    sequences = numbered(blocks, KEYS, MASKED)
    tops = tl.full((ROWS, 4), float("-inf"), tl.float32)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            s, _, _ = unscaled(
                q_tile, k, scale, pairs, at, i0, bounds, first_key(n, sequences[EDGE], KEYS), queries,
                FOLD, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            tops = tl.maximum(tops, maxima_of(s))
    top = finite(tl.max(tops, 1))
    tau, step = level_of(-1.0, top, factor, FOLD), tl.zeros((ROWS,), tl.float32)
    count, more = 0, steps > 0
    while more:
        tau = tl.maximum(tau, tau + step)
        sides = tl.zeros((ROWS, 4, 2), tl.float32)
        for EDGE in tl.static_range(MASKED, 2):
            bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
            for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
                s, _, _ = unscaled(
                    q_tile, k, scale, pairs, at, i0, bounds, first_key(n, sequences[EDGE], KEYS), queries,
                    FOLD, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION,
                )  # fmt: skip
                t = above(tau, s, top, factor, FOLD)
                sides += tl.join(sums_of(WEIGH(t, numbers[3])), sums_of(SLOPE(t, numbers[3])))
        mass, slope = tl.split(tl.sum(sides, 1))
        step = (mass - 1.0) / divisor(slope * numbers[3])
        count += 1
        more = rising(tau, step, count, steps)
    total = tl.zeros((ROWS, 4), tl.float32)
    sums = nothing(ROWS, E, False)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            s, inside, seen = unscaled(
                q_tile, k, scale, pairs, at, i0, bounds, j0, queries,
                FOLD, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            u = WEIGH(above(tau, s, top, factor, FOLD) - step[:, None], numbers[3])
            total += sums_of(u)
            if o is not None:
                values = load_rows(v, at[3], at[2], j0, tl.arange(0, KEYS), seen if EDGE else None, e, E)
                sums = add_values(sums, u, inside, values, pairs, at, i0, j0, ROWS, KEYS, PRECISION)
    total, tau, top = tl.sum(total, 1), tau - top * factor if FOLD else tau, top * unit
    if o is not None:
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    store_stats(stats, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, tau, step, total)


@triton.jit
def load_stats(stats, at, i, queries):
    """The saved numbers of the queries i; τ and c of softmax are 0."""
    top = load_of_rows(stats[0], at[0], at[1], i, queries, 0.0)
    tau, step = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    if stats[1] is not None:
        tau = load_of_rows(stats[1], at[0], at[1], i, queries, 0.0)
        step = load_of_rows(stats[2], at[0], at[1], i, queries, 0.0)
    return top, tau, step, load_of_rows(stats[3], at[0], at[1], i, queries, 0.0)


@triton.jit
def standing_slopes(
    q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
    WEIGH: tl.constexpr, TILT: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u and dp of a standing tile, and its keys."""
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    s, inside, seen, keys = standing_scores(
        q_tile, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
    )
    values = load_rows(v, at[3], at[2], j0, columns, seen, e, E)
    x = relative(s, row[0][:, None], numbers)
    p = weights(x, row[1][:, None], row[2][:, None], numbers, WEIGH) * row[3][:, None]
    dp = tl.dot(do_tile, tl.trans(values), input_precision=PRECISION)
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
    q, k, v, do, dq, stats, delta, dlse, pairs, rows, limits, numbers, heads, groups,
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
    do_tile = load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    u, dp, keys = standing_slopes(
        q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, 0,
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
    q, k, v, do, dq, stats, delta, dlse, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for any number of keys: a pass for δ and one for dq."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, bounds = own[0], bounds_of(at, i0, limits, own, rows, blocks, ROWS)
    beside = tl.arange(0, ROWS)
    row = load_stats(stats, at, i0 + beside, queries)
    do_tile = load_rows(do, at[0], at[1], i0, beside, i0 + beside < queries, e, E)
    products, totals = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for j0 in range(blocks[0], blocks[3], KEYS):
        u, dp, _ = standing_slopes(
            q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
            WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        products += tl.sum(u * dp, 1)
        totals += tl.sum(u, 1)
    mean = means(products, totals, dlse, numbers[1], at, i0 + beside, queries)
    store_of_rows(delta, at[0], at[1], i0 + beside, queries, mean)
    if dq is not None:
        sums = nothing(ROWS, D, False)
        for j0 in range(blocks[0], blocks[3], KEYS):
            u, dp, keys = standing_slopes(
                q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
                WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            sums = add_product(sums, u * (dp - mean[:, None]), keys, PRECISION)
        total = whole_sum(sums, None, k[0].dtype.element_ty) * (numbers[0] * numbers[1])
        store_rows(dq, at[0], at[1], i0, beside, i0 + beside < queries, total, d, D)


@triton.jit
def backward_keys(
    q, k, v, do, dk, dv, stats, delta, pairs, rows, limits, numbers, stored, heads, groups,
    WEIGH: tl.constexpr, TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for KEYS of the `stored` keys of one of `heads` heads, which `groups` query heads share."""
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
    dv_sums = nothing(KEYS, E, False)
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
            mean = load_of_rows(delta, item, at[1], i0 + beside, queries, 0.0)
            products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            s = scores(products, pairs[0], numbers, at, i0, i, j0, j, inside)
            x = relative(s, row[0][None, :], numbers)
            p = weights(x, row[1][None, :], row[2][None, :], numbers, WEIGH) * row[3][None, :]
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            dp = after_dropout(dp, pairs[2], pairs[3], pairs[4], item, at[1], i0, i, j0, j, inside)
            ds = tl.where(inside, TILT(p, numbers[2]) * (dp - mean[None, :]), 0.0)
            p = after_dropout(p, pairs[2], pairs[3], pairs[4], item, at[1], i0, i, j0, j, inside)
            dv_sums = add_product(dv_sums, p, do_tile, PRECISION)
            dk_sums = add_product(dk_sums, ds, q_tile, PRECISION)
    in_range = j0 + columns < stored
    dk_total = whole_sum(dk_sums, None, q[0].dtype.element_ty) * (numbers[0] * numbers[1])
    dv_total = whole_sum(dv_sums, None, do[0].dtype.element_ty) * numbers[1]
    store_rows(dk, key_item, shared, j0, columns, in_range, dk_total, d, D)
    store_rows(dv, key_item, shared, j0, columns, in_range, dv_total, e, E)


@triton.jit
def backward_bias(
    q, k, v, do, dbias, stats, delta, pairs, rows, limits, numbers, stored, items, heads, groups, bias_items,
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
                do_tile = load_rows(do, item, head, i0, beside, in_range, e, E)
                row = load_stats(stats, at, i0 + beside, queries)
                mean = load_of_rows(delta, item, head, i0 + beside, queries, 0.0)
                bounds = (hi, stop) if left is None else (hi, stop, left, i0 - left)
                u, dp, _keys = standing_slopes(
                    q_tile, do_tile, k, v, row, pairs, numbers, at, i0, bounds, j0,
                    WEIGH, TILT, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
                )  # fmt: skip
                sums += u * (dp - mean[:, None])
    at_pairs = dbias[0] + first_item * dbias[1] + first_head * dbias[2]
    at_pairs += (i0 + beside[:, None]).to(tl.int64) * dbias[3] + (j0 + columns[None, :])
    tl.store(at_pairs, sums * numbers[1], mask=in_range[:, None] & (j0 + columns[None, :] < stored))
