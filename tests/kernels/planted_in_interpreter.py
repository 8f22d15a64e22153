"""Triton kernels in the interpreter with one function of theirs replaced: what test_planted_triton.py judges."""

import os
from typing import Any

import triton
import triton.language as tl

from attnkit.backends.torch.triton import linear_features
from attnkit.kernels import linear_calls
from attnkit.kernels.triton import (
    decoding,
    distances,
    linear,
    linear_step,
    linear_sweeps,
    linear_tokens,
    newton,
    pointwise,
    rows,
    rows_gradients,
    rows_statistics,
    softpick,
    statistics,
    tiles,
    whole_head,
)
from attnkit_conformance.adapters.triton_interpreted import Interpreted, Split

MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        decoding, distances, linear, linear_features, linear_step, linear_sweeps, linear_tokens, newton, pointwise,
        rows, rows_gradients, rows_statistics, softpick, statistics, tiles, whole_head,
    )
}  # fmt: skip


class Segmented(Interpreted):
    """With segments of 64 tokens for any number of them."""

    def __init__(self) -> None:
        super().__init__()
        linear_calls.FEWEST = 1


def wrong(kind: type[Interpreted] = Interpreted) -> Interpreted:
    """The kernels, with PLANTED of this module in the place of the function REPLACED, such as tiles.own_tokens."""
    adapter = kind()
    module, _, name = os.environ["REPLACED"].partition(".")
    setattr(MODULES[module], name, globals()[os.environ["PLANTED"]])
    return adapter


def wrong_segmented() -> Interpreted:
    return wrong(Segmented)


def wrong_split() -> Interpreted:
    return wrong(Split)


# ---------------------------------------------------------------------------------------------- pairs and rows


@triton.jit
def every_pair(mask, lo, hi, item, head, i0, i, j0, j):
    return (i0 + i >= 0) & (j0 + j >= 0)


@triton.jit
def whole_blocks(i0, queries, keys, left, right, ROWS: tl.constexpr, KEYS: tl.constexpr):
    first, whole, end, stop = tiles.key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    return first, whole, end, stop // KEYS * KEYS


@triton.jit
def never_spreads(sums):
    return tl.max((sums[0] != sums[0]).to(tl.int32)) > 1


@triton.jit
def one_key_more(key_lengths, keys, item, head):
    return tiles.valid_keys(key_lengths, keys, item, head) + 1


@triton.jit
def nowhere(total, count):
    return total * 0.0


@triton.jit
def products_alone(sums, own, dtype):
    return tiles.whole_sum((sums[0], sums[1]), own, dtype)


@triton.jit
def near_alone(tile, rest, others, PRECISION: tl.constexpr):
    return tl.dot(tile, tl.trans(others), input_precision=PRECISION)


