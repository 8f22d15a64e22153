"""Point-wise attention, o_i = gain·f_i Σ_j m r h(x) v_j, and its gradients.

    dv_j = gain Σ_i m r f_i h(x) do_i         ds_ij = m r f_i h'(x) do_i·v_j
    dq_i = gain·scale Σ_j ds_ij k_j           dk_j = gain·scale Σ_i ds_ij q_i           dbias_ij = gain·ds_ij

f_i = n_i^-alpha, m is the visibility and r the dropout of a pair, x = scale·q_i·k_j + bias_ij + shift (or - log n_i).
Standing tiles are (queries, keys), lying tiles (keys, queries). Most functions share these tuples:

    pairs = (bias, mask, dropout_mask, seed, last_kept)   views of arrays of pairs, and the dropout by counter
    rows = (key_lengths, query_mask, factors, logs, key_norms)   views without the axes that these arrays lack
    limits = (queries, keys, left, right, *packed)        query i may see the keys i - left ≤ j ≤ i + right below `keys`
    packed = (edges, edges, sequences, after)             of queries and keys, None without any; a sequence with S keys
                                                          and L queries has left - (S - L) instead of left, and
                                                          right ≤ S - L + after
    own = (queries, keys, left, right)                    of a program
    numbers = (scale, shift, gain, alpha, keep)           shift and alpha are None if they have no effect
    factors, logs = n^-alpha, log n                       from `row_constants`, None if a kernel computes them
    at = (item, head, shared, key_item)                   `shared` and `key_item` are head and item of k and v

Distances are products of centred vectors q̂ and k̂ (`attnkit.kernels.triton.distances`) minus two norms: `logs` holds
|q̂_i|²/2, `key_norms` |k̂_j|²/2, and x = scale·min(q̂_i·k̂_j - both, 0) + bias_ij. Without `key_norms`
none of this is compiled. Their gradients are

    dq_i = gain·scale Σ_j ds_ij (k̂_j - q̂_i)   dk_j = gain·scale Σ_i ds_ij (q̂_i - k̂_j)

where Σ_j ds_ij sums the rounded ds of the product, so that rounding ds only rounds the weight of a difference. For half
types only the tokens that a program owns are centred, queries or, in `backward_keys`, keys:

    rest, whole                                           views of what rounding them to a half type left, and of the
                                                          tokens themselves, whose differences are those of gradients

Gradients need no maximum, no sum and no saved values. Every program owns its results, so sums have a fixed order: dq by
queries, dk and dv by keys, dbias by tiles. On request the programs that own keys add their parts of dq to float32
memory, taking turns: five products per tile instead of seven. Heads of few queries have one program for all of it, in
a fixed order (`attnkit.kernels.triton.whole_head`).

Statistics of the weights w_ij = gain·keep·f_i·h(x), before dropout with keep probability `keep`, are computed beside o
by `attnkit.kernels.triton.statistics` and written to its tuple `outputs`; without it none of this is compiled, and
without v and o only the statistics are. `dstats` holds cotangents of statistics: m r do_i·v_j becomes that plus keep
times the gradient of w_ij; without v and do only the latter.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import unit_of
from attnkit.kernels.triton.statistics import (
    add_weights,
    addresses,
    load_cotangents,
    no_weights,
    scale_of_weights,
    store_statistics,
    with_statistics,
)
from attnkit.kernels.triton.tiles import (
    add_product,
    add_rows,
    after_dropout,
    end_turn,
    key_blocks,
    key_ends,
    keys_of_a_tile,
    left_of,
    load_of_rows,
    load_pairs,
    load_rows,
    masked_pairs,
    nothing,
    place,
    placed,
    queries_of_a_tile,
    query_blocks,
    range_lengths,
    right_of,
    spreads,
    store_of_rows,
    store_rows,
    turn_of,
    valid_keys,
    visible_pairs,
    wait_for_turn,
    whole_sum,
)


@triton.jit
def power(n, alpha):
    """n^-alpha."""
    return tl.exp2(-alpha * tl.log2(n))


@triton.jit
def row_settings(i, hi, limits, rows, numbers, at, LOG_LENGTH: tl.constexpr):
    """n^-alpha and log n of the queries i, 1 and 0 if not needed."""
    factor, log_length = tl.full(i.shape, 1.0, tl.float32), tl.zeros(i.shape, tl.float32)
    if rows[2] is not None:
        factor = load_of_rows(rows[2], at[0], at[1], i, limits[0], 1.0)
    elif numbers[3] is not None:
        factor = power(range_lengths(i, limits[2], hi), numbers[3])
    if rows[3] is not None:
        log_length = load_of_rows(rows[3], at[0], at[1], i, limits[0], 0.0)
    elif LOG_LENGTH:
        log_length = tl.log(range_lengths(i, limits[2], hi))
    return factor, log_length


@triton.jit
def products_of(tile, rest, others, PRECISION: tl.constexpr):
    """The products of the tokens of two tiles, of which the first may have a `rest`."""
    if rest is None:
        products = tl.dot(tile, tl.trans(others), input_precision=PRECISION)
    else:
        products = tl.dot(rest, tl.trans(others), input_precision=PRECISION)
        products = tl.dot(tile, tl.trans(others), products, input_precision=PRECISION)
    return products


@triton.jit
def whole_tokens(tile, whole, item, head, first, rows, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The tokens first + rows as gradients subtract them: those of the tile unless they were rounded."""
    return tile if whole is None else load_rows(whole, item, head, first, rows, keep, WIDTH, PADDED)


