"""LSH attention (Reformer): a token attends to those in its bucket or next to it after sorting by bucket.

Letters: n tokens, d features of qk, e features of v. Sorting and chunking amount to a table of integers, how often
query i meets key j; given that table, everything is softmax with multiplicities.
"""

from dataclasses import dataclass
from typing import Required, TypedDict, Unpack, cast

import numpy as np

from attnkit_reference._check import Array, as_float, broadcast, cotangent, leading_axes
from attnkit_reference._core import reduce_to, transposed, visibility
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of, refuse_others
from attnkit_reference.lowrank.newton import whole
from attnkit_reference.lowrank.soft import refuse_pair_mask

SELF_LOGIT = -1e5  # added to the logit of a token with itself: it attends to itself only if alone
NORM_EPS = 1e-6  # times d, under the root


def random_rotations(d: int, num_hashes: int, num_buckets: int, seed: int) -> Array:
    """Standard normal numbers (d, num_hashes, num_buckets/2) in float64, from NumPy's default generator.

    Each round of hashing projects a token on num_buckets/2 directions, whose two ends are two buckets. ValueError
    unless num_buckets is even. Source: Kitaev et al. 2020 §2 after Andoni et al. 2015.
    """
    op = "random_rotations"
    for name, value, least in (("d", d, 1), ("num_hashes", num_hashes, 1), ("num_buckets", num_buckets, 2)):
        whole(op, name, value, least)
    whole(op, "seed", seed, 0)
    if num_buckets % 2:
        raise ValueError(f"{op}: num_buckets; expected an even number, got {num_buckets}")
    return np.random.default_rng(seed).standard_normal((d, num_hashes, num_buckets // 2))


def hash_tokens(qk: Array, rotations: Array, valid: Array) -> Array:
    """(..., rounds, n): the first argmax of [x R, -x R]; num_buckets, one beyond the last, for invalid tokens."""
    d, rounds, half = rotations.shape[-3:]
    with np.errstate(over="ignore", invalid="ignore"):
        flat = qk @ rotations.reshape(*rotations.shape[:-3], d, rounds * half)
    projected = np.swapaxes(flat.reshape(*flat.shape[:-1], rounds, half), -3, -2)
    buckets = np.argmax(np.concatenate([projected, -projected], axis=-1), axis=-1)
    of_valid: Array = np.where(valid[..., None, :], buckets, 2 * half)
    return of_valid


def meetings(buckets: Array, num_buckets: int, chunk_size: int) -> Array:
    """How often query i meets key j (n, n), for the buckets (rounds, n) of one sequence.

    Filler makes n a multiple of chunk_size. All rounds are concatenated, each sorted by (bucket, position);
    chunks of that one sequence see themselves and the one before, the first the last; a single chunk sees itself once.
    """
    n = buckets.shape[-1]
    filler = -n % chunk_size
    buckets = np.pad(buckets, ((0, 0), (0, filler)), constant_values=num_buckets)
    sequence = [i for row in buckets for _, i in sorted(zip(row, range(n + filler), strict=True))]
    chunks = [sequence[start : start + chunk_size] for start in range(0, len(sequence), chunk_size)]
    met = np.zeros((n + filler, n + filler), dtype=int)
    for number, chunk in enumerate(chunks):
        before = chunks[number - 1] if len(chunks) > 1 else []
        np.add.at(met, np.ix_(chunk, chunk + before), 1)
    return met[:n, :n]


class Options(TypedDict, total=False):
    """The keyword arguments of `lsh_attention`."""

    chunk_size: Required[int]
    mask: Array | None
    causal: bool | str


@dataclass(frozen=True)
class Lsh:
    """One call: w_ij = met_ij exp(s_ij)/Σ_j met_ij exp(s_ij), s = qk k̂^T, o = w v."""

    op: str
    qk: Array  # (..., n, d), 0 where invalid
    v: Array | None
    unit: Array  # k̂
    norm: Array  # (..., n, 1)
    valid: Array  # (..., n)
    met: Array  # (..., n, n) integers, 0 where invisible
    w: Array
    shapes: dict[str, tuple[int, ...]]


def _lsh(
    op: str,
    qk: Array,
    v: Array | None,
    rotations: Array,
    *,
    chunk_size: int,
    mask: Array | None = None,
    causal: bool | str = False,
) -> Lsh:
    whole(op, "chunk_size", chunk_size, 1)
    wide, wide_v, wide_rotations = _inputs(op, qk, v, rotations)
    n, d = qk.shape[-2:]
    leading = leading_axes(op, "qk, v", (x.shape[:-2] for x in (qk, v) if x is not None))
    refuse_pair_mask(op, mask)
    causal_pairs = visibility(op, (*leading, n, n), mask, causal)
    valid = np.diagonal(visibility(op, (*leading, n, n), mask), axis1=-2, axis2=-1)
    x = np.where(valid[..., None], np.broadcast_to(wide, (*leading, n, d)), 0.0)
    if wide_v is not None:
        wide_v = np.where(valid[..., None], np.broadcast_to(wide_v, (*leading, *wide_v.shape[-2:])), 0.0)

    buckets = hash_tokens(x, np.broadcast_to(wide_rotations, (*leading, *wide_rotations.shape[-3:])), valid)
    met = np.zeros((*leading, n, n), dtype=int)
    for item in np.ndindex(*leading):
        met[item] = meetings(buckets[item], 2 * rotations.shape[-1], chunk_size)
    met = np.where(causal_pairs & valid[..., None] & valid[..., None, :], met, 0)

    norm = np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS * d)
    s = x @ transposed(x / norm) + SELF_LOGIT * np.eye(n)
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf, where=met > 0)
    e = met * np.exp(np.where(met > 0, s - np.where(np.isfinite(top), top, 0.0), -np.inf))
    total = e.sum(axis=-1, keepdims=True)
    shapes = {"qk": qk.shape, **({} if v is None else {"v": v.shape})}
    return Lsh(op, x, wide_v, x / norm, norm, valid, met, e / np.where(total > 0, total, 1.0), shapes)


