"""Statistics of the rows of weights, in the sweep of an attention kernel, and the gradient of the weights from them.

Tuples, with None for entries that a call does not need:

    outputs = (total, entropy, sum_squares, maximum, nonzero, visible, first)  rows to write; `first` is never None
    stats = (alive, total, squares, largest, first, spread, visible)           running values of a program's queries
    dstats = (first, dtotal, dentropy, dsquares, dmaximum, total, entropy)     rows to read

Rows are pointers to contiguous arrays (items, heads, queries), so one offset serves all of them.
`alive` counts the weights that are not 0, `first` is the key of the first maximum, -1 where all weights are 0. Entropy
is computed from two sums of non-negative terms, with m the largest weight so far:

    H = log(Z/m) + Σ w log(m/w) / Z        a larger m' adds Z log(m'/m) to Σ w log(m/w)
"""

import triton
import triton.language as tl


@triton.jit
def no_weights(outputs, EXACT: tl.constexpr, ROWS: tl.constexpr):
    """`stats` before any key; EXACT: weights of 0 are exact, not underflow."""
    zero = tl.zeros((ROWS,), tl.float32)
    stats = None
    if outputs is not None:
        stats = (
            zero,
            zero if outputs[0] is not None or outputs[1] is not None else None,
            zero if outputs[2] is not None else None,
            zero - float("inf") if outputs[1] is not None or outputs[3] is not None else None,
            tl.zeros((ROWS,), tl.int32) if outputs[3] is not None else None,
            zero if outputs[1] is not None else None,
            zero if outputs[5] is not None or (outputs[4] is not None and not EXACT) else None,
        )
    return stats


@triton.jit
def logarithm(x):
    """log x, 0 where x is not positive."""
    return tl.log(tl.where(x > 0.0, x, 1.0))


@triton.jit
def add_weights(stats, w, inside, j0, j):
    """`stats` with the weights of a standing tile, 0 on invisible pairs."""
    alive, total, squares, largest, first, spread, visible = stats
    if largest is not None:
        visible_w = tl.where(inside, w, float("-inf"))
        top, at = tl.max(visible_w, 1, return_indices=True)
        top += tl.sum(tl.where(w == w, 0.0, float("nan")), 1)
        higher = tl.maximum(largest, top, propagate_nan=tl.PropagateNan.ALL)
        if first is not None:
            first = tl.where(top > largest, j0 + at, first)
        if spread is not None:
            m = tl.where(higher > 0.0, higher, 1.0)
            spread += total * logarithm(m / tl.where(largest > 0.0, largest, m))
            spread -= tl.sum(w * logarithm(w / m[:, None]), 1)
        largest = higher
    alive += tl.sum((w != 0.0).to(tl.float32), 1)
    if total is not None:
        total += tl.sum(w, 1)
    if squares is not None:
        squares += tl.sum(w * w, 1)
    if visible is not None:
        visible += tl.sum((inside & (j >= 0)).to(tl.float32), 1)
    return alive, total, squares, largest, first, spread, visible


@triton.jit
def store_statistics(outputs, stats, at, live, EXACT: tl.constexpr):
    """Write statistics at the addresses `at` of `live` rows: 0 except `visible` if all weights are 0."""
    count, total, squares, largest, first, spread, visible = stats
    alive = count > 0.0
    if outputs[0] is not None:
        tl.store(outputs[0] + at, total, mask=live)
    if outputs[1] is not None:
        Z = tl.where(total == 0.0, 1.0, total)
        entropy = tl.where(alive, logarithm(Z / tl.where(largest > 0.0, largest, Z)) + spread / Z, 0.0)
        tl.store(outputs[1] + at, entropy, mask=live)
    if outputs[2] is not None:
        tl.store(outputs[2] + at, squares, mask=live)
    if outputs[3] is not None:
        tl.store(outputs[3] + at, tl.where(alive, largest, 0.0), mask=live)
    if outputs[4] is not None:
        tl.store(outputs[4] + at, count if EXACT else tl.where(alive, visible, 0.0), mask=live)
    if outputs[5] is not None:
        tl.store(outputs[5] + at, visible, mask=live)
    if first is None:
        first = count.to(tl.int32) * 0
    tl.store(outputs[6] + at, tl.where(alive, first, -1), mask=live)


@triton.jit
def addresses(i, item, head, heads, queries):
    """The offsets of the rows of queries i of a head."""
    return (item * heads + head) * queries + i


@triton.jit
def load_cotangents(dstats, at, live):
    """The rows of `dstats` at the addresses `at`, 0 unless `live` and for rows of zeros; None without `dstats`."""
    drows = None
    if dstats is not None:
        first = tl.load(dstats[0] + at, mask=live, other=-1)
        alive = live & (first >= 0)
        drows = (
            first,
            optional_rows(dstats[1], at, alive),
            optional_rows(dstats[2], at, alive),
            optional_rows(dstats[3], at, alive),
            optional_rows(dstats[4], at, alive),
            optional_rows(dstats[5], at, alive),
            optional_rows(dstats[6], at, alive),
        )
    return drows


@triton.jit
def optional_rows(row, at, live):
    """Values at addresses, None without a pointer."""
    x = None
    if row is not None:
        x = tl.load(row + at, mask=live, other=0.0)
    return x


@triton.jit
def scale_of_weights(i, factor, numbers):
    """The factor from h to weights for the queries i: gain, without dropout's, times f_i; None if not needed."""
    scale = None
    if numbers[4] is not None:
        scale = i.to(tl.float32) * 0.0 + numbers[2] * numbers[4]
        if factor is not None:
            scale *= factor
    return scale


@triton.jit
def with_statistics(du, drows, w, share, j):
    """du of the output (or None) plus the contribution of statistics; gain·`share` is the gain of weights."""
    if drows is not None:
        dw = weight_gradient(drows, w, j) * share
        du = dw if du is None else du + dw
    return du


@triton.jit
def weight_gradient(drows, w, j):
    """dZ - dH (log p + H)/Z on the support + 2 w dΣw² + dmax at the first maximum, for the weights w of the keys j."""
    first, dtotal, dentropy, dsquares, dmaximum, total, entropy = drows
    dw = w * 0.0
    if dtotal is not None:
        dw += dtotal
    if dsquares is not None:
        dw += 2.0 * w * dsquares
    if dentropy is not None:
        Z = tl.where(total > 0.0, total, 1.0)
        p = w / Z
        dw -= tl.where(p > 0.0, (logarithm(p) + entropy) * (dentropy / Z), 0.0)
    if dmaximum is not None:
        dw += tl.where(j == first, dmaximum, 0.0)
    return dw
