"""The kernels of `linear` for callers that pass arrays separately, as in `flat`.

KERNEL    the name of the kernel; its result is o, a gradient, the states of segments, or with do 1/den and δ; those of
          sweeps are dq, 1/den and δ, or dk and dv
STRIDES   of each array in the order of the arguments, None for an absent one
SEGMENTS  of the states, PARTS of δ
STATEFUL  whether there is an initial state
LIMITS, HEADS, SPAN (its first four numbers), BLOCKS and NUMBERS (scale, eps) are those of `linear`
"""

import triton
import triton.language as tl

from attnkit.kernels.triton import linear, linear_sweeps
from attnkit.kernels.triton.flat import column, matrix


@triton.jit
def run(
    q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result, more, last,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr, STATEFUL: tl.constexpr,
    LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, TWICE: tl.constexpr,
    NORMALIZE: tl.constexpr, FLOOR: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The kernel of that name, which writes `result` and, if it has more outputs, `more` and `last`."""
    q = None if STRIDES[0] is None else matrix(q, STRIDES[0])
    k, v = matrix(k, STRIDES[1]), matrix(v, STRIDES[2])
    do = None if STRIDES[3] is None else matrix(do, STRIDES[3])
    rows = (
        None if STRIDES[4] is None else column(inverses, STRIDES[4]),
        None if STRIDES[5] is None else column(deltas, STRIDES[5]),
        HEADS[0],
        PARTS,
    )
    before = None if STRIDES[6] is None else (states, SEGMENTS)
    masks = (
        None if STRIDES[7] is None else column(key_mask, STRIDES[7]),
        None if STRIDES[8] is None else (firsts, STRIDES[8][0], STRIDES[8][1]),
        None if STRIDES[9] is None else (stops, STRIDES[9][0], STRIDES[9][1]),
        None if STRIDES[10] is None else column(query_mask, STRIDES[10]),
        1 if STATEFUL else None,
        None,
    )
    limits = (LIMITS[0], LIMITS[1], LIMITS[2], LIMITS[3])
    heads = (HEADS[0], HEADS[1], HEADS[2])
    span = (SPAN[0], SPAN[1], SPAN[2], SPAN[3], None, None, None, None, None)
    scale = NUMBERS[0]
    if KERNEL == "key_sums":
        linear.key_sums(
            k, v, (result, SEGMENTS), masks, limits, heads, span, BLOCKS,
            PHI, CAUSAL, TWICE, d, e, D, BLOCK, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "query_sums":
        linear.query_sums(
            q, do, rows, (result, SEGMENTS), masks, limits, scale, heads, span, BLOCKS,
            PHI, CAUSAL, d, e, D, BLOCK, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "outputs":
        o = matrix(result, STRIDES[11]) if do is None else None
        ends = rows if do is None else (column(result, STRIDES[11]), column(more, STRIDES[12]), HEADS[0], PARTS)
        linear.outputs(
            q, k, v, o, do, ends, before, masks, limits, scale, NUMBERS[1], heads, span, BLOCKS,
            PHI, CAUSAL, NORMALIZE, FLOOR, d, e, D, BLOCK, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "gradient_queries":
        linear.gradient_queries(
            q, k, v, do, matrix(result, STRIDES[11]), rows, before, masks, limits, scale, heads, span, BLOCKS,
            PHI, SLOPE, CAUSAL, d, e, E, BLOCK, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "gradient_keys":
        linear.gradient_keys(
            q, k, v, do, matrix(result, STRIDES[11]), rows, before, masks, limits, scale, heads, span, BLOCKS,
            PHI, SLOPE, CAUSAL, d, e, E, BLOCK, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "gradient_values":
        linear.gradient_values(
            q, k, do, matrix(result, STRIDES[11]), rows, before, masks, limits, scale, heads, span, BLOCKS,
            PHI, CAUSAL, d, e, D, BLOCK, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "sweep_queries":
        ends = (None, None, 0, 0)
        if NORMALIZE:
            ends = (column(more, STRIDES[12]), column(last, STRIDES[13]), HEADS[0], PARTS)
        linear_sweeps.sweep_queries(
            q, k, v, do, matrix(result, STRIDES[11]), ends, before, masks, limits, scale, NUMBERS[1], heads, span,
            BLOCKS, PHI, SLOPE_OF, CAUSAL, NORMALIZE, FLOOR, d, e, D, E, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip
    if KERNEL == "sweep_keys":
        linear_sweeps.sweep_keys(
            q, k, v, do, matrix(result, STRIDES[11]), matrix(more, STRIDES[12]), rows, before, masks, limits, scale,
            heads, span, BLOCKS, PHI, SLOPE_OF, CAUSAL, d, e, D, E, CHUNK, OPERAND, PRECISION,
        )  # fmt: skip


@triton.jit
def one(
    q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr, STATEFUL: tl.constexpr,
    LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, TWICE: tl.constexpr,
    NORMALIZE: tl.constexpr, FLOOR: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A kernel with one output."""
    run(
        q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result, None, None,
        KERNEL, STRIDES, SEGMENTS, PARTS, STATEFUL, LIMITS, NUMBERS, HEADS, SPAN, BLOCKS, PHI, SLOPE, SLOPE_OF, CAUSAL,
        TWICE, NORMALIZE, FLOOR, d, e, D, E, BLOCK, CHUNK, OPERAND, PRECISION,
    )  # fmt: skip


@triton.jit
def two(
    q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result, more,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr, STATEFUL: tl.constexpr,
    LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, TWICE: tl.constexpr,
    NORMALIZE: tl.constexpr, FLOOR: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """1/den and δ, or dk and dv."""
    run(
        q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result, more, None,
        KERNEL, STRIDES, SEGMENTS, PARTS, STATEFUL, LIMITS, NUMBERS, HEADS, SPAN, BLOCKS, PHI, SLOPE, SLOPE_OF, CAUSAL,
        TWICE, NORMALIZE, FLOOR, d, e, D, E, BLOCK, CHUNK, OPERAND, PRECISION,
    )  # fmt: skip


@triton.jit
def three(
    q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result, more, last,
    KERNEL: tl.constexpr, STRIDES: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr, STATEFUL: tl.constexpr,
    LIMITS: tl.constexpr, NUMBERS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SLOPE_OF: tl.constexpr, CAUSAL: tl.constexpr, TWICE: tl.constexpr,
    NORMALIZE: tl.constexpr, FLOOR: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, 1/den and δ."""
    run(
        q, k, v, do, inverses, deltas, states, key_mask, firsts, stops, query_mask, result, more, last,
        KERNEL, STRIDES, SEGMENTS, PARTS, STATEFUL, LIMITS, NUMBERS, HEADS, SPAN, BLOCKS, PHI, SLOPE, SLOPE_OF, CAUSAL,
        TWICE, NORMALIZE, FLOOR, d, e, D, E, BLOCK, CHUNK, OPERAND, PRECISION,
    )  # fmt: skip


@triton.jit
def totals(
    states, initial_S, initial_z, sums, S, z,
    STRIDES: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kernel `running`, where `sums` have the memory of `states`; S and z are the whole sums."""
    initial = None if STRIDES is None else (matrix(initial_S, STRIDES[0]), column(initial_z, STRIDES[1]))
    final = None if S is None else (S, z)
    heads = (HEADS[0], HEADS[1], HEADS[2])
    span = (SPAN[0], SPAN[1], SPAN[2], SPAN[3], None, None, None, None, None)
    linear.running(
        (sums, SEGMENTS), initial, final, None, None, heads, span, BLOCKS, CAUSAL, REVERSE, d, e, BLOCK
    )  # fmt: skip


@triton.jit
def running(
    states, initial_S, initial_z, sums,
    STRIDES: tl.constexpr, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same without the whole sums."""
    totals(
        states, initial_S, initial_z, sums, None, None,
        STRIDES, SEGMENTS, HEADS, SPAN, BLOCKS, CAUSAL, REVERSE, d, e, BLOCK,
    )  # fmt: skip
