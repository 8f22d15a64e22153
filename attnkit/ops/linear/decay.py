"""Decay of linear attention: token l multiplies what came before it by exp(g_l), g_l <= 0, a number.

What is left of key j for query i is exp(g_{j+1} + ... + g_i). `chunks` sums that up; here are its argument, the gates g
(..., S, 1) made of it, and masks of pairs. Queries are the last tokens.
"""

from attnkit._core import check
from attnkit._core.mask import Rows, positions
from attnkit._core.quadratic import cast
from attnkit._core.tokens import chosen, split_heads, zeros
from attnkit._core.typing import Array, Namespace
from attnkit.ops.linear.chunks import (
    chunk_length,
    cut,
    fading_sums,
    joined,
    pull_fading_sums,
    sums_after,
    sums_before,
)
from attnkit.ops.linear.states import gathered

CHUNK = 64
"""Tokens whose gates are summed up before those of a sequence."""


# ---------------------------------------------------------------------------------------------- the argument


def check_decay(c: check.Context, name: str, x: Array, leading: tuple[int, ...], tokens: int | None) -> None:
    """A number at most 0, or an array: a number, one for each head of k, or over `leading` and the tokens. Of a step,
    whose tokens are None, any array over `leading`."""
    if not check.is_learned(x):
        if check.number(c.op, name, x) > 0:
            raise ValueError(f"{c.op}: {name} must be at most 0, the logarithm of what is left; got {x!r}")
        return
    check.same_home(c.op, c.first_name, c.first, name, x)
    if check.dtype_name(x) not in check.FLOATS:
        check.wrong_dtype(c.op, name, x, "a real float dtype")
    shape, heads = tuple(x.shape), leading[-1:]
    whole = leading if tokens is None else (*leading, tokens)
    if shape == () or (tokens is not None and shape == heads):
        return
    per_head = x.ndim == 1 and tokens is not None and heads
    if per_head or not check.fits(shape, whole) or (tokens is not None and shape[-1] != tokens):
        of_heads = f"() or {heads}, a number for each head of k, or " if heads and tokens is not None else ""
        text = "a number for each token of k" if tokens is not None else "that of k_t without its features"
        check.wrong_shape(c.op, name, x, f"{of_heads}a shape that broadcasts to {whole}, {text}")


def _beside_tokens(x: Array, heads: bool) -> Array:
    """An argument that is an array as it broadcasts to (..., S, 1); `heads`: whether the call has any."""
    return x[..., None, None] if x.ndim == 0 or (x.ndim == 1 and heads) else x[..., None]


def gates(xp: Namespace, x: float | Array, like: Array, heads: bool, valid: Array | None, shared: int | None) -> Array:
    """g (..., S, 1) with split heads in the dtype of `like` (..., S, ·), 0 at hidden tokens."""
    shape = (like.shape[-2], 1)
    if not check.is_learned(x):
        return chosen(xp, valid, zeros(xp, like, shape) + float(x))
    g = split_heads(xp, _beside_tokens(cast(xp, x, like.dtype), heads), shared)
    return chosen(xp, valid, xp.broadcast_to(g, (*g.shape[:-2], *shape)))


def gradient(
    xp: Namespace, terms: list[Array | None], like: Array, heads: bool, valid: Array | None, shared: int | None
) -> Array:
    """The gradient of an argument `like` from terms (..., S, 1) of that of the gates, in the compute dtype."""
    terms = [None if g is None else chosen(xp, valid, g) for g in terms]
    dtype = next((g.dtype for g in terms if g is not None), like.dtype)
    return xp.reshape(gathered(xp, terms, _beside_tokens(cast(xp, like, dtype), heads), shared), tuple(like.shape))


# ---------------------------------------------------------------------------------------------- sums


def _last(xp: Namespace, x: Array, n: int) -> Array:
    """The last n tokens of x (..., tokens, f), with tokens of 0 before them if it has fewer."""
    missing = n - x.shape[-2]
    if missing <= 0:
        return x[..., -missing:, :]
    return xp.concat([zeros(xp, x, (*x.shape[:-2], missing, x.shape[-1])), x], axis=-2)


