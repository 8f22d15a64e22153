"""Sums of linear attention over whole sequences: out_i = Σ_j x_i·y_j c_j over the keys j that query i may see.

The pairs (i, j) are never formed: y_jᵀ c_j is summed over keys once (`total`), or chunk by chunk under causality
(`scan`), so memory is O(tokens). A level per token, non-decreasing along the sequence, lets old sums fade: pair (i, j)
is multiplied by exp(level_j - level_i), which lies in [0, 1]. Stabilised exponentials need this: nothing overflows, and
results are bitwise causal.
"""

import math
from typing import NamedTuple, overload

from attnkit._core.check import broadcast
from attnkit._core.mask import positions
from attnkit._core.special import cumulative_maximum, cumulative_sum, unstack
from attnkit._core.tokens import zeros
from attnkit._core.typing import Array, Factor, Namespace

_ELEMENTS = 2**22  # of the largest array that a block of a scan may make
_SUMMED = 512  # products added in one matrix product: longer sums are added pairwise


def leading(*arrays: Array) -> tuple[int, ...]:
    """The leading axes of several (..., n, f) arrays."""
    return broadcast("attention", "leading axes", *(tuple(x.shape[:-2]) for x in arrays))


def _symbolic(*sizes: int) -> bool:
    """Whether a size is symbolic: torch.export traces one program for all sizes, so nothing may depend on its value."""
    return not all(isinstance(size, int) for size in sizes)


def _padded(xp: Namespace, x: Array, n: int, repeat: bool = False) -> Array:
    """x with n tokens: 0 after its own, or its last one again."""
    missing = n - x.shape[-2]
    if not _symbolic(missing) and missing == 0:
        return x
    shape = (*x.shape[:-2], missing, x.shape[-1])
    return xp.concat([x, xp.broadcast_to(x[..., -1:, :], shape) if repeat else zeros(xp, x, shape)], axis=-2)


