"""Shared by the kernels of linear attention: masks, tokens and their features, products.

`limits`, `masks`, `rows` and `span` are those of `attnkit.kernels.triton.linear`; a view is a pointer with its strides.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import exp
from attnkit.kernels.triton.tiles import corner, own_sequence, own_tokens

SLICE = tl.constexpr(64)  # terms of a sum per warp


@triton.jit
def place(blocks, span, limits, heads, CAUSAL: tl.constexpr):
    """Block of features, segment, head, items, positions and limits of this program; adjacent ones share a segment.

    items = (of queries, of keys, of states); positions = (begin, end, first segment of the sequence).
    """
    n = tl.program_id(0)
    block, n = n % blocks, n // blocks
    segment, n = n % span[0], n // span[0]
    head, item = (n % heads).to(tl.int64), (n // heads).to(tl.int64)
    if span[4] is None:
        items, begin, end, first = (item, item, item), span[2] + segment * span[1], span[3], 0
    else:
        sequence, first = own_sequence(span[6], span[7], segment, span[1])
        query_item, queries = own_tokens(span[4], sequence)
        key_item, keys = own_tokens(span[5], sequence)
        shift, stop = 0, tl.where(queries > 0, keys, 0)
        if span[8] is not None:
            shift = keys - queries
        if CAUSAL:
            stop = tl.minimum(keys, queries + shift)
        begin, end = (segment - first) * span[1] + tl.minimum(shift, 0), tl.maximum(keys, queries + shift)
        items, limits = (query_item, key_item, item), (queries, keys, stop, shift)
    return block, segment, head, items, (begin, end, first), limits


@triton.jit
def load_of(view, item, head, i, keep):
    """Values of the tokens i from a view without columns, 0 where `keep` is False."""
    at = view[0] + item * view[1] + head * view[2] + tl.cast(i, tl.int64) * view[3]
    return tl.load(at, mask=keep, other=0)


@triton.jit
def store_of(view, item, head, i, keep, x):
    """The inverse of `load_of`."""
    tl.store(view[0] + item * view[1] + head * view[2] + tl.cast(i, tl.int64) * view[3], x, mask=keep)


@triton.jit
def seen_range(limits, masks, item, head):
    """first, stop: the keys that some query of a head sees are among first ≤ j < stop."""
    first, stop = 0, limits[2]
    if masks[1] is not None:
        first = tl.load(masks[1][0] + item * masks[1][1] + head * masks[1][2]).to(tl.int32)
    if masks[2] is not None:
        length = tl.load(masks[2][0] + item * masks[2][1] + head * masks[2][2])
        stop = tl.minimum(tl.maximum(length.to(tl.int64), 0), stop).to(tl.int32)
    return first, stop


@triton.jit
def seen_keys(j, bounds, masks, item, head):
    """The keys that some query sees."""
    seen = (j >= bounds[0]) & (j < bounds[1])
    if masks[0] is not None:
        seen = seen & (load_of(masks[0], item, head, j, seen) != 0)
    return seen


@triton.jit
def live_queries(i, bounds, limits, masks, item, head, CAUSAL: tl.constexpr):
    """The queries that see some key or a state."""
    live = (i >= 0) & (i < limits[0])
    if masks[4] is None:
        live = live & (i < tl.where(bounds[0] < bounds[1], limits[0], 0))
        if CAUSAL:
            live = live & (i + limits[3] >= bounds[0])
    if masks[3] is not None:
        live = live & (load_of(masks[3], item, head, i, live) != 0)
    return live


@triton.jit
def level_at(levels, item, head, p, keys):
    """The level of positions p, of a decay as the sum of two numbers: that of the key there, or of the last one. Before
    the first a decay has the level 0, and features any, for no sum of theirs is there."""
    at = tl.minimum(p, keys - 1)
    place = item * levels[1] + head * levels[2] + tl.cast(tl.maximum(at, 0), tl.int64) * levels[3]
    if len(levels) == 4:  # Triton 3.6 returns no None, and cannot tell from None what has one in it
        level = (tl.load(levels[0] + place),)
    else:
        level = (
            tl.load(levels[0] + place, mask=at >= 0, other=0.0),
            tl.load(levels[4] + place, mask=at >= 0, other=0.0),
        )
    return level


@triton.jit
def in_row(levels):
    """The levels of tokens as those of columns."""
    if len(levels) == 1:
        row = (levels[0][None, :],)
    else:
        row = (levels[0][None, :], levels[1][None, :])
    return row


@triton.jit
def in_column(levels):
    """The levels of tokens as those of rows."""
    if len(levels) == 1:
        column = (levels[0][:, None],)
    else:
        column = (levels[0][:, None], levels[1][:, None])
    return column


@triton.jit
def fades(earlier, later):
    """exp(earlier - later) ≤ 1, for pairs of levels (rows, columns) of which both may come first."""
    change = earlier[0] - later[0]
    if len(earlier) == 2:
        change += earlier[1] - later[1]
    return exp(tl.minimum(change, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def within(keep, column, width, COLUMNS: tl.constexpr):
    """(len(keep), COLUMNS): where `keep` is True, and columns before the width."""
    return keep[:, None] & (column + tl.arange(0, COLUMNS) < width)[None, :]


@triton.jit
def load_tokens(view, item, head, first, keep, column, width, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Columns column .. of CHUNK tokens in float32, (CHUNK, COLUMNS); 0 where `keep` is False and beyond the width."""
    rows, columns = tl.cast(first + tl.arange(0, CHUNK), tl.int64), tl.arange(0, COLUMNS)
    at = corner(view, item, head, 0, column) + rows[:, None] * view[3] + columns[None, :] * view[4]
    return tl.load(at, mask=within(keep, column, width, COLUMNS), other=0.0).to(tl.float32)


