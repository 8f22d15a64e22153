"""Chunks of a recurrence whose state fades: products of pairs of tokens, and what passes from chunk to chunk.

A token l multiplies what came before it by exp(g_l), g_l <= 0, a number or one per feature. What lies between token j
and a later one i is exp(g_{j+1} + ... + g_i). Such a sum is never the difference of two running sums: after a sum of
thousands, float32 has no digits left for a gate of 0.999. Nor is a factor above 1 ever formed. So the second half of
every 2, 4, 8, ... tokens meets the first at the boundary between them: exp of the sum from there to i, times exp of the
sum from j to there.
"""

import math
from typing import NamedTuple

from attnkit._core.mask import positions
from attnkit._core.quadratic import sum_to
from attnkit._core.special import cumulative_sum
from attnkit._core.tokens import zeros
from attnkit._core.typing import Array, Factor, Namespace, OfLibrary


def chunk_length(size: int, n: int) -> int:
    """The smallest power of two that holds `size` or n tokens."""
    length: int = 2 ** math.ceil(math.log2(max(1, min(size, n))))
    return length


def cut(xp: Namespace, x: Array, size: int) -> Array:
    """x (..., n, f) as (..., chunks, size, f), with tokens of 0 after its own."""
    n = x.shape[-2]
    chunks = (n + size - 1) // size
    missing = chunks * size - n
    if missing:
        x = xp.concat([x, zeros(xp, x, (*x.shape[:-2], missing, x.shape[-1]))], axis=-2)
    return xp.reshape(x, (*x.shape[:-2], chunks, size, x.shape[-1]))


def joined(xp: Namespace, x: Array, n: int) -> Array:
    """The first n tokens of x (..., chunks, size, f), the inverse of `cut`."""
    return xp.reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))[..., :n, :]


