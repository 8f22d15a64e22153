"""The gradients of point-wise attention. With the names of `attnkit.kernels.triton.pointwise`,

    dv_j = gain Σ_i m r f_i h(x) do_i         ds_ij = m r f_i h'(x) do_i·v_j
    dq_i = gain·scale Σ_j ds_ij k_j           dk_j = gain·scale Σ_i ds_ij q_i           dbias_ij = gain·ds_ij

No maximum, no sum and nothing saved. Every program owns its results, so that sums have one order: dq by queries, dk and
dv by keys, dbias by tiles. Only where it is asked for, the programs that own keys add their parts of dq to float32 in
memory, in any order: five products of a tile instead of seven. Of distances

    dq_i = gain·scale Σ_j ds_ij (k̂_j - q̂_i)   dk_j = gain·scale Σ_i ds_ij (q̂_i - k̂_j)

where Σ_j ds_ij adds up what the product was made of: to round ds is then to round the weight of a difference.

`given`, a tuple of `attnkit.kernels.triton.statistics`, holds cotangents of statistics: m r do_i·v_j becomes that plus
kept times the gradient of w_ij. Without it nothing of that is compiled; without v and do nothing but that.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.pointwise import (
    arguments,
    norms_of_keys,
    row_settings,
)
from attnkit.kernels.triton.statistics import (
    addresses,
    load_cotangents,
    scale_of_weights,
    with_statistics,
)
from attnkit.kernels.triton.tiles import (
    add_product,
    add_rows,
    after_dropout,
    key_blocks,
    key_ranges,
    keys_of_a_tile,
    load_rows,
    lying,
    nothing,
    optional_matrix,
    place,
    placed_limits,
    queries_of_a_tile,
    query_blocks,
    standing,
    store_rows,
    valid_keys,
    visible_pairs,
    whole_sum,
)


@triton.jit
def pulled_pairs(pulled, valued, pairs, at, i0, i, j0, j, inside, PRECISION: tl.constexpr):
    """r do_i·v_j for a tile, None where there is no do."""
    du = None
    if pulled is not None:
        du = tl.dot(pulled, tl.trans(valued), input_precision=PRECISION)
        du = after_dropout(du, pairs[2], pairs[3], pairs[4], at[0], at[1], i0, i, j0, j, inside)
    return du


@triton.jit
def gather(
    sums, queried, pulled, loaded, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low, high,
    first, stop, H: tl.constexpr, DH: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + Σ_j ds_ij/(gain·f_i) k_j over the key blocks first .. stop."""
    item, head, shared, key_item = at
    columns = tl.arange(0, KEYS)
    i, j = tl.arange(0, ROWS)[:, None], columns[None, :]
    for j0 in range(first, stop, KEYS):
        seen, inside = None, i0 + i < limits[0]
        if EDGE:
            inside = visible_pairs(pairs[1], standing(lo), standing(hi), item, head, i0, i, j0, j)
            seen = keys_of_a_tile(inside, j0 + columns, low, high, MASKED)
        keys = load_rows(k, key_item, shared, j0, columns, seen, d, D)
        values = optional_matrix(v, key_item, shared, j0, columns, seen, e, E)
        products = tl.dot(queried, tl.trans(keys), input_precision=PRECISION)
        of_keys = norms_of_keys(rows, at, j0 + j, limits[1])
        x = arguments(products, numbers, standing(log_length), of_keys, pairs[0], at, i0, i, j0, j, inside)
        du = pulled_pairs(pulled, values, pairs, at, i0, i, j0, j, inside, PRECISION)
        if loaded is not None:
            du = with_statistics(du, loaded, H(x) * standing(scale), numbers[4], j0 + j)
        ds = DH(x) * du
        if EDGE:
            ds = tl.where(inside, ds, 0.0)
        sums = add_product(sums, ds, keys, PRECISION)
    return sums


