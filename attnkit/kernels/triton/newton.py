"""The Newton-Raphson iteration X ← 2X - XAX from X = factor·2/‖A‖₁²·A (Lu et al. 2021, Algorithm 2), and its gradients.

One program processes one matrix in float32, padded with zeros to (M, M), which the iteration preserves. With HELD the
program keeps A and X in registers through all steps. Otherwise, and in gradients, operands of products are read K
columns and rows at a time from memory that only this program writes: `iterates` and `scratch` are contiguous (matrices,
several, M, M), so nothing has to be masked. a, x, dx and da are views (items, heads, m, m); factors are (number, None)
or (None, view with one per matrix).

PRECISION is that of products. A single TF32 product is not enough: an error of X is multiplied by A, and so by the
inverse of the smallest eigenvalue that is already inverted.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.linear_tokens import product
from attnkit.kernels.triton.tiles import load_rows, store_rows


@triton.jit
def matrix_of(heads):
    """Number, item and head of the matrix of this program."""
    n = tl.program_id(0).to(tl.int64)
    return n, n // heads, n % heads


@triton.jit
def load_matrix(view, item, head, m: tl.constexpr, M: tl.constexpr):
    """(M, M) in float32, 0 beyond (m, m)."""
    rows = tl.arange(0, M)
    return load_rows(view, item, head, 0, rows, rows < m, m, M).to(tl.float32)


@triton.jit
def store_matrix(view, item, head, x, m: tl.constexpr, M: tl.constexpr):
    """The inverse of `load`, rounded to the dtype of the view."""
    rows = tl.arange(0, M)
    store_rows(view, item, head, 0, rows, rows < m, x, m, M)


@triton.jit
def part(at, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, TURNED: tl.constexpr):
    """Addresses of rows and columns of a contiguous matrix, or of its transpose."""
    rows, columns = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
    return at + (columns * M + rows if TURNED else rows * M + columns)


@triton.jit
def keep(at, x, M: tl.constexpr):
    """Write x to memory for the whole program."""
    tl.store(part(at, 0, 0, M, M, M, False), x)
    tl.debug_barrier()


@triton.jit
def add_product(
    total, x, y, TURN_X: tl.constexpr, TURN_Y: tl.constexpr, M: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    """total + x y of two matrices in memory, or of their transposes."""
    for k in range(0, M, K):
        left, right = tl.load(part(x, 0, k, M, K, M, TURN_X)), tl.load(part(y, k, 0, K, M, M, TURN_Y))
        total = product(left, right, total, tl.float32, PRECISION)
    return total


@triton.jit
def factor_of(factors, item, head):
    """The factor of one matrix."""
    factor, own = factors[0], factors[1]
    if own is not None:
        factor = tl.load(own[0] + item * own[1] + head * own[2]).to(tl.float32)
    return factor


@triton.jit
def column_sums(a):
    """Σ_i |a_ij| (M,), their maximum ‖A‖₁, NaN if any is NaN, and the same with 1 in place of 0."""
    sums = tl.sum(tl.abs(a), 0)
    norm = tl.max(sums, 0)
    norm = tl.where(tl.sum((sums != sums).to(tl.int32), 0) > 0, float("nan"), norm)
    return sums, norm, tl.where(norm == 0.0, 1.0, norm)


@triton.jit
def step(a, x, PRECISION: tl.constexpr):
    """2X - XAX of matrices in registers."""
    xa = product(x, a, None, tl.float32, PRECISION)
    return x * 2.0 - product(xa, x, None, tl.float32, PRECISION)


@triton.jit
def inverse(
    a, factors, x, iterates, scratch, steps, heads, m: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    KEEP: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X_T into those of x and `iterates` that are not None, with KEEP X_0 .. X_T into `iterates`.

    Without HELD, X is in `iterates`, XA and A in `scratch`.
    """
    n, item, head = matrix_of(heads)
    at, space = iterates, scratch
    if iterates is not None:
        at = iterates + n * ((steps + 1 if KEEP else 1) * M * M)
    A = load_matrix(a, item, head, m, M)
    _, _, safe = column_sums(A)
    X = A / safe * (factor_of(factors, item, head) * 2.0 / safe)
    if not HELD:
        space = scratch + n * (2 * M * M)
        keep(space + M * M, A, M)
    for _ in range(0, steps):
        if KEEP or not HELD:
            keep(at, X, M)
        if HELD:
            X = step(A, X, PRECISION)
        else:
            nothing = tl.zeros((M, M), tl.float32)
            keep(space, add_product(nothing, at, space + M * M, False, False, M, K, PRECISION), M)
            X = X * 2.0 - add_product(nothing, space, at, False, False, M, K, PRECISION)
            tl.debug_barrier()
        if KEEP:
            at += M * M
    if iterates is not None:
        keep(at, X, M)
    if x is not None:
        store_matrix(x, item, head, X, m, M)


