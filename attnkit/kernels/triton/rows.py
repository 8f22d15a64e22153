"""Attention by rows of weights that sum to 1: softmax, sparsemax and entmax.

With the numbers of a row, top = max s, τ and c (None for softmax) and 1/Σ, and the functions of `normalisers`,

    p_ij = weigh((α-1)(s_ij - top_i) - τ_i - c_i)/Σ_i       o_i = gain Σ_j r_ij p_ij v_j

The numbers are saved: `rows_gradients` and `rows_statistics` compute the weights anew from them. Every program owns its
results, so sums have a fixed order.

τ is found by Newton's method from below. The mass Σ weigh is convex and decreasing in τ, so τ only rises, and each step
makes excess mass times slope at least four times smaller: with S keys it lies between S² and 2^-24, so 12 + log2 S
steps are enough. Far from the end steps are those for mass^(1/power) = 1: a norm of [x - τ]₊, it is convex as well and
closer to a line, so that they are longer and never too long. A row that no longer rises keeps its τ, however many steps
its neighbours need. c is the last step: too small for the precision of τ, or what leaves at most `enough` of the mass
too much (`newton_step`).

Up to a number of keys a row of scores is *resident*, in registers, and τ begins at -1. For more keys, each pass
recomputes its tiles. The first keeps a maximum for every column of a tile: scores of the row, the largest among them,
whose own threshold is at most τ and close to it, and takes no pass. The tuples are those of `pointwise`, except

    numbers = (scale, gain, α - 1, power)       the last two are None for softmax; NEGATIVE: scale < 0
    stats = (top, τ, c, 1/Σ)                    views without columns; 1/Σ is 0 for a row that sees no key
    pairs = (bias, mask, dropout_mask, seed, last_kept, fade)     fade = (high, low, strides of items, heads and tokens,
                                                S - L, S), of forgetting attention: the running sums c of its gates in
                                                two numbers; c_i - c_j is added to s, query i being token i + S - L
    rows = (key_lengths, query_mask, sink)      views; the sink of softmax, one for each head, is one more score of a
                                                row, without a value
    own = (queries, keys, visible)              of a program, and how many keys its key_lengths leave
    bounds = (hi, high) or (hi, high, left, low)     where keys end for each query and for all queries of a tile, and
                                                with a bound `left` where they begin for the latter
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import exp
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
    masked_pairs,
    nothing,
    numbered,
    placed,
    right_of,
    spreads,
    store_of_rows,
    store_rows,
    sums_of,
    valid_keys,
    visible_pairs,
    whole_sum,
)

START = tl.constexpr(0.125)  # of the mass of a few scores too much: their threshold is a beginning


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
def fade_of(fade, item, head, i, j):
    """c_i - c_j of a tile: differences of high numbers and of low ones, before anything is added to them."""
    high = fade[0], fade[2], fade[3], fade[4]
    low = fade[1], fade[2], fade[3], fade[4]
    own = tl.maximum(i + fade[5], 0)  # queries before the first token see nothing
    difference = load_of_rows(high, item, head, own, fade[6], 0.0) - load_of_rows(high, item, head, j, fade[6], 0.0)
    rest = load_of_rows(low, item, head, own, fade[6], 0.0) - load_of_rows(low, item, head, j, fade[6], 0.0)
    return difference + rest


@triton.jit
def beside_products(s, pairs, at, i0, i, j0, j, inside):
    """s of a tile with what is added to the products."""
    if pairs[0] is not None:
        s += load_pairs(pairs[0], at[0], at[1], i0, i, j0, j, inside).to(tl.float32)
    if pairs[5] is not None:
        s += fade_of(pairs[5], at[0], at[1], i0 + i, j0 + j)
    return s


@triton.jit
def scores(products, pairs, numbers, at, i0, i, j0, j, inside):
    """s of a tile, -inf on invisible pairs."""
    s = beside_products(products * numbers[0], pairs, at, i0, i, j0, j, inside)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def standing_products(
    q_tile, k, pairs, at, i0, bounds, j0, queries,
    EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q·k of a standing tile, its visible pairs, a mask of the keys that some query sees, and these keys.

    Without EDGE all queries see all keys, but for masks: pairs are visible if they have a query.
    """
    i, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)
    j = columns[None, :]
    seen, inside = columns >= 0, i0 + i < queries
    if EDGE:
        left, low = (None, None) if len(bounds) == 2 else bounds[2:]
        if MASKED:
            inside = visible_pairs(pairs[1], left, bounds[0][:, None], at[0], at[1], i0, i, j0, j)
        seen = keys_of_a_tile(inside, j0 + columns, low, bounds[1], MASKED)
    elif MASKED:
        inside = masked_pairs(pairs[1], bounds[0][:, None], at[0], at[1], i0, i, j0, j)
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
    return scores(products, pairs, numbers, at, i0, i, j0, j, inside), inside, seen, keys


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
        i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
        s = beside_products(s * scale, pairs, at, i0, i, j0, j, inside)
    if EDGE or MASKED:
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
def enough(dtype):
    """How much the mass of a row may exceed 1 by: little beside the digits of inputs."""
    return 2.0**-24 if dtype == tl.float32 else 2.0**-20


