"""Gradients of linear attention of half types: one sweep over queries for dq, one over keys for dk and dv.

With x = φ(q), y = φ(k), f_i = scale/den_i, δ_i = do_i·o_i and sums over the pairs where query i sees key j,

    dφ(q)_i = f_i Σ_j (do_i·v_j - δ_i) y_j    dφ(k)_j = Σ_i (do_i·v_j - δ_i) f_i x_i    dv_j = Σ_i (f_i x_i·y_j) do_i

Products have operands in bfloat16, or in TF32, which has the digits of float16 and the range of float32. do and v are
such operands as they come, so that do·v is what it is in float32: 1/den multiplies features, not do. The states
S, z of keys and R = Σ_i f_i x_i do_iᵀ, r = -Σ_i f_i x_i δ_i of queries are those of `linear`, and so are the tuples;
`rows` are 1/den and δ. o is not needed: with G_i = Σ_j (do_i·v_j) y_j and Z_i = Σ_j y_j, of earlier keys S do_i and z,

    den_i = scale x_i·Z_i + eps    δ_i = f_i x_i·G_i    dφ(q)_i = f_i (G_i - δ_i Z_i)

δ and 1/den are a matter of float32, because they cancel against do·v and divide everything: in G and Z are two operands
for y, for do·v and for how far a pair fades (as one, gradients of gates are 92 bounds off), in dv for the pairs, and
for S and R wherever they are multiplied. The gradients of an initial state are float32: with one, S and the pairs of G
and Z are three (as two, 0.78 bounds off where sums fade). Rounded are, once each, f x, y in dv, and do·v - δ in dk. z
and r are sums of what S and R have: a number that is added to all v leaves through δ.

Tokens are columns. The rows of products are then features: a state is multiplied from the registers where it is, and
with 128 of them eight warps have rows of their own, which 64 tokens are too few for.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.linear import opening
from attnkit.kernels.triton.linear_tokens import (
    SLICE,
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
    multiply,
    operand,
    place,
    seen_keys,
    seen_range,
    store_of,
    store_tokens,
    two_operands,
)
from attnkit.kernels.triton.special import INTERPRETED


# An instruction that the compiler does not repeat.
@triton.jit
def move(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def load_once(levels, item, head, p, keys):
    """`level_at` for the tokens of a chunk: the compiler would load what is so short for every layout, as often as
    threads hold a column."""
    level = level_at(levels, item, head, p, keys)
    if not INTERPRETED:
        if len(level) == 1:
            level = (move(level[0]),)
        else:
            level = (move(level[0]), move(level[1]))
    return level


@triton.jit
def third(x, first, second, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """What two operands leave of x, as one."""
    return operand(x - first.to(tl.float32) - second.to(tl.float32), OPERAND, PRECISION)


@triton.jit
def add_pairs(total, first, rest, pairs, TERMS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + (first + rest)ᵀ pairs, these as the sum of TERMS operands; of two without what both lack of the first."""
    if TERMS > 1:
        near, far = two_operands(pairs, OPERAND)
        if TERMS > 2:
            total = multiply(tl.trans(first), third(pairs, near, far, OPERAND, PRECISION), total, PRECISION)
            total = multiply(tl.trans(rest), far, total, PRECISION)
        total = multiply(tl.trans(first), far, total, PRECISION)
    else:
        near = operand(pairs, OPERAND, PRECISION)
    total = multiply(tl.trans(rest), near, total, PRECISION)
    return multiply(tl.trans(first), near, total, PRECISION)


