"""Softmax attention: the baseline of every other variant."""

import math
from typing import Any, Unpack

from attnkit._core import quadratic
from attnkit._core.dispatch import namespace, operation
from attnkit._core.family import Family, recorded, weights_of
from attnkit._core.special import stop_gradient
from attnkit._core.typing import Array, Common, Impl, Namespace


def exponentials(xp: Namespace, s: Array, a: quadratic.Inputs) -> tuple[Array, Array, Array]:
    """u = exp(s - m) with 0 on invisible pairs, m the maximum of the visible scores and z = Σu, both (..., L, 1).

    Rows without a finite visible score have m = 0, u = 0 and z = 0. Gradients do not flow through m: it cancels.
    """
    if a.pairs is not None:
        s = xp.where(a.pairs, s, -math.inf)
    if a.keys == 0:
        m = xp.sum(s, axis=-1, keepdims=True)
    else:
        m = stop_gradient(xp.max(s, axis=-1, keepdims=True))
        if _may_be_empty(a):
            m = xp.where(m == -math.inf, 0.0, m)
    u = xp.exp(s - m)
    return u, m, xp.sum(u, axis=-1, keepdims=True)


def _may_be_empty(a: quadratic.Inputs) -> bool:
    """Whether a row may have no finite visible score: only through masks, a bias of -inf, or no keys."""
    return a.pairs is not None or a.bias is not None or a.keys == 0


def _inverse(xp: Namespace, z: Array, a: quadratic.Inputs) -> Array:
    """1/z, and 1 where z is 0."""
    return 1.0 / (xp.where(z == 0, 1.0, z) if _may_be_empty(a) else z)


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs) -> tuple[Array, Array]:
    """u = exp(s - m) and the row factor 1/Σu, which is 1 where the sum is 0."""
    u, _, z = exponentials(xp, s, a)
    return u, _inverse(xp, z, a)


def _logsumexp(xp: Namespace, m: Array, z: Array) -> Array:
    lse = m + xp.log(xp.where(z == 0, 1.0, z))
    return xp.where(z == 0, -math.inf, lse)[..., 0]


def score_gradient(xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Any) -> Array:
    """ds_j = w_j (dw_j - Σ w dw)."""
    return w * (dw - xp.sum(w * dw, axis=-1, keepdims=True))


SOFTMAX = Family("softmax_attention", weigh, score_gradient, output_only=("return_lse",))


@recorded(SOFTMAX)
@operation
def softmax_attention(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, impl: Impl = "auto", **common: Unpack[Common]
) -> Any:
    """o_i = Σ_j w_ij v_j with w_ij = exp(s_ij) / Σ_t exp(s_it) over the keys t visible to query i.

    Vaswani et al. 2017 eq 1; α_ij in Wortsman et al. 2023 eq 1. s_ij = scale·q_i·k_j + bias_ij.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        return_lse: also return lse_i = log Σ_t exp(s_it), (..., L), in the compute dtype; -inf on null rows.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias` (-inf allowed), `causal`, `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d),
            `enable_gqa`, `dropout_mask`, `dropout`; see docs/semantics.md. A
            scale that is an array, () or (H,) with a number for each head, is differentiable.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_lse` (o, lse).
        A row that sees no key, or only scores of -inf, is null: w = 0, o = 0, all its gradients 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(q)
    a = quadratic.prepare(xp, q, k, v, **common)
    u, m, z = exponentials(xp, quadratic.scores(xp, a), a)
    o = quadratic.cast(xp, quadratic.output(xp, a, u, _inverse(xp, z, a)), q.dtype)
    return (o, xp.broadcast_to(_logsumexp(xp, m, z), o.shape[:-1])) if return_lse else o


softmax_attention_weights = weights_of(softmax_attention, SOFTMAX)


@operation
def softmax_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dlse: Array | None = None,
    *,
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> dict[str, Array]:
    """Gradients {"q", "k", "v"}, "bias" if one was passed and "scale" if it is an array, for the cotangents do and dlse
    (None = 0).

    With dw = do vᵀ ⊙ dropout: ds = w ⊙ (dw - Σ_j w dw + dlse), dq = scale·ds k, dk = scale·dsᵀ q,
    dv = (w ⊙ dropout)ᵀ do, dbias = ds, dscale = Σ ds ⊙ q kᵀ; each has the shape and dtype of its argument.
    """
    xp = namespace(q)
    a = quadratic.prepare(xp, q, k, v, **common)
    like = {"q": q, "k": k, "v": v, "bias": common.get("bias"), **SOFTMAX.learned({}, common)}
    from_lse = None if dlse is None else lambda w: w * dlse[..., None]
    grads = SOFTMAX.gradients(xp, a, quadratic.scores(xp, a), like, do, {}, of_scores=from_lse)
    return quadratic.rounded(xp, grads, like)
