"""The kernels of point-wise attention for callers that pass arrays separately and everything else at compile time.

    KERNEL    the name of the kernel in `pointwise`; STORED, ITEMS and OWN (bias_items, bias_heads) are of gradients
    STRIDES   of each array in the order of the arguments, as (items, heads, rows, columns) or its first numbers; None
              for an absent array, in whose place any other array is passed
    LIMITS    (queries, keys, left, right), NUMBERS (scale, shift, gain, alpha) and HEADS (heads, groups) of
              `attnkit.kernels.triton.pointwise`; LAST_KEPT of dropout by counter

n^-alpha and log n are arrays if they differ between queries.
"""

from typing import Any

import triton
import triton.language as tl

from attnkit.kernels.triton import pointwise


def constant(value: Any) -> Any:
    """A constant of a kernel: what a tuple holds as constants of Triton, whose 3.6 takes no plain ones from it, nor
    returns a tuple with None from a function: tuples are built where they are used.
    """
    if isinstance(value, tuple):
        return tuple(constant(x) if isinstance(x, tuple) else tl.constexpr(x) for x in value)
    return value


@triton.jit
def matrix(pointer, STRIDES: tl.constexpr):
    """A view with rows and columns."""
    return pointer, STRIDES[0], STRIDES[1], STRIDES[2], STRIDES[3]


@triton.jit
def column(pointer, STRIDES: tl.constexpr):
    """A view with rows only."""
    return pointer, STRIDES[0], STRIDES[1], STRIDES[2]


@triton.jit
def run(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, factors, logs, key_norms, rest, whole, do, result,
    more, KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, H: tl.constexpr,
    DH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel of that name, which writes `result` and, if it has two outputs, `more`."""
    q, k, v = matrix(q, STRIDES[0]), matrix(k, STRIDES[1]), matrix(v, STRIDES[2])
    pairs = (
        None if STRIDES[3] is None else matrix(bias, STRIDES[3]),
        None if STRIDES[4] is None else matrix(mask, STRIDES[4]),
        None if STRIDES[5] is None else matrix(dropout_mask, STRIDES[5]),
        None if STRIDES[8] is None else seed,
        LAST_KEPT,
    )
    rows = (
        None if STRIDES[6] is None else (key_lengths, STRIDES[6][0], STRIDES[6][1]),
        None if STRIDES[7] is None else column(query_mask, STRIDES[7]),
        None if STRIDES[9] is None else column(factors, STRIDES[9]),
        None if STRIDES[10] is None else column(logs, STRIDES[10]),
        None if STRIDES[11] is None else column(key_norms, STRIDES[11]),
    )
    rest = None if STRIDES[12] is None else matrix(rest, STRIDES[12])
    whole = None if STRIDES[13] is None else matrix(whole, STRIDES[13])
    limits = (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3], None, None, None, None)
    numbers = (NUMBERS[0], NUMBERS[1], NUMBERS[2], NUMBERS[3], 1.0)
    dstats = (None, None, None, None, None, None, None)
    do = None if STRIDES[14] is None else matrix(do, STRIDES[14])
    result = matrix(result, STRIDES[15])
    if KERNEL == "forward":
        pointwise.forward(
            q, k, v, result, None, pairs, rows, limits, numbers, rest, HEADS[0], HEADS[1],
            H, False, None, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "backward_queries":
        pointwise.backward_queries(
            q, k, v, do, dstats, result, pairs, rows, limits, numbers, rest, whole, HEADS[0],
            HEADS[1], H, DH, False, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "backward_keys":
        pointwise.backward_keys(
            q, k, v, do, dstats, result, matrix(more, STRIDES[16]), None, None, pairs, rows, limits,
            numbers, rest, whole, STORED, HEADS[0], HEADS[1], H, DH, False, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if KERNEL == "backward_bias":
        pointwise.backward_bias(
            q, k, v, do, dstats, result, pairs, rows, limits, numbers, rest, STORED, ITEMS,
            HEADS[0], HEADS[1], OWN[0], OWN[1], H, DH, False, d, e, D, E, ROWS, KEYS, PRECISION,
        )  # fmt: skip


@triton.jit
def one(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, factors, logs, key_norms, rest, whole, do, result,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, H: tl.constexpr,
    DH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A kernel with one output: o, dq, or dbias with OWN = (items, heads)."""
    run(
        q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, factors, logs, key_norms, rest, whole, do,
        result, None, KERNEL, STRIDES, LIMITS, NUMBERS, HEADS, LAST_KEPT, STORED, ITEMS, OWN, H, DH, d, e, D, E, ROWS,
        KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def two(
    q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, factors, logs, key_norms, rest, whole, do, result,
    more, KERNEL: tl.constexpr, STRIDES: tl.constexpr, LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr,
    LAST_KEPT: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr, OWN: tl.constexpr, H: tl.constexpr,
    DH: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of all STORED keys; the first of HEADS are those of k."""
    run(
        q, k, v, bias, mask, dropout_mask, key_lengths, query_mask, seed, factors, logs, key_norms, rest, whole, do,
        result, more, KERNEL, STRIDES, LIMITS, NUMBERS, HEADS, LAST_KEPT, STORED, ITEMS, OWN, H, DH, d, e, D, E, ROWS,
        KEYS, PRECISION,
    )  # fmt: skip