def _first(xp: Namespace, y: Array, c: Array, g: Array, state: Array | None) -> Array:
    """The sums before the first key, with the leading axes of those after it."""
    known = [y, c, g] if state is None else [y, c, g, state]
    leading = check.broadcast("attention", "leading axes", *(tuple(a.shape[:-2]) for a in known))
    if state is None:
        return zeros(xp, y, (*leading, y.shape[-1], c.shape[-1]))
    return xp.broadcast_to(state, (*leading, *state.shape[-2:]))


def causal_sums(xp: Namespace, x: Array, y: Array, c: Array, g: Array, state: Array | None, size: int) -> Array:
    """out_i = x_i·S_i for queries x (..., L, f), which are the last tokens, S_i the fading sums of y cᵀ (..., S, ·)."""
    queries, keys = x.shape[-2], y.shape[-2]
    length = chunk_length(size, keys)
    first = _first(xp, y, c, g, state)
    x, y, c, g = (cut(xp, a, length) for a in (_last(xp, x, keys), y, c, g))
    out, _ = fading_sums(xp, x, y, c, g, first)
    return _last(xp, joined(xp, out, keys), queries)


def pull_causal_sums(
    xp: Namespace, x: Array, y: Array, c: Array, g: Array, state: Array | None, size: int, d: Array
) -> tuple[Array, ...]:
    """Gradients of x, y, c, the state and g, for d (..., L, ·)."""
    queries, keys = x.shape[-2], y.shape[-2]
    length, first = chunk_length(size, keys), _first(xp, y, c, g, state)
    x, y, c, g, d = (cut(xp, a, length) for a in (_last(xp, x, keys), y, c, g, _last(xp, d, keys)))
    grads = pull_fading_sums(xp, x, y, c, g, first, d, xp.zeros_like(first))
    dx, dy, dc, dg = (joined(xp, a, keys) for a in grads[:4])
    return _last(xp, dx, queries), dy, dc, grads.first, dg


def until_end(xp: Namespace, g: Array) -> tuple[Array, Array]:
    """What is left at the end of each token (..., S, 1), and of what came before all (..., 1, 1).

    Gates are added up in chunks, then chunks: rounding errors of one running sum would grow with all tokens.
    """
    n = g.shape[-2]
    g = cut(xp, g, chunk_length(CHUNK, n))
    whole = xp.sum(g, axis=-2)
    left = sums_after(xp, g) + sums_after(xp, whole)[..., None]
    return xp.exp(joined(xp, left, n)), xp.exp(xp.sum(whole, axis=-2, keepdims=True))


def pull_until_end(xp: Namespace, through: Array, of_first: Array | None) -> Array:
    """The gradient of g for those of the logarithms of `until_end`."""
    dg = sums_before(xp, through)
    return dg if of_first is None else dg + of_first


# ---------------------------------------------------------------------------------------------- pairs


def tokens_so_far(xp: Namespace, x: Array, rows: Rows, tokens: int, valid: Array | None = None) -> Array:
    """Whether a token has come when a query of these rows sees, (L, S), and of (..., S) is valid: (..., L, S)."""
    last = positions(xp, x, rows.start, rows.stop) + (tokens - rows.total)
    come = positions(xp, x, 0, tokens) <= last[:, None]
    return come if valid is None else come & valid[..., None, :]


def of_pairs(xp: Namespace, g: Array, come: Array) -> tuple[Array, Array]:
    """What is left for each query of each key (..., L, S), and of what came before all (..., L, 1); `come` (..., L, S)
    are the tokens of `tokens_so_far`."""
    wide = xp.where(come.mT, g, 0.0)
    return xp.exp(sums_after(xp, wide).mT), xp.exp(xp.sum(wide, axis=-2, keepdims=True).mT)


def pull_pairs(xp: Namespace, come: Array, through: Array, of_rows: Array | None = None) -> Array:
    """The gradient of g for those of the logarithms of `of_pairs`, (..., L, S) and (..., L, 1)."""
    summed = sums_before(xp, through.mT)
    dg = xp.sum(xp.where(come.mT, summed, 0.0), axis=-1, keepdims=True)
    if of_rows is None:
        return dg
    return dg + xp.sum(xp.where(come.mT, of_rows.mT, 0.0), axis=-1, keepdims=True)
