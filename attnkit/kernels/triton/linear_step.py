"""One more token of linear attention: S' = S + φ(k) vᵀ, z' = z + φ(k), o = scale·φ(q)ᵀS'/(scale·φ(q)·z' + eps).

A decay multiplies S and z first: by `left`, a number, and exp of `log_decay`, a view over items and heads of k.

A program has BLOCK columns of the state of one head of k, and all query heads of its group: a state is read and written
once. Everything is computed in float32. `state` is None where nothing has been seen yet.
"""

import triton
import triton.language as tl

from attnkit.kernels.triton.activations import exp
from attnkit.kernels.triton.tiles import place


@triton.jit
def vector(view, item, head, at, width):
    """The features `at` of one token in float32, 0 beyond `width`."""
    start = view[0] + item * view[1] + head * view[2]
    return tl.load(start + at * view[3], mask=at < width, other=0.0).to(tl.float32)


@triton.jit
def matrix(view, item, head, rows, columns):
    """The addresses of a tile of a state."""
    start = view[0] + item * view[1] + head * view[2]
    return start + rows[:, None] * view[3] + columns[None, :] * view[4]


@triton.jit
def step(
    q, k, v, S, z, log_decay, left, o, next_S, next_z, scale, eps, heads, groups,
    F: tl.constexpr, NORMALIZE: tl.constexpr, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """o of a group of query heads, and the next state; `heads` are those of k."""
    block, head, item = place(tl.cdiv(e, BLOCK), heads)
    rows, columns = tl.arange(0, D), block * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < d)[:, None] & (columns < e)[None, :]
    y = tl.where(rows < d, F(vector(k, item, head, rows, d)), 0.0)
    state = y[:, None] * vector(v, item, head, columns, e)[None, :]
    if S is not None:
        if log_decay is not None:
            g = tl.load(log_decay[0] + item * log_decay[1] + head * log_decay[2])
            left *= exp(g.to(tl.float32))
        state += tl.load(matrix(S, item, head, rows, columns), mask=inside, other=0.0).to(tl.float32) * left
        y += vector(z, item, head, rows, d) * left
    tl.store(matrix(next_S, item, head, rows, columns), state, mask=inside)
    at = next_z[0] + item * next_z[1] + head * next_z[2] + rows * next_z[3]
    tl.store(at, y, mask=rows < tl.where(block == 0, d, 0))
    for n in range(0, groups):
        own = head * groups + n
        x = tl.where(rows < d, F(vector(q, item, own, rows, d)), 0.0)
        total = tl.sum(x[:, None] * state, 0) * scale
        if NORMALIZE:
            den = tl.sum(x * y, 0) * scale + eps
            total = tl.where(den == 0.0, 0.0, total / tl.where(den == 0.0, 1.0, den))
        start = o[0] + item * o[1] + own * o[2]
        tl.store(start + columns * o[3], total.to(o[0].dtype.element_ty), mask=columns < e)
