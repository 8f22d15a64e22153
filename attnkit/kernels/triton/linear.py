"""Linear attention: o_i = num_i/(raw_i + eps) from sums over keys, and its gradients, in time linear in the tokens.

With x = scale·φ(q), y = φ(k), dn = do/den, dd = -(do·o)/den and sums over the pairs where query i sees key j,

    num_i = Σ_j (x_i·y_j) v_j                      raw_i = Σ_j x_i·y_j
    dφ(q)_i = scale Σ_j (dn_i·v_j + dd_i) y_j      dφ(k)_j = Σ_i (dn_i·v_j + dd_i) x_i      dv_j = Σ_i (y_j·x_i) dn_i

Each is a product with a state: S = Σ_j y_j v_jᵀ and z = Σ_j y_j of keys, R = Σ_i x_i dn_iᵀ and r = Σ_i x_i dd_i of
queries. Under causality the state holds the tokens before a chunk (after it, for R), and the pairs within a chunk are
multiplied out. The tokens of a head are divided into segments: `key_sums` or `query_sums` of every segment, their
`running` sums, then all segments in parallel. A causal call with enough heads is one segment, whose state stays in
registers. Every program owns its results, so sums have a fixed order.

Sums may fade: with levels t_p that never fall, every sum of query i is one of exp(t_j - t_i) x_i·y_j. Features of keys
that stand for φ·exp(t_j) are so divided by the largest so far, and a decay is t_p = -Σ_{l ≤ p} g_l, 0 before the first
key, whose gates have gradients. S has the level of the last position that it holds, R that of its first, and no
exponent is above 0. Without levels none of this is compiled.

Query i is at position i + shift and key j at position j; position p is visible from p on. Most functions share these
tuples:

    limits = (queries, keys, stop, shift)                 keys from `stop` on are seen by no query
    masks = (key_mask, firsts, stops, query_mask, stateful, levels)   views; the keys that a head sees are firsts ≤ j
                                                          < stops; `stateful` is None unless there is an initial state,
                                                          which every query sees; `levels` of causal calls whose
                                                          sums fade: a view for every state, of a decay with one more
                                                          pointer, to what the first lacks
    rows = (inverses, deltas, heads, parts)               views of 1/den and δ = do·o, None without a denominator;
                                                          the latter is the sum of `parts` arrays of `heads` heads
    states = (pointer, segments)                          per state [S, z] or [R, r] in float32, d·e + d numbers
    initial = (view of S, view of z)                      initial sums for each head of k
    final = (pointer, pointer)                            S and z of every state in float32, without gaps
    heads = (heads, groups, members)                      query head h has the keys of head h // groups, the state of
                                                          head h // members, and so many query heads share a state
    span = (segments, size, start, end, *packed)          of positions; `size` is a multiple of CHUNK
    packed = (edges, edges, reach, sequences, shifted)    of the queries, keys and positions of packed sequences, None
                                                          without any. Each has separate segments, its first token as
                                                          item, and S - L as shift unless `shifted` is None
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.linear_tokens import (
    add_row_sums,
    add_tokens,
    add_weighted_tokens,
    alone,
    beside,
    fades,
    in_column,
    in_row,
    left_over,
    level_at,
    live_queries,
    load_cotangents,
    load_features,
    load_rows,
    load_tokens,
    multiply,
    operand,
    place,
    product,
    row_products,
    seen_keys,
    seen_range,
    store_of,
    store_tokens,
    two_operands,
)
from attnkit.kernels.triton.tiles import first_block

# ---------------------------------------------------------------------------------------------- states


@triton.jit
def state_at(states, segment, heads, item, head, d, e):
    """Address of the state of a segment, for a query head."""
    kv_head = item * (heads[0] // heads[2]) + head // heads[2]
    return states[0] + (kv_head * states[1] + segment) * (d * e + d)


@triton.jit
def load_state(at, f0, c0, d, e, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """S[f0.., c0..] (ROWS, COLUMNS) and z[f0..] (ROWS,), 0 beyond (d, e)."""
    f, c = f0 + tl.arange(0, ROWS), c0 + tl.arange(0, COLUMNS)
    S = tl.load(at + f[:, None] * e + c[None, :], mask=(f < d)[:, None] & (c < e)[None, :], other=0.0)
    return S, tl.load(at + d * e + f, mask=f < d, other=0.0)


@triton.jit
def store_state(at, c0, S, z, d, e, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns c0.. of S; the first block stores z."""
    f, c = tl.arange(0, ROWS), c0 + tl.arange(0, COLUMNS)
    tl.store(at + f[:, None] * e + c[None, :], S, mask=(f < d)[:, None] & (c < e)[None, :])
    tl.store(at + d * e + f, z, mask=f < tl.where(c0 == 0, d, 0))


