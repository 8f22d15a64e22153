"""Gradients of linear attention by products of a half type: one sweep over queries for dq, one over keys for dk and dv.

With x = φ(q), y = φ(k), f_i = scale/den_i, δ_i = do_i·o_i and sums over the pairs where query i sees key j,

    dφ(q)_i = f_i Σ_j (do_i·v_j - δ_i) y_j    dφ(k)_j = Σ_i (do_i·v_j - δ_i) f_i x_i    dv_j = Σ_i (f_i x_i·y_j) do_i

do and v come in the half type, so that do·v and δ are what they are in float32: 1/den multiplies features, not do. The
states S, z of keys and R = Σ_i f_i x_i do_iᵀ, r = -Σ_i f_i x_i δ_i of queries are those of `linear`, and so are the
tuples; `rows` are (1/den, δ).

Rounded are what products take: x, y, f x, the pairs of a chunk with f, and S and R. Where sums cancel (S do - z δ and
R v + r, and S in δ) states are two such numbers, and z and r are sums of what S and R have: a number that is added to
all v leaves through δ. 1/den is that of the sum before pairs are rounded, δ has the sum of the rounded ones.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.linear import opening
from attnkit.kernels.triton.linear_tokens import (
    add_row_sums,
    add_tokens,
    add_weighted_tokens,
    alone,
    beside,
    fades,
    left_over,
    level_at,
    live_queries,
    load_features,
    load_rows,
    load_tokens,
    operand,
    place,
    product,
    row_products,
    seen_keys,
    seen_range,
    store_of,
    store_tokens,
)


@triton.jit
def twice(x, y, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + x y, y having twice the digits of OPERAND."""
    total = product(x, y, total, OPERAND, PRECISION)
    return product(x, left_over(y, OPERAND, PRECISION), total, OPERAND, PRECISION)


@triton.jit
def reciprocal(raw, scale, eps, live):
    """1/(scale raw + eps), 0 where that is 0 and for queries that see nothing."""
    den = raw * scale + eps
    return tl.where(live & (den != 0.0), 1.0 / tl.where(den != 0.0, den, 1.0), 0.0)


