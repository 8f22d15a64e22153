"""Queries and keys centred near the keys, so that distances computed from products do not cancel for a common offset.

The centre c of a head of keys is the mean of the keys visible to the first query with a key, so results are bitwise
causal. It is rounded to the dtype of the inputs, so x̂ = x - c is exact in float32 if all x are far away. Products are
of x̂ in float32 for float32 inputs, and for half types whose weights must be as exact:

    -‖q̂ - k̂‖²/2 = q̂·k̂ - |q̂|²/2 - |k̂|²/2

Otherwise tensor cores multiply half types. q and k are exact in theirs and x̂ is not: rounded to it, distances are those
of other tokens. So the tokens x that a program owns are two matrices, x̂ = near + rest, and the others, y, are read as
they are:

    -‖x̂ - ŷ‖²/2 = x̂·y - (|x̂|²/2 + c·x̂) - |ŷ|²/2

The norm of x̂ is that of near + rest, so the identity holds. Its terms cancel for a common offset, in float32, but then
inputs of half types have few digits themselves.
Tuples are those of `attnkit.kernels.triton.pointwise`.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.tiles import (
    key_blocks,
    key_ends,
    key_starts,
    load_rows,
    place,
    store_of_rows,
    store_rows,
    valid_keys,
    visible_pairs,
)


@triton.jit
def first_live(i0, mask, rows, limits, item, head, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The first of the queries i0 .. i0 + ROWS - 1 of a head that sees a key, or the number of queries."""
    queries, keys, left, right = limits[:4]
    i = i0 + tl.arange(0, ROWS)
    keys = valid_keys(rows[0], keys, item, head)
    hi = key_ends(i, queries, keys, right, rows[1], item, head)
    live = hi > key_starts(i, left)
    if mask is not None:
        live = i < 0
        columns = tl.arange(0, KEYS)
        first, _, _, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
        for j0 in range(first, stop, KEYS):
            of_rows = tl.arange(0, ROWS)[:, None]
            inside = visible_pairs(mask, left, hi[:, None], item, head, i0, of_rows, j0, columns[None, :])
            live = live | (tl.max(inside.to(tl.int32), 1) > 0)
    return tl.min(tl.where(live, i, queries), 0)


@triton.jit
def mean_of(total, count):
    """The mean of `count` vectors, 0 of none."""
    return total / tl.maximum(count, 1.0)


@triton.jit
def centre(
    k, centres, mask, rows, limits, heads, groups,
    d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """c for one head of keys, which `groups` query heads share."""
    rows = rows[:]
    queries, keys, left, right = limits[:4]
    _, shared, item = place(1, heads)
    query = tl.program_id(0) * 0 + queries
    i0 = 0
    while i0 < query:
        for member in range(groups):
            query = tl.minimum(query, first_live(i0, mask, rows, limits, item, shared * groups + member, ROWS, KEYS))
        i0 += ROWS
    columns = tl.arange(0, KEYS)
    total, count = tl.zeros((D,), tl.float32), tl.zeros((KEYS,), tl.float32)
    for j0 in range(0, tl.where(query < queries, keys, 0), KEYS):
        visible = columns < 0
        for member in range(groups):
            head = shared * groups + member
            valid = valid_keys(rows[0], keys, item, head)
            hi = key_ends(query + columns * 0, queries, valid, right, rows[1], item, head)
            visible = visible | visible_pairs(mask, left, hi, item, head, query, columns * 0, j0, columns)
        total += tl.sum(load_rows(k, item, shared, j0, columns, visible, d, D).to(tl.float32), 0)
        count += visible.to(tl.float32)
    mean = mean_of(total, tl.sum(count, 0))
    store_rows(centres, item, shared, 0, tl.arange(0, 1), tl.arange(0, 1) < 1, mean[None, :], d, D)


@triton.jit
def within_range(x, dtype: tl.constexpr):
    """x, but float16's largest numbers instead of those beyond them: what is missing is left to the rest."""
    if dtype == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def move(
    x, centres, near, rest, norms, tokens, heads, groups, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """|x̂|²/2 for ROWS tokens, and x̂ = x - c rounded to the dtype of `near`; `groups` heads have this c.

    With `rest`, which takes what rounding left, c·x̂ is added to the norms.
    """
    block, head, item = place(tl.cdiv(tokens, ROWS), heads)
    rows = tl.arange(0, ROWS)
    inside = block * ROWS + rows < tokens
    c = load_rows(centres, item, head // groups, 0, tl.arange(0, 1), None, d, D)
    moved = load_rows(x, item, head, block * ROWS, rows, inside, d, D).to(tl.float32) - c
    if near is not None:
        high = within_range(moved, near[0].dtype.element_ty).to(near[0].dtype.element_ty)
        store_rows(near, item, head, block * ROWS, rows, inside, high, d, D)
    products = 0.5 * moved
    if rest is not None:
        low = (moved - high.to(tl.float32)).to(high.dtype)
        store_rows(rest, item, head, block * ROWS, rows, inside, low, d, D)
        moved = high.to(tl.float32) + low.to(tl.float32)
        products = 0.5 * moved + c
    store_of_rows(norms, item, head, block * ROWS + rows, tokens, tl.sum(moved * products, 1))