def total(xp: Namespace, y: Array, c: Array) -> Array:
    """Σ_j y_j c_jᵀ (..., f, g). Rounding errors grow with the logarithm of the number of tokens."""
    n = y.shape[-2]
    if _symbolic(n) or n <= _SUMMED:
        return xp.matrix_transpose(y) @ c
    parts = 2 ** math.ceil(math.log2(n / _SUMMED))
    size = (n + parts - 1) // parts
    y, c = (xp.reshape(_padded(xp, x, parts * size), (*x.shape[:-2], parts, size, x.shape[-1])) for x in (y, c))
    sums = xp.matrix_transpose(y) @ c
    while sums.shape[-3] > 1:
        half = (*sums.shape[:-3], sums.shape[-3] // 2, 2, *sums.shape[-2:])
        sums = xp.sum(xp.reshape(sums, half), axis=-3)
    return sums[..., 0, :, :]


# ---------------------------------------------------------------------------------------------- causal sums


def _halved(xp: Namespace, x: Array, half: int) -> tuple[Array, Array]:
    """(..., n, half, f) twice: the first and the second half of every 2·half tokens."""
    x = xp.reshape(x, (*x.shape[:-2], x.shape[-2] // (2 * half), 2 * half, x.shape[-1]))
    return x[..., :half, :], x[..., half:, :]


class _Faded(NamedTuple):
    """How sums fade with the level (..., n, w): all alike (w = 1), or each feature of x and y (w = f), or, with
    `outputs`, each feature of c (w = g)."""

    outputs: bool = False

    def pairs(self, xp: Namespace, x: Array, y: Array, c: Array, level: Array | None, past: Array) -> Array:
        """Σ_j over the pairs of a chunk."""
        if level is None:
            return xp.where(past, x @ xp.matrix_transpose(y), 0.0) @ c
        if level.shape[-1] == 1:
            fade = xp.exp(xp.where(past, xp.matrix_transpose(level) - level, 0.0))
            return xp.where(past, (x @ xp.matrix_transpose(y)) * fade, 0.0) @ c
        return self.halves(xp, x, y, c, level)

    def halves(self, xp: Namespace, x: Array, y: Array, c: Array, level: Array) -> Array:
        """The same with a level for each feature, in chunks of 2^m tokens: every token with itself, then the second
        half of every 2, 4, ... tokens with the first, whose last level parts a fade into two factors up to 1.

        Own products are matrix products too: sums over shared heads end the process on CPUs with jaxlib 0.10.2.
        """
        out, half = ((x[..., None, :] @ y[..., None]) @ c[..., None, :])[..., 0, :], 1
        while half < x.shape[-2]:
            (y_, _), (c_, _), (level_, later) = (_halved(xp, a, half) for a in (y, c, level))
            end = level_[..., -1:, :]
            late, early = xp.exp(end - later), xp.exp(level_ - end)
            x_ = _halved(xp, x, half)[1]
            if self.outputs:
                term = ((x_ @ xp.matrix_transpose(y_)) @ (c_ * early)) * late
            else:
                term = ((x_ * late) @ xp.matrix_transpose(y_ * early)) @ c_
            first, second = _halved(xp, out, half)
            second = second + term
            joint = xp.concat([xp.broadcast_to(first, second.shape), second], axis=-2)
            out = xp.reshape(joint, (*joint.shape[:-3], x.shape[-2], joint.shape[-1]))
            half *= 2
        return out

    def added(self, xp: Namespace, y: Array, c: Array, level: Array | None, end: Array | None) -> Array:
        """The contribution of a chunk to later sums."""
        if level is None:
            return xp.matrix_transpose(y) @ c
        fade = xp.exp(level - end)
        return xp.matrix_transpose(y) @ (c * fade) if self.outputs else xp.matrix_transpose(y * fade) @ c

    def drawn(self, xp: Namespace, x: Array, state: Array, level: Array | None, start: Array | None) -> Array:
        """The outputs of a chunk from the sums before it."""
        if level is None:
            return x @ state
        fade = xp.exp(start - level)
        return (x @ state) * fade if self.outputs else (x * fade) @ state

    def moved(self, xp: Namespace, state: Array, old: Array | None, new: Array | None) -> Array:
        """Sums at level `old` as sums at level `new`, both (..., 1, w)."""
        if old is None:
            return state
        fade = xp.exp(old - new)
        return state * (fade if self.outputs else xp.matrix_transpose(fade))


ALIKE = _Faded()
BY_OUTPUT = _Faded(outputs=True)


def _running(xp: Namespace, faded: _Faded, states: Array, levels: Array | None) -> Array:
    """states[n] + all before it, faded: (..., n, f, g) with levels (..., n, 1, w). Doubling: errors grow with log n."""
    n, step = states.shape[-3], 1
    if _symbolic(n):
        return _running_sums(xp, faded, states, levels)
    while step < n:
        earlier = faded.moved(
            xp,
            states[..., : n - step, :, :],
            None if levels is None else levels[..., : n - step, :, :],
            None if levels is None else levels[..., step:, :, :],
        )
        states = xp.concat([states[..., :step, :, :], states[..., step:, :, :] + earlier], axis=-3)
        step *= 2
    return states


def _running_sums(xp: Namespace, faded: _Faded, states: Array, levels: Array | None) -> Array:
    """The same for any n, without a loop: the states of n chunks are combined pairwise."""
    if levels is None:
        return cumulative_sum(xp, states, -3)
    i = positions(xp, states, 0, states.shape[-3])
    level = xp.matrix_transpose(levels[..., 0, :])  # (..., w, n)
    past = i[:, None] >= i
    fade = xp.where(past, xp.exp(xp.where(past, level[..., None, :] - level[..., :, None], 0.0)), 0.0)
    lead = tuple(range(states.ndim - 3))
    n, f, g = (states.ndim - axis for axis in (3, 2, 1))
    there, back = ((g, n, f), (n + 1, n + 2, n)) if faded.outputs else ((f, n, g), (n + 1, n, n + 2))
    return xp.permute_dims(fade @ xp.permute_dims(states, (*lead, *there)), (*lead, *back))


def _block(
    xp: Namespace,
    faded: _Faded,
    x: Array,
    y: Array,
    c: Array,
    level: Array | None,
    state: Array,
    start: Array | None,
) -> tuple[Array, Array, Array | None]:
    """The outputs of a block of chunks (..., n, size, ·), the sums after it and their level."""
    i = positions(xp, x, 0, x.shape[-2])
    out = faded.pairs(xp, x, y, c, level, i[:, None] >= i)
    ends = None if level is None else level[..., -1:, :]
    added = faded.added(xp, y, c, level, ends)
    first = state[..., None, :, :]
    lead = broadcast("attention", "leading axes", tuple(added.shape[:-3]), tuple(first.shape[:-3]))
    added, first = (xp.broadcast_to(s, (*lead, *s.shape[-3:])) for s in (added, first))
    at = None
    if level is not None and ends is not None and start is not None:
        opening = xp.broadcast_to(start[..., None, :, :], (*ends.shape[:-3], 1, *ends.shape[-2:]))
        at = xp.concat([opening, ends], axis=-3)
    states = _running(xp, faded, xp.concat([first, added], axis=-3), at)
    out = out + faded.drawn(xp, x, states[..., :-1, :, :], level, None if at is None else at[..., :-1, :, :])
    return out, states[..., -1, :, :], None if at is None else at[..., -1, :, :]


def _to_halve(size: int, n: int) -> int:
    """The smallest power of two that holds `size` or n tokens."""
    size = 2 ** math.ceil(math.log2(size))
    while not _symbolic(n) and size >= 2 * n:
        size //= 2
    return size


def scan(
    xp: Namespace,
    x: Array,
    y: Array,
    c: Array,
    state: Array,
    size: int,
    level: Array | None = None,
    start: Array | None = None,
    faded: _Faded = ALIKE,
) -> tuple[Array, Array, Array | None]:
    """out_i = x_i·state + Σ_{j <= i} x_i·y_j c_j (..., n, g), the sums after the last token, and their level.

    x, y (..., n, f), c (..., n, g), state (..., f, g) at level `start` (..., 1, w), level (..., n, w). Chunks of `size`
    tokens, for w > 1 of the next power of two, are multiplied out; the sums before each chunk come from those of all
    chunks of a block at once; blocks, as many tokens as `_ELEMENTS` allow, follow each other.
    """
    n, f, g = x.shape[-2], x.shape[-1], c.shape[-1]
    if not _symbolic(n) and n == 0:
        return x @ (state + xp.matrix_transpose(y) @ c), state, start
    wide = 1 if level is None else level.shape[-1]
    if wide > 1:
        size = _to_halve(size, n)
    elif not _symbolic(n):
        size = min(size, n)
    each = math.prod(leading(x, y, c)) * (size * max(size, wide) + f * g)
    chunks, blocks = (n + size - 1) // size, 1  # not -(-n // size), which ONNX rounds towards 0
    if not _symbolic(n, each):
        chunks = min(chunks, max(1, _ELEMENTS // max(1, each)))
        blocks = (n + size * chunks - 1) // (size * chunks)

    def cut(a: Array, repeat: bool = False) -> tuple[Array, ...]:
        a = _padded(xp, a, blocks * chunks * size, repeat)
        lead, width = a.shape[:-2], a.shape[-1]
        parts = unstack(xp, xp.reshape(a, (*lead, blocks, chunks * size, width)), axis=-3)
        return tuple(xp.reshape(part, (*lead, chunks, size, width)) for part in parts)

    levels = (None,) * blocks if level is None else cut(level, repeat=True)
    outputs = []
    for x_, y_, c_, level_ in zip(cut(x), cut(y), cut(c), levels, strict=True):
        out, state, start = _block(xp, faded, x_, y_, c_, level_, state, start)
        outputs.append(xp.reshape(out, (*out.shape[:-3], chunks * size, g)))
    out = outputs[0] if blocks == 1 else xp.concat(outputs, axis=-2)
    return (out if not _symbolic(n) and out.shape[-2] == n else out[..., :n, :]), state, start


@overload
def _part(x: Array, start: int, stop: int) -> Array: ...
@overload
def _part(x: Array | None, start: int, stop: int) -> Array | None: ...
def _part(x: Array | None, start: int, stop: int) -> Array | None:
    return None if x is None else x[..., start:stop, :]


def causal(
    xp: Namespace,
    x: Array,
    y: Array,
    c: Array,
    shift: int,
    size: int,
    state: Array | None = None,
    start: Array | None = None,
    level: Array | None = None,
    level_of_x: Array | None = None,
    faded: _Faded = ALIKE,
) -> Array:
    """out_i = x_i·state + Σ_j x_i·y_j c_j over j <= i + shift: x (..., L, f), y (..., S, f), c (..., S, g).

    `level` (..., S, w) is that of the keys, `level_of_x` (..., L, w) that of queries behind all keys; `start` that of
    the state, which is legal for L = S, shift = 0.
    """
    queries, keys, g = x.shape[-2], y.shape[-2], c.shape[-1]
    ahead, idle = min(max(shift, 0), keys), min(max(-shift, 0), queries)
    aligned = min(queries - idle, keys - ahead)
    if keys == 0:
        level = level_of_x = start = None
    elif level is not None and start is None:
        start = level[..., :1, :]
    if state is None:
        state = zeros(xp, c, (*leading(y, c), y.shape[-1], g))
    if ahead:
        end = fades = None
        if level is not None:
            end = level[..., ahead - 1 : ahead, :]
            fades = xp.exp(level[..., :ahead, :] - end)
        first, second = _part(y, 0, ahead), _part(c, 0, ahead)
        if fades is not None:
            first, second = (first, second * fades) if faded.outputs else (first * fades, second)
        state, start = total(xp, first, second), end
    out, state, start = scan(
        xp,
        _part(x, idle, idle + aligned),
        _part(y, ahead, ahead + aligned),
        _part(c, ahead, ahead + aligned),
        state,
        size,
        _part(level, ahead, ahead + aligned),
        start,
        faded,
    )
    pieces = [zeros(xp, out, (*out.shape[:-2], idle, g))] if idle else []
    pieces.append(out)
    if idle + aligned < queries:
        rest = _part(level_of_x, idle + aligned, queries)
        pieces.append(faded.drawn(xp, _part(x, idle + aligned, queries), state, rest, start))
    if len(pieces) == 1:
        return out
    lead = broadcast("attention", "leading axes", *(tuple(p.shape[:-2]) for p in pieces))
    return xp.concat([xp.broadcast_to(p, (*lead, *p.shape[-2:])) for p in pieces], axis=-2)


def anticausal(
    xp: Namespace,
    x: Array,
    y: Array,
    c: Array,
    shift: int,
    size: int,
    level: Array | None = None,
    level_of_y: Array | None = None,
    faded: _Faded = ALIKE,
) -> Array:
    """The transpose of `causal`, for gradients: out_j = Σ_i x_j·y_i c_i over the queries i with j <= i + shift.

    x (..., S, f) is of keys, y (..., L, f) and c (..., L, g) of queries; `level` (..., S, w), `level_of_y` (..., L, w).
    """
    keys, queries = x.shape[-2], y.shape[-2]
    x, y, c = (xp.flip(a, axis=-2) for a in (x, y, c))
    turned = [None if a is None else -xp.flip(a, axis=-2) for a in (level_of_y, level)]
    out = causal(xp, x, y, c, queries - keys + shift, size, level=turned[0], level_of_x=turned[1], faded=faded)
    return xp.flip(out, axis=-2)


def levels_of_queries(xp: Namespace, level: Array, queries: int, shift: int) -> Array:
    """The level (..., L, w) of the last key that each query may see; queries that see none have the first."""
    keys = level.shape[-2]
    ahead, idle = min(max(shift, 0), keys), min(max(-shift, 0), queries)
    aligned = min(queries - idle, keys - ahead)
    after = queries - idle - aligned
    if keys == 0 or queries == 0:
        return zeros(xp, level, (*level.shape[:-2], queries, level.shape[-1]))
    sizes = (level[..., :1, :], idle), (level[..., ahead : ahead + aligned, :], aligned), (level[..., -1:, :], after)
    parts = [xp.broadcast_to(x, (*x.shape[:-2], n, x.shape[-1])) for x, n in sizes if n]
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2)


class Fading(NamedTuple):
    """The level that sums are divided by the exponential of."""

    top: Array  # (..., 1, w), or (..., S, w) under causality
    before: Factor  # what an initial state is multiplied by: a number or (..., 1, w)
    start: Array | None  # (..., 1, w): the level of the initial state after that, under causality


def fading(xp: Namespace, level: Array, initial: Array | None, ordered: bool) -> Fading:
    """The largest level (..., S, w), -inf at keys that do not count, of all keys or, if `ordered`, of those so far; and
    of the initial one (..., 1, w). All are constants to automatic differentiation."""
    if not ordered or level.shape[-2] == 0:
        top = xp.matrix_transpose(largest(xp, xp.matrix_transpose(level)))
        top = finite(xp, top if initial is None else xp.maximum(top, initial))
        return Fading(top, 1.0 if initial is None else xp.exp(initial - top), None)
    top = _running_maximum(xp, level)
    top = top if initial is None else xp.maximum(top, initial)
    # before the first key that counts, the level of that key: levels may not decrease
    lowest = xp.min(xp.where(top == -math.inf, math.inf, top), axis=-2, keepdims=True)
    top = xp.where(top == -math.inf, xp.where(lowest == math.inf, 0.0, lowest), top)
    if initial is None:
        return Fading(top, 1.0, None)
    empty = initial == -math.inf
    return Fading(top, xp.astype(~empty, level.dtype), xp.where(empty, top[..., :1, :], initial))


def largest(xp: Namespace, x: Array) -> Array:
    """The largest along the last axis (..., 1); -inf of nothing."""
    if x.shape[-1] == 0:
        return zeros(xp, x, (*x.shape[:-1], 1)) - math.inf
    return xp.max(x, axis=-1, keepdims=True)


def finite(xp: Namespace, level: Array) -> Array:
    """A level with 0 in place of -inf, where nothing has been seen."""
    return xp.where(level == -math.inf, 0.0, level)


def _running_maximum(xp: Namespace, x: Array) -> Array:
    """The largest of x[0..n] for each n along axis -2, by doubling."""
    n, step = x.shape[-2], 1
    if _symbolic(n):
        return cumulative_maximum(x, -2)
    while step < n:
        x = xp.concat([x[..., :step, :], xp.maximum(x[..., step:, :], x[..., : n - step, :])], axis=-2)
        step *= 2
    return x
