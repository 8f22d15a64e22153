"""Nyströmformer attention: three softmaxes through the means of segments, and a cubic iteration for an inverse.

Letters: n tokens, m landmarks, d and e features, T inverse steps. What Linformer shares with it is here too.
"""

from dataclasses import dataclass
from typing import Required, Unpack, cast

import numpy as np

from attnkit_reference._check import Array, cotangent, number
from attnkit_reference._core import Rows, Scores, Tokens, reduce_to, scores, transposed
from attnkit_reference._op import Gradients, derived_gradients, derived_weights, keywords_of
from attnkit_reference.lowrank.newton import column_sums, whole
from attnkit_reference.lowrank.soft import refuse_pair_mask
from attnkit_reference.softmax import softmax_rows

INITS = ("exact", "batch_max")


def masked_softmax(s: Array, visible: Array) -> Array:
    """exp(s)/Σ exp(s) over visible entries; 0 elsewhere and in rows without any."""
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf, where=visible)
    e = np.exp(np.where(visible, s - np.where(np.isfinite(top), top, 0.0), -np.inf))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total > 0, total, 1.0)


def softmax_pull(w: Array, dw: Array, size: Array | None = None) -> Array:
    """ds = w (dw - Σ w dw); with the absolute value `size` of dw the same sum of absolute values."""
    if size is not None:
        ds: Array = w * (size + np.abs(np.sum(w * dw, axis=-1, keepdims=True)))
    else:
        ds = w * (dw - np.sum(w * dw, axis=-1, keepdims=True))
    return ds


def like_output(op: str, do: Array, shape: tuple[int, ...], live: Array) -> Array:
    return np.where(live[..., None], cotangent(op, "do", do, shape), 0.0)


class Options(Tokens, total=False):
    """The keyword arguments of `nystrom_attention`."""

    num_landmarks: Required[int]
    inverse_steps: int
    init: str
    scale: float | None


@dataclass(frozen=True)
class Nystrom:
    """One call: o = K1 Z (K3 v), or exact softmax for items with at most m valid tokens."""

    sc: Scores
    q: Array  # (..., n, d), 0 at invalid tokens
    k: Array
    v: Array | None
    valid: Array  # (..., n) bool
    exact: Array  # (..., 1, 1) bool: this item uses exact softmax
    average: Array  # (..., m, n): rows are the means over segments
    k1: Array  # (..., n, m)
    k2: Array  # (..., m, m)
    k3: Array  # (..., m, n)
    first: Array  # (..., m, m): derivative of the norm by the entries of k2, coupled over items for batch_max
    norm: Array  # (..., 1, 1)
    inverses: list[Array]  # Z_0 .. Z_T
    visible: Array  # (..., n, n) pairs of valid tokens
    init: str
    arrays: dict[str, Array]


def segment_means(valid: Array, num_landmarks: int) -> Array:
    """(..., m, n): row i averages the i-th segment of the valid tokens, which m - (n mod m) segments of floor(n/m)
    tokens, then n mod m of one more, partition in order. Fewer than m tokens give segments of one token.
    """
    average = np.zeros((*valid.shape[:-1], num_landmarks, valid.shape[-1]))
    for item in np.ndindex(valid.shape[:-1]):
        tokens = np.flatnonzero(valid[item])
        m = min(num_landmarks, len(tokens))
        short, longer = divmod(len(tokens), max(m, 1))
        start = 0
        for i in range(m):
            stop = start + short + (i >= m - longer)
            average[(*item, i, tokens[start:stop])] = 1.0 / (stop - start)
            start = stop
    return average


def cubic_inverses(k2: Array, norm: Array, steps: int) -> list[Array]:
    """Z_0 .. Z_T: Z_0 = K^T/norm, Z <- Z (13 I - KZ (15 I - KZ (7 I - KZ)))/4."""
    eye = np.eye(k2.shape[-1])
    inverses = [transposed(k2) / np.where(norm > 0, norm, 1.0)]
    for _ in range(steps):
        z = inverses[-1]
        kz = k2 @ z
        inverses.append(0.25 * z @ (13.0 * eye - kz @ (15.0 * eye - kz @ (7.0 * eye - kz))))
    return inverses


def cubic_pullback(a: Nystrom, dz: Array) -> tuple[Array, Array]:
    """dK for a cotangent of Z_T and the absolute value of its summands, back through every step and Z_0."""
    k2, eye = a.k2, np.eye(a.k2.shape[-1])
    dk, size = np.zeros(k2.shape), np.zeros(k2.shape)
    for z in a.inverses[-2::-1]:
        kz = k2 @ z
        inner = 7.0 * eye - kz
        middle = 15.0 * eye - kz @ inner
        outer = 13.0 * eye - kz @ middle
        d_outer = 0.25 * transposed(z) @ dz
        d_middle = -transposed(kz) @ d_outer
        d_inner = -transposed(kz) @ d_middle
        d_kz = -d_outer @ transposed(middle) - d_middle @ transposed(inner) - d_inner
        dk, size = dk + d_kz @ transposed(z), size + np.abs(d_kz) @ np.abs(transposed(z))
        dz = 0.25 * dz @ transposed(outer) + transposed(k2) @ d_kz
    safe = np.where(a.norm > 0, a.norm, 1.0)
    through_norm = -np.sum(dz * transposed(k2), axis=(-2, -1), keepdims=True) / safe**2
    if a.init == "batch_max":
        through_norm = np.sum(np.where(a.exact, 0.0, through_norm))
    return dk + transposed(dz) / safe + through_norm * a.first, size + np.abs(transposed(dz)) / safe