def shifted(xp: Namespace, x: Array) -> Array:
    """x (..., n, f) one token later, 0 first."""
    return xp.concat([xp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def sums_before(xp: Namespace, x: Array) -> Array:
    """The sum of all tokens before each."""
    return shifted(xp, cumulative_sum(xp, x, -2))


def sums_from(xp: Namespace, x: Array) -> Array:
    """The sum of each token and all after it."""
    return xp.flip(cumulative_sum(xp, xp.flip(x, axis=-2), -2), axis=-2)


def sums_after(xp: Namespace, x: Array) -> Array:
    """The sum of all tokens after each."""
    return xp.flip(sums_before(xp, xp.flip(x, axis=-2)), axis=-2)


class Fades(NamedTuple):
    """The factors of a chunk, (..., size, w), or numbers if nothing fades."""

    within: Factor  # (..., size, w): from before the chunk to each token
    until: Factor  # (..., size, w): from each token to the end
    whole: OfLibrary  # (..., 1, w): of all tokens


def fade(x: Array, factor: Factor) -> Array:
    """x times a factor of `Fades`; a product with 1 would be a pass over x for nothing."""
    return x if isinstance(factor, float) else x * factor


def fades(xp: Namespace, g: Array | None) -> Fades:
    if g is None:
        return Fades(1.0, 1.0, 1.0)
    within = xp.exp(cumulative_sum(xp, g, -2))
    return Fades(within, xp.exp(sums_after(xp, g)), within[..., -1:, :])


# ---------------------------------------------------------------------------------------------- pairs of a chunk


def halves(xp: Namespace, x: Array, half: int) -> tuple[Array, Array]:
    """(..., n, half, f) twice: the first and the second half of every 2·half tokens."""
    x = xp.reshape(x, (*x.shape[:-2], x.shape[-2] // (2 * half), 2 * half, x.shape[-1]))
    return x[..., :half, :], x[..., half:, :]


def _whole(xp: Namespace, first: Array, second: Array, like: Array) -> Array:
    """The inverse of `halves`, for an array of as many tokens as `like`."""
    x = xp.concat([first, second], axis=-2)
    return xp.reshape(x, (*x.shape[:-3], like.shape[-2], x.shape[-1]))


def _past(xp: Namespace, x: Array) -> Array:
    """Whether token j is not after token i, (size, size)."""
    i = positions(xp, x, 0, x.shape[-2])
    return i[:, None] >= i


def _later(xp: Namespace, x: Array) -> Array:
    """Whether token i is after token j, (size, size)."""
    i = positions(xp, x, 0, x.shape[-2])
    return i[:, None] > i


def _sums_between(xp: Namespace, g: Array) -> Array:
    """Σ g_l over j < l <= i, (..., size, size), of a number per token."""
    wide = xp.broadcast_to(g, (*g.shape[:-1], g.shape[-2]))
    return cumulative_sum(xp, xp.where(_later(xp, g), wide, 0.0), -2)


def _in_a_row(xp: Namespace, x: Array) -> Array:
    """(..., chunks, size, f) as (..., chunks·size, f). Products in XLA end the process from 8 axes on, on CPUs, and a
    Hessian adds two."""
    return xp.reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))


def _lower(xp: Namespace, first: Array, low: Array, second: Array) -> Array:
    """[[first, 0], [low, second]]."""
    above = xp.concat([first, xp.zeros_like(first)], axis=-1)
    return xp.concat([above, xp.concat([low, second], axis=-1)], axis=-2)


def _by_twos(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Blocks (..., 2n, a, b) as those at even and at odd places."""
    x = xp.reshape(x, (*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:]))
    return x[..., 0, :, :], x[..., 1, :, :]


def products(xp: Namespace, x: Array, y: Array, g: Array | None) -> Array:
    """M_ij = Σ_c x_ic y_jc exp(Σ_{j<l<=i} g_lc), (..., size, size), 0 for j > i, of chunks of 2^m tokens."""
    if g is None:
        return xp.where(_past(xp, x), x @ y.mT, 0.0)
    if g.shape[-1] == 1:
        return xp.where(_past(xp, x), (x @ y.mT) * xp.exp(_sums_between(xp, g)), 0.0)
    size, (x, y, g) = x.shape[-2], (_in_a_row(xp, a) for a in (x, y, g))
    m, half = x[..., None, :] @ y[..., None], 1  # as a sum, of shared heads, it ends the process with jaxlib 0.10.2
    while half < size:
        (y_, _), (_, x_), (early, late) = (halves(xp, a, half) for a in (y, x, g))
        low = (x_ * xp.exp(cumulative_sum(xp, late, -2))) @ (y_ * xp.exp(sums_after(xp, early))).mT
        first, second = (xp.broadcast_to(a, low.shape) for a in _by_twos(xp, m))
        m, half = _lower(xp, first, low, second), 2 * half
    return m


class Pulled(NamedTuple):
    """Gradients of x, y and g; that of g is 0 if there is none."""

    x: Array  # (..., size, f)
    y: Array  # (..., size, f)
    g: OfLibrary  # (..., size, w)


def pull_products(xp: Namespace, x: Array, y: Array, g: Array | None, dm: Array, m: Array) -> Pulled:
    """The gradients of `products`, which gave m, for dm."""
    if g is None or g.shape[-1] == 1:
        ds = xp.where(_past(xp, x), dm, 0.0)
        if g is None:
            return Pulled(ds @ y, ds.mT @ x, 0.0)
        through = sums_from(xp, ds * m)  # of the sums between
        dg = xp.sum(xp.where(_later(xp, x), through, 0.0), axis=-1, keepdims=True)
        ds = ds * xp.exp(_sums_between(xp, g))
        return Pulled(ds @ y, ds.mT @ x, dg)
    own = xp.sum(xp.where(_past(xp, x) & _past(xp, x).mT, dm, 0.0), axis=-1, keepdims=True)
    shape, half, blocks = (*dm.shape[:-1], x.shape[-1]), x.shape[-2] // 2, dm
    x, y, g, own = (_in_a_row(xp, a) for a in (x, y, g, own))
    dx, dy = own * y, own * x
    dg = xp.zeros_like(dx)
    while half:
        (y_, _), (_, x_), (early, late) = (halves(xp, a, half) for a in (y, x, g))
        late, early = xp.exp(cumulative_sum(xp, late, -2)), xp.exp(sums_after(xp, early))
        low, blocks = _quartered(xp, blocks)
        of_x, of_y = (low @ (y_ * early)) * late, (low.mT @ (x_ * late)) * early
        dx = dx + _whole(xp, xp.zeros_like(of_x), of_x, x)
        dy = dy + _whole(xp, of_y, xp.zeros_like(of_y), x)
        dg = dg + _whole(xp, sums_before(xp, of_y * y_), sums_from(xp, of_x * x_), x)
        half //= 2
    return Pulled(*(xp.reshape(a, shape) for a in (dx, dy, dg)))


def _quartered(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Of blocks (..., n, 2h, 2h) the lower left quarters (..., n, h, h), and those on the diagonal (..., 2n, h, h)."""
    half = x.shape[-1] // 2
    both = xp.stack([x[..., :half, :half], x[..., half:, half:]], axis=-3)
    return x[..., half:, :half], xp.reshape(both, (*x.shape[:-3], x.shape[-3] * 2, half, half))


def inverse(xp: Namespace, a: Array) -> Array:
    """(I + a)⁻¹, a (..., size, size) what is below its diagonal, size 2^m: of blocks, from the inverses of halves."""
    lows, blocks = [], a
    while blocks.shape[-1] > 1:
        low, blocks = _quartered(xp, blocks)
        lows.append(low)
    x = xp.ones_like(blocks)
    for low in reversed(lows):
        first, second = _by_twos(xp, x)
        x = _lower(xp, first, -(second @ low @ first), second)
    return x


# ---------------------------------------------------------------------------------------------- chunk after chunk


def running(xp: Namespace, first: Array, whole: Array, added: Array) -> Array:
    """S_0 = first (..., d, e), S_{n+1} = whole_n ⊙ S_n + added_n: (..., chunks + 1, d, e), whole (..., chunks, d, 1).

    By doubling: a sum over 2, 4, 8, ... chunks at a time, each faded by those after it.
    """
    states = xp.concat([first[..., None, :, :], added], axis=-3)
    keep = xp.concat([xp.ones_like(whole[..., :1, :, :]), whole], axis=-3)
    step, n = 1, states.shape[-3]
    while step < n:
        earlier = states[..., : n - step, :, :] * keep[..., step:, :, :]
        joint = keep[..., step:, :, :] * keep[..., : n - step, :, :]
        keep = xp.concat([keep[..., :step, :, :], joint], axis=-3)
        states = xp.concat([states[..., :step, :, :], states[..., step:, :, :] + earlier], axis=-3)
        step *= 2
    return states


def running_back(xp: Namespace, last: Array, whole: Array, added: Array) -> Array:
    """R_N = last, R_n = whole_n ⊙ R_{n+1} + added_n, the transpose of `running`."""
    turned = xp.flip(whole, axis=-3)
    return xp.flip(running(xp, last, turned, xp.flip(added, axis=-3)), axis=-3)


# ---------------------------------------------------------------------------------------------- sums that fade


def _states(xp: Namespace, y: Array, c: Array, f: Fades, first: Array) -> Array:
    """The sums before each chunk and after the last, (..., chunks + 1, d, e)."""
    added = (y * f.until).mT @ c
    return running(xp, first, f.whole.mT, xp.broadcast_to(added, (*first.shape[:-2], *added.shape[-3:])))


def fading_sums(xp: Namespace, x: Array, y: Array, c: Array, g: Array, first: Array) -> tuple[Array, Array]:
    """out_i = x_i·S_i, S_i = diag(exp(g_i)) S_{i-1} + y_i c_iᵀ, and the last S, of chunks (..., chunks, size, ·).

    g has a number per token or one per feature; S_0 = first (..., d, e) has the leading axes of y, c and g.
    """
    f = fades(xp, g)
    states = _states(xp, y, c, f, first)
    out = products(xp, x, y, g) @ c + (x * f.within) @ states[..., :-1, :, :]
    return out, states[..., -1, :, :]


class FadingGradients(NamedTuple):
    x: Array  # (..., chunks, size, d)
    y: Array  # (..., chunks, size, d)
    c: Array  # (..., chunks, size, e)
    g: Array  # (..., chunks, size, w)
    first: Array  # (..., d, e)


def pull_fading_sums(
    xp: Namespace, x: Array, y: Array, c: Array, g: Array, first: Array, d: Array, dlast: Array
) -> FadingGradients:
    """The transposes of `fading_sums`. Gates are in sums of each chunk, so theirs are sums too, not differences."""

    def of_gates(through: Array) -> Array:
        return through if g.shape[-1] > 1 else xp.sum(through, axis=-1, keepdims=True)

    f = fades(xp, g)
    states, pairs = _states(xp, y, c, f, first), products(xp, x, y, g)
    pulled = pull_products(xp, x, y, g, d @ c.mT, pairs)
    before = states[..., :-1, :, :]
    lead = tuple(before.shape[:-2])

    through_x = (d @ before.mT) * f.within
    drawn = sum_to(xp, (x * f.within).mT @ d, (*lead, *before.shape[-2:]))
    dstates = running_back(xp, dlast, f.whole.mT, drawn)
    after = dstates[..., 1:, :, :]
    through_y = (c @ after.mT) * f.until
    of_whole = of_gates(xp.sum(after * before, axis=-1)[..., None, :]) * f.whole

    of_sums = sum_to(xp, of_gates(x * through_x), (*lead, *g.shape[-2:]))
    dg = sums_from(xp, of_sums) + sums_before(xp, of_gates(y * through_y)) + of_whole
    return FadingGradients(
        x=pulled.x + through_x,
        y=sum_to(xp, pulled.y, tuple(through_y.shape)) + through_y,
        c=sum_to(xp, pairs.mT @ d, (*lead, *c.shape[-2:])) + (y * f.until) @ after,
        g=sum_to(xp, pulled.g, tuple(dg.shape)) + dg,
        first=dstates[..., 0, :, :],
    )
