"""SimA (Koohpayegani & Pirsiavash 2022): q and k normalised by the L1 norm of each channel over the tokens, no
softmax."""

from typing import NamedTuple, Unpack

from attnkit._core import check, quadratic
from attnkit._core.derived import vjp_like, weights_like
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.mask import positions
from attnkit._core.special import magnitude
from attnkit._core.tokens import Tokens, both, chosen, gradient_like, join_heads, key_mask, split_heads, valid_keys
from attnkit._core.typing import A, Array, Impl, Keywords, Namespace


class GroupedTokens(Tokens, total=False):
    """`Tokens`, with heads in groups."""

    enable_gqa: bool


class _Options(GroupedTokens, total=False):
    eps: float


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    """Shapes as in every attention op; where L = S, padded keys need padded queries."""
    c = check.attention_context(op, arrays, options)
    hidden = [name for name in ("mask", "key_lengths") if options.get(name) is not None]
    if hidden and options.get("query_mask") is None and c.queries == c.keys:
        text = f"with {hidden[0]} where L = S (all True if every query counts): it decides the norm of q; got None"
        raise ValueError(f"{op}: query_mask must be given {text}")
    return c


OWN = {"mask": key_mask}


class _Side(NamedTuple):
    """q or k with split heads: x, 0 at invalid tokens, x̂ = x/norm, and whether Σ_t |x| exceeds eps."""

    x: Array  # (..., n, d)
    hat: Array  # (..., n, d)
    norm: Array  # (..., 1, d)
    above: Array  # (..., 1, d)


def _side(xp: Namespace, x: Array, valid: Array | None, eps: float) -> _Side:
    x = chosen(xp, valid, x)
    total = xp.sum(magnitude(xp, x), axis=-2, keepdims=True)
    above = total > eps
    norm = xp.where(above, total, eps)
    return _Side(x, x / norm, norm, above)


def _gradient(xp: Namespace, side: _Side, dhat: Array) -> Array:
    """dx = (dx̂ - sign(x) Σ_t dx̂ x̂)/norm, the second term only where the norm is not eps."""
    along = xp.where(side.above, xp.sum(dhat * side.hat, axis=-2, keepdims=True), 0.0)
    return (dhat - xp.sign(side.x) * along) / side.norm


class _Inputs(NamedTuple):
    q: _Side
    k: _Side
    v: Array | None  # (..., S, e)
    live: Array | None  # (..., L) valid queries
    seen: Array | None  # (..., S) valid keys
    shared: int | None  # heads of k, where they are in groups


def _any(xp: Namespace, valid: Array | None, x: Array) -> Array | None:
    """Whether x has a valid token; None if it has."""
    if valid is None and x.shape[-2] == 0:
        valid = positions(xp, x, 0, 0) < 0
    return None if valid is None else xp.any(valid, axis=-1, keepdims=True)


def _prepare(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array | None,
    *,
    eps: float = 1e-12,
    mask: Array | None = None,
    key_lengths: Array | int | None = None,
    query_mask: Array | None = None,
    enable_gqa: bool = False,
) -> _Inputs:
    dtype = quadratic.compute_dtype(xp, q)
    shared = k.shape[-3] if enable_gqa else None
    live = split_heads(xp, query_mask, shared, -2)
    visible = split_heads(xp, valid_keys(xp, k, k.shape[-2], mask, key_lengths), shared, -2)
    # tokens without a valid token on the other side do not contribute
    live, visible = both(live, _any(xp, visible, k)), both(visible, _any(xp, live, q))
    q, k = (split_heads(xp, quadratic.cast(xp, x, dtype), shared) for x in (q, k))
    if v is not None:
        v = chosen(xp, visible, split_heads(xp, quadratic.cast(xp, v, dtype), shared))
    return _Inputs(_side(xp, q, live, eps), _side(xp, k, visible, eps), v, live, visible, shared)


@operation_checked_by(_context, OWN)
def sima_attention(q: A, k: A, v: A, *, eps: float = 1e-12, impl: Impl = "auto", **tokens: Unpack[GroupedTokens]) -> A:
    """o = q̂ (k̂ᵀ v) with x̂_tc = x_tc/max(Σ_t |x_tc|, eps) over the valid tokens t, for q and for k.

    Koohpayegani & Pirsiavash 2022 §3. Time O(L d e): no (L, S) array. No scale; the implied weights may be negative.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        eps: the least norm, 1e-12 as in the official code.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **tokens: `mask`, a key mask (..., 1, S) or (S,), and `key_lengths`: the valid keys; `query_mask` (..., L): the
            valid queries, which all enter the norm of q; `enable_gqa`. With hidden keys and L = S `query_mask` is
            required. There is no causal form: every output depends on every query.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); 0 for a masked query and where no
        key is valid.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(q)
    a = _prepare(xp, q, k, v, eps=eps, **tokens)
    joined = join_heads(xp, a.q.hat @ (xp.matrix_transpose(a.k.hat) @ a.v), a.shared)
    return quadratic.cast_for(q, xp, joined, q.dtype)


@operation_checked_by(_context, OWN)
@weights_like(sima_attention)
def sima_attention_weights(q: Array, k: Array, **options: Unpack[_Options]) -> Array:
    """The implied weights q̂ k̂ᵀ (..., L, S) of `sima_attention` in the dtype of q, 0 where query or key is not valid."""
    xp = namespace(q)
    a = _prepare(xp, q, k, None, **options)
    return quadratic.cast(xp, join_heads(xp, a.q.hat @ a.k.hat.mT, a.shared), q.dtype)


@operation_checked_by(_context, OWN)
@vjp_like(sima_attention)
def sima_attention_vjp(q: Array, k: Array, v: Array, do: Array, **options: Unpack[_Options]) -> dict[str, Array]:
    """Gradients {"q", "k", "v"} of `sima_attention` for the cotangent do, in time O(L d e).

    dq̂ = do (k̂ᵀ v)ᵀ, dk̂ = v (q̂ᵀ do)ᵀ, dv = k̂ (q̂ᵀ do); dx = (dx̂ - sign(x) Σ_t dx̂ x̂)/Σ_t |x| where that sum exceeds eps,
    dx̂/eps elsewhere.
    """
    xp = namespace(q)
    a = _prepare(xp, q, k, v, **options)
    do = chosen(xp, a.live, split_heads(xp, quadratic.cast(xp, do, a.q.x.dtype), a.shared))
    assert a.v is not None
    values, from_queries = a.k.hat.mT @ a.v, a.q.hat.mT @ do
    of_q = chosen(xp, a.live, _gradient(xp, a.q, do @ values.mT))
    of_k = chosen(xp, a.seen, _gradient(xp, a.k, a.v @ from_queries.mT))
    of_v = chosen(xp, a.seen, a.k.hat @ from_queries)
    return {
        "q": gradient_like(xp, of_q, q, a.shared),
        "k": gradient_like(xp, of_k, k, a.shared),
        "v": gradient_like(xp, of_v, v, a.shared),
    }