def _norm(k2: Array, exact: Array, init: str) -> tuple[Array, Array]:
    """‖K‖₁ (..., 1, 1) and its derivative by the entries of K: 1 in the first column with the maximal sum.

    batch_max: the maximum over all items that do not use exact softmax, and its first column overall.
    """
    if init == "exact" or k2.size == 0:
        norm, first = column_sums(k2)
        return norm, np.broadcast_to(first, k2.shape).astype(np.float64)
    sums = np.where(exact, 0.0, k2.sum(axis=-2, keepdims=True))
    first = np.zeros(sums.shape)
    first.reshape(-1)[int(np.argmax(sums))] = 1.0
    return np.full(exact.shape, sums.max()), np.broadcast_to(first, k2.shape)


def _nystrom(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    num_landmarks: int,
    inverse_steps: int = 6,
    init: str = "exact",
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    query_mask: Array | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Nystrom:
    m, steps = whole(op, "num_landmarks", num_landmarks, 1), whole(op, "inverse_steps", inverse_steps, 0)
    if init not in INITS:
        raise ValueError(f"{op}: init; expected 'exact' or 'batch_max', got {init!r}")
    refuse_pair_mask(op, mask)
    sc = scores(
        op,
        q,
        k,
        v,
        mask=mask,
        key_lengths=key_lengths,
        query_mask=query_mask,
        scale=None if scale is None else number(op, "scale", scale),
        enable_gqa=enable_gqa,
    )
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"{op}: k must have the tokens of q; expected (..., {q.shape[-2]}, d), got {k.shape}")
    valid = np.diagonal(sc.visible, axis1=-2, axis2=-1)
    exact = valid.sum(axis=-1)[..., None, None] <= m
    q, k = (np.where(valid[..., None], x, 0.0) for x in (sc.q, sc.k))
    average = segment_means(valid, m)
    slots = cast(Array, average.any(axis=-1))
    q_means, k_means = average @ q, average @ k
    k1 = masked_softmax(sc.scale * q @ transposed(k_means), valid[..., :, None] & slots[..., None, :])
    k2 = masked_softmax(sc.scale * q_means @ transposed(k_means), slots[..., :, None] & slots[..., None, :])
    k3 = masked_softmax(sc.scale * q_means @ transposed(k), slots[..., :, None] & valid[..., None, :])
    norm, first = _norm(k2, exact, init)
    inverses = cubic_inverses(k2, norm, steps)
    visible = valid[..., :, None] & valid[..., None, :]
    values = None if sc.v is None else np.where(valid[..., None], sc.v, 0.0)
    arrays = {"q": q, "k": k} if values is None else {"q": q, "k": k, "v": values}
    return Nystrom(
        sc, q, k, values, valid, exact, average, k1, k2, k3, first, norm, inverses, visible, init, arrays
    )  # fmt: skip


def _exact_rows(a: Nystrom) -> Rows:
    op, arrays = a.sc.op, [np.broadcast_to(x, (*a.valid.shape[:-1], *x.shape[-2:])) for x in a.arrays.values()]
    return softmax_rows(op, *arrays, mask=a.visible, scale=a.sc.scale)


def _nystrom_weights(a: Nystrom) -> Array:
    """(K1 Z) K3, or w for items with exact softmax."""
    return np.where(a.exact, _exact_rows(a).w, a.k1 @ a.inverses[-1] @ a.k3)


def _nystrom_output(a: Nystrom, absolute: bool = False) -> Array:
    """K1 (Z (K3 v)), or w v for items with exact softmax; or with the last product of absolute values."""
    v, w = cast(Array, a.v), _exact_rows(a).w
    size = np.abs if absolute else np.asarray
    return np.where(a.exact, w @ size(v), a.k1 @ size(a.inverses[-1] @ (a.k3 @ v)))


def _nystrom_pull(a: Nystrom, do: Array, absolute: bool = False) -> Gradients:
    v = cast(Array, a.v)
    do = like_output(a.sc.op, do, (*a.valid.shape, v.shape[-1]), a.valid)
    exact = _exact_pull(a, np.where(a.exact, do, 0.0), absolute)
    through = _landmark_pull(a, np.where(a.exact, 0.0, do), absolute)
    groups = {"k": a.sc.groups, "v": a.sc.groups}
    grads = {
        name: reduce_to(exact[name] + through[name], shape, groups.get(name, 1)) for name, shape in a.sc.shapes.items()
    }
    return {"o": _nystrom_output(a, absolute=True), **grads} if absolute else grads