@triton.jit
def risen(tau, step, left, most):
    """τ after a step, of rows that need one."""
    return tl.where(left > most, tl.maximum(tau, tau + step), tau)


@triton.jit
def newton_step(mass, slope, step, before, left, power, most):
    """How much τ rises, the same if it is Newton's step and else 0, and at most how much mass is too much after it.

    `step`, `before` and `left` are those results of the step before, and stay where no more than `most` is left. From
    power 2 on the second derivative of the mass falls as τ rises: Newton's step leaves at least half its square times
    the derivative there, and the next at most half its own.
    """
    excess, going, far_off = mass - 1.0, left > most, mass > 2.0
    near = excess / divisor(slope * power)
    far = (mass - tl.exp2(tl.log2(tl.maximum(mass, 1.0)) * (1.0 - 1.0 / power))) / divisor(slope)
    share = tl.where(before > 0.0, near / divisor(before), 1.0)
    after = excess * tl.where(power >= 2.0, share * share, 1.0)
    step = tl.where(going, tl.where(far_off, far, near), step)
    return step, tl.where(going, tl.where(far_off, 0.0, near), before), tl.where(going, after, left)


@triton.jit
def rising(tau, step, left, most, count, steps):
    """Whether some row needs another step, to have no more than `most` too much, and one is left."""
    return (count < steps) & (tl.max(((tau + step > tau) & (left > most)).to(tl.int32), 0) > 0)


