"""LSH attention (Kitaev et al. 2020, "Reformer"): tokens sorted by bucket attend to their chunk and the one before."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Required, Self, TypedDict, Unpack, overload

from attnkit._core import check
from attnkit._core.derived import vjp_like, weights_like
from attnkit._core.dispatch import Kernel, namespace, operation_checked_by, with_gradients
from attnkit._core.mask import positions
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.special import generator, real, stop_gradient
from attnkit._core.tokens import both, chosen, cotangent, key_mask, valid_keys, whole, zeros
from attnkit._core.typing import A, AnyFunction, Array, Causal, Impl, Keywords, Namespace, OfLibrary
from attnkit.ops.softmax import softmax_attention, softmax_attention_vjp

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


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
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


def _chunked_context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    if "chunk_size" not in options:
        raise TypeError(f"{op}: missing argument 'chunk_size'")
    return _context(op, arrays, options)


def _chunk_size(c: check.Context, name: str, value: object) -> None:
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


class _Options(TypedDict, total=False):
    chunk_size: Required[int]
    mask: Array | None
    causal: Causal


class _Order(NamedTuple):
    """The sorting permutation of each round and its inverse: (..., R, T) with T tokens, including filler."""

    sorted: Array  # (..., R, T)
    back: Array  # (..., R, T)
    chunk_size: int

    @property
    def rounds(self) -> int:
        return self.sorted.shape[-2]

    @property
    def chunks(self) -> int:
        return self.rounds * self.sorted.shape[-1] // self.chunk_size


def _rows(xp: Namespace, x: Array, index: Array) -> Array:
    """The rows (axis -2) of x (..., T, c) at index (..., U), each copied whole."""
    *lead, rows, c = x.shape
    count, wanted = math.prod(lead), index.shape[-1]
    at = xp.reshape(index, (count, wanted)) + positions(xp, x, 0, count)[:, None] * rows
    taken = xp.take(xp.reshape(x, (count * rows, c)), xp.reshape(at, (count * wanted,)), axis=0)
    return xp.reshape(taken, (*lead, wanted, c))


def _chunked(xp: Namespace, x: Array, order: _Order) -> Array:
    """Sorted tokens of all rounds, one round after the other, as chunks (..., C, chunk_size, c)."""
    return xp.reshape(x, (*order.sorted.shape[:-2], order.chunks, order.chunk_size, x.shape[-1]))


def _into_chunks(xp: Namespace, x: Array, order: _Order) -> Array:
    """Tokens (..., T, c), the same in all rounds, in the order of each."""
    *lead, rounds, tokens = order.sorted.shape
    return _chunked(xp, _rows(xp, x, xp.reshape(order.sorted, (*lead, rounds * tokens))), order)


def _rounds_into_chunks(xp: Namespace, x: Array, order: _Order) -> Array:
    """Tokens of every round (..., R, T, c) in the order of the round."""
    return _chunked(xp, _rows(xp, x, order.sorted), order)


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


class _Softmax(NamedTuple):
    """Softmax attention and its gradients, by one implementation."""

    attend: AnyFunction
    vjp: Callable[..., dict[str, Array]]

    @classmethod
    def by(cls, impl: str) -> Self:
        return cls(partial(softmax_attention, impl=impl), partial(softmax_attention_vjp, impl=impl))


class _Chunks(NamedTuple):
    """Sorted queries, keys and values in the compute dtype, and the options under which they attend."""

    q: Array  # (..., C, c, d)
    k: Array  # (..., C, 2c, d), of length about 1; (..., C, c, d) for a single chunk
    v: Array  # (..., C, 2c, e)
    options: Keywords
    order: _Order
    valid: Array | None  # (..., n)
    unit: Array  # k̂ (..., n, d)
    norm: Array  # (..., n, 1)


class _Rounds(NamedTuple):
    """What tokens get from each round, and the share of the round in all."""

    o: Array  # (..., R, T, e)
    share: Array  # (..., R, T, 1): exp(lse_r - lse), 0 for a token that sees nothing


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

    norm = xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS * real(xp, x.shape[-1], x.dtype))
    unit = x / norm
    q, k, values = (_into_chunks(xp, _filled(xp, y, chunk_size), order) for y in (x, unit, v))
    options = {"scale": 1.0, "bias": _bias(xp, x, order), "mask": _visible(xp, order, valid, n, causal)}
    return _Chunks(q, _with_previous(xp, k), _with_previous(xp, values), options, order, valid, unit, norm)


def _queries_and_keys(xp: Namespace, order: _Order) -> tuple[Array, Array]:
    """The positions of queries (..., C, c, 1) and keys (..., C, 1, 2c)."""
    at = xp.reshape(order.sorted, (*order.sorted.shape[:-2], order.chunks, order.chunk_size, 1))
    return at, _with_previous(xp, at).mT


def _bias(xp: Namespace, x: Array, order: _Order) -> Array:
    """-10⁵ where a token meets itself, in the dtype of x: (..., C, c, 2c)."""
    query, key = _queries_and_keys(xp, order)
    return xp.where(query == key, zeros(xp, x, (1,)) + SELF_LOGIT, 0.0)


def _visible(xp: Namespace, order: _Order, valid: Array | None, n: int, causal: Causal) -> Array | None:
    """No filler, no invalid keys and, if causal, no keys after the query: (..., C, 1 or c, 2c), None = all."""
    query, key = _queries_and_keys(xp, order)
    if valid is not None:
        there = _filled(xp, xp.astype(valid, xp.int32)[..., None], order.chunk_size)
        visible: Array | None = (_with_previous(xp, _into_chunks(xp, there, order)) > 0).mT
    else:
        visible = key < n if order.sorted.shape[-1] > n else None
    return both(visible, key <= query if causal else None)


@overload
def _flat(xp: Namespace, x: Array) -> Array: ...
@overload
def _flat(xp: Namespace, x: Array | None) -> Array | None: ...
def _flat(xp: Namespace, x: Array | None) -> Array | None:
    """All chunks on one axis."""
    return x if x is None else xp.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))


def _arguments(xp: Namespace, a: _Chunks) -> tuple[tuple[Array, ...], Keywords]:
    arrays = {name: _flat(xp, a.options[name]) for name in ("bias", "mask")}
    return tuple(_flat(xp, x) for x in (a.q, a.k, a.v)), a.options | arrays


def _rounds(xp: Namespace, softmax: _Softmax, a: _Chunks) -> _Rounds:
    arrays, options = _arguments(xp, a)
    o, lse = softmax.attend(*arrays, return_lse=True, **options)
    shape = a.q.shape[:-1]
    o = _out_of_chunks(xp, xp.reshape(o, (*shape, a.v.shape[-1])), a.order)
    lse = _out_of_chunks(xp, xp.reshape(lse, (*shape, 1)), a.order)
    top = stop_gradient(xp.max(lse, axis=-3, keepdims=True))
    u = xp.exp(lse - xp.where(top == -math.inf, 0.0, top))
    total = xp.sum(u, axis=-3, keepdims=True)
    return _Rounds(o, u / xp.where(total == 0, 1.0, total))


def _joined(xp: Namespace, a: _Chunks, rounds: _Rounds, n: int) -> Array:
    """o (..., n, e), 0 at invalid tokens."""
    return chosen(xp, a.valid, xp.sum(rounds.share * rounds.o, axis=-3)[..., :n, :])


def _attend(softmax: _Softmax, qk: Array, v: Array, rotations: Array, **options: Unpack[_Options]) -> Array:
    """`lsh_attention` with attention within chunks by an implementation of softmax."""
    xp = namespace(qk)
    a = _chunks(xp, qk, v, rotations, **options)
    return cast(xp, _joined(xp, a, _rounds(xp, softmax, a), qk.shape[-2]), qk.dtype)


def _pull(
    softmax: _Softmax, qk: Array, v: Array, rotations: Array, do: Array, **options: Unpack[_Options]
) -> dict[str, Array]:
    """`lsh_attention_vjp` with them: a round has the cotangents share·do of o_r and share (do·o_r - do·o) of lse_r."""
    xp, n, chunk_size = namespace(qk), qk.shape[-2], options["chunk_size"]
    a = _chunks(xp, qk, v, rotations, **options)
    rounds = _rounds(xp, softmax, a)
    do = chosen(xp, a.valid, cast(xp, do, a.q.dtype))
    o, do = (_filled(xp, x, chunk_size)[..., None, :, :] for x in (_joined(xp, a, rounds, n), do))
    of_lse = rounds.share * xp.sum(do * (rounds.o - o), axis=-1, keepdims=True)
    of_o, of_lse = (_flat(xp, _rounds_into_chunks(xp, x, a.order)) for x in (rounds.share * do, of_lse))
    arrays, others = _arguments(xp, a)
    grads = softmax.vjp(*arrays, of_o, of_lse[..., 0], **others)

    def home(name: str, like: Array) -> Array:
        g = xp.reshape(grads[name], like.shape)
        g = g if name == "q" else _to_both(xp, g, chunk_size)
        return chosen(xp, a.valid, xp.sum(_out_of_chunks(xp, g, a.order), axis=-3)[..., :n, :])

    dunit = home("k", a.k)
    to_keys = (dunit - a.unit * xp.sum(a.unit * dunit, axis=-1, keepdims=True)) / a.norm
    full = {"qk": (home("q", a.q) + to_keys, qk), "v": (home("v", a.v), v)}
    return {name: cast(xp, sum_to(xp, g, tuple(like.shape)), like.dtype) for name, (g, like) in full.items()}


@operation_checked_by(_context, {"mask": key_mask})
def lsh_buckets(qk: A, rotations: A, *, mask: Array | None = None, impl: Impl = "auto") -> A:
    """The buckets of tokens, integers (..., num_hashes, n): the first argmax of [x R, -x R] in each round.

    Kitaev et al. 2020 §2, h(x) = argmax([xR; -xR]); computed in float32 (float64 for float64). A token that falls
    almost between two buckets may be hashed differently by different hardware.

    Args:
        qk: (..., n, d).
        rotations: (..., d, num_hashes, num_buckets/2), any real float dtype, for example from `random_rotations`.
        mask: a key mask (..., 1, n) or (n,). What it excludes falls into bucket num_buckets, beyond the last.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).

    Raises:
        ValueError, TypeError: shapes, dtypes or libraries that do not fit.
    """
    xp = namespace(qk)
    valid = valid_keys(xp, qk, qk.shape[-2], mask, None)
    x = chosen(xp, valid, cast(xp, qk, compute_dtype(xp, qk)))
    found: OfLibrary = _hash(xp, stop_gradient(x), rotations, valid)
    buckets: A = found
    return buckets


_GENERIC = _Softmax.by("generic")


@operation_checked_by(_chunked_context, _OWN, runs=partial(_attend, _GENERIC))
def lsh_attention(
    qk: A,
    v: A,
    rotations: A,
    *,
    chunk_size: int,
    mask: Array | None = None,
    causal: Causal = False,
    impl: Impl = "auto",
) -> A:
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
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).

    Returns:
        o (..., n, e) in the dtype of qk, computed in float32 (float64 for float64).

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


@operation_checked_by(_chunked_context, _OWN)
@weights_like(lsh_attention)
def lsh_attention_weights(qk: Array, rotations: Array, **options: Unpack[_Options]) -> Array:
    """The weights w (..., n, n) of `lsh_attention`, summed over rounds, in the dtype of qk: its result for v = 1."""
    xp, n = namespace(qk), qk.shape[-2]
    i = positions(xp, qk, 0, n)
    identity = xp.astype(i[:, None] == i, qk.dtype)
    return _attend(_GENERIC, qk, identity, rotations, **options)


@operation_checked_by(_chunked_context, _OWN)
@vjp_like(lsh_attention)
def lsh_attention_vjp(
    qk: Array, v: Array, rotations: Array, do: Array, **options: Unpack[_Options]
) -> dict[str, Array]:
    """Gradients {"qk", "v"} of `lsh_attention` for the cotangent do, with the buckets as constants.

    dw = do vᵀ, ds = w (dw - do·o), dk̂ = dsᵀ qk, dqk = ds k̂ + (dk̂ - k̂ (k̂·dk̂))/√(‖x‖² + 10⁻⁶ d), dv = wᵀ do, within
    chunks; then tokens are unsorted and rounds are added.
    """
    return _pull(_GENERIC, qk, v, rotations, do, **options)


# ---------------------------------------------------------------------------------------------- kernels


def pairs(qk: Array, v: Array, rotations: Array, chunk_size: int) -> int:
    """Pairs of a query and a key in all rounds."""
    leading = check.broadcast("attention", "leading axes", tuple(qk.shape[:-2]), tuple(v.shape[:-2]))
    return 2 * math.prod(leading) * rotations.shape[-2] * qk.shape[-2] * chunk_size


def kernels(of: Kernel, enough: int = 0) -> dict[str, Kernel]:
    """The table of a library, which takes less time from so many pairs on: attention within chunks by its kernel of
    softmax attention."""
    softmax = _Softmax.by(of.name)

    def unsupported(qk: Array, v: Array, *rest: Array, **options: object) -> str | None:
        return of.unsupported(qk, qk, v)

    def is_faster(qk: Array, v: Array, rotations: Array, *rest: Array, chunk_size: int, **options: object) -> bool:
        return pairs(qk, v, rotations, chunk_size) >= enough

    kernel = Kernel(of.name, partial(_attend, softmax), unsupported, is_faster)
    return with_gradients(lsh_attention, kernel, partial(_pull, softmax))
