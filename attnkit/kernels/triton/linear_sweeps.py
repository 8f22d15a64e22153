"""Gradients of linear attention by products of a half type: one sweep over queries for dq, one over keys for dk and dv.

With x = φ(q), y = φ(k), f_i = scale/den_i, δ_i = do_i·o_i and sums over the pairs where query i sees key j,

    dφ(q)_i = f_i Σ_j (do_i·v_j - δ_i) y_j    dφ(k)_j = Σ_i (do_i·v_j - δ_i) f_i x_i    dv_j = Σ_i (f_i x_i·y_j) do_i

do and v come in the half type, so that do·v is what it is in float32: 1/den multiplies features, not do. The states
S, z of keys and R = Σ_i f_i x_i do_iᵀ, r = -Σ_i f_i x_i δ_i of queries are those of `linear`, and so are the tuples;
`rows` are 1/den and δ. o is not needed:

    δ_i = f_i Σ_j (x_i·y_j) (do_i·v_j), of earlier keys f_i x_i·(S do_i)

Rounded are, once each, f x, do·v - δ, and y where it is the last factor. δ and 1/den are a matter of float32, because
they cancel against do·v and divide everything: there x and y are two operands, so are the pairs of dv, and S and R
wherever they are multiplied. z and r are sums of what S and R have: a number that is added to all v leaves through δ.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.linear import add_keys, opening
from attnkit.kernels.triton.linear_tokens import (
    add_weighted_tokens,
    alone,
    beside,
    fades,
    in_column,
    in_row,
    left_over,
    level_at,
    live_queries,
    load_features,
    load_rows,
    load_tokens,
    operand,
    place,
    product,
    seen_keys,
    seen_range,
    store_of,
    store_tokens,
    two_operands,
)


@triton.jit
def exact_pairs(x, high, low, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x (high + low)ᵀ, but for the product of what both have beyond the digits of OPERAND."""
    first, rest = two_operands(x, OPERAND, PRECISION)
    pairs = product(rest, tl.trans(high), None, OPERAND, PRECISION)
    pairs = product(first, tl.trans(low), pairs, OPERAND, PRECISION)
    return product(first, tl.trans(high), pairs, OPERAND, PRECISION)


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
    shared, own, token = head // heads[1], head // heads[2], tl.arange(0, CHUNK)
    bounds = seen_range(limits, masks, item, head)
    S, z = opening(states, segment, positions[2], heads, items[2], head, 0, 0, CAUSAL, d, e, D, E)
    z = beside(z, OPERAND)
    for p0 in range(begin, tl.minimum(begin + span[1], positions[1]), CHUNK):
        i0 = p0 - limits[3]
        i = i0 + token
        inside, live = (i >= 0) & (i < limits[0]), live_queries(i, bounds, limits, masks, item, head, CAUSAL)
        x = PHI(load_tokens(q, item, head, i0, live, 0, d, D, CHUNK))
        cotangents = operand(load_tokens(do, item, head, i0, live, 0, e, E, CHUNK), OPERAND, PRECISION)
        raw, dots = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        if CAUSAL:
            seen = seen_keys(p0 + token, bounds, masks, key_item, head)
            y = load_features(k, key_item, shared, p0, seen, 0, d, PHI, D, CHUNK)
            high = operand(y, OPERAND, PRECISION)
            low = operand(left_over(y, OPERAND, PRECISION), OPERAND, PRECISION)
            c = operand(load_tokens(v, key_item, shared, p0, seen, 0, e, E, CHUNK), OPERAND, PRECISION)
            in_order = token[:, None] >= token[None, :]
            nothing = scale * 0.0  # for a constant the compiler would round pairs one by one
            if masks[5] is not None:
                levels = level_at(masks[5], key_item, own, p0 + token, limits[1])
                opened, last = (
                    level_at(masks[5], key_item, own, p0 - 1, limits[1]),
                    level_at(masks[5], key_item, own, p0 + CHUNK - 1, limits[1]),
                )
                fade, between = fades(opened, levels), fades(in_row(levels), in_column(levels))
            if NORMALIZE:
                weights = exact_pairs(x, high, low, OPERAND, PRECISION)
                if masks[5] is not None:
                    weights *= between
                weights = tl.where(in_order, weights, 0.0)
                raw += tl.sum(weights, 1)
            pairs = product(cotangents, tl.trans(c), None, OPERAND, PRECISION)
            if NORMALIZE:
                dots += tl.sum(tl.where(in_order, weights * pairs, 0.0), 1)
        before = alone(z, OPERAND)[None, :]
        s_high, s_low = two_operands(S, OPERAND, PRECISION)
        total = product(cotangents, tl.trans(s_high), None, OPERAND, PRECISION)
        total = product(cotangents, tl.trans(s_low), total, OPERAND, PRECISION)
        if NORMALIZE:
            earlier, of_earlier = tl.sum(x * before, 1), tl.sum(x * total, 1)
            if masks[5] is not None:
                earlier, of_earlier = earlier * fade, of_earlier * fade
            raw, dots = raw + earlier, dots + of_earlier
        factor = tl.where(live, scale, 0.0)
        if NORMALIZE:
            den = raw * scale + eps
            inverse = tl.where(live & (den != 0.0), 1.0 / tl.where(den != 0.0, den, 1.0), 0.0)
            factor *= inverse
            delta = dots * factor
            store_of(rows[0], item, head, i, inside, inverse)
            store_of(rows[1], item, head, i, inside, delta)
            total -= delta[:, None] * before
        if CAUSAL:
            if NORMALIZE:
                pairs -= delta[:, None]
            if masks[5] is not None:
                total, pairs = total * fade[:, None], pairs * between
            total = product(tl.where(in_order, pairs, nothing), high, total, OPERAND, PRECISION)
            if masks[5] is not None:
                high, low = two_operands(y * fades(levels, last)[:, None], OPERAND, PRECISION)
                S, z = S * fades(opened, last), z * fades(opened, last)
            S, z = add_keys(S, z, low, c, OPERAND, PRECISION)
            S, z = add_keys(S, z, high, c, OPERAND, PRECISION)
        total = tl.where(live[:, None], total * SLOPE_OF(x) * factor[:, None], 0.0)
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
    for step in tl.range(0, chunks, disable_licm=True):  # addresses from before the loop would spill
        j0 = begin + (chunks - 1 - step) * CHUNK
        i0 = j0 - limits[3]
        seen = seen_keys(j0 + token, bounds, masks, key_item, first)
        of_keys = load_features(k, key_item, shared, j0, seen, 0, d, PHI, D, CHUNK)
        y = operand(of_keys, OPERAND, PRECISION)
        c = operand(load_tokens(v, key_item, shared, j0, seen, 0, e, E, CHUNK), OPERAND, PRECISION)
        high, low = two_operands(R, OPERAND, PRECISION)
        later = alone(r, OPERAND)[None, :]
        to_v, to_k = tl.zeros((CHUNK, E), tl.float32), tl.zeros((CHUNK, D), tl.float32)
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, kv_head, j0 + token, limits[1])
            opened, after = (
                level_at(masks[5], key_item, kv_head, j0, limits[1]),
                level_at(masks[5], key_item, kv_head, j0 + CHUNK, limits[1]),
            )
            R, r = R * fades(opened, after), r * fades(opened, after)
        if CAUSAL:
            in_order, nothing = token[:, None] <= token[None, :], scale * 0.0  # see `sweep_queries`
            for member in range(heads[2]):
                head = first + member
                i = i0 + token
                live = live_queries(i, bounds, limits, masks, item, head, CAUSAL)
                inverse, delta = load_rows(rows, item, head, i, live)
                features = PHI(load_tokens(q, item, head, i0, live, 0, d, D, CHUNK)) * (inverse * scale)[:, None]
                x = operand(features, OPERAND, PRECISION)
                cotangents = operand(load_tokens(do, item, head, i0, live, 0, e, E, CHUNK), OPERAND, PRECISION)
                pairs = product(c, tl.trans(cotangents), None, OPERAND, PRECISION)
                if rows[0] is not None:
                    pairs -= delta[None, :]
                if masks[5] is not None:
                    pairs *= fades(in_column(levels), in_row(levels))
                to_k = product(tl.where(in_order, pairs, nothing), x, to_k, OPERAND, PRECISION)
                weights = product(y, tl.trans(x), None, OPERAND, PRECISION)
                if masks[5] is not None:
                    weights *= fades(in_column(levels), in_row(levels))
                near, rest = two_operands(tl.where(in_order, weights, nothing), OPERAND, PRECISION)
                to_v = product(near, cotangents, to_v, OPERAND, PRECISION)
                to_v = product(rest, cotangents, to_v, OPERAND, PRECISION)
                if masks[5] is not None:
                    x = operand(features * fades(opened, levels)[:, None], OPERAND, PRECISION)
                R = product(tl.trans(x), cotangents, R, OPERAND, PRECISION)
                if rows[0] is not None:
                    r = add_weighted_tokens(r, x, -delta, OPERAND, PRECISION)
        stored = (j0 + token >= 0) & (j0 + token < limits[1])
        if masks[5] is not None:
            fade = fades(levels, after)[:, None]
            of_v = product(y, low, product(y, high, None, OPERAND, PRECISION), OPERAND, PRECISION)
            to_v += of_v * fade
        else:
            to_v = product(y, low, product(y, high, to_v, OPERAND, PRECISION), OPERAND, PRECISION)
        if not CAUSAL:
            to_v = product(left_over(of_keys, OPERAND, PRECISION), high, to_v, OPERAND, PRECISION)
        store_tokens(dv, key_item, kv_head, j0, stored, to_v, 0, e, E, CHUNK)
        if masks[5] is not None:
            of_k = product(c, tl.trans(high), None, OPERAND, PRECISION)
            of_k = product(c, tl.trans(low), of_k, OPERAND, PRECISION) + later
            to_k += of_k * fade
        else:
            to_k = product(c, tl.trans(high), to_k, OPERAND, PRECISION)
            to_k = product(c, tl.trans(low), to_k, OPERAND, PRECISION) + later
        to_k = tl.where(seen[:, None], to_k * SLOPE_OF(of_keys), 0.0)
        store_tokens(dk, key_item, kv_head, j0, stored, to_k, 0, d, D, CHUNK)