@triton.jit
def threshold(x, power, most, steps, WEIGH: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr):
    """τ and c of resident rows, whose mass is at most `most` too much."""
    tau, step = tl.full((ROWS,), -1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
    before, left, count, more = step, step + float("inf"), 0, steps > 0
    while more:
        tau = risen(tau, step, left, most)
        t = x - tau[:, None]
        mass, slope = tl.sum(WEIGH(t, power), 1), tl.sum(SLOPE(t, power), 1)
        step, before, left = newton_step(mass, slope, step, before, left, power, most)
        count += 1
        more = rising(tau, step, left, most, count, steps)
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
def sink_of(rows, item, head):
    """The sink of a head."""
    return tl.load(rows[2][0] + item * rows[2][1] + head * rows[2][2]).to(tl.float32)


@triton.jit
def beside_sink(top, total, sink, WEIGH: tl.constexpr):
    """top and Σ u of rows with a sink, what sums of u shrink to, and Σ u - 1 where the sink is the highest, else -1.

    Rows that see no key have no sink.
    """
    sees, lift = top > float("-inf"), 2.0 ** lift_of(WEIGH)
    higher = tl.where(sees, tl.maximum(top, sink), top)
    shrink = tl.where(sees, exp(top - finite(higher)), 1.0)
    rest = tl.where(sees & (sink >= top), total * shrink / lift, -1.0)
    total = total * shrink + tl.where(sees, exp(sink - finite(higher)) * lift, 0.0)
    return higher, total, shrink, rest


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, with the digits of x where it is small."""
    one = 1.0 + x
    return tl.where(one == 1.0, x, tl.log(one) * (x / divisor(one - 1.0)))


@triton.jit
def store_stats(stats, lse, item, head, i, queries, top, tau, step, total, rest):
    """The numbers of rows, and log Σ exp(s) if requested; `rest` is that of `beside_sink`, or None."""
    store_of_rows(stats[0], item, head, i, queries, top)
    if tau is not None:
        store_of_rows(stats[1], item, head, i, queries, tau)
        store_of_rows(stats[2], item, head, i, queries, step)
    store_of_rows(stats[3], item, head, i, queries, tl.where(total == 0.0, 0.0, 1.0 / divisor(total)))
    if lse is not None:
        value = top + tl.log(divisor(total))
        if rest is not None:
            value = tl.where(rest < 0.0, value, top + log1p(tl.maximum(rest, 0.0)))
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
    tau, step = threshold(x, numbers[3], enough(q_tile.dtype), steps, WEIGH, SLOPE, ROWS)
    u = weights(x, tau[:, None], step[:, None], numbers, WEIGH)
    total = tl.sum(u, 1)
    if o is not None:
        sums = nothing(ROWS, E, False)
        sums = add_values(sums, u, inside, values, pairs, at, i0, 0, ROWS, KEYS, PRECISION)
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    store_stats(stats, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, tau, step, total, None)


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
    FOLD: tl.constexpr = (pairs[0] is None and pairs[5] is None) and q_tile.dtype != tl.float32
    unit = scale if FOLD else 1.0
    factor = unit * unit_of(WEIGH)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
    sums, sequences = nothing(ROWS, E, False), numbered(blocks, KEYS, False)
    for EDGE in tl.static_range(0, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE or MASKED else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            top, total, sums = add_tile(
                top, total, sums, q_tile, k, None if o is None else v, scale, factor, pairs, at, i0, bounds, j0,
                queries, WEIGH, FOLD, EDGE, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
    if MASKED and o is not None:
        spread = spreads(sums)
        if spread:
            bounds, sequences = bounds_of(at, i0, limits, own, rows, blocks, ROWS), numbered(blocks, KEYS, True)
            top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
            sums = nothing(ROWS, E, False)
            for n in range(0, sequences[1][1]):
                j0 = first_key(n, sequences[1], KEYS)
                top, total, sums = add_tile(
                    top, total, sums, q_tile, k, v, scale, factor, pairs, at, i0, bounds, j0, queries, WEIGH, FOLD,
                    True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
                )  # fmt: skip
    total, top, rest = tl.sum(total, 1), top * unit, None
    if rows[2] is not None:
        top, total, shrink, rest = beside_sink(top, total, sink_of(rows, at[0], at[1]), WEIGH)
        sums = (sums[0] * shrink[:, None], sums[1])
    if o is not None:
        store_output(o, at, i0, queries, sums, total, numbers[1], v[0].dtype.element_ty, e, E, ROWS)
    total *= 2.0 ** -lift_of(WEIGH)
    store_stats(stats, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, finite(top), None, None, total, rest)


@triton.jit
def forward_tiled(
    q, k, v, o, stats, lse, pairs, rows, limits, numbers, heads, groups, steps,
    WEIGH: tl.constexpr, SLOPE: tl.constexpr, NEGATIVE: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with a threshold: a pass for maxima, one for each step, and one for the product with v."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries = own[0]
    q_tile, scale = rising_scale(q_tile, numbers[0], NEGATIVE)
    FOLD: tl.constexpr = pairs[0] is None and q_tile.dtype != tl.float32
    unit = scale if FOLD else 1.0
    factor = unit * numbers[2]
    sequences = numbered(blocks, KEYS, MASKED)
    tops = tl.full((ROWS, KEYS), float("-inf"), tl.float32)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            s, _, _ = unscaled(
                q_tile, k, scale, pairs, at, i0, bounds, first_key(n, sequences[EDGE], KEYS), queries,
                FOLD, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            tops = tl.maximum(tops, s)
    top = finite(tl.max(tops, 1))
    tau, step = threshold((tops - top[:, None]) * factor, numbers[3], START, steps, WEIGH, SLOPE, ROWS)
    tau, step = level_of(tl.maximum(tau, tau + step), top, factor, FOLD), tl.zeros((ROWS,), tl.float32)
    before, left, count, more = step, step + float("inf"), 0, steps > 0
    most = enough(q_tile.dtype)
    while more:
        tau = risen(tau, step, left, most)
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
        step, before, left = newton_step(mass, slope, step, before, left, numbers[3], most)
        count += 1
        more = rising(tau, step, left, most, count, steps)
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
    store_stats(stats, lse, at[0], at[1], i0 + tl.arange(0, ROWS), queries, top, tau, step, total, None)


@triton.jit
def load_stats(stats, at, i, queries):
    """The saved numbers of the queries i; τ and c of softmax are 0."""
    top = load_of_rows(stats[0], at[0], at[1], i, queries, 0.0)
    tau, step = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    if stats[1] is not None:
        tau = load_of_rows(stats[1], at[0], at[1], i, queries, 0.0)
        step = load_of_rows(stats[2], at[0], at[1], i, queries, 0.0)
    return top, tau, step, load_of_rows(stats[3], at[0], at[1], i, queries, 0.0)
