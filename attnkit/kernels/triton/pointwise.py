"""Point-wise attention: o_i = gain·f_i Σ_j m r h(x) v_j, and what its gradients share with it.

f_i = n_i^-alpha, m is the visibility and r the dropout of a pair, x = scale·q_i·k_j + bias_ij + shift (or - log n_i).
Tiles of (queries, keys) stand, those of (keys, queries) lie. Tuples hold what most functions need:

    pairs = (bias, mask, dropout_mask, seed, last_kept)   views of arrays of pairs, and the dropout by counter
    rows = (key_lengths, query_mask, factors, logs, key_norms)   views without the axes that these arrays lack
    limits = (queries, keys, left, right, packed)         query i may see the keys i - left ≤ j ≤ i + right below `keys`
    packed = (edges, edges, sequences, before, after)     of queries and keys; with S keys and L queries a sequence has
                                                          left = before - (S - L) and right ≤ S - L + after
    numbers = (scale, shift, gain, alpha, kept)           shift and alpha are None where they do nothing
    factors, logs = n^-alpha, log n                       from `row_constants`, None where a kernel finds them itself
    at = (item, head, shared, key_item)                   `shared` and `key_item` are head and item of k and v

Distances are products of centred vectors q̂ and k̂ (`attnkit.kernels.triton.distances`), less two norms: `logs` holds
(scale/2)|q̂_i|², `key_norms` (scale/2)|k̂_j|², and x = scale·q̂_i·k̂_j - both, 0 at most, + bias_ij. Without
`key_norms` nothing of this is compiled.

Statistics of the weights w_ij = gain·kept·f_i·h(x), dropout left out and `kept` being the share that it keeps, are made
beside o by `attnkit.kernels.triton.statistics`, whose tuple `wanted` is. Without it nothing of that is compiled;
without v and o nothing but that.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.statistics import (
    add_weights,
    addresses,
    no_weights,
    scale_of_weights,
    store_statistics,
)
from attnkit.kernels.triton.tiles import (
    add_product,
    after_dropout,
    key_blocks,
    key_ranges,
    keys_of_a_tile,
    load_of_rows,
    load_pairs,
    load_rows,
    nothing,
    placed_limits,
    range_lengths,
    standing,
    store_of_rows,
    store_rows,
    valid_keys,
    visible_pairs,
    whole_sum,
)


@triton.jit
def power(n, alpha):
    """n^-alpha."""
    return tl.exp2(-alpha * tl.log2(n))


@triton.jit
def row_settings(i, lo, hi, limits, rows, numbers, at, LOG_LENGTH: tl.constexpr):
    """n^-alpha and log n of the queries i, None where the call has no use for them."""
    factor, log_length = None, None
    if rows[2] is not None:
        factor = load_of_rows(rows[2], at[0], at[1], i, limits[0], 1.0)
    elif numbers[3] is not None:
        factor = power(range_lengths(lo, hi), numbers[3])
    if rows[3] is not None:
        log_length = load_of_rows(rows[3], at[0], at[1], i, limits[0], 0.0)
    elif LOG_LENGTH:
        log_length = tl.log(range_lengths(lo, hi))
    return factor, log_length


@triton.jit
def norms_of_keys(rows, at, j, keys):
    """(scale/2)|k̂_j|² of the keys j, None where scores are products."""
    norms = None
    if rows[4] is not None:
        norms = load_of_rows(rows[4], at[3], at[2], j, keys, 0.0)
    return norms


@triton.jit
def arguments(products, numbers, of_queries, of_keys, bias, at, i0, i, j0, j, inside):
    """x from the products q·k of a tile."""
    x = products * numbers[0]
    if of_queries is not None:
        x -= of_queries
    if of_keys is not None:
        x -= of_keys
        x = tl.where(x * numbers[0] > 0.0, 0.0, x)
    if bias is not None:
        x += load_pairs(bias, at[0], at[1], i0, i, j0, j, inside).to(tl.float32)
    if numbers[1] is not None:
        x += numbers[1]
    return x


@triton.jit
def attend(
    sums, found, queried, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low, high, first, stop,
    H: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + Σ_j m r h(x) v_j, and what is `found` of weights, over the key blocks first .. stop; without EDGE, every
    query sees every key of them."""
    item, head, shared, key_item = at
    columns = tl.arange(0, KEYS)
    i, j = tl.arange(0, ROWS)[:, None], columns[None, :]
    for j0 in range(first, stop, KEYS):
        seen, inside = None, i0 + i < limits[0]
        if EDGE:
            inside = visible_pairs(pairs[1], standing(lo), standing(hi), item, head, i0, i, j0, j)
            seen = keys_of_a_tile(inside, j0 + columns, low, high, MASKED)
        keys = load_rows(k, key_item, shared, j0, columns, seen, d, D)
        products = tl.dot(queried, tl.trans(keys), input_precision=PRECISION)
        of_keys = norms_of_keys(rows, at, j0 + j, limits[1])
        x = arguments(products, numbers, standing(log_length), of_keys, pairs[0], at, i0, i, j0, j, inside)
        u = H(x)
        if EDGE:
            u = tl.where(inside, u, 0.0)
        if found is not None:
            found = add_weights(found, u * standing(scale), inside, j0, j)
        if v is not None:
            values = load_rows(v, key_item, shared, j0, columns, seen, e, E)
            u = after_dropout(u, pairs[2], pairs[3], pairs[4], item, head, i0, i, j0, j, inside)
            sums = add_product(sums, u, values, PRECISION)
    return sums, found