@triton.jit
def implicit_gradient(
    iterates, scratch, dx, da, heads, m: tl.constexpr, M: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    """dA = -Xᵀ dX Xᵀ. `scratch` holds dX and Xᵀ dX."""
    n, item, head = matrix_of(heads)
    at, space = iterates + n * (M * M), scratch + n * (2 * M * M)
    nothing = tl.zeros((M, M), tl.float32)
    keep(space, load_matrix(dx, item, head, m, M), M)
    keep(space + M * M, add_product(nothing, at, space, True, False, M, K, PRECISION), M)
    dA = add_product(nothing, space + M * M, at, False, True, M, K, PRECISION)
    store_matrix(da, item, head, -dA, m, M)


@triton.jit
def start_gradient(A, dX, factor, M: tl.constexpr):
    """Gradients of A, to whose first largest column that of ‖A‖₁ goes, and of the factor, for that of X_0."""
    sums, norm, safe = column_sums(A)
    twice = 2.0 / (safe * safe)
    along = tl.sum(tl.sum(dX * A, 1), 0)
    dnorm = tl.where(norm == 0.0, 0.0, factor * twice * along * -2.0 / safe)
    first = tl.argmax(sums, 0) == tl.arange(0, M)
    sign = tl.where(A > 0.0, 1.0, tl.where(A < 0.0, -1.0, 0.0))
    return dX * (factor * twice) + tl.where(first[None, :], dnorm, 0.0) * sign, twice * along


@triton.jit
def unrolled_gradient(
    a, factors, iterates, scratch, dx, da, dfactors, steps, heads, m: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dA = -Σ_k X_kᵀ dX_k+1 X_kᵀ and that of X_0, with dX_k = 2 dX_k+1 - dX_k+1 (A X_k)ᵀ - (X_k A)ᵀ dX_k+1.

    `scratch` holds dX, Xᵀ dX, dX Xᵀ and A.
    """
    n, item, head = matrix_of(heads)
    at, space = iterates + (n * (steps + 1) + steps) * (M * M), scratch + n * (4 * M * M)
    left, right, whole = space + M * M, space + 2 * M * M, space + 3 * M * M
    keep(whole, load_matrix(a, item, head, m, M), M)
    dX, nothing = load_matrix(dx, item, head, m, M), tl.zeros((M, M), tl.float32)
    factor = factor_of(factors, item, head)  # after a loop Triton 3.6 does not know strides of 1
    dA = nothing
    for _ in range(0, steps):
        at -= M * M
        keep(space, dX, M)
        keep(left, add_product(nothing, at, space, True, False, M, K, PRECISION), M)
        keep(right, add_product(nothing, space, at, False, True, M, K, PRECISION), M)
        dA -= add_product(nothing, left, at, False, True, M, K, PRECISION)
        lost = add_product(nothing, right, whole, False, True, M, K, PRECISION)
        dX = dX * 2.0 - add_product(lost, whole, left, True, False, M, K, PRECISION)
        tl.debug_barrier()
    A = tl.load(part(whole, 0, 0, M, M, M, False))
    more, dfactor = start_gradient(A, dX, factor, M)
    store_matrix(da, item, head, dA + more, m, M)
    if dfactors is not None:
        tl.store(dfactors + n, dfactor)
