"""Attention by rows of weights that sum to 1: softmax, sparsemax and entmax, and their gradients.

With the numbers of a row, top = max s, τ and c (None for softmax) and 1/Σ, and the functions of `normalisers`,

    p_ij = weigh((α-1)(s_ij - top_i) - τ_i - c_i)/Σ_i       o_i = gain Σ_j r_ij p_ij v_j
    u_ij = tilt(p_ij)      dp_ij = r_ij do_i·v_j            δ_i = Σ_j u_ij dp_ij / Σ_j u_ij - dlse_i/gain
    ds_ij = gain·u_ij (dp_ij - δ_i)                         dv_j = gain Σ_i r_ij p_ij do_i

dq, dk and dbias follow from ds. τ is found by Newton's method from -1. The mass Σ weigh is convex and falls with τ, so
that τ only rises, and each step makes mass beyond 1 times slope at least four times smaller: with S keys they are
between S² and 2^-24, and 12 + log2 S steps are enough. A row that no longer rises keeps its τ whatever further steps
its neighbours need. c is the last step, which is too small for the digits of τ.

Up to a number of keys a row of scores is *resident*, in registers; beyond, each pass over it makes its tiles again. The
tuples are those of `pointwise`, but for

    numbers = (scale, gain, α - 1, power)       the last two are None for softmax
    found = (top, τ, c, 1/Σ)                    views without columns
    bounds = (lo, hi, low, high)                keys of each query, and of all queries of a tile
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import exp
from attnkit.kernels.triton.tiles import (
    add_product,
    after_dropout,
    key_blocks,
    key_ranges,
    keys_of_a_tile,
    load_pairs,
    load_rows,
    nothing,
    placed_limits,
    standing,
    store_of_rows,
    store_rows,
    valid_keys,
    visible_pairs,
    whole_sum,
)


@triton.jit
def begin(
    q, rows, limits, heads, groups, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Where a program with ROWS queries of one head is, their number, these queries, the bounds of their keys, and the
    first block."""
    block, head, item, key_item, limits = placed_limits(limits, limits[0], heads, ROWS, False)
    queries, keys, left, right = limits
    i0 = block * ROWS
    i = i0 + tl.arange(0, ROWS)
    keys = valid_keys(rows[0], keys, item, head)
    lo, hi = key_ranges(i, queries, keys, left, right, rows[1], item, head)
    first, _, _, high = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    queried = load_rows(q, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    bounds = (lo, hi, None if left is None else i0 - left, high)
    return (item, head, head // groups, key_item), i0, queries, queried, bounds, first


@triton.jit
def scores(products, bias, numbers, at, i0, i, j0, j, inside):
    """s of a tile, -inf on invisible pairs."""
    s = products * numbers[0]
    if bias is not None:
        s += load_pairs(bias, at[0], at[1], i0, i, j0, j, inside).to(tl.float32)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def standing_scores(
    queried, k, pairs, numbers, at, i0, bounds, j0,
    MASKED: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """s of a standing tile, its visible pairs, which of its keys some query sees, and these keys."""
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    j = columns[None, :]
    inside = visible_pairs(pairs[1], standing(bounds[0]), standing(bounds[1]), at[0], at[1], i0, i, j0, j)
    seen = keys_of_a_tile(inside, j0 + columns, bounds[2], bounds[3], MASKED)
    keys = load_rows(k, at[3], at[2], j0, columns, seen, d, D)
    products = tl.dot(queried, tl.trans(keys), input_precision=PRECISION)
    return scores(products, pairs[0], numbers, at, i0, i, j0, j, inside), inside, seen, keys


@triton.jit
def finite(top):
    """The maximum of a row, 0 where it has no finite score."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def divisor(total):
    """A sum, 1 where it is 0."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def rising(tau, step, count, steps):
    """Whether some row needs another step, and there is one left."""
    return (count < steps) & (tl.max((tau + step > tau).to(tl.int32), 0) > 0)


@triton.jit
def threshold(x, power, steps, WEIGH: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr):
    """τ and c of resident rows."""
    tau, step = tl.full((ROWS,), -1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
    count, more = 0, steps > 0
    while more:
        tau = tl.maximum(tau, tau + step)
        t = x - tau[:, None]
        step = (tl.sum(WEIGH(t, power), 1) - 1.0) / divisor(tl.sum(SLOPE(t, power), 1))
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
    if tau is not None:
        x = x - tau - step
    return WEIGH(x, numbers[3])


@triton.jit
def store_found(found, lse, item, head, i, queries, top, tau, step, total):
    """The numbers of rows, and log Σ exp(s) where it is wanted."""
    store_of_rows(found[0], item, head, i, queries, top)
    if tau is not None:
        store_of_rows(found[1], item, head, i, queries, tau)
        store_of_rows(found[2], item, head, i, queries, step)
    store_of_rows(found[3], item, head, i, queries, 1.0 / divisor(total))
    if lse is not None:
        known = top + tl.log(divisor(total))
        store_of_rows(lse, item, head, i, queries, tl.where(total == 0.0, float("-inf"), known))


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
    q, k, v, o, found, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o, unless it is None, and the numbers of ROWS queries of one head that has at most KEYS keys, with thresholds."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, queries, queried, bounds, _ = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    s, inside, seen, _ = standing_scores(
        queried, k, pairs, numbers, at, i0, bounds, 0, MASKED, d, D, ROWS, KEYS, PRECISION
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
    store_found(found, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, tau, step, total)


@triton.jit
def forward_online(
    q, k, v, o, found, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for softmax and any number of keys, in one pass that keeps the maximum so far."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, queries, queried, bounds, first = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    sums = nothing(ROWS, E, False)
    for j0 in range(first, bounds[3], KEYS):
        s, inside, seen, _ = standing_scores(
            queried, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
        )
        higher = tl.maximum(top, tl.max(s, 1))
        shrink = exp(top - finite(higher))
        u = weights(relative(s, finite(higher)[:, None], numbers), None, None, numbers, WEIGH)
        total = total * shrink + tl.sum(u, 1)
        if o is not None:
            sums = (sums[0] * shrink[:, None], sums[1], sums[2])
            values = load_rows(v, at[3], at[2], j0, tl.arange(0, KEYS), seen, e, E)
            sums = add_values(sums, u, inside, values, pairs, at, i0, j0, ROWS, KEYS, PRECISION)
        top = higher
    if o is not None:
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    store_found(found, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, finite(top), None, None, total)


@triton.jit
def forward_tiled(
    q, k, v, o, found, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with a threshold: a pass for the maximum, one for each step, and one for the product with v."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, queries, queried, bounds, first = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for j0 in range(first, bounds[3], KEYS):
        s, _, _, _ = standing_scores(
            queried, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
        )
        top = tl.maximum(top, tl.max(s, 1))
    top = finite(top)
    tau, step = tl.full((ROWS,), -1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
    count, more = 0, steps > 0
    while more:
        tau = tl.maximum(tau, tau + step)
        mass, slope = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
        for j0 in range(first, bounds[3], KEYS):
            s, _, _, _ = standing_scores(
                queried, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
            )
            t = relative(s, top[:, None], numbers) - tau[:, None]
            mass += tl.sum(WEIGH(t, numbers[3]), 1)
            slope += tl.sum(SLOPE(t, numbers[3]), 1)
        step = (mass - 1.0) / divisor(slope)
        count += 1
        more = rising(tau, step, count, steps)
    total = tl.zeros((ROWS,), tl.float32)
    sums = nothing(ROWS, E, False)
    for j0 in range(first, bounds[3], KEYS):
        s, inside, seen, _ = standing_scores(
            queried, k, pairs, numbers, at, i0, bounds, j0, MASKED, d, D, ROWS, KEYS, PRECISION
        )
        u = weights(relative(s, top[:, None], numbers), tau[:, None], step[:, None], numbers, WEIGH)
        total += tl.sum(u, 1)
        if o is not None:
            values = load_rows(v, at[3], at[2], j0, tl.arange(0, KEYS), seen, e, E)
            sums = add_values(sums, u, inside, values, pairs, at, i0, j0, ROWS, KEYS, PRECISION)
    if o is not None:
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    store_found(found, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, tau, step, total)