def _inputs(op: str, qk: Array, v: Array | None, rotations: Array) -> tuple[Array, Array | None, Array]:
    wide, wide_rotations = as_float(op, "qk", qk), as_float(op, "rotations", rotations)
    wide_v = None if v is None else as_float(op, "v", v)
    for name, x in (("qk", qk), ("v", v)):
        if x is not None and x.ndim < 2:
            raise ValueError(f"{op}: {name} needs two axes, tokens and features; expected (..., n, d), got {x.shape}")
    if v is not None and v.dtype != qk.dtype:
        raise TypeError(f"{op}: v must share the dtype of qk; expected {qk.dtype}, got {v.dtype}")
    n, d = qk.shape[-2:]
    if v is not None and v.shape[-2] != n:
        raise ValueError(f"{op}: v must have the tokens of qk; expected (..., {n}, e), got {v.shape}")
    if d == 0 or rotations.ndim < 3 or rotations.shape[-3] != d or 0 in rotations.shape[-2:]:
        expected = f"(..., {d}, num_hashes, num_buckets/2) for the features of qk"
        raise ValueError(f"{op}: rotations; expected {expected}, got {rotations.shape}")
    broadcast(op, "rotations", wide_rotations, (*qk.shape[:-2], *rotations.shape[-3:]))
    return wide, wide_v, wide_rotations


def _pull(a: Lsh, do: Array, absolute: bool = False) -> dict[str, Array]:
    """dqk, dv; with `absolute` the sums of the absolute values of their summands, and those of o.

    ds = w (dw - Σ w dw) with dw = do v^T; dqk = ds k̂ as a query and (dk̂ - k̂ (k̂·dk̂))/norm as a key, dk̂ = ds^T qk.
    """
    v = cast(Array, a.v)
    do = np.where(a.valid[..., None], cotangent(a.op, "do", do, (*a.valid.shape, v.shape[-1])), 0.0)
    size = np.abs if absolute else np.asarray
    dw = do @ transposed(v)
    inner = np.sum(a.w * dw, axis=-1, keepdims=True)
    ds = a.w * (np.abs(dw) + np.abs(inner)) if absolute else a.w * (dw - inner)
    dunit = transposed(ds) @ size(a.qk)
    along = size(a.unit) * np.sum(size(a.unit) * dunit, axis=-1, keepdims=True)
    full = {
        "qk": ds @ size(a.unit) + (dunit + along if absolute else dunit - along) / a.norm,
        "v": transposed(a.w) @ size(do),
    }
    grads = {name: reduce_to(full[name], shape) for name, shape in a.shapes.items()}
    return {"o": a.w @ size(v), **grads} if absolute else grads