@triton.jit
def add_operands(S, z, y, c, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """S + yᵀ c, and z + the sum of the tokens of y."""
    return multiply(tl.trans(y), c, S, PRECISION), add_tokens(z, y, OPERAND, PRECISION)


@triton.jit
def add_keys(S, z, y, c, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The same for what products round."""
    return product(tl.trans(y), c, S, OPERAND, PRECISION), add_tokens(z, y, OPERAND, PRECISION)


@triton.jit
def key_sums(
    k, v, states, masks, limits, heads, span, blocks,
    PHI: tl.constexpr, CAUSAL: tl.constexpr, TWICE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S = Σ φ(k)_j v_jᵀ for BLOCK columns and z = Σ φ(k)_j over the keys of a segment, with φ(k) as one operand or as
    two, which have TWICE the digits."""
    masks = masks[:]
    block, segment, kv_head, items, positions, limits = place(blocks, span, limits, heads[0] // heads[2], CAUSAL)
    item, begin = items[1], positions[0]
    head, c0 = kv_head * heads[2], block * BLOCK
    shared = head // heads[1]
    bounds = seen_range(limits, masks, item, head)
    S, z = tl.zeros((D, BLOCK), tl.float32), beside(tl.zeros((D,), tl.float32), OPERAND)
    for j0 in range(begin, tl.minimum(begin + span[1], bounds[1]), CHUNK):
        seen = seen_keys(j0 + tl.arange(0, CHUNK), bounds, masks, item, head)
        y = load_features(k, item, shared, j0, seen, 0, d, PHI, D, CHUNK)
        c = load_tokens(v, item, shared, j0, seen, c0, e, BLOCK, CHUNK)
        if masks[5] is not None:
            last = level_at(masks[5], item, kv_head, begin + span[1] - 1, limits[1])
            y *= fades(level_at(masks[5], item, kv_head, j0 + tl.arange(0, CHUNK), limits[1]), last)[:, None]
        if TWICE:
            high, low = two_operands(y, OPERAND)
            c = c.to(OPERAND)  # as it came
            S, z = add_operands(S, z, low, c, OPERAND, PRECISION)
            S, z = add_operands(S, z, high, c, OPERAND, PRECISION)
        else:
            S, z = add_keys(S, z, y, c, OPERAND, PRECISION)
    at = state_at(states, segment, heads, items[2], head, d, e)
    store_state(at, c0, S, alone(z, OPERAND), d, e, D, BLOCK)


@triton.jit
def query_sums(
    q, do, rows, states, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, CAUSAL: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R = Σ x_i dn_iᵀ for BLOCK columns and r = Σ x_i dd_i over the queries of a segment and all heads of a state.

    1/den multiplies x: do is exact in OPERAND. The gradients of an initial state are float32, and three terms of
    bfloat16 have all digits of x.
    """
    TERMS: tl.constexpr = 1 if masks[4] is None or tl.float32 == OPERAND else 3
    rows, masks = rows[:], masks[:]
    block, segment, kv_head, items, positions, limits = place(blocks, span, limits, heads[0] // heads[2], CAUSAL)
    item, begin = items[0], positions[0] - limits[3]
    first, c0 = kv_head * heads[2], block * BLOCK
    R, r = tl.zeros((D, BLOCK), tl.float32), beside(tl.zeros((D,), tl.float32), OPERAND)
    for member in range(heads[2]):
        head = first + member
        bounds = seen_range(limits, masks, item, head)
        for i0 in range(begin, tl.minimum(begin + span[1], limits[0]), CHUNK):
            i = i0 + tl.arange(0, CHUNK)
            live = live_queries(i, bounds, limits, masks, item, head, CAUSAL)
            inverse, delta = load_rows(rows, item, head, i, live)
            factor = inverse * scale
            if masks[5] is not None:
                opened = level_at(masks[5], items[1], kv_head, positions[0], limits[1])
                levels = level_at(masks[5], items[1], kv_head, i + limits[3], limits[1])
                factor *= fades(opened, levels)
            x = load_features(q, item, head, i0, live, 0, d, PHI, D, CHUNK)
            rest = x * factor[:, None]
            cotangents = load_tokens(do, item, head, i0, live, c0, e, BLOCK, CHUNK).to(OPERAND)
            for _ in tl.static_range(TERMS):
                x = operand(rest, OPERAND, PRECISION)
                R = multiply(tl.trans(x), cotangents, R, PRECISION)
                if rows[0] is not None:
                    r = add_weighted_tokens(r, x, -delta, OPERAND, PRECISION)
                rest = left_over(rest, OPERAND, PRECISION)
    at = state_at(states, segment, heads, items[2], first, d, e)
    store_state(at, c0, R, alone(r, OPERAND), d, e, D, BLOCK)


@triton.jit
def load_initial(initial, heads, number, at, d: tl.constexpr, e: tl.constexpr, REVERSE: tl.constexpr):
    """The elements `at` of the initial [S, z].

    With REVERSE it is the gradient of the returned state, which belongs to the states of a group: the first one gets
    it.
    """
    S, z = initial
    kv_head = heads[0] // heads[2]
    item, query_head = number // kv_head, number % kv_head * heads[2]
    head, row = query_head // heads[1], at // e
    own = d * e + d
    if REVERSE:
        own = tl.where(query_head % heads[1] == 0, own, 0)
    value = tl.load(
        S[0] + item * S[1] + head * S[2] + row.to(tl.int64) * S[3] + (at - row * e).to(tl.int64) * S[4],
        mask=at < tl.minimum(own, d * e), other=0.0,
    )  # fmt: skip
    rest = tl.load(
        z[0] + item * z[1] + head * z[2] + (at - d * e).to(tl.int64) * z[3], mask=(at >= d * e) & (at < own), other=0.0
    )
    return value.to(tl.float32) + rest.to(tl.float32)


@triton.jit
def fade_of_segment(levels, number, heads, span, segment, keys, REVERSE: tl.constexpr):
    """From the level of the state before a segment to that of the state after it; with REVERSE from the end."""
    begin = span[2] + segment * span[1]
    if REVERSE:
        one, other = begin, begin + span[1]
    else:
        one, other = begin - 1, begin + span[1] - 1
    return fade_between(levels, number, heads, one, other, keys)


@triton.jit
def fade_between(levels, number, heads, one, other, keys):
    """From the level of a position to that of a later one, for the state of that number."""
    states = heads[0] // heads[2]
    item, head = number // states, number % states
    return fades(level_at(levels, item, head, one, keys), level_at(levels, item, head, other, keys))


@triton.jit
def running(
    states, initial, final, levels, keys, heads, span, blocks, CAUSAL: tl.constexpr, REVERSE: tl.constexpr,
    d: tl.constexpr, e: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The states of segments become the sums of those before them (after them with REVERSE), or the first the total.

    All sums start from `initial`, and the total goes to `final` as well. With levels, of `keys` keys, sums fade.
    """
    n, size = tl.program_id(0), d * e + d
    at = n % blocks * BLOCK + tl.arange(0, BLOCK)
    number, segments, reach = (n // blocks).to(tl.int64), states[1], span[6]
    first = number * segments
    if reach is not None:
        sequence = (number % span[7]).to(tl.int32)
        before = first_block(reach, sequence, span[1])
        segments = first_block(reach, sequence + 1, span[1]) - before
        first = number // span[7] * states[1] + before
    first = states[0] + first * size
    total = tl.zeros((BLOCK,), tl.float32)
    if initial is not None:
        total += load_initial(initial, heads, number, at, d, e, REVERSE)
    for step in range(0, segments):
        segment = segments - 1 - step if REVERSE else step
        place = first + tl.cast(segment, tl.int64) * size + at
        own = tl.load(place, mask=at < size, other=0.0)
        if CAUSAL:
            tl.store(place, total, mask=at < size)
        if levels is not None:
            total *= fade_of_segment(levels, number, heads, span, segment, keys, REVERSE)
        total += own
    if not CAUSAL:
        tl.store(first + at, total, mask=at < size)
    if final is not None:
        if REVERSE and levels is not None:  # an initial state fades at the first token, too
            total *= fade_between(levels, number, heads, span[2] - 1, span[2], keys)
        tl.store(final[0] + number * (d * e) + at, total, mask=at < d * e)
        tl.store(final[1] + number * d + (at - d * e), total, mask=(at >= d * e) & (at < size))


@triton.jit
def opening(
    states, segment, first, heads, item, head, f0, c0, CAUSAL: tl.constexpr, d: tl.constexpr, e: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The initial state of a segment: 0 without any; without causality the total, stored at the first."""
    if states is None:
        S, z = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS,), tl.float32)
    else:
        at = state_at(states, segment if CAUSAL else first, heads, item, head, d, e)
        S, z = load_state(at, f0, c0, d, e, ROWS, COLUMNS)
    return S, z


# ---------------------------------------------------------------------------------------------- outputs


@triton.jit
def outputs(
    q, k, v, o, do, rows, states, masks, limits, scale, eps, heads, span, blocks,
    PHI: tl.constexpr, CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr, FLOOR: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of o for a segment of queries; or, with do, 1/den and its part of δ into `rows`.

    With FLOOR den = max(raw, 0) + eps, whose slope is 0 where raw ≤ 0: δ is 0 there. Without a denominator, which
    would be rounded alike, φ(q) has twice the digits of OPERAND beside the state, and so have the pairs of a chunk.
    """
    TWICE: tl.constexpr = not NORMALIZE and (tl.float32 != OPERAND or PRECISION == "tf32")
    rows, masks = rows[:], masks[:]
    block, segment, head, items, positions, limits = place(blocks, span, limits, heads[0], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    shared, own, c0 = head // heads[1], head // heads[2], block * BLOCK
    bounds = seen_range(limits, masks, item, head)
    S, z = opening(states, segment, positions[2], heads, items[2], head, 0, c0, CAUSAL, d, e, D, BLOCK)
    z, token = beside(z, OPERAND), tl.arange(0, CHUNK)
    for p0 in range(begin, tl.minimum(begin + span[1], positions[1]), CHUNK):
        i0 = p0 - limits[3]
        i = i0 + token
        inside, live = (i >= 0) & (i < limits[0]), live_queries(i, bounds, limits, masks, item, head, CAUSAL)
        x = load_features(q, item, head, i0, live, 0, d, PHI, D, CHUNK)
        num = product(left_over(x, OPERAND, PRECISION), S, None, OPERAND, PRECISION) if TWICE else None
        num, raw = product(x, S, num, OPERAND, PRECISION), row_products(x, z, OPERAND, PRECISION)
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, own, p0 + token, limits[1])
            before, last = (
                level_at(masks[5], key_item, own, p0 - 1, limits[1]),
                level_at(masks[5], key_item, own, p0 + CHUNK - 1, limits[1]),
            )
            fade = fades(before, levels)
            num, raw = num * fade[:, None], raw * (fade if tl.float32 == OPERAND else fade[:, None])
        if CAUSAL:
            seen = seen_keys(p0 + token, bounds, masks, key_item, head)
            y = load_features(k, key_item, shared, p0, seen, 0, d, PHI, D, CHUNK)
            c = load_tokens(v, key_item, shared, p0, seen, c0, e, BLOCK, CHUNK)
            pairs = product(x, tl.trans(y), None, OPERAND, PRECISION)
            if masks[5] is not None:
                pairs *= fades(in_row(levels), in_column(levels))
            pairs = tl.where(token[:, None] >= token[None, :], pairs, 0.0)
            num, raw = product(pairs, c, num, OPERAND, PRECISION), add_row_sums(raw, pairs, OPERAND, PRECISION)
            if TWICE:
                num = product(left_over(pairs, OPERAND, PRECISION), c, num, OPERAND, PRECISION)
            if masks[5] is not None:
                y, S, z = y * fades(levels, last)[:, None], S * fades(before, last), z * fades(before, last)
            S, z = add_keys(S, z, y, c, OPERAND, PRECISION)
        inverse = tl.where(live, 1.0, 0.0)
        if NORMALIZE:
            sums = alone(raw, OPERAND) * scale
            den = tl.where(sums <= 0.0, eps, sums + eps) if FLOOR else sums + eps
            inverse = tl.where(live & (den != 0.0), 1.0 / tl.where(den != 0.0, den, 1.0), 0.0)
        if do is None:
            store_tokens(o, item, head, i0, inside, num * (inverse * scale)[:, None], c0, e, BLOCK, CHUNK)
        else:
            delta = tl.sum(load_tokens(do, item, head, i0, live, c0, e, BLOCK, CHUNK) * num, 1) * scale * inverse
            if FLOOR:
                delta = tl.where(sums <= 0.0, 0.0, delta)
            store_of(rows[0], item, head, i, inside, inverse)
            store_of(rows[1], item, head + block * rows[2], i, inside, delta)


# ---------------------------------------------------------------------------------------------- gradients


@triton.jit
def gradient_queries(
    q, k, v, do, dq, rows, states, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, SLOPE: tl.constexpr, CAUSAL: tl.constexpr, d: tl.constexpr, e: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of dq = φ'(q)·scale·(S dn + z dd + the pairs of the chunk) for a segment of queries."""
    rows, masks = rows[:], masks[:]
    block, segment, head, items, positions, limits = place(blocks, span, limits, heads[0], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    shared, own, f0 = head // heads[1], head // heads[2], block * BLOCK
    bounds = seen_range(limits, masks, item, head)
    S, z = opening(states, segment, positions[2], heads, items[2], head, f0, 0, CAUSAL, d, e, BLOCK, E)
    beside = tl.arange(0, CHUNK)
    for p0 in range(begin, tl.minimum(begin + span[1], positions[1]), CHUNK):
        i0 = p0 - limits[3]
        i = i0 + beside
        live = live_queries(i, bounds, limits, masks, item, head, CAUSAL)
        dn, dd = load_cotangents(do, rows, item, head, i0, i, live, 0, e, E, CHUNK)
        total = product(dn, tl.trans(S), None, OPERAND, PRECISION)
        if rows[0] is not None:
            total += dd[:, None] * z[None, :]
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, own, p0 + beside, limits[1])
            before, last = (
                level_at(masks[5], key_item, own, p0 - 1, limits[1]),
                level_at(masks[5], key_item, own, p0 + CHUNK - 1, limits[1]),
            )
            total *= fades(before, levels)[:, None]
        if CAUSAL:
            seen = seen_keys(p0 + beside, bounds, masks, key_item, head)
            y = load_features(k, key_item, shared, p0, seen, f0, d, PHI, BLOCK, CHUNK)
            c = load_tokens(v, key_item, shared, p0, seen, 0, e, E, CHUNK)
            pairs = product(dn, tl.trans(c), None, OPERAND, PRECISION)
            if rows[0] is not None:
                pairs += dd[:, None]
            pairs = tl.where(beside[:, None] >= beside[None, :], pairs, 0.0)
            if masks[5] is not None:
                pairs *= fades(in_row(levels), in_column(levels))
            total = product(pairs, y, total, OPERAND, PRECISION)
            if masks[5] is not None:
                y, S, z = y * fades(levels, last)[:, None], S * fades(before, last), z * fades(before, last)
            S = product(tl.trans(y), c, S, OPERAND, PRECISION)
            z += tl.sum(y, 0)
        q_tile = load_tokens(q, item, head, i0, live, f0, d, BLOCK, CHUNK)
        total = tl.where(live[:, None], total * SLOPE(q_tile) * scale, 0.0)
        store_tokens(dq, item, head, i0, (i >= 0) & (i < limits[0]), total, f0, d, BLOCK, CHUNK)


@triton.jit
def gradient_keys(
    q, k, v, do, dk, rows, states, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, SLOPE: tl.constexpr, CAUSAL: tl.constexpr, d: tl.constexpr, e: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of dk = φ'(k)·(R v + r + the pairs of the chunk) for a segment of keys, from its end."""
    rows, masks = rows[:], masks[:]
    block, segment, kv_head, items, positions, limits = place(blocks, span, limits, heads[0] // heads[2], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    first, f0 = kv_head * heads[2], block * BLOCK
    shared = first // heads[1]
    bounds = seen_range(limits, masks, item, first)
    R, r = opening(states, segment, positions[2], heads, items[2], first, f0, 0, CAUSAL, d, e, BLOCK, E)
    beside = tl.arange(0, CHUNK)
    chunks = tl.cdiv(tl.minimum(begin + span[1], positions[1]) - begin, CHUNK)
    for step in range(0, chunks):
        j0 = begin + (chunks - 1 - step) * CHUNK
        i0 = j0 - limits[3]
        seen = seen_keys(j0 + beside, bounds, masks, key_item, first)
        c = load_tokens(v, key_item, shared, j0, seen, 0, e, E, CHUNK)
        total = product(c, tl.trans(R), None, OPERAND, PRECISION) + r[None, :]
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, kv_head, j0 + beside, limits[1])
            opened, after = (
                level_at(masks[5], key_item, kv_head, j0, limits[1]),
                level_at(masks[5], key_item, kv_head, j0 + CHUNK, limits[1]),
            )
            total *= fades(levels, after)[:, None]
            R, r = R * fades(opened, after), r * fades(opened, after)
        if CAUSAL:
            for head in range(first, first + heads[2]):
                live = live_queries(i0 + beside, bounds, limits, masks, item, head, CAUSAL)
                x = load_features(q, item, head, i0, live, f0, d, PHI, BLOCK, CHUNK) * scale
                dn, dd = load_cotangents(do, rows, item, head, i0, i0 + beside, live, 0, e, E, CHUNK)
                pairs = product(c, tl.trans(dn), None, OPERAND, PRECISION)
                if rows[0] is not None:
                    pairs += dd[None, :]
                pairs = tl.where(beside[:, None] <= beside[None, :], pairs, 0.0)
                if masks[5] is not None:
                    pairs *= fades(in_column(levels), in_row(levels))
                total = product(pairs, x, total, OPERAND, PRECISION)
                if masks[5] is not None:
                    x *= fades(opened, levels)[:, None]
                if rows[0] is not None:
                    r += tl.sum(x * dd[:, None], 0)
                R = product(tl.trans(x), dn, R, OPERAND, PRECISION)
        k_tile = load_tokens(k, key_item, shared, j0, seen, f0, d, BLOCK, CHUNK)
        total = tl.where(seen[:, None], total * SLOPE(k_tile), 0.0)
        stored = (j0 + beside >= 0) & (j0 + beside < limits[1])
        store_tokens(dk, key_item, kv_head, j0, stored, total, f0, d, BLOCK, CHUNK)


@triton.jit
def gradient_values(
    q, k, do, dv, rows, states, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, CAUSAL: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of dv = Rᵀφ(k) + the pairs of the chunk for a segment of keys, from its end."""
    rows, masks = rows[:], masks[:]
    block, segment, kv_head, items, positions, limits = place(blocks, span, limits, heads[0] // heads[2], CAUSAL)
    item, key_item, begin = items[0], items[1], positions[0]
    first, c0 = kv_head * heads[2], block * BLOCK
    shared = first // heads[1]
    bounds = seen_range(limits, masks, item, first)
    R = opening(states, segment, positions[2], heads, items[2], first, 0, c0, CAUSAL, d, e, D, BLOCK)[0]
    beside = tl.arange(0, CHUNK)
    chunks = tl.cdiv(tl.minimum(begin + span[1], positions[1]) - begin, CHUNK)
    for step in range(0, chunks):
        j0 = begin + (chunks - 1 - step) * CHUNK
        i0 = j0 - limits[3]
        seen = seen_keys(j0 + beside, bounds, masks, key_item, first)
        y = load_features(k, key_item, shared, j0, seen, 0, d, PHI, D, CHUNK)
        total = product(y, R, None, OPERAND, PRECISION)
        if masks[5] is not None:
            levels = level_at(masks[5], key_item, kv_head, j0 + beside, limits[1])
            opened, after = (
                level_at(masks[5], key_item, kv_head, j0, limits[1]),
                level_at(masks[5], key_item, kv_head, j0 + CHUNK, limits[1]),
            )
            total, R = total * fades(levels, after)[:, None], R * fades(opened, after)
        if CAUSAL:
            for head in range(first, first + heads[2]):
                live = live_queries(i0 + beside, bounds, limits, masks, item, head, CAUSAL)
                x = load_features(q, item, head, i0, live, 0, d, PHI, D, CHUNK) * scale
                dn = load_cotangents(do, rows, item, head, i0, i0 + beside, live, c0, e, BLOCK, CHUNK)[0]
                pairs = product(y, tl.trans(x), None, OPERAND, PRECISION)
                pairs = tl.where(beside[:, None] <= beside[None, :], pairs, 0.0)
                if masks[5] is not None:
                    pairs *= fades(in_column(levels), in_row(levels))
                    x *= fades(opened, levels)[:, None]
                total = product(pairs, dn, total, OPERAND, PRECISION)
                R = product(tl.trans(x), dn, R, OPERAND, PRECISION)
        stored = (j0 + beside >= 0) & (j0 + beside < limits[1])
        store_tokens(dv, key_item, kv_head, j0, stored, total, c0, e, BLOCK, CHUNK)


@triton.jit
def gradient_gates(
    q, k, v, do, dg, rows, before, after, masks, limits, scale, heads, span, blocks,
    PHI: tl.constexpr, d: tl.constexpr, e: tl.constexpr, FEATURES: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dg_l = Σ_{i ≥ l > j} exp(t_j - t_i) x_i·y_j (dn_i·v_j + dd_i) of the gates of a segment, which is a chunk.

    A difference of running sums would cancel: those pairs are summed of which both, the query, the key or none are in
    the chunk. What is outside is in the state `before` it and in [R, r] `after` it. FEATURES are multiplied at a time.
    """
    rows, masks = rows[:], masks[:]
    _, segment, kv_head, items, positions, limits = place(blocks, span, limits, heads[0] // heads[2], True)
    item, key_item, p0 = items[0], items[1], positions[0]
    first, i0, token = kv_head * heads[2], p0 - limits[3], tl.arange(0, CHUNK)
    shared, p = first // heads[1], p0 + tl.arange(0, CHUNK)
    bounds = seen_range(limits, masks, item, first)
    seen = seen_keys(p, bounds, masks, key_item, first)
    earlier, later = None, None
    if before is not None:
        earlier = state_at(before, segment, heads, items[2], first, d, e)
    if after is not None:
        later = state_at(after, segment, heads, items[2], first, d, e)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_queries, of_keys = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    outside = tl.zeros((FEATURES,), tl.float32)
    for head in range(first, first + heads[2]):
        live = live_queries(i0 + token, bounds, limits, masks, item, head, True)
        inverse, delta = load_rows(rows, item, head, i0 + token, live)
        weights, dots = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
        dots -= (delta * inverse)[:, None]
        for c0 in range(0, e, FEATURES):
            dn = load_cotangents(do, rows, item, head, i0, i0 + token, live, c0, e, FEATURES, CHUNK)[0]
            c = load_tokens(v, key_item, shared, p0, seen, c0, e, FEATURES, CHUNK)
            dots = product(dn, tl.trans(c), dots, OPERAND, PRECISION)
        for f0 in range(0, d, FEATURES):
            x = load_features(q, item, head, i0, live, f0, d, PHI, FEATURES, CHUNK) * scale
            y = load_features(k, key_item, shared, p0, seen, f0, d, PHI, FEATURES, CHUNK)
            weights = product(x, tl.trans(y), weights, OPERAND, PRECISION)
            if before is not None:
                z = load_state(earlier, f0, 0, d, e, FEATURES, FEATURES)[1]
                of_queries -= delta * inverse * tl.sum(x * z[None, :], 1)
                for c0 in range(0, e, FEATURES):
                    S = load_state(earlier, f0, c0, d, e, FEATURES, FEATURES)[0]
                    dn = load_cotangents(do, rows, item, head, i0, i0 + token, live, c0, e, FEATURES, CHUNK)[0]
                    of_queries += tl.sum(product(x, S, None, OPERAND, PRECISION) * dn, 1)
        pairs += weights * dots
    if after is not None:
        for f0 in range(0, d, FEATURES):
            y = load_features(k, key_item, shared, p0, seen, f0, d, PHI, FEATURES, CHUNK)
            r = load_state(later, f0, 0, d, e, FEATURES, FEATURES)[1]
            of_keys += tl.sum(y * r[None, :], 1)
            if before is not None:
                outside += load_state(earlier, f0, 0, d, e, FEATURES, FEATURES)[1] * r
            for c0 in range(0, e, FEATURES):
                R = load_state(later, f0, c0, d, e, FEATURES, FEATURES)[0]
                c = load_tokens(v, key_item, shared, p0, seen, c0, e, FEATURES, CHUNK)
                of_keys += tl.sum(product(y, R, None, OPERAND, PRECISION) * c, 1)
                if before is not None:
                    outside += tl.sum(load_state(earlier, f0, c0, d, e, FEATURES, FEATURES)[0] * R, 1)
    levels = level_at(masks[5], key_item, kv_head, p, limits[1])
    opened, closed = (
        level_at(masks[5], key_item, kv_head, p0 - 1, limits[1]),
        level_at(masks[5], key_item, kv_head, p0 + CHUNK, limits[1]),
    )
    behind = token[:, None] > token[None, :]
    pairs = tl.where(behind, pairs * fades(in_row(levels), in_column(levels)), 0.0)
    of_queries, of_keys = of_queries * fades(opened, levels), of_keys * fades(levels, closed)
    rest = tl.sum(outside, 0) * fades(opened, closed)
    # of the gate behind each token: keys up to it are before that gate, and queries behind it are not
    total = tl.sum(tl.where(behind, tl.cumsum(pairs, 1) + of_queries[:, None], 0.0), 0)
    total += tl.cumsum(of_keys, 0) + rest
    store_of(dg, key_item, kv_head, p + 1, (p >= -1) & (p + 1 < tl.minimum(p0 + CHUNK, limits[1])), total)
    store_of(dg, key_item, kv_head, p0, (p0 >= 0) & (p0 < limits[1]), tl.sum(of_queries, 0) + rest)