def _exact_pull(a: Nystrom, do: Array, absolute: bool) -> Gradients:
    w, v = _exact_rows(a).w, cast(Array, a.v)
    size = np.abs if absolute else np.asarray
    dw = do @ transposed(v)
    ds = softmax_pull(w, dw, np.abs(dw) if absolute else None)
    scale = size(a.sc.scale)
    return {"q": scale * ds @ size(a.k), "k": scale * transposed(ds) @ size(a.q), "v": transposed(w) @ size(do)}


def _landmark_pull(a: Nystrom, do: Array, absolute: bool) -> Gradients:
    """o = K1 Y, Y = Z U, U = K3 v; then back through three softmaxes and the means of segments."""
    v, z, size = cast(Array, a.v), a.inverses[-1], np.abs if absolute else np.asarray
    u = a.k3 @ v
    y, dy = z @ u, transposed(a.k1) @ do
    du = transposed(z) @ dy
    dk1, dk3 = do @ transposed(y), du @ transposed(v)
    dk2, dk2_size = cubic_pullback(a, dy @ transposed(u))
    ds1, ds2, ds3 = (
        softmax_pull(w, dw, summands if absolute else None)
        for w, dw, summands in ((a.k1, dk1, np.abs(dk1)), (a.k2, dk2, dk2_size), (a.k3, dk3, np.abs(dk3)))
    )
    scale, back = size(a.sc.scale), transposed(a.average)
    q_means, k_means = size(a.average @ a.q), size(a.average @ a.k)
    dq = ds1 @ k_means + back @ (ds2 @ k_means + ds3 @ size(a.k))
    dk = transposed(ds3) @ q_means + back @ (transposed(ds1) @ size(a.q) + transposed(ds2) @ q_means)
    return {"q": scale * dq, "k": scale * dk, "v": transposed(a.k3) @ size(du)}


@keywords_of(_nystrom)
def nystrom_attention(q: Array, k: Array, v: Array, **params: Unpack[Options]) -> Array:
    """o = K1 Z K3 v with K1 = softmax(s(q, k̃)), K2 = softmax(s(q̃, k̃)), K3 = softmax(s(q̃, k)), Z the inverse of K2.

    q (..., n, d), k (..., n, d), v (..., n, e) -> o (..., n, e); s(x, y) = scale x y^T, 1/√d by default. The landmarks
    q̃, k̃ are means over `num_landmarks` segments of the valid tokens of each item, in order: m - (n mod m) segments of
    floor(n/m) tokens, then n mod m of one more. An item with at most m valid tokens gets exact softmax attention.

    Z_0 = K2^T/‖K2‖₁ and `inverse_steps` times Z <- Z (13 I - K2 Z (15 I - K2 Z (7 I - K2 Z)))/4, which 6 steps do not
    bring to convergence: the steps are part of the definition. init="batch_max" divides by the largest ‖K2‖₁ of all
    leading axes instead (the default of the authors' code; it makes an item depend on its batch-mates).

    A token is valid if mask, a key mask (..., 1, n) or (n,), key_lengths and query_mask (..., n) allow it; an invalid
    one is neither key nor query nor part of a mean: its output is 0. ValueError for shapes, values and unknown
    arguments, TypeError for dtypes. Source: Xiong et al. 2021, Algorithm 1; iteration: Razavi et al. 2014.
    """
    return _nystrom_output(_nystrom("nystrom_attention", q, k, v, **params))


nystrom_attention_weights = derived_weights(
    nystrom_attention,
    _nystrom,
    _nystrom_weights,
    doc="K1 Z K3 (..., n, n), the matrix that `nystrom_attention` multiplies v by; entries may be negative.",
)


@keywords_of(_nystrom)
def nystrom_attention_weights_magnitudes(q: Array, k: Array, **params: Unpack[Options]) -> dict[str, Array]:
    """What rounding errors of the weights are measured against: |K1 Z| K3, and (K1 |Z|) K3 before it, in which an entry
    of Z has the size from which its last step brought it down: that is a difference.
    """
    a = _nystrom("nystrom_attention_weights", q, k, None, **params)
    z = a.inverses[-1]
    sizes = {"w": np.abs(a.k1 @ z) @ a.k3, "w_before": a.k1 @ np.abs(a.inverses[-2:]).max(axis=0) @ a.k3}
    return {name: np.where(a.exact, _exact_rows(a).w, size) for name, size in sizes.items()}


nystrom_attention_vjp, nystrom_attention_magnitudes = derived_gradients(
    nystrom_attention,
    _nystrom,
    """Gradients {"q", "k", "v"} of `nystrom_attention`: exact, through every step, Z_0 and its norm, whose maximum
    passes its gradient to the first column (of the whole batch for init="batch_max").
    """,
    """What rounding errors are measured against: "o" and the gradients with the summands of their last contraction in
    absolute value.
    """,
    pull=_nystrom_pull,
)