@triton.jit
def sweep_queries(
    q, k, v, do, dq, rows, states, masks, limits, scale, eps, heads, span, blocks,
    PHI: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = φ'(q)·f·(S do - z δ + the pairs of the chunk) for a segment of queries, and their 1/den and δ."""
    rows, masks = rows[:], masks[:]
    _, segment, head, items, positions, limits = place(blocks, span, limits, heads[0], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    shared, token = head // heads[1], tl.arange(0, CHUNK)
    bounds = seen_range(limits, masks, item, head)
    S, z = opening(states, segment, positions[2], heads, items[2], head, 0, 0, CAUSAL, d, e, D, E)
    z = beside(z, OPERAND)
    for p0 in range(begin, tl.minimum(begin + span[1], positions[1]), CHUNK):
        i0 = p0 - limits[3]
        i = i0 + token
        inside, live = (i >= 0) & (i < limits[0]), live_queries(i, bounds, limits, masks, item, head, CAUSAL)
        features = load_features(q, item, head, i0, live, 0, d, PHI, D, CHUNK)
        x = operand(features, OPERAND, PRECISION)
        cotangents = load_tokens(do, item, head, i0, live, 0, e, E, CHUNK)
        if CAUSAL:
            seen = seen_keys(p0 + token, bounds, masks, key_item, head)
            of_keys = load_features(k, key_item, shared, p0, seen, 0, d, PHI, D, CHUNK)
            y = operand(of_keys, OPERAND, PRECISION)
            c = load_tokens(v, key_item, shared, p0, seen, 0, e, E, CHUNK)
            ordered = token[:, None] >= token[None, :]
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, shared, p0 + token, limits[1])
            before, last = (
                level_at(masks[5], key_item, shared, p0 - 1, limits[1]),
                level_at(masks[5], key_item, shared, p0 + CHUNK - 1, limits[1]),
            )
            fade = fades(before, levels)
        factor = tl.where(live, scale, 0.0)
        if NORMALIZE:
            num, raw = twice(x, S, None, OPERAND, PRECISION), row_products(x, z, OPERAND, PRECISION)
            if masks[5] is not None:
                num, raw = num * fade[:, None], raw * (fade if tl.float32 == OPERAND else fade[:, None])
            exact = alone(raw, OPERAND)
            if CAUSAL:
                pairs = product(x, tl.trans(y), None, OPERAND, PRECISION)
                if masks[5] is not None:
                    pairs *= fades(levels[None, :], levels[:, None])
                pairs = tl.where(ordered, pairs, 0.0)
                exact += tl.sum(pairs, 1)
                pairs = operand(pairs, OPERAND, PRECISION)
                num, raw = product(pairs, c, num, OPERAND, PRECISION), add_row_sums(raw, pairs, OPERAND, PRECISION)
            inverse = reciprocal(exact, scale, eps, live)
            delta = tl.sum(cotangents * num, 1) * scale * reciprocal(alone(raw, OPERAND), scale, eps, live)
            store_of(rows[0], item, head, i, inside, inverse)
            store_of(rows[1], item, head, i, inside, delta)
            factor = scale * inverse
        total = twice(cotangents, tl.trans(S), None, OPERAND, PRECISION)
        if NORMALIZE:
            total -= delta[:, None] * alone(z, OPERAND)[None, :]
        if masks[5] is not None:
            total *= fade[:, None]
        if CAUSAL:
            pairs = product(cotangents, tl.trans(c), None, OPERAND, PRECISION)
            if NORMALIZE:
                pairs -= delta[:, None]
            if masks[5] is not None:
                pairs *= fades(levels[None, :], levels[:, None])
            total = product(tl.where(ordered, pairs, 0.0), y, total, OPERAND, PRECISION)
            if masks[5] is not None:
                y = operand(of_keys * fades(levels, last)[:, None], OPERAND, PRECISION)
                S, z = S * fades(before, last), z * fades(before, last)
            S, z = product(tl.trans(y), c, S, OPERAND, PRECISION), add_tokens(z, y, OPERAND, PRECISION)
        total = tl.where(live[:, None], total * SLOPE_OF(features) * factor[:, None], 0.0)
        store_tokens(dq, item, head, i0, inside, total, 0, d, D, CHUNK)


@triton.jit
def sweep_keys(
    q, k, v, do, dk, dv, rows, states, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk = φ'(k)·(R v + r + the pairs of the chunk) and dv = Rᵀφ(k) + its pairs for a segment of keys, from its end."""
    rows, masks = rows[:], masks[:]
    _, segment, kv_head, items, positions, limits = place(blocks, span, limits, heads[0] // heads[2], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    first, token = kv_head * heads[2], tl.arange(0, CHUNK)
    shared = first // heads[1]
    bounds = seen_range(limits, masks, item, first)
    R, r = opening(states, segment, positions[2], heads, items[2], first, 0, 0, CAUSAL, d, e, D, E)
    r = beside(r, OPERAND)
    chunks = tl.cdiv(tl.minimum(begin + span[1], positions[1]) - begin, CHUNK)
    for step in range(0, chunks):
        j0 = begin + (chunks - 1 - step) * CHUNK
        i0 = j0 - limits[3]
        seen = seen_keys(j0 + token, bounds, masks, key_item, first)
        features = load_features(k, key_item, shared, j0, seen, 0, d, PHI, D, CHUNK)
        y = operand(features, OPERAND, PRECISION)
        c = load_tokens(v, key_item, shared, j0, seen, 0, e, E, CHUNK)
        to_v = product(y, R, None, OPERAND, PRECISION)
        to_k = twice(c, tl.trans(R), None, OPERAND, PRECISION) + alone(r, OPERAND)[None, :]
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, shared, j0 + token, limits[1])
            opened, after = (
                level_at(masks[5], key_item, shared, j0, limits[1]),
                level_at(masks[5], key_item, shared, j0 + CHUNK, limits[1]),
            )
            fade = fades(levels, after)[:, None]
            to_v, to_k, R, r = to_v * fade, to_k * fade, R * fades(opened, after), r * fades(opened, after)
        if CAUSAL:
            ordered = token[:, None] <= token[None, :]
            for member in range(heads[2]):
                head = first + member
                i = i0 + token
                live = live_queries(i, bounds, limits, masks, item, head, CAUSAL)
                x = load_features(q, item, head, i0, live, 0, d, PHI, D, CHUNK)
                cotangents = load_tokens(do, item, head, i0, live, 0, e, E, CHUNK)
                inverse, delta = load_rows(rows, item, head, i, live)
                factor = inverse * scale
                weights = product(y, tl.trans(x), None, OPERAND, PRECISION) * factor[None, :]
                pairs = product(c, tl.trans(cotangents), None, OPERAND, PRECISION)
                if rows[0] is not None:
                    pairs -= delta[None, :]
                pairs *= factor[None, :]
                if masks[5] is not None:
                    between = fades(levels[:, None], levels[None, :])
                    weights, pairs = weights * between, pairs * between
                weights, pairs = tl.where(ordered, weights, 0.0), tl.where(ordered, pairs, 0.0)
                to_v = product(weights, cotangents, to_v, OPERAND, PRECISION)
                to_k = product(pairs, x, to_k, OPERAND, PRECISION)
                if masks[5] is not None:
                    factor *= fades(opened, levels)
                x = operand(x * factor[:, None], OPERAND, PRECISION)
                R = product(tl.trans(x), cotangents, R, OPERAND, PRECISION)
                if rows[0] is not None:
                    r = add_weighted_tokens(r, x, -delta, OPERAND, PRECISION)
        to_k = tl.where(seen[:, None], to_k * SLOPE_OF(features), 0.0)
        stored = (j0 + token >= 0) & (j0 + token < limits[1])
        store_tokens(dk, key_item, kv_head, j0, stored, to_k, 0, d, D, CHUNK)
        store_tokens(dv, key_item, kv_head, j0, stored, to_v, 0, e, E, CHUNK)