@triton.jit
def near_tokens(tile, exact, item, head, first, rows, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    return tile


@triton.jit
def no_logarithm(x):
    return x * 0.0


@triton.jit
def output_alone(du, dstats, drows, w, share, j):
    return du


@triton.jit
def with_a_lower_threshold(stats, at, i, queries):
    top, tau, step, inverse = rows.load_stats(stats, at, i, queries)
    return top, tau - 0.125, step, inverse


shrunk = rows_statistics.shrunk


@triton.jit
def squares_as_they_were(stats, fall, shrink, KIND: tl.constexpr):
    total, size, _, largest, first, spread, alive, visible = shrunk(stats, fall, shrink, KIND)
    return total, size, stats[2], largest, first, spread, alive, visible


@triton.jit
def spread_unmoved(stats, fall, shrink, KIND: tl.constexpr):
    return shrunk(stats, tl.zeros_like(fall), shrink, KIND)


@triton.jit
def one_step(tau, step, left, most, count, steps):
    return count < 1


@triton.jit
def never_shrunk(top, higher, factor, WEIGH: tl.constexpr):
    return tl.where(higher < 0.0, 1.0, 1.0)


@triton.jit
def no_means(products, total, dlse, gain, at, i, queries):
    return products * 0.0


@triton.jit
def unmasked_scores(products, pairs, numbers, at, i0, i, j0, j, inside):
    return products * numbers[0]


@triton.jit
def never_first(highest, first, s, j):
    return highest, first


@triton.jit
def last_maximum(highest, first, s, j):
    top = tl.max(s, 1)
    return tl.maximum(highest, top), tl.where(top > highest, tl.max(tl.where(s == top[:, None], j, -1), 1), first)


@triton.jit
def difference(s, top, dtype):
    p = softpick.falling(s - top, dtype)
    return p, p - softpick.falling(-top, dtype)


# ---------------------------------------------------------------------------------------------- gates

store_crossing, store_tiles = rows_gradients.store_crossing, rows_gradients.store_tiles


@triton.jit
def without_low_digits(fade, item, head, i, j):
    high = fade[0], fade[2], fade[3], fade[4]
    own = tiles.load_of_rows(high, item, head, tl.maximum(i + fade[5], 0), fade[6], 0.0)
    return own - tiles.load_of_rows(high, item, head, j, fade[6], 0.0)


@triton.jit
def of_the_last_tile(gates, ds, whole, at, i0, j0, heads, queries, ROWS: tl.constexpr, KEYS: tl.constexpr):
    return store_tiles(gates, ds, whole * 0.0, at, i0, j0, heads, queries, ROWS, KEYS)


@triton.jit
def of_own_tiles(gates, ds, before, fade, at, i0, j0, heads, ROWS: tl.constexpr, KEYS: tl.constexpr):
    store_crossing(gates, ds, before * 0.0, fade, at, i0, j0, heads, ROWS, KEYS)


# ---------------------------------------------------------------------------------------------- whole heads


@triton.jit
def without_the_last_key(j, queries, keys, left, right):
    return j < keys - 1


@triton.jit
def one_key_later(mask, left, hi, item, head, i0, i, j0, j):
    return tiles.visible_pairs(mask, left, hi + 1, item, head, i0, i, j0, j)


@triton.jit
def of_the_last_keys(total, ds, k_tile):
    return tl.dot(tl.trans(k_tile), ds)


# ---------------------------------------------------------------------------------------------- keys in parts


@triton.jit
def every_key(part, count, hi, left, KEYS: tl.constexpr):
    return part * 0, tl.max(hi, 0)


@triton.jit
def rows_of_the_first_head(limits, heads, groups, count, ROWS: tl.constexpr):
    blocks = tl.cdiv(groups * limits[0], ROWS)
    n, shared, item = tiles.place(blocks * count, heads // groups)
    row = n % blocks * ROWS + tl.arange(0, ROWS)
    i = tl.where(row < groups * limits[0], row % limits[0], limits[0])
    return n // blocks, shared, item, shared * groups + row * 0, i


@triton.jit
def unweighted(x):
    return tl.where(x < 0.0, 1.0, 1.0)


# ---------------------------------------------------------------------------------------------- packed sequences


@triton.jit
def first_alone(edges, sequences, block, size):
    return block * 0, tiles.first_block(edges, block * 0, size)


@triton.jit
def one_token_less(edges, sequence):
    first = tl.load(edges + sequence).to(tl.int64)
    return first, tl.maximum((tl.load(edges + sequence + 1) - first).to(tl.int32) - 1, 0)


# ---------------------------------------------------------------------------------------------- linear attention

load_state, load_initial, place = linear.load_state, linear.load_initial, linear_step.place
call_of, faded = linear_features.call_of, linear_features._faded
level_at, fade_between, gradient_gates = linear.level_at, linear.fade_between, linear.gradient_gates


@triton.jit
def forgotten(at, f0, c0, d, e, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    S, z = load_state(at, f0, c0, d, e, ROWS, COLUMNS)
    return S * 0.0, z * 0.0


@triton.jit
def without_z(at, f0, c0, d, e, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    S, z = load_state(at, f0, c0, d, e, ROWS, COLUMNS)
    return S, z * 0.0


@triton.jit
def unmasked_keys(j, bounds, masks, item, head):
    return j >= 0


@triton.jit
def not_added(initial, heads, number, at, d: tl.constexpr, e: tl.constexpr, REVERSE: tl.constexpr):
    return load_initial(initial, heads, number, at, d, e, REVERSE) * 0.0


@triton.jit
def null_without_keys(i, bounds, limits, masks, item, head, CAUSAL: tl.constexpr):
    stateless = masks[0], masks[1], masks[2], masks[3], None
    return linear_tokens.live_queries(i, bounds, limits, stateless, item, head, CAUSAL)


@triton.jit
def without_what_high_lacks(levels, item, head, p, keys):
    return (level_at(levels, item, head, p, keys)[0],)


@triton.jit
def of_the_first_key(levels, item, head, p, keys):
    return level_at(levels, item, head, tl.maximum(p, 0), keys)


@triton.jit
def never_fading(levels, number, heads, one, other, keys):
    return fade_between(levels, number, heads, one, one, keys)


@triton.jit
def of_no_later_chunk(
    q, k, v, do, dg, rows, before, after, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, d: tl.constexpr, e: tl.constexpr, FEATURES: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    gradient_gates(
        q, k, v, do, dg, rows, before, None, masks, limits, scale, heads, span, blocks,
        PHI, d, e, FEATURES, CHUNK, OPERAND, PRECISION,
    )  # fmt: skip


@triton.jit
def nothing(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return x * 0.0


@triton.jit
def without_delta(rows, item, head, i, live):
    inverse, delta = linear_tokens.load_rows(rows, item, head, i, live)
    return inverse, delta * 0.0


@triton.jit
def first_digits_alone(x, OPERAND: tl.constexpr):
    first, _ = linear_tokens.two_operands(x, OPERAND)
    return first, first * 0.0


@triton.jit
def of_the_first_member(view, item, head, first, keep, column, width, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    return linear_tokens.load_tokens(view, item, head // 2 * 2, first, keep, column, width, COLUMNS, CHUNK)


@triton.jit
def of_the_first_head(blocks, heads):
    block, head, item = place(blocks, heads)
    return block, head * 0, item


def with_eps(record: Any, *arrays: Any, **options: Any) -> Any:
    call = call_of(record, *arrays, **options)
    return call._replace(options=call.options | {"normalize": True, "eps": 0.01})


def never_faded(xp: Any, k: Any, level: Any, seen: Any, ordered: Any) -> Any:
    return faded(xp, k, level * 0.0, seen, ordered)


def of_all_keys(xp: Any, k: Any, level: Any, seen: Any, ordered: Any) -> Any:
    return faded(xp, k, level, seen, ordered)[0], None


# ---------------------------------------------------------------------------------------------- the Newton inverse

step = newton.step


@triton.jit
def tf32(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def one_product(x, y, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    found = tl.dot(tf32(x), tf32(y))
    return found if total is None else total + found


@triton.jit
def three_products(x, y, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    high, over = tf32(x), tf32(y)
    found = tl.dot(tf32(x - high), over) + tl.dot(high, tf32(y - over)) + tl.dot(high, over)
    return found if total is None else total + found


@triton.jit
def half_step(a, x, PRECISION: tl.constexpr):
    return step(a, x * 0.5, PRECISION) * 2.0


@triton.jit
def constant_norm(a, dx, factor, M: tl.constexpr):
    _, _, safe = newton.column_sums(a)
    twice = 2.0 / (safe * safe)
    return dx * (factor * twice), twice * tl.sum(tl.sum(dx * a, 1), 0)
