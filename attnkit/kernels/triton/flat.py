"""The kernels of point-wise attention for callers that pass arrays separately and everything else at compile time.

    STRIDES   of each array in the order of the arguments, as (items, heads, rows, columns) or its first numbers; None
              for an absent array, in whose place any other array is passed
    LIMITS    (queries, keys, left, right), NUMBERS (scale, shift, gain, alpha, keep) and HEADS (heads, groups) of
              `attnkit.kernels.triton.pointwise`; LAST_KEPT of dropout by counter

n^-alpha and log n are arrays if they differ between queries.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton import pointwise


@triton.jit
def matrix(pointer, STRIDES: tl.constexpr):
    """A view with rows and columns."""
    view = None
    if STRIDES is not None:
        view = (pointer, STRIDES[0], STRIDES[1], STRIDES[2], STRIDES[3])
    return view


@triton.jit
def column(pointer, STRIDES: tl.constexpr):
    """A view with rows only."""
    view = None
    if STRIDES is not None:
        view = (pointer, STRIDES[0], STRIDES[1], STRIDES[2])
    return view


@triton.jit
def number(pointer, STRIDES: tl.constexpr):
    """A view with neither."""
    view = None
    if STRIDES is not None:
        view = (pointer, STRIDES[0], STRIDES[1])
    return view


@triton.jit
def optional(pointer, STRIDES: tl.constexpr):
    """The pointer itself, if there is an array."""
    result = None
    if STRIDES is not None:
        result = pointer
    return result


@triton.jit
def pairs_of(bias, mask, dropout_mask, seed, STRIDES: tl.constexpr, LAST_KEPT: tl.constexpr):
    """pairs of `attnkit.kernels.triton.pointwise`."""
    of_bias, of_mask = matrix(bias, STRIDES[3]), matrix(mask, STRIDES[4])
    return of_bias, of_mask, matrix(dropout_mask, STRIDES[5]), optional(seed, STRIDES[10]), LAST_KEPT


@triton.jit
def rows_of(key_lengths, query_mask, factors, logs, STRIDES: tl.constexpr):
    """rows of `attnkit.kernels.triton.pointwise`."""
    lengths, masked = number(key_lengths, STRIDES[6]), column(query_mask, STRIDES[7])
    return lengths, masked, column(factors, STRIDES[8]), column(logs, STRIDES[9]), None


@triton.jit
def forward(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, factors, logs, seed, o,
    STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, LAST_KEPT: tl.constexpr,
    H: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o."""
    pairs = pairs_of(bias, mask, dropout_mask, seed, STRIDES, LAST_KEPT)
    rows = rows_of(key_lengths, query_mask, factors, logs, STRIDES)
    pointwise.forward(
        matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2]), matrix(o, STRIDES[11]), None, pairs, rows,
        (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None), (NUMBERS[0], NUMBERS[1], NUMBERS[2], NUMBERS[3], None),
        None, HEADS[0], HEADS[1], H, False, False, False, False, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def backward_queries(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, factors, logs, seed, do, dq,
    STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, LAST_KEPT: tl.constexpr,
    H: tl.constexpr, DH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq."""
    pairs = pairs_of(bias, mask, dropout_mask, seed, STRIDES, LAST_KEPT)
    rows = rows_of(key_lengths, query_mask, factors, logs, STRIDES)
    pointwise.backward_queries(
        matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2]), matrix(do, STRIDES[11]), None,
        matrix(dq, STRIDES[12]), pairs, rows, (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None),
        (NUMBERS[0], NUMBERS[1], NUMBERS[2], NUMBERS[3], None), None, HEADS[0], HEADS[1], H, DH, False, d, e, D, E,
        ROWS, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def backward_keys(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, factors, logs, seed, do, dk, dv,
    STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, LAST_KEPT: tl.constexpr,
    STORED: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of all STORED keys; the first of HEADS are those of k."""
    pairs = pairs_of(bias, mask, dropout_mask, seed, STRIDES, LAST_KEPT)
    rows = rows_of(key_lengths, query_mask, factors, logs, STRIDES)
    pointwise.backward_keys(
        matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2]), matrix(do, STRIDES[11]), None,
        matrix(dk, STRIDES[12]), matrix(dv, STRIDES[13]), None, pairs, rows,
        (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None), (NUMBERS[0], NUMBERS[1], NUMBERS[2], NUMBERS[3], None),
        None, STORED, HEADS[0], HEADS[1], H, DH, False, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def backward_bias(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, factors, logs, seed, do, dbias,
    STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, LAST_KEPT: tl.constexpr,
    STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, d: tl.constexpr,
    e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias, with OWN = (items, heads)."""
    pairs = pairs_of(bias, mask, dropout_mask, seed, STRIDES, LAST_KEPT)
    rows = rows_of(key_lengths, query_mask, factors, logs, STRIDES)
    pointwise.backward_bias(
        matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2]), matrix(do, STRIDES[11]), None,
        matrix(dbias, STRIDES[12]), pairs, rows, (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None),
        (NUMBERS[0], NUMBERS[1], NUMBERS[2], NUMBERS[3], None), None, STORED, ITEMS, HEADS[0], HEADS[1], OWN[0], OWN[1],
        H, DH, False, d, e, D, E, ROWS, KEYS, PRECISION,
    )  # fmt: skip
