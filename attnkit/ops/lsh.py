"""LSH attention (Kitaev et al. 2020, "Reformer"): tokens sorted by bucket attend to their chunk and the one before."""

import math
from typing import Any, NamedTuple

from attnkit._core import check
from attnkit._core.derived import vjp_like, weights_like
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.mask import positions
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.special import generator, stop_gradient, take_along
from attnkit._core.tokens import chosen, cotangent, key_mask, valid_keys, whole, zeros
from attnkit._core.typing import Array, Causal, Impl, Namespace

SELF_LOGIT = -1e5
NORM_EPS = 1e-6  # times d, under the root


def random_rotations(d: int, num_hashes: int, num_buckets: int, seed: int) -> Array:
    """Standard normal numbers (d, num_hashes, num_buckets/2): a NumPy array in float64, the same for any library.

    Kitaev et al. 2020 §2 after Andoni et al. 2015: each round of hashing projects a token on num_buckets/2 directions,
    whose two ends are two buckets. Convert it with the `asarray` of the library at hand.

    Raises:
        ValueError: sizes below 1, an odd num_buckets. TypeError: sizes that are no integers.

    >>> import attnkit
    >>> attnkit.random_rotations(8, num_hashes=2, num_buckets=6, seed=0).shape
    (8, 2, 3)
    """
    op = "random_rotations"
    for name, value, least in (("d", d, 1), ("num_hashes", num_hashes, 1), ("num_buckets", num_buckets, 2)):
        whole(op, name, value, least)
    whole(op, "seed", seed, 0)
    if num_buckets % 2:
        raise ValueError(f"{op}: num_buckets must be even; got {num_buckets}")
    return generator(seed).standard_normal((d, num_hashes, num_buckets // 2))


# ---------------------------------------------------------------------------------------------- checks


def _context(op: str, arrays: dict[str, Any], options: dict[str, Any]) -> check.Context:
    qk, v, rotations = arrays["qk"], arrays.get("v"), arrays["rotations"]
    for name, x in (("qk", qk), ("v", v)):
        if x is not None and x.ndim < 2:
            check.wrong_shape(op, name, x, "at least two axes, (..., tokens, features)")
    n, d = qk.shape[-2:]
    if d == 0:
        check.wrong_shape(op, "qk", qk, "at least one feature")
    if v is not None and v.shape[-2] != n:
        check.wrong_shape(op, "v", v, f"(..., {n}, e) as qk has {n} tokens")
    if rotations.ndim < 3 or rotations.shape[-3] != d or 0 in tuple(rotations.shape[-2:]):
        check.wrong_shape(op, "rotations", rotations, f"(..., {d}, num_hashes, num_buckets/2) as qk has {d} features")
    lead, of_qk = tuple(rotations.shape[:-3]), tuple(qk.shape[:-2])
    if not check.fits(lead, of_qk):
        check.wrong_shape(op, "rotations", rotations, f"leading axes that broadcast to {of_qk}, those of qk")
    leading = of_qk if v is None else check.broadcast(op, "the leading axes of qk and v", of_qk, tuple(v.shape[:-2]))
    if v is not None:
        cotangent(op, "do", arrays.get("do"), (*leading, n, v.shape[-1]))
    return check.Context(op, qk, leading, n, n, options, "qk")


def _chunked_context(op: str, arrays: dict[str, Any], options: dict[str, Any]) -> check.Context:
    if "chunk_size" not in options:
        raise TypeError(f"{op}: missing argument 'chunk_size'")
    return _context(op, arrays, options)


def _chunk_size(c: check.Context, name: str, value: Any) -> None:
    whole(c.op, name, value, 1)


_OWN = {"mask": key_mask, "chunk_size": _chunk_size}


# ---------------------------------------------------------------------------------------------- order


def _hash(xp: Namespace, x: Array, rotations: Array, valid: Array | None) -> Array:
    """Buckets (..., R, n): the first argmax of [x R, -x R], num_buckets for invalid tokens."""
    d, rounds, half = rotations.shape[-3:]
    flat = xp.reshape(cast(xp, rotations, x.dtype), (*rotations.shape[:-3], d, rounds * half))
    projected = x @ flat
    projected = xp.reshape(projected, (*projected.shape[:-1], rounds, half))
    buckets = xp.argmax(xp.concat([projected, -projected], axis=-1), axis=-1).mT
    return buckets if valid is None else xp.where(valid[..., None, :], buckets, 2 * half)


class _Order(NamedTuple):
    """The sorting permutation of each round and its inverse: (..., R, T) with T tokens, including filler."""

    sorted: Array
    back: Array
    chunk_size: int

    @property
    def rounds(self) -> int:
        return self.sorted.shape[-2]

    @property
    def chunks(self) -> int:
        return self.rounds * self.sorted.shape[-1] // self.chunk_size


def _rows(xp: Namespace, x: Array, index: Array) -> Array:
    """The rows (axis -2) of x (..., T, c) at index (..., T)."""
    return take_along(xp, x, xp.broadcast_to(index[..., None], (*index.shape, x.shape[-1])), -2)


def _into_chunks(xp: Namespace, x: Array, order: _Order) -> Array:
    """Tokens (..., T, c) in the order of every round, one round after the other, as chunks (..., C, chunk_size, c)."""
    lead = x.shape[:-2]
    spread = xp.broadcast_to(x[..., None, :, :], (*lead, order.rounds, *x.shape[-2:]))
    return xp.reshape(_rows(xp, spread, order.sorted), (*lead, order.chunks, order.chunk_size, x.shape[-1]))


def _out_of_chunks(xp: Namespace, x: Array, order: _Order) -> Array:
    """Chunks (..., C, chunk_size, c) as tokens of every round, (..., R, T, c), in their own order."""
    return _rows(xp, xp.reshape(x, (*x.shape[:-3], *order.sorted.shape[-2:], x.shape[-1])), order.back)


def _with_previous(xp: Namespace, x: Array) -> Array:
    """Each chunk (axis -3) joined with the one before it, the first with the last; a single chunk alone."""
    if x.shape[-3] <= 1:
        return x
    before = xp.concat([x[..., -1:, :, :], x[..., :-1, :, :]], axis=-3)
    return xp.concat([x, before], axis=-2)


def _to_both(xp: Namespace, g: Array, chunk_size: int) -> Array:
    """The transpose of `_with_previous`: the gradient of a chunk as itself and as the predecessor of the next."""
    if g.shape[-3] <= 1:
        return g
    own, before = g[..., :chunk_size, :], g[..., chunk_size:, :]
    return own + xp.concat([before[..., 1:, :, :], before[..., :1, :, :]], axis=-3)


# ---------------------------------------------------------------------------------------------- attention


class _Chunks(NamedTuple):
    """Sorted queries, keys, values and scores in the compute dtype."""

    q: Array  # (..., C, c, d)
    k: Array  # (..., C, 2c, d), of length about 1; (..., C, c, d) for a single chunk
    v: Array  # (..., C, 2c, e)
    s: Array  # (..., C, c, 2c), -inf where invisible
    top: Array  # (..., T, 1): the largest logit of a token over all rounds, 0 if it sees nothing
    order: _Order
    valid: Array | None  # (..., n)
    unit: Array  # k̂ (..., n, d)
    norm: Array  # (..., n, 1)


def _filled(xp: Namespace, x: Array, chunk_size: int) -> Array:
    """x (..., n, c) with rows of 0 up to a multiple of chunk_size."""
    filler = -x.shape[-2] % chunk_size
    return xp.concat([x, zeros(xp, x, (*x.shape[:-2], filler, x.shape[-1]))], axis=-2) if filler else x


def _order(xp: Namespace, x: Array, rotations: Array, valid: Array | None, chunk_size: int) -> _Order:
    buckets = _hash(xp, x, rotations, valid)
    filler = -x.shape[-2] % chunk_size
    if filler:
        beyond = xp.broadcast_to(xp.zeros_like(buckets[..., :1]), (*buckets.shape[:-1], filler))
        buckets = xp.concat([buckets, beyond + 2 * rotations.shape[-1]], axis=-1)
    in_order = xp.argsort(buckets, axis=-1, stable=True)
    return _Order(in_order, xp.argsort(in_order, axis=-1, stable=True), chunk_size)


def _chunks(
    xp: Namespace,
    qk: Array,
    v: Array,
    rotations: Array,
    *,
    chunk_size: int,
    mask: Array | None = None,
    causal: Causal = False,
) -> _Chunks:
    dtype, n = compute_dtype(xp, qk), qk.shape[-2]
    leading = check.broadcast("attention", "leading axes", tuple(qk.shape[:-2]), tuple(v.shape[:-2]))
    valid = valid_keys(xp, qk, n, mask, None)
    x = xp.broadcast_to(chosen(xp, valid, cast(xp, qk, dtype)), (*leading, *qk.shape[-2:]))
    v = xp.broadcast_to(chosen(xp, valid, cast(xp, v, dtype)), (*leading, *v.shape[-2:]))
    valid = None if valid is None else xp.broadcast_to(valid, (*leading, n))
    order = _order(xp, stop_gradient(x), rotations, valid, chunk_size)

    norm = xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS * x.shape[-1])
    unit = x / norm
    q, k, values = (_into_chunks(xp, _filled(xp, y, chunk_size), order) for y in (x, unit, v))
    k, values = _with_previous(xp, k), _with_previous(xp, values)
    s = _scores(xp, q, k, order, valid, n, causal)
    top = _out_of_chunks(xp, _largest(xp, stop_gradient(s)), order)
    top = xp.max(top, axis=-3)
    return _Chunks(q, k, values, s, xp.where(top == -math.inf, 0.0, top), order, valid, unit, norm)


def _scores(xp: Namespace, q: Array, k: Array, order: _Order, valid: Array | None, n: int, causal: Causal) -> Array:
    """q·k̂ - 10⁵ [same token], -inf for filler, invalid keys and, if causal, keys after the query."""
    at = xp.reshape(order.sorted, (*order.sorted.shape[:-2], order.chunks, order.chunk_size, 1))
    query, key = at, _with_previous(xp, at).mT
    s = q @ k.mT
    s = xp.where(query == key, s + SELF_LOGIT, s)
    visible = key < n
    if causal:
        visible = visible & (key <= query)
    if valid is not None:
        there = _into_chunks(xp, _filled(xp, cast(xp, valid, q.dtype)[..., None], order.chunk_size), order)
        visible = visible & (_with_previous(xp, there) > 0).mT
    return xp.where(visible, s, -math.inf)


def _largest(xp: Namespace, s: Array) -> Array:
    return xp.max(s, axis=-1, keepdims=True) if s.shape[-1] else xp.sum(s, axis=-1, keepdims=True)


def _exponentials(xp: Namespace, a: _Chunks) -> tuple[Array, Array]:
    """u = exp(s - top) for every pair, and its sum (..., T, 1) over all pairs of a token in all rounds."""
    u = xp.exp(a.s - _into_chunks(xp, a.top, a.order))
    total = xp.sum(_out_of_chunks(xp, xp.sum(u, axis=-1, keepdims=True), a.order), axis=-3)
    return u, xp.where(total == 0, 1.0, total)


def _attend(xp: Namespace, a: _Chunks, n: int) -> Array:
    """o (..., n, e), 0 at invalid tokens."""
    u, total = _exponentials(xp, a)
    o = xp.sum(_out_of_chunks(xp, u @ a.v, a.order), axis=-3) / total
    return chosen(xp, a.valid, o[..., :n, :])


@operation_checked_by(_context, {"mask": key_mask})
def lsh_buckets(qk: Array, rotations: Array, *, mask: Array | None = None, impl: Impl = "auto") -> Array:
    """The buckets of tokens, integers (..., num_hashes, n): the first argmax of [x R, -x R] in each round.

    Kitaev et al. 2020 §2, h(x) = argmax([xR; -xR]); computed in float32 (float64 for float64). A token that falls
    almost between two buckets may be hashed differently by different hardware.

    Args:
        qk: (..., n, d).
        rotations: (..., d, num_hashes, num_buckets/2), any real float dtype, for example from `random_rotations`.
        mask: a key mask (..., 1, n) or (n,). What it excludes falls into bucket num_buckets, beyond the last.
        impl: "auto", "generic", the name of a kernel, or a tuple of names tried in order (see `attnkit.explain`).

    Raises:
        ValueError, TypeError: shapes, dtypes or libraries that do not fit.
    """
    xp = namespace(qk)
    valid = valid_keys(xp, qk, qk.shape[-2], mask, None)
    x = chosen(xp, valid, cast(xp, qk, compute_dtype(xp, qk)))
    return _hash(xp, stop_gradient(x), rotations, valid)


@operation_checked_by(_chunked_context, _OWN)
def lsh_attention(
    qk: Array,
    v: Array,
    rotations: Array,
    *,
    chunk_size: int,
    mask: Array | None = None,
    causal: Causal = False,
    impl: Impl = "auto",
) -> Array:
    """o = Σ_r exp(lse_r - lse) o_r over rounds r of hashing, o_r softmax attention to neighbours in sorted order.

    Kitaev et al. 2020 §2. Logits qk_i·k̂_j with k̂ = x/√(‖x‖² + 10⁻⁶ d), the scale of the authors' code (trax): no 1/√d.
    The logit of a token with itself gets -10⁵, so that it attends to itself only if it sees no other token. Tokens are
    sorted by (round, bucket, position) and cut into chunks; a chunk sees itself and the one before it in that sequence,
    across rounds, and the first sees the last. Pairs that occur several times count several times.

    Args:
        qk: (..., n, d), queries and keys in one. Leading axes of qk and v broadcast.
        v: (..., n, e).
        rotations: (..., d, num_hashes, num_buckets/2), any real float dtype, for example from `random_rotations`; its
            leading axes broadcast to those of qk. It has no gradient, and hashing passes none.
        chunk_size: tokens of a chunk. Filler makes n a multiple of it.
        mask: a key mask (..., 1, n) or (n,). An excluded token falls into a bucket of its own beyond the last, is
            neither key nor query, and its output is 0.
        causal: keys after the query are hidden. Which of the earlier keys the query sees depends on all tokens.
        impl: "auto", "generic", the name of a kernel, or a tuple of names tried in order (see `attnkit.explain`).

    Returns:
        o (..., n, e) in the dtype of qk, computed in float32 (float64 for float64).

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(qk)
    a = _chunks(xp, qk, v, rotations, chunk_size=chunk_size, mask=mask, causal=causal)
    return cast(xp, _attend(xp, a, qk.shape[-2]), qk.dtype)


@operation_checked_by(_chunked_context, _OWN)
@weights_like(lsh_attention)
def lsh_attention_weights(qk: Array, rotations: Array, **options: Any) -> Array:
    """The weights w (..., n, n) of `lsh_attention`, summed over rounds, in the dtype of qk: its result for v = 1."""
    xp, n = namespace(qk), qk.shape[-2]
    i = positions(xp, qk, 0, n)
    identity = xp.astype(i[:, None] == i, compute_dtype(xp, qk))
    a = _chunks(xp, qk, identity, rotations, **options)
    return cast(xp, _attend(xp, a, n), qk.dtype)


@operation_checked_by(_chunked_context, _OWN)
@vjp_like(lsh_attention)
def lsh_attention_vjp(qk: Array, v: Array, rotations: Array, do: Array, **options: Any) -> dict[str, Array]:
    """Gradients {"qk", "v"} of `lsh_attention` for the cotangent do, with the buckets as constants.

    dw = do vᵀ, ds = w (dw - do·o), dk̂ = dsᵀ qk, dqk = ds k̂ + (dk̂ - k̂ (k̂·dk̂))/√(‖x‖² + 10⁻⁶ d), dv = wᵀ do, within
    chunks; then tokens are unsorted and rounds are added.
    """
    xp, n, chunk_size = namespace(qk), qk.shape[-2], options["chunk_size"]
    a = _chunks(xp, qk, v, rotations, **options)
    do = chosen(xp, a.valid, cast(xp, do, a.q.dtype))
    u, total = _exponentials(xp, a)
    inner = xp.sum(do * _attend(xp, a, n), axis=-1, keepdims=True)
    do, inner = (_into_chunks(xp, _filled(xp, x, chunk_size), a.order) for x in (do, inner))
    w = u / _into_chunks(xp, total, a.order)
    ds = w * (do @ a.v.mT - inner)

    def home(g: Array) -> Array:
        return chosen(xp, a.valid, xp.sum(_out_of_chunks(xp, g, a.order), axis=-3)[..., :n, :])

    dunit = home(_to_both(xp, ds.mT @ a.q, chunk_size))
    to_keys = (dunit - a.unit * xp.sum(a.unit * dunit, axis=-1, keepdims=True)) / a.norm
    grads = {"qk": (home(ds @ a.k) + to_keys, qk), "v": (home(_to_both(xp, w.mT @ do, chunk_size)), v)}
    return {name: cast(xp, sum_to(xp, g, tuple(like.shape)), like.dtype) for name, (g, like) in grads.items()}
