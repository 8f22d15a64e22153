"""SimA: q and k are normalised, each channel by its L1 norm over the tokens, instead of the scores."""

from typing import NamedTuple, Unpack, cast

import numpy as np

from attnkit_reference._check import Array, cotangent, number
from attnkit_reference._core import Scores, Tokens, reduce_to, scores, transposed
from attnkit_reference._op import derived_gradients, derived_weights, keywords_of
from attnkit_reference.lowrank.soft import refuse_pair_mask


class Options(Tokens, total=False):
    """The keyword arguments of `sima_attention`."""

    eps: float


class _Tokens(NamedTuple):
    """x̂ = x/max(Σ_t |x|, eps) over the valid tokens, per channel."""

    x: Array  # (..., n, d), 0 where the token is not valid
    hat: Array  # (..., n, d)
    norm: Array  # (..., 1, d)
    above: Array  # (..., 1, d): whether Σ_t |x| > eps: below, the norm is a constant
    valid: Array  # (..., n, 1)

    def gradient(self, dhat: Array, absolute: bool = False) -> Array:
        """dx = (dx̂ - sign(x) Σ_t dx̂ x̂)/norm; |x| has slope 0 at 0."""
        along = np.sum(dhat * (np.abs(self.hat) if absolute else self.hat), axis=-2, keepdims=True)
        slope = np.where(self.above, np.sign(self.x), 0.0)
        dx = dhat + np.abs(slope) * along if absolute else dhat - slope * along
        return np.where(self.valid, dx / self.norm, 0.0)


def _tokens(x: Array, valid: Array, eps: float) -> _Tokens:
    x = np.where(valid, x, 0.0)
    total = np.abs(x).sum(axis=-2, keepdims=True)
    norm = np.where(total > eps, total, eps)
    return _Tokens(x, x / norm, norm, total > eps, valid)


class _Sima(NamedTuple):
    scores: Scores
    q: _Tokens
    k: _Tokens
    v: Array | None  # (..., S, e), 0 where the key is not valid


def _sima(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    eps: float = 1e-12,
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    query_mask: Array | None = None,
    enable_gqa: bool = False,
) -> _Sima:
    """The arguments, checked, and q and k normed over their valid tokens."""
    eps = number(op, "eps", eps, positive=True)
    refuse_pair_mask(op, mask)
    sc = scores(
        op, q, k, v, mask=mask, key_lengths=key_lengths, query_mask=query_mask, enable_gqa=enable_gqa, scale=1.0
    )
    hidden = mask is not None or key_lengths is not None
    if hidden and query_mask is None and sc.visible.shape[-2] == sc.visible.shape[-1]:
        text = "expected one beside a key mask where L = S (all True if every query counts), got None"
        raise ValueError(f"{op}: query_mask; {text}")
    live, seen_keys = (np.logical_or.reduce(sc.visible, axis=axis)[..., None] for axis in (-1, -2))
    values = None if sc.v is None else np.where(seen_keys, sc.v, 0.0)
    return _Sima(sc, _tokens(sc.q, live, eps), _tokens(sc.k, seen_keys, eps), values)


def _pull(a: _Sima, do: Array, absolute: bool = False) -> dict[str, Array]:
    """dq, dk, dv, or the sums of the absolute values of their summands and those of o."""
    sc, v = a.scores, cast(Array, a.v)
    do = cotangent(sc.op, "do", do, (*sc.n.shape, v.shape[-1]))
    size = np.abs if absolute else np.asarray
    q_hat, k_hat, v, do = size(a.q.hat), size(a.k.hat), size(v), size(np.where(a.q.valid, do, 0.0))
    values, from_queries = transposed(k_hat) @ v, transposed(q_hat) @ do  # (..., d, e)
    full = {
        "q": a.q.gradient(do @ transposed(values), absolute),
        "k": a.k.gradient(v @ transposed(from_queries), absolute),
        "v": np.where(a.k.valid, k_hat @ from_queries, 0.0),
    }
    grads = {name: reduce_to(x, sc.shapes[name], 1 if name == "q" else sc.groups) for name, x in full.items()}
    return {"o": q_hat @ values, **grads} if absolute else grads


def _weights(a: _Sima) -> Array:
    return np.where(a.scores.visible, a.q.hat @ transposed(a.k.hat), 0.0)


@keywords_of(_sima)
def sima_attention(q: Array, k: Array, v: Array, **params: Unpack[Options]) -> Array:
    """o = q̂ (k̂^T v) with x̂_tc = x_tc/max(Σ_t |x_tc|, eps) for q and for k: an L1 norm over the tokens, per channel.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e); no scale, no softmax; weights may be negative. The
    sums run over the valid tokens: queries with query_mask True, keys that `mask` (a key mask (..., 1, S) or (S,)) and
    key_lengths allow. Every query depends on the others, so there is no causal form. Where L = S a key mask needs
    query_mask beside it: padded keys are padded queries too, and those would enter the norm of q.

    A query that is masked, or whose sequence has no valid key, gives 0. ValueError for shapes, values and unknown
    arguments, TypeError for dtypes. Source: Koohpayegani & Pirsiavash 2022 "SimA: Simple Softmax-free Attention" §3.
    """
    a = _sima("sima_attention", q, k, v, **params)
    o: Array = a.q.hat @ (transposed(a.k.hat) @ cast(Array, a.v))
    return o


sima_attention_weights = derived_weights(
    sima_attention, _sima, _weights, doc="The weights q̂ k̂^T (..., L, S) of `sima_attention`; exactly 0 where invisible."
)


@keywords_of(_sima)
def sima_attention_weights_magnitudes(q: Array, k: Array, **params: Unpack[Options]) -> dict[str, Array]:
    """What rounding errors of the weights are measured against: |q̂| |k̂|^T."""
    a = _sima("sima_attention_weights", q, k, **params)
    return {"w": np.where(a.scores.visible, np.abs(a.q.hat) @ np.abs(transposed(a.k.hat)), 0.0)}


sima_attention_vjp, sima_attention_magnitudes = derived_gradients(
    sima_attention,
    _sima,
    """Gradients {"q", "k", "v"} of `sima_attention`.

    dq̂ = do (k̂^T v)^T, dk̂ = v (q̂^T do)^T, dv = k̂ (q̂^T do); dx = (dx̂ - sign(x) Σ_t dx̂ x̂)/Σ_t |x| where that sum exceeds
    eps, dx̂/eps elsewhere; sign(0) = 0.
    """,
    'What rounding errors of "o" and the gradients are measured against: all summands in absolute value.',
    pull=_pull,
)
