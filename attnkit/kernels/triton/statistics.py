"""Statistics of the rows of weights, in the sweep of an attention kernel, and the gradient of the weights from them.

Tuples, with None for rows that a call does not need:

    outputs = (total, entropy, sum_squares, maximum, nonzero, visible, first)  rows to write; `first` is never None
    stats = (total, size, squares, largest, first, spread, alive, visible)     running values of a program's queries
    dstats = (first, dtotal, dentropy, dsquares, dmaximum, total, entropy)     rows to read, or None everywhere

Rows are pointers to contiguous arrays (items, heads, queries), so one offset serves all of them. KIND, made by `kind`,
says for each of `stats` whether it is needed; the others stay as they are.

Sums are of h, and what all weights of a row are h times is put in at the end; of signed weights, whose largest it may
turn into the smallest, they are of the weights, and `size` is that of their absolute values. `alive` counts the weights
that are not 0. `first` is -1 where all weights are 0, else 0, or if needed the key of the first maximum, which only its
gradient needs. Entropy is log Z - Σ w log w / Z: it does not depend on a common factor.

Sums and maxima are (rows, 4), apart for the threads that share a row of a product, until all keys are in: threads then
exchange them once and not for every tile.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.special import SMALLEST, fast_log2
from attnkit.kernels.triton.tiles import maxima_of, sums_of

LN_2 = tl.constexpr(0.6931471805599453)
FAINTEST = tl.constexpr(1.504632769052528e-36)  # row sum whose entropy has a gradient: 128 smallest normal numbers


def kind(outputs, exact, signed, first):
    """KIND for rows to write, None without any; `exact`: weights of 0 are exact, not underflow."""
    if outputs is None:
        return None
    _, entropy, squares, maximum, nonzero, visible, _ = (x is not None for x in outputs)
    alive = nonzero and exact
    return True, signed, squares, maximum or first, first, entropy, alive, visible or (nonzero and not alive)


@triton.jit
def no_weights(KIND: tl.constexpr, ROWS: tl.constexpr):
    """`stats` before any key. Maxima are of whole rows if their keys are needed too."""
    zero = tl.zeros((ROWS, 4), tl.float32)
    if KIND[4]:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
    else:
        largest = tl.full((ROWS, 4), float("-inf"), tl.float32)
    return zero, zero, zero, largest, tl.zeros((ROWS,), tl.int32), zero, zero, zero


@triton.jit
def logarithm(x):
    """log x, 0 where x is not positive."""
    return tl.log(tl.where(x > 0.0, x, 1.0))


@triton.jit
def add_weights(stats, w, inside, j0, KIND: tl.constexpr, KEYS: tl.constexpr):
    """`stats` with the weights of a standing tile, 0 on invisible pairs; all are visible if `inside` is None."""
    total, size, squares, largest, first, spread, alive, visible = stats
    total += sums_of(w)
    if KIND[1]:
        size += sums_of(tl.abs(w))
    if KIND[2]:
        squares += sums_of(w * w)
    if KIND[5]:
        spread += sums_of(w * fast_log2(tl.maximum(w, SMALLEST)))
    if KIND[6]:
        alive += sums_of((w != 0.0).to(tl.float32))
    if KIND[7]:
        if inside is None:
            visible += KEYS // 4
        else:
            visible += sums_of(inside.to(tl.float32))
    if KIND[3]:
        seen = w
        if KIND[1] and inside is not None:
            seen = tl.where(inside, w, float("-inf"))
        if KIND[4]:
            top, at = tl.max(seen, 1, return_indices=True)
            first = tl.where(top > largest, j0 + at, first)
        else:
            top = maxima_of(seen)
        largest = tl.maximum(largest, top)
    return total, size, squares, largest, first, spread, alive, visible


@triton.jit
def store_statistics(outputs, stats, scale, at, live, KIND: tl.constexpr):
    """Write statistics at the addresses `at` of `live` rows: 0 except `visible` if all weights are 0.

    Weights are `scale` times what was added, or just that if they are signed; NaN is found in their sum.
    """
    total, size, squares, largest, first, spread, count, visible = stats
    total = tl.sum(total, 1)
    if KIND[1]:
        size, scale = tl.sum(size, 1), scale * 0.0 + 1.0
    else:
        size = total
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
        nonzero = tl.sum(count, 1) if KIND[6] else tl.where(alive, tl.sum(visible, 1), 0.0)
        tl.store(outputs[4] + at, nonzero, mask=live)
    if outputs[5] is not None:
        tl.store(outputs[5] + at, tl.sum(visible, 1), mask=live)
    tl.store(outputs[6] + at, tl.where(alive, first, -1), mask=live)


@triton.jit
def addresses(i, item, head, heads, queries):
    """The offsets of the rows of queries i of a head."""
    return (item * heads + head) * queries + i


@triton.jit
def load_cotangents(dstats, at, live):
    """The rows of `dstats` at the addresses `at`, 0 unless `live`, for rows of zeros, and if they are absent."""
    first = tl.load(dstats[0] + at, mask=live, other=-1)
    alive = live & (first >= 0)
    return (
        first,
        optional_rows(dstats[1], at, alive),
        optional_rows(dstats[2], at, alive),
        optional_rows(dstats[3], at, alive),
        optional_rows(dstats[4], at, alive),
        optional_rows(dstats[5], at, alive),
        optional_rows(dstats[6], at, alive),
    )


@triton.jit
def optional_rows(row, at, live):
    """Values at addresses, 0 without a pointer."""
    return tl.zeros(at.shape, tl.float32) if row is None else tl.load(row + at, mask=live, other=0.0)


@triton.jit
def scale_of_weights(factor, numbers):
    """The factor from h to weights: gain, without dropout's, times `factor`, the f_i of queries."""
    return factor * (numbers[2] * numbers[4])


@triton.jit
def with_statistics(du, dstats, drows, w, share, j):
    """du of the output (or None) plus the contribution of statistics; gain·`share` is the gain of weights."""
    dw = weight_gradient(dstats, drows, w, j) * share
    return dw if du is None else du + dw


@triton.jit
def weight_gradient(dstats, drows, w, j):
    """dZ - dH (log p + H)/Z on the support + 2 w dΣw² + dmax at the first maximum, for the weights w of the keys j."""
    first, dtotal, dentropy, dsquares, dmaximum, total, entropy = drows
    dw = w * 0.0
    if dstats[1] is not None:
        dw += dtotal
    if dstats[3] is not None:
        dw += 2.0 * w * dsquares
    if dstats[2] is not None:
        known = total >= FAINTEST
        Z = tl.where(known, total, 1.0)
        p = w / Z
        dw -= tl.where(known & (p > 0.0), (logarithm(p) + entropy) * (dentropy / Z), 0.0)
    if dstats[4] is not None:
        dw += tl.where(j == first, dmaximum, 0.0)
    return dw
