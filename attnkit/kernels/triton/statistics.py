"""Statistics of the rows of weights, in the sweep of an attention kernel, and the gradient of the weights from them.

Tuples, with None for entries that a call does not need:

    outputs = (total, entropy, sum_squares, maximum, nonzero, visible, first)  rows to write; `first` is never None
    stats = (total, size, squares, largest, first, spread, alive, visible)     running values of a program's queries
    dstats = (first, dtotal, dentropy, dsquares, dmaximum, total, entropy)     rows to read

Rows are pointers to contiguous arrays (items, heads, queries), so one offset serves all of them.

Sums are of h, and what all weights of a row are h times is put in at the end; of SIGNED weights, whose largest it may
turn into the smallest, they are of the weights, and `size` is that of their absolute values. `alive` counts the weights
that are not 0. `first` is -1 where all weights are 0, else 0, or with FIRST the key of the first maximum, which only
its gradient needs. Entropy is log Z - Σ w log w / Z: it does not depend on a common factor.

Sums and maxima are (rows, 4), apart for the threads that share a row of a product, until all keys are in: threads then
exchange them once and not for every tile.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.special import SMALLEST, fast_log2
from attnkit.kernels.triton.tiles import maxima_of, sums_of

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def no_maximum(maximum, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """The maximum of nothing, of whole rows if its key is needed too; None if it is not needed."""
    largest = None
    if FIRST:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
    elif maximum is not None:
        largest = tl.full((ROWS, 4), float("-inf"), tl.float32)
    return largest


@triton.jit
def no_weights(outputs, EXACT: tl.constexpr, SIGNED: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """`stats` before any key; EXACT: weights of 0 are exact, not underflow."""
    zero = tl.zeros((ROWS, 4), tl.float32)
    stats = None
    if outputs is not None:
        stats = (
            zero,
            zero if SIGNED else None,
            zero if outputs[2] is not None else None,
            no_maximum(outputs[3], FIRST, ROWS),
            tl.zeros((ROWS,), tl.int32) if FIRST else None,
            zero if outputs[1] is not None else None,
            zero if outputs[4] is not None and EXACT else None,
            zero if outputs[5] is not None or (outputs[4] is not None and not EXACT) else None,
        )
    return stats


@triton.jit
def logarithm(x):
    """log x, 0 where x is not positive."""
    return tl.log(tl.where(x > 0.0, x, 1.0))


@triton.jit
def add_weights(stats, w, inside, j0, KEYS: tl.constexpr):
    """`stats` with the weights of a standing tile, 0 on invisible pairs; all are visible if `inside` is None."""
    total, size, squares, largest, first, spread, alive, visible = stats
    total += sums_of(w)
    if size is not None:
        size += sums_of(tl.abs(w))
    if squares is not None:
        squares += sums_of(w * w)
    if spread is not None:
        spread += sums_of(w * fast_log2(tl.maximum(w, SMALLEST)))
    if alive is not None:
        alive += sums_of((w != 0.0).to(tl.float32))
    if visible is not None:
        if inside is None:
            visible += KEYS // 4
        else:
            visible += sums_of(inside.to(tl.float32))
    if largest is not None:
        seen = w
        if size is not None and inside is not None:
            seen = tl.where(inside, w, float("-inf"))
        if first is None:
            top = maxima_of(seen)
        else:
            top, at = tl.max(seen, 1, return_indices=True)
            first = tl.where(top > largest, j0 + at, first)
        largest = tl.maximum(largest, top)
    return total, size, squares, largest, first, spread, alive, visible


@triton.jit
def store_statistics(outputs, stats, scale, at, live, EXACT: tl.constexpr):
    """Write statistics at the addresses `at` of `live` rows: 0 except `visible` if all weights are 0.

    Weights are `scale` times what was added, or just that if they are signed; NaN is found in their sum.
    """
    total, size, squares, largest, first, spread, count, visible = stats
    total = tl.sum(total, 1)
    if size is None:
        size = total
    else:
        size, scale = tl.sum(size, 1), scale * 0.0 + 1.0
    alive = size != 0.0
    if outputs[0] is not None:
        tl.store(outputs[0] + at, total * scale, mask=live)
    if outputs[1] is not None:
        Z = tl.where(alive, total, 1.0)
        entropy = (tl.log2(Z) - tl.sum(spread, 1) / Z) * LN_2
        tl.store(outputs[1] + at, tl.where(alive, entropy, 0.0), mask=live)
    if outputs[2] is not None:
        tl.store(outputs[2] + at, tl.sum(squares, 1) * scale * scale, mask=live)
    if outputs[3] is not None:
        maximum = tl.where(size == size, tl.max(largest, 1) * scale, float("nan"))
        tl.store(outputs[3] + at, tl.where(alive, maximum, 0.0), mask=live)
    if outputs[4] is not None:
        nonzero = tl.sum(count, 1) if EXACT else tl.where(alive, tl.sum(visible, 1), 0.0)
        tl.store(outputs[4] + at, nonzero, mask=live)
    if outputs[5] is not None:
        tl.store(outputs[5] + at, tl.sum(visible, 1), mask=live)
    if first is None:
        first = live.to(tl.int32) * 0
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