@triton.jit
def backward_queries(
    q, k, v, do, given, dq, pairs, rows, limits, numbers, heads, groups,
    H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq for ROWS queries of one head."""
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    block, head, item, key_item, limits = placed_limits(limits, limits[0], heads, ROWS, False)
    queries, keys, left, right = limits
    i0, at = block * ROWS, (item, head, head // groups, key_item)
    i = i0 + tl.arange(0, ROWS)
    keys = valid_keys(rows[0], keys, item, head)
    lo, hi = key_ranges(i, queries, keys, left, right, rows[1], item, head)
    factor, log_length = row_settings(i, lo, hi, limits, rows, numbers, at, LOG_LENGTH)
    queried = load_rows(q, item, head, i0, tl.arange(0, ROWS), i < queries, d, D)
    pulled = optional_matrix(do, item, head, i0, tl.arange(0, ROWS), i < queries, e, E)
    loaded = load_cotangents(given, addresses(i, item, head, heads, queries)[:, None], (i < queries)[:, None])
    scale = scale_of_weights(i, factor, numbers)
    sums = nothing(ROWS, D, rows[4] is not None)
    first, whole, end, stop = key_blocks(i0, queries, keys, left, right, ROWS, KEYS)
    low = None if left is None else i0 - left
    if MASKED or left is not None:
        sums = gather(
            sums, queried, pulled, loaded, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low,
            stop, first, stop if MASKED else tl.minimum(whole, stop), H, DH, True, MASKED, d, e, D, E, ROWS, KEYS,
            PRECISION,
        )  # fmt: skip
    if not MASKED:
        sums = gather(
            sums, queried, pulled, loaded, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low,
            stop, whole, end, H, DH, False, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        sums = gather(
            sums, queried, pulled, loaded, k, v, pairs, rows, limits, numbers, at, i0, lo, hi, log_length, scale, low,
            stop, end, stop, H, DH, True, MASKED, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    total = whole_sum(sums, queried, k[0].dtype.element_ty) * (numbers[0] * numbers[2])
    if factor is not None:
        total *= factor[:, None]
    store_rows(dq, item, head, i0, tl.arange(0, ROWS), i < queries, total, d, D)


@triton.jit
def collect(
    sums, keyed, valued, of_keys, q, do, dq, given, pairs, rows, limits, numbers, at, heads, j0, first, stop,
    H: tl.constexpr, DH: tl.constexpr, EDGE: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk + Σ_i ds_ij q_i and dv + Σ_i m r f_i h(x) do_i over the query blocks first .. stop, whose dq gets Σ_j."""
    dk, dv = sums
    queries, keys, left, right = limits
    item, head, _, _ = at
    beside = tl.arange(0, ROWS)
    i, j = beside[None, :], tl.arange(0, KEYS)[:, None]
    for i0 in range(first, stop, ROWS):
        lo, hi = key_ranges(i0 + beside, queries, keys, left, right, rows[1], item, head)
        factor, log_length = row_settings(i0 + beside, lo, hi, limits, rows, numbers, at, LOG_LENGTH)
        seen, inside = None, j0 + j < keys
        if EDGE:
            inside = visible_pairs(pairs[1], lying(lo), lying(hi), item, head, i0, i, j0, j)
            seen = queries_of_a_tile(inside, lo, hi, j0, KEYS, pairs[1] is not None)
        queried = load_rows(q, item, head, i0, beside, seen, d, D)
        pulled = optional_matrix(do, item, head, i0, beside, seen, e, E)
        products = tl.dot(keyed, tl.trans(queried), input_precision=PRECISION)
        x = arguments(products, numbers, lying(log_length), of_keys, pairs[0], at, i0, i, j0, j, inside)
        du = pulled_pairs(valued, pulled, pairs, at, i0, i, j0, j, inside, PRECISION)
        if given is not None:
            loaded = load_cotangents(given, addresses(i0 + i, item, head, heads, queries), i0 + i < queries)
            scale = scale_of_weights(i0 + beside, factor, numbers)
            du = with_statistics(du, loaded, H(x) * lying(scale), numbers[4], j0 + j)
        if factor is not None:
            du *= factor[None, :]
        ds = DH(x) * du
        if EDGE:
            ds = tl.where(inside, ds, 0.0)
        if do is not None:
            u = after_dropout(H(x), pairs[2], pairs[3], pairs[4], item, head, i0, i, j0, j, inside)
            if factor is not None:
                u *= factor[None, :]
            if EDGE:
                u = tl.where(inside, u, 0.0)
            dv = add_product(dv, u, pulled, PRECISION)
        dk = add_product(dk, ds, queried, PRECISION)
        if dq is not None:
            used = keyed
            if EDGE:
                used = tl.where((tl.max(inside.to(tl.int32), 1) > 0)[:, None], keyed, 0.0)
            part = add_product(nothing(ROWS, D, rows[4] is not None), tl.trans(ds), used, PRECISION)
            part = whole_sum(part, queried, keyed.dtype) * (numbers[0] * numbers[2])
            add_rows(dq, item, head, i0, beside, i0 + beside < queries, part, d, D)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, do, given, dk, dv, dq, pairs, rows, limits, numbers, stored, heads, groups,
    H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for KEYS of the `stored` keys of one of `heads` heads, which `groups` query heads share.

    If there is a dq, float32, what these keys add to it as well.
    """
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    block, shared, item, key_item, own = placed_limits(limits, stored, heads, KEYS, True)
    queries, keys, left, right = own
    if limits[4] is not None:
        stored = keys
    j0 = block * KEYS
    columns = tl.arange(0, KEYS)
    sums = nothing(KEYS, D, rows[4] is not None), nothing(KEYS, E, False) if do is not None else None
    keyed = load_rows(k, key_item, shared, j0, columns, j0 + columns < keys, d, D)
    valued = optional_matrix(v, key_item, shared, j0, columns, j0 + columns < keys, e, E)
    for member in range(groups):
        head = shared * groups + member
        at = (item, head, shared, key_item)
        of_keys = norms_of_keys(rows, at, j0 + columns[:, None], stored)
        valid = valid_keys(rows[0], keys, item, head)
        bounds = (queries, valid, left, right)
        first, whole, end, stop = query_blocks(j0, queries, valid, left, right, ROWS, KEYS)
        if MASKED or right is not None:
            sums = collect(
                sums, keyed, valued, of_keys, q, do, dq, given, pairs, rows, bounds, numbers, at,
                heads * groups, j0, first, stop if MASKED else tl.minimum(whole, stop), H, DH, True, LOG_LENGTH,
                d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
        if not MASKED:
            sums = collect(
                sums, keyed, valued, of_keys, q, do, dq, given, pairs, rows, bounds, numbers, at,
                heads * groups, j0, whole, end, H, DH, False, LOG_LENGTH, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            sums = collect(
                sums, keyed, valued, of_keys, q, do, dq, given, pairs, rows, bounds, numbers, at,
                heads * groups, j0, end, stop, H, DH, True, LOG_LENGTH, d, e, D, E, ROWS, KEYS, PRECISION,
            )  # fmt: skip
    kept = j0 + columns < stored
    dk_total = whole_sum(sums[0], keyed, q[0].dtype.element_ty) * (numbers[0] * numbers[2])
    store_rows(dk, key_item, shared, j0, columns, kept, dk_total, d, D)
    if do is not None:
        dv_total = whole_sum(sums[1], None, do[0].dtype.element_ty) * numbers[2]
        store_rows(dv, key_item, shared, j0, columns, kept, dv_total, e, E)


@triton.jit
def backward_bias(
    q, k, v, do, given, dbias, pairs, rows, limits, numbers, stored, items, heads, groups, bias_items, bias_heads,
    H: tl.constexpr, DH: tl.constexpr, LOG_LENGTH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (bias_items, bias_heads, L, S) for one tile, summed over the items and heads that share it."""
    queries, keys, left, right, _packed = limits
    across = tl.cdiv(stored, KEYS)
    block, first_head, first_item = place(tl.cdiv(queries, ROWS) * across, bias_heads)
    i0, j0 = block // across * ROWS, block % across * KEYS
    beside, columns = tl.arange(0, ROWS), tl.arange(0, KEYS)
    i, j = beside[:, None], columns[None, :]
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for item in range(first_item, items, bias_items):
        for head in range(first_head, heads, bias_heads):
            at = (item, head, head // groups, item)
            valid = valid_keys(rows[0], keys, item, head)
            lo, hi = key_ranges(i0 + beside, queries, valid, left, right, rows[1], item, head)
            first, _, _, stop = key_blocks(i0, queries, valid, left, right, ROWS, KEYS)
            if (j0 < stop) & (j0 + KEYS > first):
                factor, log_length = row_settings(i0 + beside, lo, hi, limits, rows, numbers, at, LOG_LENGTH)
                inside = visible_pairs(pairs[1], standing(lo), standing(hi), item, head, i0, i, j0, j)
                queried = load_rows(q, item, head, i0, beside, i0 + beside < queries, d, D)
                pulled = optional_matrix(do, item, head, i0, beside, i0 + beside < queries, e, E)
                keyed = load_rows(k, item, at[2], j0, columns, j0 + columns < valid, d, D)
                valued = optional_matrix(v, item, at[2], j0, columns, j0 + columns < valid, e, E)
                products = tl.dot(queried, tl.trans(keyed), input_precision=PRECISION)
                of_keys = norms_of_keys(rows, at, j0 + j, stored)
                x = arguments(products, numbers, standing(log_length), of_keys, pairs[0], at, i0, i, j0, j, inside)
                du = pulled_pairs(pulled, valued, pairs, at, i0, i, j0, j, inside, PRECISION)
                if given is not None:
                    loaded = load_cotangents(given, addresses(i0 + i, item, head, heads, queries), i0 + i < queries)
                    scale = scale_of_weights(i0 + beside, factor, numbers)
                    du = with_statistics(du, loaded, H(x) * standing(scale), numbers[4], j0 + j)
                ds = DH(x) * du
                if factor is not None:
                    ds *= factor[:, None]
                total += tl.where(inside, ds, 0.0)
    kept = i0 + beside < queries
    at_pairs = dbias[0] + first_item * dbias[1] + first_head * dbias[2]
    at_pairs += (i0 + i).to(tl.int64) * dbias[3] + (j0 + j)
    tl.store(at_pairs, total * numbers[2], mask=kept[:, None] & (j0 + j < stored))
