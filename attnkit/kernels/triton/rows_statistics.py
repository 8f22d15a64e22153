"""Statistics of rows of weights that sum to 1, in one sweep, from the numbers that the kernels of `rows` save.

The weights are those of the gradients, p_ij = weigh((α-1)(s_ij - top_i) - τ_i - c_i)/Σ_i; tuples are those of `rows`
and `statistics`.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.rows import begin, bounds_of, load_stats, relative, scores, standing_products, weights
from attnkit.kernels.triton.statistics import add_weights, addresses, no_weights, store_statistics
from attnkit.kernels.triton.tiles import first_key, numbered


@triton.jit
def statistics_of_rows(
    q, k, outputs, stats, pairs, rows, limits, numbers, heads, groups,
    WEIGH: tl.constexpr, KIND: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The statistics `outputs` of ROWS queries of one head; what all weights of a row are divided by comes last."""
    stats, pairs, rows = stats[:], pairs[:], rows[:]
    MASKED: tl.constexpr = pairs[1] is not None or rows[1] is not None
    at, i0, q_tile, own, blocks = begin(q, rows, limits, heads, groups, d, D, ROWS, KEYS)
    queries, beside, columns = own[0], tl.arange(0, ROWS), tl.arange(0, KEYS)[None, :]
    top, tau, step, inverse = load_stats(stats, at, i0 + beside, queries)
    running, sequences = no_weights(KIND, ROWS), numbered(blocks, KEYS, MASKED)
    for EDGE in tl.static_range(MASKED, 2):
        bounds = bounds_of(at, i0, limits, own, rows, blocks, ROWS) if EDGE else None
        for n in tl.range(0, sequences[EDGE][1], num_stages=1 if EDGE and not MASKED else None):
            j0 = first_key(n, sequences[EDGE], KEYS)
            products, inside, _, _ = standing_products(
                q_tile, k, pairs, at, i0, bounds, j0, queries, EDGE, MASKED, d, D, ROWS, KEYS, PRECISION
            )
            s = scores(products, pairs[0], numbers, at, i0, beside[:, None], j0, columns, inside)
            x = relative(s, top[:, None], numbers)
            u = weights(x, tau[:, None], step[:, None], numbers, WEIGH)
            running = add_weights(running, u, inside if EDGE else None, j0, KIND, KEYS)
    i = i0 + beside
    store_statistics(outputs, running, inverse, addresses(i, at[0], at[1], heads, queries), i < queries, KIND)