@triton.jit
def arguments(
    products, numbers, of_queries, of_keys, bias, at, i0, i, j0, j, inside, H: tl.constexpr, EDGE: tl.constexpr
):
    """x from the products q·k of a tile, in the unit of H; 0 on invisible pairs, whose NaN may not spread."""
    unit: tl.constexpr = unit_of(H)
    scale = numbers[0] * unit
    if of_keys is not None:
        x = tl.minimum(products - of_queries - of_keys, 0.0, propagate_nan=tl.PropagateNan.ALL) * scale
    else:
        x = products * scale - of_queries * unit
    if bias is not None:
        x += load_pairs(bias, at[0], at[1], i0, i, j0, j, inside).to(tl.float32) * unit
    if numbers[1] is not None:
        x += numbers[1] * unit
    if EDGE:
        x = tl.where(inside, x, 0.0)
    return x


@triton.jit
def attend(
    sums, stats, q_tile, rest, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale, low, high, first,
    stop, H: tl.constexpr, KIND: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + Σ_j m r h(x) v_j, and `stats` of the weights, over the key blocks first .. stop; without EDGE, every
    query sees all of their keys, but for masks."""
    HIDES: tl.constexpr = EDGE or MASKED
    item, head, shared, key_item = at
    columns = tl.arange(0, KEYS)
    i, j = tl.arange(0, ROWS)[:, None], columns[None, :]
    for j0 in range(first, stop, KEYS):
        seen, inside = None, i0 + i < own[0]
        if EDGE:
            inside = visible_pairs(pairs[1], own[2], hi[:, None], item, head, i0, i, j0, j)
            seen = keys_of_a_tile(inside, j0 + columns, low, high, MASKED)
        elif MASKED:
            inside = masked_pairs(pairs[1], hi[:, None], item, head, i0, i, j0, j)
        keys = load_rows(k, key_item, shared, j0, columns, seen, d, D)
        products = products_of(q_tile, rest, keys, PRECISION)
        of_keys = None if rows[4] is None else load_of_rows(rows[4], key_item, shared, j0 + j, own[1], 0.0)
        x = arguments(products, numbers, log_length[:, None], of_keys, pairs[0], at, i0, i, j0, j, inside, H, HIDES)
        u = H(x)
        if HIDES:
            u = tl.where(inside, u, 0.0)
        if KIND is not None:
            w = u * scale[:, None] if KIND[1] else u
            stats = add_weights(stats, w, inside if HIDES else None, j0, KIND, KEYS)
        if v is not None:
            values = load_rows(v, key_item, shared, j0, columns, seen, e, E)
            u = after_dropout(u, pairs[2], pairs[3], pairs[4], item, head, i0, i, j0, j, inside)
            sums = add_product(sums, u, values, PRECISION)
    return sums, stats


@triton.jit
def forward(
    q, k, v, o, outputs, pairs, rows, limits, numbers, rest, heads, groups,
    H: tl.constexpr, LOG_LENGTH: tl.constexpr, KIND: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and the statistics `outputs` for ROWS queries of one head; query head h has the keys of head h // groups."""
    pairs, rows = pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    block, head, item, key_item, queries, keys = placed(limits, limits[0], heads, ROWS, False)
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    own, i0, at = (queries, keys, left, right), block * ROWS, (item, head, head // groups, key_item)
    i = i0 + tl.arange(0, ROWS)
    keys = valid_keys(rows[0], keys, item, head)
    hi = key_ends(i, queries, keys, right, rows[1], item, head)
    factor, log_length = row_settings(i, hi, own, rows, numbers, at, LOG_LENGTH)
    q_tile = load_rows(q, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    rest = None if rest is None else load_rows(rest, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    scale = None if KIND is None else scale_of_weights(factor, numbers)
    sums, stats = () if v is None else nothing(ROWS, E, False), () if KIND is None else no_weights(KIND, ROWS)
    first, whole, end, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    low = None if left is None else i0 - left
    if left is not None:
        sums, stats = attend(
            sums, stats, q_tile, rest, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale, low, stop,
            first, tl.minimum(whole, stop), H, KIND, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    sums, stats = attend(
        sums, stats, q_tile, rest, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale, low, stop,
        whole, end, H, KIND, False, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    sums, stats = attend(
        sums, stats, q_tile, rest, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale, low, stop,
        end, stop, H, KIND, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    if MASKED and v is not None:
        spread = spreads(sums)
        if spread:
            sums, _ = attend(
                nothing(ROWS, E, False), (), q_tile, rest, k, v, pairs, rows, own, numbers, at, i0, hi, log_length,
                scale, low, stop, first, stop, H, None, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
    if KIND is not None:
        store_statistics(outputs, stats, scale, addresses(i, item, head, heads, queries), i < queries, KIND)
    if v is not None:
        total = whole_sum(sums, None, v[0].dtype.element_ty) * numbers[2] * factor[:, None]
        store_rows(o, item, head, i0, tl.arange(0, ROWS), i < queries, total, e, E)


@triton.jit
def row_constants(
    mask, lengths, rows, limits, numbers, heads, LOG_LENGTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """n^-alpha into the view rows[2] and log n into rows[3] for ROWS queries of one head, if these are not None.

    n is read from `lengths` or counted, with a boolean mask pair by pair.
    """
    rows = rows[:]
    block, head, item, _key_item, queries, keys = placed(limits, limits[0], heads, ROWS, False)
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    i0 = block * ROWS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    keys = valid_keys(rows[0], keys, item, head)
    hi = key_ends(i0 + beside, queries, keys, right, rows[1], item, head)
    if lengths is not None:
        n = load_of_rows(lengths, item, head, i0 + beside, queries, 1.0)
    elif mask is not None:
        total = tl.zeros((ROWS,), tl.int32)
        first, _, _, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
        for j0 in range(first, stop, KEYS):
            inside = visible_pairs(mask, left, hi[:, None], item, head, i0, beside[:, None], j0, columns[None, :])
            total += tl.sum(inside.to(tl.int32), 1)
        n = range_lengths(i0 + beside, None, total)
    else:
        n = range_lengths(i0 + beside, left, hi)
    if rows[2] is not None:
        store_of_rows(rows[2], item, head, i0 + beside, queries, power(n, numbers[3]))
    if rows[3] is not None:
        store_of_rows(rows[3], item, head, i0 + beside, queries, tl.log(n))


@triton.jit
def du_tile(do_tile, v_tile, pairs, at, i0, i, j0, j, inside, PRECISION: tl.constexpr):
    """r do_i·v_j for a tile."""
    du = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
    return after_dropout(du, pairs[2], pairs[3], pairs[4], at[0], at[1], i0, i, j0, j, inside)


@triton.jit
def gather(
    sums, q_tile, rest, do_tile, dstats, drows, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale, low,
    high, first, stop, H: tl.constexpr, DH: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + Σ_j ds_ij/(gain·f_i) k_j over the key blocks first .. stop; EDGE is that of `attend`."""
    HIDES: tl.constexpr = EDGE or MASKED
    item, head, shared, key_item = at
    columns = tl.arange(0, KEYS)
    i, j = tl.arange(0, ROWS)[:, None], columns[None, :]
    for j0 in range(first, stop, KEYS):
        seen, inside = None, i0 + i < own[0]
        if EDGE:
            inside = visible_pairs(pairs[1], own[2], hi[:, None], item, head, i0, i, j0, j)
            seen = keys_of_a_tile(inside, j0 + columns, low, high, MASKED)
        elif MASKED:
            inside = masked_pairs(pairs[1], hi[:, None], item, head, i0, i, j0, j)
        keys = load_rows(k, key_item, shared, j0, columns, seen, d, D)
        values = None if v is None else load_rows(v, key_item, shared, j0, columns, seen, e, E)
        products = products_of(q_tile, rest, keys, PRECISION)
        of_keys = None if rows[4] is None else load_of_rows(rows[4], key_item, shared, j0 + j, own[1], 0.0)
        x = arguments(products, numbers, log_length[:, None], of_keys, pairs[0], at, i0, i, j0, j, inside, H, HIDES)
        du = None if v is None else du_tile(do_tile, values, pairs, at, i0, i, j0, j, inside, PRECISION)
        if dstats[0] is not None:
            du = with_statistics(du, dstats, drows, H(x) * scale[:, None], numbers[4], j0 + j)
        ds = DH(x) * du
        if HIDES:
            ds = tl.where(inside, ds, 0.0)
        sums = add_product(sums, ds, keys, PRECISION)
    return sums


@triton.jit
def backward_queries(
    q, k, v, do, dstats, dq, pairs, rows, limits, numbers, rest, whole, heads, groups,
    H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq for ROWS queries of one head."""
    pairs, rows = pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    block, head, item, key_item, queries, keys = placed(limits, limits[0], heads, ROWS, False)
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    own, i0, at = (queries, keys, left, right), block * ROWS, (item, head, head // groups, key_item)
    i = i0 + tl.arange(0, ROWS)
    keys = valid_keys(rows[0], keys, item, head)
    hi = key_ends(i, queries, keys, right, rows[1], item, head)
    factor, log_length = row_settings(i, hi, own, rows, numbers, at, LOG_LENGTH)
    q_tile = load_rows(q, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    rest = None if rest is None else load_rows(rest, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    do_tile = None if do is None else load_rows(do, item, head, i0, tl.arange(0, ROWS), i < queries, e, E)
    at_rows, drows = addresses(i, item, head, heads, queries)[:, None], ()
    if dstats[0] is not None:
        drows = load_cotangents(dstats, at_rows, (i < queries)[:, None])
    scale = None if dstats[0] is None else scale_of_weights(factor, numbers)
    sums = nothing(ROWS, D, rows[4] is not None)
    first, full, end, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    low = None if left is None else i0 - left
    if left is not None:
        sums = gather(
            sums, q_tile, rest, do_tile, dstats, drows, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale,
            low, stop, first, tl.minimum(full, stop), H, DH, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    sums = gather(
        sums, q_tile, rest, do_tile, dstats, drows, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale,
        low, stop, full, end, H, DH, False, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    sums = gather(
        sums, q_tile, rest, do_tile, dstats, drows, k, v, pairs, rows, own, numbers, at, i0, hi, log_length, scale,
        low, stop, end, stop, H, DH, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
    if MASKED:
        spread = spreads(sums)
        if spread:
            sums = gather(
                nothing(ROWS, D, rows[4] is not None), q_tile, rest, do_tile, dstats, drows, k, v, pairs, rows, own,
                numbers, at, i0, hi, log_length, scale, low, stop, first, stop, H, DH, True, MASKED, d, e, D, E, ROWS,
                KEYS, PRECISION,
            )  # fmt: skip
    whole_tile = whole_tokens(q_tile, whole, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    total = whole_sum(sums, whole_tile, k[0].dtype.element_ty) * (numbers[0] * numbers[2]) * factor[:, None]
    store_rows(dq, item, head, i0, tl.arange(0, ROWS), i < queries, total, d, D)


@triton.jit
def weights_and_slopes(
    k_tile, rest, v_tile, of_keys, q_tile, do_tile, dstats, pairs, rows, own, numbers, at, heads, i0, hi, j0, inside,
    H: tl.constexpr, DH: tl.constexpr, EDGE: tl.constexpr, LOG_LENGTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m r f_i h(x) and ds_ij/gain of a lying tile; the former is not computed unless it is used."""
    item, head, _, _ = at
    beside = tl.arange(0, ROWS)
    i, j = beside[None, :], tl.arange(0, KEYS)[:, None]
    factor, log_length = row_settings(i0 + beside, hi, own, rows, numbers, at, LOG_LENGTH)
    products = products_of(k_tile, rest, q_tile, PRECISION)
    x = arguments(products, numbers, log_length[None, :], of_keys, pairs[0], at, i0, i, j0, j, inside, H, EDGE)
    du = None if do_tile is None else du_tile(v_tile, do_tile, pairs, at, i0, i, j0, j, inside, PRECISION)
    if dstats[0] is not None:
        drows = load_cotangents(dstats, addresses(i0 + i, item, head, heads, own[0]), i0 + i < own[0])
        w = H(x) * scale_of_weights(factor, numbers)[None, :]
        du = with_statistics(du, dstats, drows, w, numbers[4], j0 + j)
    ds = DH(x) * (du * factor[None, :])
    if EDGE:
        ds = tl.where(inside, ds, 0.0)
    u = after_dropout(H(x), pairs[2], pairs[3], pairs[4], item, head, i0, i, j0, j, inside) * factor[None, :]
    if EDGE:
        u = tl.where(inside, u, 0.0)
    return u, ds


@triton.jit
def collect(
    sums, k_tile, rest, whole_tile, v_tile, of_keys, q, do, dq, turn, dstats, pairs, rows, own, numbers, at, heads, j0,
    first, stop, H: tl.constexpr, DH: tl.constexpr, EDGE: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk + Σ_i ds_ij q_i and dv + Σ_i m r f_i h(x) do_i over the query blocks first .. stop, whose dq gets Σ_j.

    turn = (own, before, count, rows of the query heads before this one): see `turn_of`; () without dq.
    """
    dk, dv = sums
    queries, keys, left, right = own
    item, head, _, _ = at
    beside = tl.arange(0, ROWS)
    i, j = beside[None, :], tl.arange(0, KEYS)[:, None]
    for i0 in range(first, stop, ROWS):
        hi = key_ends(i0 + beside, queries, keys, right, rows[1], item, head)
        seen, inside = None, j0 + j < keys
        if EDGE:
            inside = visible_pairs(pairs[1], left, hi[None, :], item, head, i0, i, j0, j)
            seen = queries_of_a_tile(inside, i0 + beside, left, hi, j0, KEYS, pairs[1] is not None)
        q_tile = load_rows(q, item, head, i0, beside, seen, d, D)
        do_tile = None if do is None else load_rows(do, item, head, i0, beside, seen, e, E)
        u, ds = weights_and_slopes(
            k_tile, rest, v_tile, of_keys, q_tile, do_tile, dstats, pairs, rows, own, numbers, at, heads, i0, hi, j0,
            inside, H, DH, EDGE, LOG_LENGTH, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        if do is not None:
            dv = add_product(dv, u, do_tile, PRECISION)
        dk = add_product(dk, ds, q_tile, PRECISION)
        if dq is not None:
            used = whole_tile
            if EDGE:
                used = tl.where((tl.max(inside.to(tl.int32), 1) > 0)[:, None], used, 0.0)
            part = add_product(nothing(ROWS, D, rows[4] is not None), tl.trans(ds), used, PRECISION)
            part = whole_sum(part, q_tile, k_tile.dtype) * (numbers[0] * numbers[2])
            done = turn[3] + i0 + ROWS
            wait_for_turn(turn, done)
            add_rows(dq, item, head, i0, beside, i0 + beside < queries, part, d, D)
            end_turn(turn, done)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, do, dstats, dk, dv, dq, turns, pairs, rows, limits, numbers, rest, whole, stored, heads, groups,
    H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for KEYS of the `stored` keys of one of `heads` heads, which `groups` query heads share.

    With dq, in float32, their contribution is added to it, with `turns` of the programs.
    """
    pairs, rows = pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    block, shared, item, key_item, queries, keys = placed(limits, stored, heads, KEYS, True, dq is not None)
    turn = (turns, turns, 0)
    if dq is not None:
        turn = turn_of(turns, block, tl.cdiv(stored, KEYS) + (0 if limits[4] is None else limits[6]))
    left, right = (
        None if limits[2] is None else left_of(limits, queries, keys),
        None if limits[3] is None else right_of(limits, queries, keys),
    )
    if limits[4] is not None:
        stored = keys
    j0 = block * KEYS
    columns = tl.arange(0, KEYS)
    j = j0 + columns[:, None]
    sums = nothing(KEYS, D, rows[4] is not None), () if do is None else nothing(KEYS, E, False)
    k_tile = load_rows(k, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    rest = None if rest is None else load_rows(rest, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    whole_tile = None
    if dq is not None:
        whole_tile = whole_tokens(k_tile, whole, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    v_tile = None if v is None else load_rows(v, key_item, shared, j0, columns, j0 + columns < keys, e, E)
    for member in range(groups):
        head = shared * groups + member
        at = (item, head, shared, key_item)
        of_keys = None if rows[4] is None else load_of_rows(rows[4], key_item, shared, j, stored, 0.0)
        valid = valid_keys(rows[0], keys, item, head)
        bounds = (queries, valid, left, right)
        first, full, end, stop = query_blocks(j0, queries, valid, left, right, ROWS, KEYS)
        before = member * (queries + ROWS)
        own_turn = () if dq is None else (turn[0], turn[1], turn[2], before)
        if MASKED or right is not None:
            sums = collect(
                sums, k_tile, rest, whole_tile, v_tile, of_keys, q, do, dq, own_turn, dstats, pairs, rows, bounds,
                numbers, at, heads * groups, j0, first, stop if MASKED else tl.minimum(full, stop), H, DH, True,
                LOG_LENGTH, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
        if not MASKED:
            sums = collect(
                sums, k_tile, rest, whole_tile, v_tile, of_keys, q, do, dq, own_turn, dstats, pairs, rows, bounds,
                numbers, at, heads * groups, j0, full, end, H, DH, False, LOG_LENGTH, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            sums = collect(
                sums, k_tile, rest, whole_tile, v_tile, of_keys, q, do, dq, own_turn, dstats, pairs, rows, bounds,
                numbers, at, heads * groups, j0, end, stop, H, DH, True, LOG_LENGTH, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
        if dq is not None:
            end_turn(turn, before + queries + ROWS)
    in_range = j0 + columns < stored
    if dq is None:
        whole_tile = whole_tokens(k_tile, whole, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    dk_total = whole_sum(sums[0], whole_tile, q[0].dtype.element_ty) * (numbers[0] * numbers[2])
    store_rows(dk, key_item, shared, j0, columns, in_range, dk_total, d, D)
    if do is not None:
        dv_total = whole_sum(sums[1], None, do[0].dtype.element_ty) * numbers[2]
        store_rows(dv, key_item, shared, j0, columns, in_range, dv_total, e, E)


@triton.jit
def backward_bias(
    q, k, v, do, dstats, dbias, pairs, rows, limits, numbers, rest, stored, items, heads, groups, bias_items,
    bias_heads, H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (bias_items, bias_heads, L, S) for one tile, summed over the items and heads that share it."""
    pairs, rows = pairs[:], rows[:]
    queries, keys, left, right = limits[:4]
    across = tl.cdiv(stored, KEYS)
    block, first_head, first_item = place(tl.cdiv(queries, ROWS) * across, bias_heads)
    i0, j0 = block // across * ROWS, block % across * KEYS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    i, j, in_range = beside[:, None], columns[None, :], i0 + beside < queries
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for item in range(first_item, items, bias_items):
        for head in range(first_head, heads, bias_heads):
            at = (item, head, head // groups, item)
            valid = valid_keys(rows[0], keys, item, head)
            hi = key_ends(i0 + beside, queries, valid, right, rows[1], item, head)
            first, _, _, stop = key_blocks(i0, queries, valid, left, right, ROWS, KEYS)
            if (j0 < stop) & (j0 + KEYS > first):
                factor, log_length = row_settings(i0 + beside, hi, limits, rows, numbers, at, LOG_LENGTH)
                inside = visible_pairs(pairs[1], left, hi[:, None], item, head, i0, i, j0, j)
                q_tile = load_rows(q, item, head, i0, beside, in_range, d, D)
                left_over = None if rest is None else load_rows(rest, item, head, i0, beside, in_range, d, D)
                do_tile = None if do is None else load_rows(do, item, head, i0, beside, in_range, e, E)
                k_tile = load_rows(k, item, at[2], j0, columns, j0 + columns < valid, d, D)
                v_tile = None if v is None else load_rows(v, item, at[2], j0, columns, j0 + columns < valid, e, E)
                products = products_of(q_tile, left_over, k_tile, PRECISION)
                of_keys = None if rows[4] is None else load_of_rows(rows[4], item, at[2], j0 + j, stored, 0.0)
                x = arguments(
                    products, numbers, log_length[:, None], of_keys, pairs[0], at, i0, i, j0, j, inside, H, True
                )
                du = None if v is None else du_tile(do_tile, v_tile, pairs, at, i0, i, j0, j, inside, PRECISION)
                if dstats[0] is not None:
                    drows = load_cotangents(dstats, addresses(i0 + i, item, head, heads, queries), i0 + i < queries)
                    w = H(x) * scale_of_weights(factor, numbers)[:, None]
                    du = with_statistics(du, dstats, drows, w, numbers[4], j0 + j)
                total += tl.where(inside, DH(x) * du * factor[:, None], 0.0)
    at_pairs = dbias[0] + first_item * dbias[1] + first_head * dbias[2]
    at_pairs += (i0 + i).to(tl.int64) * dbias[3] + (j0 + j)
    tl.store(at_pairs, total * numbers[2], mask=in_range[:, None] & (j0 + j < stored))