@triton.jit
def forward(
    q, k, v, o, wanted, pairs, rows, limits, numbers, heads, groups,
    H: tl.constexpr, LOG_LENGTH: tl.constexpr, EXACT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and the statistics `wanted` for ROWS queries of one head; query head h has the keys of head h // groups."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    block, head, item, key_item, limits = placed_limits(limits, limits[0], heads, ROWS, False)
    queries, keys, left, right = limits
    i0, at = block * ROWS, (item, head, head // groups, key_item)
    i = i0 + tl.arange(0, ROWS)
    keys = valid_keys(rows[0], keys, item, head)
    lo, hi = key_ranges(i, queries, keys, left, right, rows[1], item, head)
    factor, log_length = row_settings(i, lo, hi, limits, rows, numbers, at, LOG_LENGTH)
    queried = load_rows(q, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    scale = scale_of_weights(i, factor, numbers)
    sums, found = nothing(ROWS, E, False) if v is not None else None, no_weights(wanted, EXACT, ROWS)
    first, whole, end, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    low = None if left is None else i0 - left
    if MASKED or left is not None:
        sums, found = attend(
            sums, found, queried, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low, stop,
            first, stop if MASKED else tl.minimum(whole, stop), H, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if not MASKED:
        sums, found = attend(
            sums, found, queried, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low, stop,
            whole, end, H, False, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        sums, found = attend(
            sums, found, queried, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low, stop,
            end, stop, H, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if found is not None:
        store_statistics(wanted, found, addresses(i, item, head, heads, queries), i < queries, EXACT)
    if v is not None:
        total = whole_sum(sums, None, v[0].dtype.element_ty) * numbers[2]
        if factor is not None:
            total *= factor[:, None]
        store_rows(o, item, head, i0, tl.arange(0, ROWS), i < queries, total, e, E)


@triton.jit
def row_constants(
    mask, lengths, rows, limits, numbers, heads, LOG_LENGTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """n^-alpha into the view rows[2] and log n into rows[3] for ROWS queries of one head, where they are given.

    n is given in `lengths`, or counted: with a boolean mask pair by pair.
    """
    block, head, item, _key_item, limits = placed_limits(limits, limits[0], heads, ROWS, False)
    queries, keys, left, right = limits
    i0 = block * ROWS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    keys = valid_keys(rows[0], keys, item, head)
    lo, hi = key_ranges(i0 + beside, queries, keys, left, right, rows[1], item, head)
    if lengths is not None:
        n = load_of_rows(lengths, item, head, i0 + beside, queries, 1.0)
    elif mask is not None:
        total = tl.zeros((ROWS,), tl.int32)
        first, _, _, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
        for j0 in range(first, stop, KEYS):
            inside = visible_pairs(
                mask, standing(lo), standing(hi), item, head, i0, beside[:, None], j0, columns[None, :]
            )
            total += tl.sum(inside.to(tl.int32), 1)
        n = range_lengths(None, total)
    else:
        n = range_lengths(lo, hi)
    if rows[2] is not None:
        store_of_rows(rows[2], item, head, i0 + beside, queries, power(n, numbers[3]))
    if rows[3] is not None:
        store_of_rows(rows[3], item, head, i0 + beside, queries, tl.log(n))
