"""Stick-breaking attention: from the nearest key to the farthest, each takes its share of what is left of a stick."""

from typing import Unpack

from attnkit._core import quadratic
from attnkit._core.activations import ACTIVATIONS
from attnkit._core.derived import with_rows
from attnkit._core.dispatch import namespace, operation
from attnkit._core.family import Family, recorded, weights_of
from attnkit._core.special import logistic, sum_before
from attnkit._core.typing import Array, Bindings, Impl, Keywords, Namespace, WithoutCausal

_softplus = ACTIVATIONS["softplus"].h


def seeing(
    attend_current: bool = False, window: tuple[int | None, int | None] | None = None, **common: object
) -> Keywords:
    """The keys before a query's own position, or up to it: causality, and a window that ends one key earlier."""
    if not attend_current:
        window = (None if window is None else window[0], -1)
    return {**common, "causal": True, "window": window}


def _taken(xp: Namespace, s: Array, a: quadratic.Inputs) -> Array:
    """softplus(s) = -log(1 - β) on visible pairs, 0 on others, which leave the stick as it is."""
    return quadratic.masked(xp, a, _softplus(xp, s))


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs) -> tuple[Array, float]:
    """w_j = β_j Π_{k > j} (1 - β_k), as exp(-softplus(-s_j) - Σ_{k > j} softplus(s_k)): sums of positive numbers."""
    s = quadratic.masked(xp, a, s)
    log_w = -_softplus(xp, -s) - sum_before(xp, _taken(xp, s, a), reverse=True)
    return quadratic.masked(xp, a, xp.exp(log_w)), 1.0


def score_gradient(xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array) -> Array:
    """ds_k = (1 - β_k) w_k dw_k - β_k Σ_{j < k} w_j dw_j."""
    s, g = quadratic.masked(xp, a, s), w * dw
    return logistic(xp, -s) * g - logistic(xp, s) * sum_before(xp, g)


def _remainder(xp: Namespace, s: Array, a: quadratic.Inputs) -> Array:
    """r = Π (1 - β) (..., L, 1), 1 on rows that see no key."""
    return xp.exp(-xp.sum(_taken(xp, quadratic.masked(xp, a, s), a), axis=-1, keepdims=True))


STICK_BREAKING = Family(
    "stick_breaking_attention",
    weigh,
    score_gradient,
    common=frozenset((*quadratic.COMMON, "attend_current")),
    output_only=("return_remainder",),
    seeing=seeing,
)


def _scored(
    xp: Namespace, q: Array, k: Array, v: Array, attend_current: bool, common: Bindings
) -> tuple[quadratic.Inputs, Array]:
    a = quadratic.prepare(xp, q, k, v, **seeing(attend_current, **common))
    return a, quadratic.scores(xp, a)


@with_rows
@recorded(STICK_BREAKING)
@operation
def stick_breaking_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    attend_current: bool = False,
    return_remainder: bool = False,
    impl: Impl = "auto",
    **common: Unpack[WithoutCausal],
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = β_ij Π_{k > j} (1 - β_ik), β = sigmoid(s), over the keys visible to query i that
    lie before it; s_ij = scale·q_i·k_j + bias_ij.

    Tan et al. 2024. A stick of length 1 is broken from the nearest key to the farthest: each takes the share β of what
    is left. So positions need no embedding, and rows sum to at most 1: what nobody takes is the remainder r_i = 1 -
    Σ_j w_ij = Π_k (1 - β_ik). The authors add r_i v_i to the output, with the token's own value.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        attend_current: also see the key at the query's own position. Positions are aligned at the last token: query i
            sees keys j < i + S - L, or j ≤ i + S - L. The op is causal by itself and has no option `causal`.
        return_remainder: also return r (..., L), in the compute dtype; 1 on rows that see no key.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias` (finite), `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d), `enable_gqa`,
            `dropout_mask`, `dropout`; see docs/semantics.md. Keys that are not visible leave the stick as it is. A
            scale that is an array, () or (H,) with a number for each head, is differentiable.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_remainder` (o, r). A
        row that sees no key, such as the first one, is null: o = 0, r = 1, all its gradients 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(q)
    a, s = _scored(xp, q, k, v, attend_current, common)
    o = quadratic.cast(xp, quadratic.output(xp, a, *weigh(xp, s, a)), q.dtype)
    return (o, xp.broadcast_to(_remainder(xp, s, a)[..., 0], o.shape[:-1])) if return_remainder else o


stick_breaking_attention_weights = weights_of(stick_breaking_attention, STICK_BREAKING)


@operation
def stick_breaking_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dr: Array | None = None,
    *,
    attend_current: bool = False,
    impl: Impl = "auto",
    **common: Unpack[WithoutCausal],
) -> dict[str, Array]:
    """Gradients {"q", "k", "v"}, "bias" if one was passed and "scale" if it is an array, for the cotangents do and dr
    (None = 0).

    With dw = do vᵀ ⊙ dropout: ds_k = (1 - β_k) w_k dw_k - β_k Σ_{j < k} w_j dw_j - β_k r dr, dq = scale·ds k,
    dk = scale·dsᵀ q, dv = (w ⊙ dropout)ᵀ do, dbias = ds, dscale = Σ ds ⊙ q kᵀ; each has the shape and dtype of its
    argument.
    """
    xp = namespace(q)
    a, s = _scored(xp, q, k, v, attend_current, common)
    like = {"q": q, "k": k, "v": v, "bias": common.get("bias"), **STICK_BREAKING.learned({}, common)}

    def of_scores(w: Array) -> Array:
        assert dr is not None
        dr_of_rows = quadratic.masked_rows(xp, a, quadratic.cast(xp, dr, a.dtype)[..., None])
        return -(dr_of_rows * _remainder(xp, s, a)) * logistic(xp, s)

    grads = STICK_BREAKING.gradients(xp, a, s, like, do, {}, of_scores=None if dr is None else of_scores)
    return quadratic.rounded(xp, grads, like)
