"""The kernels of `rows` and `rows_gradients` for callers that pass arrays separately, as in `flat`.

    KERNEL    the name of the kernel; STATS are the strides of top, τ, c and 1/Σ, which are rows of one matrix, SAVED
              the rows that they have in it, and the last of its rows is lse
    NUMBERS   (scale, gain, α - 1, power)

Gradients read the cotangents do and dlse, the numbers saved, and δ.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton import rows as kernels
from attnkit.kernels.triton import rows_gradients as gradients
from attnkit.kernels.triton.flat import column, matrix


@triton.jit
def row_of(pointer, n: tl.constexpr, STRIDES: tl.constexpr):
    """A row of every matrix as a view with rows only."""
    return pointer + n * STRIDES[2], STRIDES[0], STRIDES[1], STRIDES[3]


@triton.jit
def forward(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, o, saved,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STEPS: tl.constexpr, WEIGH: tl.constexpr, SLOPE: tl.constexpr, NEGATIVE: tl.constexpr,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o, and the numbers of rows; the third of softmax is lse."""
    q, k, v, o = matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2]), matrix(o, STRIDES[9])
    pairs = (
        None if STRIDES[3] is None else matrix(bias, STRIDES[3]),
        None if STRIDES[4] is None else matrix(mask, STRIDES[4]),
        None if STRIDES[5] is None else matrix(dropout_mask, STRIDES[5]),
        None if STRIDES[8] is None else seed,
        LAST_KEPT,
        None,
    )
    masks = (
        None if STRIDES[6] is None else (key_lengths, STRIDES[6][0], STRIDES[6][1]),
        None if STRIDES[7] is None else column(query_mask, STRIDES[7]),
        None,
    )
    limits = (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None, None, None, None)
    stats = (
        row_of(saved, 0, STRIDES[10]),
        row_of(saved, 2, STRIDES[10]) if SLOPE is not None else None,
        row_of(saved, 3, STRIDES[10]) if SLOPE is not None else None,
        row_of(saved, 1, STRIDES[10]),
    )
    lse = row_of(saved, 2, STRIDES[10]) if SLOPE is None else None
    if KERNEL == "forward_resident":
        kernels.forward_resident(
            q, k, v, o, stats, lse, pairs, masks, limits, NUMBERS, HEADS[0], HEADS[1], STEPS, WEIGH, SLOPE,
            d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "forward_online":
        kernels.forward_online(
            q, k, v, o, stats, lse, pairs, masks, limits, NUMBERS, HEADS[0], HEADS[1], STEPS, WEIGH, SLOPE, NEGATIVE,
            d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "forward_tiled":
        kernels.forward_tiled(
            q, k, v, o, stats, lse, pairs, masks, limits, NUMBERS, HEADS[0], HEADS[1], STEPS, WEIGH, SLOPE, NEGATIVE,
            d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip


@triton.jit
def run(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, do, dlse, saved, delta, result, more,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, WEIGH: tl.constexpr,
    TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel of gradients of that name, which writes `result` and, if it has two outputs, `more`."""
    q, k, v, do = matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2]), matrix(do, STRIDES[9])
    pairs = (
        None if STRIDES[3] is None else matrix(bias, STRIDES[3]),
        None if STRIDES[4] is None else matrix(mask, STRIDES[4]),
        None if STRIDES[5] is None else matrix(dropout_mask, STRIDES[5]),
        None if STRIDES[8] is None else seed,
        LAST_KEPT,
        None,
    )
    masks = (
        None if STRIDES[6] is None else (key_lengths, STRIDES[6][0], STRIDES[6][1]),
        None if STRIDES[7] is None else column(query_mask, STRIDES[7]),
        None,
    )
    limits = (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None, None, None, None)
    dstats = (None, None, None, None, None, None, None)
    dlse = None if STRIDES[10] is None else column(dlse, STRIDES[10])
    stats = (
        row_of(saved, 0, STRIDES[11]),
        row_of(saved, 2, STRIDES[11]) if NUMBERS[2] is not None else None,
        row_of(saved, 3, STRIDES[11]) if NUMBERS[2] is not None else None,
        row_of(saved, 1, STRIDES[11]),
    )
    result = matrix(result, STRIDES[13])
    if KERNEL == "backward_resident":
        gradients.backward_resident(
            q, k, v, do, dstats, result, stats, row_of(more, 0, STRIDES[14]), dlse, pairs, masks, limits, NUMBERS,
            HEADS[0], HEADS[1], WEIGH, TILT, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "backward_tiled":
        gradients.backward_tiled(
            q, k, v, do, dstats, result, stats, row_of(more, 0, STRIDES[14]), dlse, None, pairs, masks, limits, NUMBERS,
            HEADS[0], HEADS[1], WEIGH, TILT, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "backward_keys":
        gradients.backward_keys(
            q, k, v, do, dstats, result, matrix(more, STRIDES[14]), stats, row_of(delta, 0, STRIDES[12]), None, pairs,
            masks, limits, NUMBERS, STORED, HEADS[0], HEADS[1], WEIGH, TILT, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "backward_bias":
        gradients.backward_bias(
            q, k, v, do, dstats, result, stats, row_of(delta, 0, STRIDES[12]), pairs, masks, limits, NUMBERS, STORED,
            ITEMS, HEADS[0], HEADS[1], OWN[0], OWN[1], WEIGH, TILT, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip


@triton.jit
def one(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, do, dlse, saved, delta, result,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, WEIGH: tl.constexpr,
    TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias."""
    run(
        q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, do, dlse, saved, delta, result, None, KERNEL,
        STRIDES, LIMITS, NUMBERS, HEADS, LAST_KEPT, STORED, ITEMS, OWN, WEIGH, TILT, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def two(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, do, dlse, saved, delta, result, more,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, WEIGH: tl.constexpr,
    TILT: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and δ, or dk and dv."""
    run(
        q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, do, dlse, saved, delta, result, more, KERNEL,
        STRIDES, LIMITS, NUMBERS, HEADS, LAST_KEPT, STORED, ITEMS, OWN, WEIGH, TILT, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