@refuse_others
def lsh_buckets(qk: Array, rotations: Array, *, mask: Array | None = None) -> Array:
    """The buckets (..., num_hashes, n) of the tokens qk (..., n, d): the first argmax of [x R, -x R] in each round.

    rotations (..., d, num_hashes, num_buckets/2), for example from `random_rotations`. mask, a key mask (..., 1, n) or
    (n,): a token that it excludes falls into bucket num_buckets, beyond the last. ValueError for shapes and unknown
    arguments, TypeError for dtypes. Source: Kitaev et al. 2020 §2, h(x) = argmax([xR; -xR]).
    """
    op = "lsh_buckets"
    wide, _, wide_rotations = _inputs(op, qk, None, rotations)
    refuse_pair_mask(op, mask)
    n = qk.shape[-2]
    valid = np.diagonal(visibility(op, (*qk.shape[:-2], n, n), mask), axis1=-2, axis2=-1)
    x = np.where(valid[..., None], wide, 0.0)
    return hash_tokens(x, np.broadcast_to(wide_rotations, (*qk.shape[:-2], *rotations.shape[-3:])), valid)


@keywords_of(_lsh)
def lsh_attention(qk: Array, v: Array, rotations: Array, **params: Unpack[Options]) -> Array:
    """o_i = Σ_j w_ij v_j, w_ij = met_ij exp(s_ij)/Σ_j met_ij exp(s_ij), met_ij how often i meets j among sorted tokens.

    qk (..., n, d), queries and keys in one; v (..., n, e); rotations (..., d, num_hashes, num_buckets/2) -> o (..., n,
    e). s_ij = qk_i·k̂_j with k̂ = x/√(‖x‖² + 10⁻⁶ d), so that there is no 1/√d; s_ii gets -10⁵, so that a token attends
    to itself only if it meets no other token.

    Tokens are sorted by (round, bucket, position), filled up to a multiple of chunk_size, and cut into chunks of
    chunk_size; each sees itself and the chunk before it in that one sequence, across rounds, and the first the last.
    This equals Σ_r exp(lse_r - lse) o_r over the rounds r: meetings in several rounds count several times.

    mask, a key mask (..., 1, n) or (n,): an excluded token falls into a bucket beyond the last, is neither key nor
    query, and its output is 0. causal: j <= i. Which keys a query meets depends on all tokens even then. Gradients flow
    through qk as query and as key and through v, none through hashing. ValueError for shapes, values and unknown
    arguments, TypeError for dtypes. Source: Kitaev et al. 2020 "Reformer" §2, with the scale of their code (trax).
    """
    a = _lsh("lsh_attention", qk, v, rotations, **params)
    return a.w @ cast(Array, a.v)


lsh_attention_weights = derived_weights(
    lsh_attention,
    _lsh,
    doc="The weights w (..., n, n) of `lsh_attention`, summed over rounds; exactly 0 for tokens that do not meet.",
)
lsh_attention_vjp, lsh_attention_magnitudes = derived_gradients(
    lsh_attention,
    _lsh,
    """Gradients {"qk", "v"} of `lsh_attention`, with the buckets as constants.

    dw = do v^T, ds = w (dw - Σ_j w dw), dk̂ = ds^T qk, dqk = ds k̂ + (dk̂ - k̂ (k̂·dk̂))/√(‖x‖² + 10⁻⁶ d), dv = w^T do.
    """,
    'What rounding errors of "o" and the gradients are measured against: all summands in absolute value.',
    pull=_pull,
)