@triton.jit
def load_features(
    view, item, head, first, keep, column, width, PHI: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr
):
    """φ of tokens, 0 where `keep` is False and beyond the width."""
    x = load_tokens(view, item, head, first, keep, column, width, COLUMNS, CHUNK)
    x = PHI(x) * tl.where(keep, 1.0, 0.0)[:, None]
    if width != COLUMNS:
        x *= tl.where(column + tl.arange(0, COLUMNS) < width, 1.0, 0.0)[None, :]
    return x


@triton.jit
def load_rows(rows, item, head, i, live):
    """1/den and δ = do·o of the queries i, 0 for those that are not live; 1 and 0 without a denominator."""
    inverse, delta = tl.where(live, 1.0, 0.0), tl.where(live, 0.0, 0.0)
    if rows[0] is not None:
        inverse, delta = load_of(rows[0], item, head, i, live), load_of(rows[1], item, head, i, live)
        for part in range(1, rows[3]):
            delta += load_of(rows[1], item, head + part * rows[2], i, live)
    return inverse, delta


@triton.jit
def load_cotangents(do, rows, item, head, first, i, live, column, width, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """dn = do/den (CHUNK, COLUMNS) and dd = -(do·o)/den, 0 without a denominator."""
    dn = load_tokens(do, item, head, first, live, column, width, COLUMNS, CHUNK)
    inverse, delta = load_rows(rows, item, head, i, live)
    if rows[0] is not None:
        dn *= inverse[:, None]
    return dn, -delta * inverse


@triton.jit
def store_tokens(view, item, head, first, keep, x, column, width, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The inverse of `load_tokens`, rounded to the dtype of the view."""
    rows, columns = tl.cast(first + tl.arange(0, CHUNK), tl.int64), tl.arange(0, COLUMNS)
    at = corner(view, item, head, 0, column) + rows[:, None] * view[3] + columns[None, :] * view[4]
    tl.store(at, x.to(view[0].dtype.element_ty), mask=within(keep, column, width, COLUMNS))


@triton.jit
def nearest(x, PRECISION: tl.constexpr):
    """x rounded to TF32 if products are TF32: tensor cores would truncate it."""
    if PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        x = tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def operand(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product takes it."""
    return nearest(x.to(OPERAND), PRECISION)


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """total + x y in float32, of two operands; without total if it is None.

    Long sums are split among warps: otherwise a warp would need whole rows of x and columns of y for its part of the
    result, and spill registers.
    """
    ROWS: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    COLUMNS: tl.constexpr = y.shape[1]
    PARTS: tl.constexpr = K // SLICE
    LONGEST: tl.constexpr = SLICE if x.dtype == tl.float32 else 2 * SLICE
    if K > LONGEST:
        left = tl.permute(tl.reshape(x, (ROWS, PARTS, SLICE)), (1, 0, 2))
        right = tl.reshape(y, (PARTS, SLICE, COLUMNS))
        result = tl.sum(tl.dot(left, right, input_precision=PRECISION), 0)
        if total is not None:
            result += total
    elif total is None:
        result = tl.dot(x, y, input_precision=PRECISION)
    else:
        result = tl.dot(x, y, total, input_precision=PRECISION)
    return result


@triton.jit
def product(x, y, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """`multiply` of x and y as products take them."""
    return multiply(operand(x, OPERAND, PRECISION), operand(y, OPERAND, PRECISION), total, PRECISION)


# Sums of rows and columns of bfloat16 matrices are products, which need no exchange between threads: what they are
# summed into, or multiplied with, is the first of eight columns. With operands in float32 they would be three products.


@triton.jit
def beside(x, OPERAND: tl.constexpr):
    """x as the first of eight columns, the others being 0; with operands in float32 x itself."""
    if tl.float32 != OPERAND:
        x = tl.where(tl.arange(0, 8)[None, :] == 0, x[:, None], 0.0)
    return x


@triton.jit
def alone(x, OPERAND: tl.constexpr):
    """The inverse of `beside`."""
    return x if tl.float32 == OPERAND else tl.sum(x, 1)


@triton.jit
def left_over(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """What a product of x with operands in OPERAND drops: its next digits."""
    return x - operand(x, OPERAND, PRECISION).to(tl.float32)


@triton.jit
def first_digits(x, MASK: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def two_operands(x, OPERAND: tl.constexpr):
    """Two operands, of bfloat16 or TF32, whose sum is x, with twice the digits of one. The first are cut off, not
    rounded, and in TF32 the others too: it takes half the instructions."""
    if tl.bfloat16 == OPERAND:
        first = first_digits(x, -0x10000)
        rest = x - first
    else:
        first = first_digits(x, -0x2000)
        rest = first_digits(x - first, -0x2000)
    return first.to(OPERAND), rest.to(OPERAND)


@triton.jit
def row_products(x, z, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x·z of every row of x, z having twice the digits of OPERAND."""
    if tl.float32 == OPERAND:
        result = tl.sum(x * z[None, :], 1)
    else:
        result = product(x, z, None, OPERAND, PRECISION)
        result = product(x, left_over(z, OPERAND, PRECISION), result, OPERAND, PRECISION)
    return result


@triton.jit
def add_row_sums(total, x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + the sums of the rows of x."""
    if tl.float32 == OPERAND:
        total += tl.sum(x, 1)
    else:
        total = product(x, beside(tl.full((x.shape[1],), 1.0, tl.float32), OPERAND), total, OPERAND, PRECISION)
    return total


@triton.jit
def add_tokens(total, x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + the sum of the tokens of x."""
    if tl.float32 == OPERAND:
        total += tl.sum(x, 0)
    else:
        total = add_row_sums(total, tl.trans(x), OPERAND, PRECISION)
    return total


@triton.jit
def digits(x, OPERAND: tl.constexpr):
    """x as the sum of the first three of eight columns, which have all its digits."""
    first = x.to(OPERAND).to(tl.float32)
    second = (x - first).to(OPERAND).to(tl.float32)
    column = tl.arange(0, 8)[None, :]
    rest = tl.where(column == 2, (x - first - second)[:, None], 0.0)
    return tl.where(column == 0, first[:, None], tl.where(column == 1, second[:, None], rest))


@triton.jit
def add_weighted_tokens(total, x, weights, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + the sum of the tokens of x with weights in float32."""
    if tl.float32 == OPERAND:
        total += tl.sum(x * weights[:, None], 0)
    else:
        total = product(tl.trans(x), digits(weights, OPERAND), total, OPERAND, PRECISION)
    return total