@triton.jit
def sweep_queries(
    q, k, v, do, dq, rows, states, masks, limits, scale, eps, heads, span, blocks,
    PHI: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr, FLOOR: tl.constexpr,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = φ'(q)·f·(G - δ Z) for a segment of queries, and their 1/den and δ, with FLOOR as in `outputs`."""
    TERMS: tl.constexpr = 2 if masks[4] is None else 3
    rows, masks = rows[:], masks[:]
    _, segment, head, items, positions, limits = place(blocks, span, limits, heads[0], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    shared, own, token = head // heads[1], head // heads[2], tl.arange(0, CHUNK)
    bounds = seen_range(limits, masks, item, head)
    S, z = opening(states, segment, positions[2], heads, items[2], head, 0, 0, CAUSAL, d, e, D, E)
    LARGE: tl.constexpr = D * E > SLICE * SLICE  # addresses from before the loop would spill
    nothing = scale * 0.0  # for a constant the compiler would round pairs one by one
    for p0 in tl.range(
        begin, tl.minimum(begin + span[1], positions[1]), CHUNK, disable_licm=LARGE or masks[5] is not None
    ):
        i0 = p0 - limits[3]
        i = i0 + token
        inside, live = (i >= 0) & (i < limits[0]), live_queries(i, bounds, limits, masks, item, head, CAUSAL)
        cotangents = tl.trans(load_tokens(do, item, head, i0, live, 0, e, E, CHUNK).to(OPERAND))
        high, low = two_operands(S, OPERAND)
        total = multiply(low, cotangents, multiply(high, cotangents, None, PRECISION), PRECISION)
        if TERMS > 2:
            total = multiply(third(S, high, low, OPERAND, PRECISION), cotangents, total, PRECISION)
        sums = z[:, None]
        if masks[5] is not None:
            levels = load_once(masks[5], key_item, own, p0 + token, limits[1])
            opened, last = (
                level_at(masks[5], key_item, own, p0 - 1, limits[1]),
                level_at(masks[5], key_item, own, p0 + CHUNK - 1, limits[1]),
            )
            fade = fades(opened, levels)[None, :]
            total, sums, S = total * fade, sums * fade, S * fades(opened, last)
        if CAUSAL:
            seen = seen_keys(p0 + token, bounds, masks, key_item, head)
            y = load_features(k, key_item, shared, p0, seen, 0, d, PHI, D, CHUNK)
            c = load_tokens(v, key_item, shared, p0, seen, 0, e, E, CHUNK).to(OPERAND)
            first, rest = two_operands(y, OPERAND)
            in_order = token[:, None] <= token[None, :]
            before = tl.where(in_order, 1.0, 0.0)
            pairs = multiply(c, cotangents, None, PRECISION)
            if masks[5] is not None:
                before *= fades(in_column(levels), in_row(levels))
                pairs *= before
            pairs = tl.where(in_order, pairs, nothing)
            total = add_pairs(total, first, rest, pairs, TERMS if NORMALIZE else 1, OPERAND, PRECISION)
            if NORMALIZE:
                sums += tl.zeros((D, CHUNK), tl.float32)
                sums = add_pairs(sums, first, rest, before, 1 if masks[5] is None else TERMS, OPERAND, PRECISION)
                z = tl.sum(tl.where(token[None, :] == CHUNK - 1, sums, 0.0), 1)  # the last query sees the chunk
            if masks[5] is not None:
                first, rest = two_operands(y * fades(levels, last)[:, None], OPERAND)
            S = multiply(tl.trans(rest), c, S, PRECISION)
            S = multiply(tl.trans(first), c, S, PRECISION)
        x = tl.trans(PHI(load_tokens(q, item, head, i0, live, 0, d, D, CHUNK)))
        factor = tl.where(live, scale, 0.0)
        if NORMALIZE:
            raw = tl.sum(x * sums, 0) * scale
            den = tl.where(raw <= 0.0, eps, raw + eps) if FLOOR else raw + eps
            inverse = tl.where(live & (den != 0.0), 1.0 / tl.where(den != 0.0, den, 1.0), 0.0)
            factor *= inverse
            delta = tl.sum(x * total, 0) * factor
            if FLOOR:
                delta = tl.where(raw <= 0.0, 0.0, delta)
            store_of(rows[0], item, head, i, inside, inverse)
            store_of(rows[1], item, head, i, inside, delta)
            total -= delta[None, :] * sums
        total = tl.where(live[None, :], total * SLOPE_OF(x) * factor[None, :], 0.0)
        store_tokens(dq, item, head, i0, inside, tl.trans(total), 0, d, D, CHUNK)


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
    r, nothing = beside(r, OPERAND), scale * 0.0  # see `sweep_queries`
    chunks = tl.cdiv(tl.minimum(begin + span[1], positions[1]) - begin, CHUNK)
    for step in tl.range(0, chunks, disable_licm=True):  # addresses from before the loop would spill
        j0 = begin + (chunks - 1 - step) * CHUNK
        i0 = j0 - limits[3]
        seen = seen_keys(j0 + token, bounds, masks, key_item, first)
        of_keys = tl.trans(load_features(k, key_item, shared, j0, seen, 0, d, PHI, D, CHUNK))
        y = operand(of_keys, OPERAND, PRECISION)
        c = tl.trans(load_tokens(v, key_item, shared, j0, seen, 0, e, E, CHUNK).to(OPERAND))
        high, low = two_operands(R, OPERAND)
        to_k = multiply(low, c, multiply(high, c, None, PRECISION), PRECISION)
        to_k += alone(r, OPERAND)[:, None]
        to_v = multiply(tl.trans(high), y, None, PRECISION)
        to_v = multiply(tl.trans(low), y, to_v, PRECISION)
        if not CAUSAL:
            rest = operand(left_over(of_keys, OPERAND, PRECISION), OPERAND, PRECISION)
            to_v = multiply(tl.trans(high), rest, to_v, PRECISION)
        if masks[5] is not None:
            levels = load_once(masks[5], key_item, kv_head, j0 + token, limits[1])
            opened, after = (
                level_at(masks[5], key_item, kv_head, j0, limits[1]),
                level_at(masks[5], key_item, kv_head, j0 + CHUNK, limits[1]),
            )
            fade = fades(levels, after)[None, :]
            to_k, to_v = to_k * fade, to_v * fade
            R, r = R * fades(opened, after), r * fades(opened, after)
        if CAUSAL:
            in_order = token[:, None] >= token[None, :]
            for member in range(heads[2]):
                head = first + member
                i = i0 + token
                live = live_queries(i, bounds, limits, masks, item, head, CAUSAL)
                inverse, delta = load_rows(rows, item, head, i, live)
                features = PHI(load_tokens(q, item, head, i0, live, 0, d, D, CHUNK)) * (inverse * scale)[:, None]
                x = operand(features, OPERAND, PRECISION)
                cotangents = load_tokens(do, item, head, i0, live, 0, e, E, CHUNK).to(OPERAND)
                left = x
                if masks[5] is not None:
                    left = operand(features * fades(opened, levels)[:, None], OPERAND, PRECISION)
                R = multiply(tl.trans(left), cotangents, R, PRECISION)
                if rows[0] is not None:
                    r = add_weighted_tokens(r, left, -delta, OPERAND, PRECISION)
                pairs = multiply(cotangents, c, None, PRECISION)
                if rows[0] is not None:
                    pairs -= delta[:, None]
                if masks[5] is not None:
                    pairs *= fades(in_row(levels), in_column(levels))
                pairs = operand(tl.where(in_order, pairs, nothing), OPERAND, PRECISION)
                to_k = multiply(tl.trans(x), pairs, to_k, PRECISION)
                weights = multiply(x, y, None, PRECISION)
                if masks[5] is not None:
                    weights *= fades(in_row(levels), in_column(levels))
                near, rest = two_operands(tl.where(in_order, weights, nothing), OPERAND)
                to_v = multiply(tl.trans(cotangents), near, to_v, PRECISION)
                to_v = multiply(tl.trans(cotangents), rest, to_v, PRECISION)
        stored = (j0 + token >= 0) & (j0 + token < limits[1])
        store_tokens(dv, key_item, kv_head, j0, stored, tl.trans(to_v), 0, e, E, CHUNK)
        if D * E > SLICE * SLICE:  # until here they would be spilled
            of_keys = tl.trans(PHI(load_tokens(k, key_item, shared, j0, seen, 0, d, D, CHUNK)))
        to_k = tl.where(seen[None, :], to_k * SLOPE_OF(of_keys), 0.0)
        store_tokens(dk, key_item, kv_head, j0, stored, tl.trans(to_k), 0, d, D, CHUNK)
