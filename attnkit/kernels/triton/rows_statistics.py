"""Statistics of rows of weights that sum to 1, in one sweep over the keys.

Those with a threshold are from the numbers that the kernels of `rows` save. The weights are those of the gradients,
p_ij = weigh((α-1)(s_ij - top_i) - τ_i - c_i)/Σ_i; tuples are those of `rows` and `statistics`.

Those of softmax need no other sweep: with y = s - m for the running maximum m and u = exp(y), `spread` is Σ u y, which
under a higher maximum m + a is exp(-a) (Σ u y - a Σ u). All terms have one sign, and so have both of the entropy
log Σ u - Σ u y / Σ u: nothing cancels in faint rows or in those with one weight near 1. The largest weight is 1/Σ u.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.normalisers import lift_of, unit_of
from attnkit.kernels.triton.rows import (
    above,
    add_values,
    begin,
    bounds_of,
    divisor,
    finite,
    level_of,
    load_stats,
    relative,
    rising_scale,
    scores,
    standing_products,
    store_output,
    store_stats,
    unscaled,
    weights,
)
from attnkit.kernels.triton.statistics import LN_2, add_weights, addresses, no_weights, store_statistics
from attnkit.kernels.triton.tiles import first_key, load_rows, nothing, numbered, sums_of

FAR = tl.constexpr(-1024.0)  # logarithm of a weight that is 0: finite, and their product is 0


@triton.jit
def statistics_of_rows(
    q, k, outputs, stats, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, KIND: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The statistics `outputs` of ROWS queries of one head; what all weights of a row are divided by comes last."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, beside, columns = own[0], tl.arange(0, ROWS), tl.arange(0, KEYS)[None, :]
    top, tau, step, inverse = load_stats(stats, at, i0 + beside, queries)
    running, sequences = no_weights(KIND, ROWS), numbered(blocks, KEYS, MASKED)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            products, inside, _, _ = standing_products(
                q_tile, k, pairs, at, i0, bounds, j0, queries, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION
            )
            s = scores(products, pairs, numbers, at, i0, beside[:, None], j0, columns, inside)
            x = relative(s, top[:, None], numbers)
            u = weights(x, tau[:, None], step[:, None], numbers, WEIGH)
            running = add_weights(running, u, inside if EDGE else None, j0, KIND, KEYS)
    i = i0 + beside
    store_statistics(outputs, running, inverse, addresses(i, at[0], at[1], heads, queries), i < queries, KIND)


@triton.jit
def shrunk(stats, fall, shrink, KIND: tl.constexpr):
    """`stats` under a maximum that is higher by -`fall`: weights are multiplied by `shrink`."""
    total, size, squares, largest, first, spread, alive, visible = stats
    if KIND[2]:
        squares *= (shrink * shrink)[:, None]
    if KIND[5]:
        spread = (spread + total * tl.maximum(fall, FAR)[:, None]) * shrink[:, None]
    return total * shrink[:, None], size, squares, largest, first, spread, alive, visible


@triton.jit
def add_exponentials(stats, u, y, inside, FINITE: tl.constexpr, KIND: tl.constexpr, KEYS: tl.constexpr):
    """`stats` with the weights u of a tile, which are exp(y) times a constant; all are visible if `inside` is None.
    FINITE: so is y; to look at it costs an eighth of the instructions."""
    total, size, squares, largest, first, spread, alive, visible = stats
    total += sums_of(u)
    if KIND[2]:
        squares += sums_of(u * u)
    if KIND[5]:
        spread += sums_of(u * (y if FINITE else tl.maximum(y, FAR)))
    if KIND[7]:
        if inside is None:
            visible += KEYS // 4
        else:
            visible += sums_of(inside.to(tl.float32))
    return total, size, squares, largest, first, spread, alive, visible


@triton.jit
def statistics_of_softmax(
    q, k, v, o, outputs, stats, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, NEGATIVE: tl.constexpr, KIND: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The statistics `outputs` of ROWS queries of one head, their numbers, and o, unless it is None."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    LIFT: tl.constexpr = 0.0 if o is None else lift_of(WEIGH)
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries = own[0]
    q_tile, scale = rising_scale(q_tile, numbers[0], NEGATIVE)
    FOLD: tl.constexpr = pairs[0] is None and q_tile.dtype != tl.float32
    unit = scale if FOLD else 1.0
    factor = unit * unit_of(WEIGH)
    top, running, sums = tl.full((ROWS,), float("-inf"), tl.float32), no_weights(KIND, ROWS), nothing(ROWS, E, False)
    sequences = numbered(blocks, KEYS, MASKED)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            s, inside, seen = unscaled(
                q_tile, k, scale, pairs, at, i0, bounds, j0, queries, FOLD, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION
            )
            higher = tl.maximum(top, tl.max(s, 1))
            fall = (top - finite(higher)) * factor
            shrink, top = WEIGH(fall, None), higher
            y = above(level_of(0.0, finite(top), factor, FOLD), s, finite(top), factor, FOLD)
            u = WEIGH(y + LIFT, None)
            running = shrunk(running, fall, shrink, KIND)
            running = add_exponentials(running, u, y, inside if EDGE else None, FOLD and not EDGE, KIND, KEYS)
            if o is not None:
                sums = (sums[0] * shrink[:, None], sums[1])
                values = load_rows(v, at[3], at[2], j0, tl.arange(0, KEYS), seen if EDGE else None, e, E)
                sums = add_values(sums, u, inside, values, pairs, at, i0, j0, ROWS, KEYS, PRECISION)
    i, lowered = i0 + tl.arange(0, ROWS), 2.0**-LIFT
    total, size, squares, _, first, spread, alive, visible = running
    if o is not None:
        store_output(o, at, i0, queries, sums, tl.sum(total, 1), numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    total *= lowered
    whole = tl.sum(total, 1)
    store_stats(stats, None, at[0], at[1], i, queries, finite(top) * unit, None, None, whole, None)
    spread *= lowered / (unit_of(WEIGH) * LN_2)
    running = total, size, squares * (lowered * lowered), total * 0.0 + 1.0, first, spread, alive, visible
    inverse = 1.0 / divisor(whole)
    store_statistics(outputs, running, inverse, addresses(i, at[0], at[1], heads, queries), i < queries, KIND)
