"""Softmax attention: the baseline of every other variant."""

import math
from typing import NamedTuple, Unpack

from attnkit._core import check, quadratic
from attnkit._core.derived import with_rows
from attnkit._core.dispatch import namespace, operation
from attnkit._core.family import Family, recorded, weights_of
from attnkit._core.special import stop_gradient
from attnkit._core.typing import A, Array, Bindings, Common, Factor, Impl, Namespace


class Exponentials(NamedTuple):
    """u = exp(s - m), 0 on invisible pairs, m the maximum of the visible scores and of the sink c, Σu, and exp(c - m),
    None without a sink; all but u (..., L, 1). Rows without a finite visible score have m = 0 and no sink.

    Gradients do not flow through m: it cancels.
    """

    u: Array  # (..., L, S)
    m: Array  # (..., L, 1)
    total: Array  # (..., L, 1)
    of_sink: Array | None  # (..., L, 1)

    @property
    def z(self) -> Array:
        """Σu + exp(c - m), 0 on rows without a finite visible score."""
        return self.total if self.of_sink is None else self.total + self.of_sink


def exponentials(xp: Namespace, s: Array, a: quadratic.Inputs, sink: Factor | None = None) -> Exponentials:
    """Those of scores and of a sink, None or as the op takes it."""
    if a.pairs is not None:
        s = xp.where(a.pairs, s, -math.inf)
    if a.keys == 0:
        m = xp.sum(s, axis=-1, keepdims=True) - math.inf
    else:
        m = stop_gradient(xp.max(s, axis=-1, keepdims=True))
    of_sink = None
    if sink is not None:
        m, of_sink = _with_sink(xp, m, a, sink)
    elif _may_be_empty(a):
        m = xp.where(m == -math.inf, 0.0, m)
    u = xp.exp(s - m)
    return Exponentials(u, m, xp.sum(u, axis=-1, keepdims=True), of_sink)


def _with_sink(xp: Namespace, m: Array, a: quadratic.Inputs, sink: float | Array) -> tuple[Array, Array]:
    """The maximum of m and of the sink c, and exp(c - it); both 0 where m = -inf: null rows have no sink."""
    c = quadratic.number(xp, sink, a.dtype)
    c = c if check.is_learned(c) else xp.full_like(m, c)
    top = xp.maximum(m, stop_gradient(c))
    if not _may_be_empty(a):
        return top, xp.exp(c - top)
    live = m != -math.inf
    top = xp.where(live, top, 0.0)
    return top, xp.exp(xp.where(live, c - top, -math.inf))


def _may_be_empty(a: quadratic.Inputs) -> bool:
    """Whether a row may have no finite visible score: only through masks, a bias of -inf, or no keys."""
    return a.pairs is not None or a.bias is not None or a.keys == 0


def inverse(xp: Namespace, z: Array, a: quadratic.Inputs) -> Array:
    """1/z, and 1 where z is 0."""
    return 1.0 / (xp.where(z == 0, 1.0, z) if _may_be_empty(a) else z)


def weigh(xp: Namespace, s: Array, a: quadratic.Inputs, sink: Factor | None = None) -> tuple[Array, Array]:
    """u = exp(s - m) and the row factor 1/(Σu + exp(c - m)), which is 1 where the sum is 0."""
    e = exponentials(xp, s, a, sink)
    return e.u, inverse(xp, e.z, a)


def logsumexp(xp: Namespace, e: Exponentials) -> Array:
    """m + log z; beside a sink above all scores log(1 + Σu), to all digits where Σu is small, as c may be 0."""
    z = e.z
    log_z = xp.log(xp.where(z == 0, 1.0, z))
    if e.of_sink is not None:
        above = e.of_sink == 1
        less_1 = e.total + (e.of_sink - 1.0)  # its value is Σu, its gradient is that of z
        log_z = xp.where(above, xp.log1p(xp.where(above, less_1, 0.0)), log_z)
    return xp.where(z == 0, -math.inf, e.m + log_z)[..., 0]


def score_gradient(
    xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array, sink: Factor | None = None
) -> Array:
    """ds_j = w_j (dw_j - Σ w dw)."""
    return w * (dw - xp.sum(w * dw, axis=-1, keepdims=True))


def beside(
    xp: Namespace,
    s: Array,
    a: quadratic.Inputs,
    w: Array,
    dw: Array,
    ds: Array,
    like: dict[str, Array],
    sink: Factor | None = None,
) -> dict[str, Array]:
    """dc = -Σ_i p_i Σ_j w_ij dw_ij, if the sink is an array."""
    if "sink" not in like:
        return {}
    return {"sink": _of_sink(xp, s, a, sink, -xp.sum(w * dw, axis=-1, keepdims=True), like["sink"])}


def _of_sink(xp: Namespace, s: Array, a: quadratic.Inputs, sink: float | Array | None, x: Array, like: Array) -> Array:
    """Σ_i p_i x_i, p = exp(c - lse), for x (..., L, 1), which may be NaN in null rows."""
    e = exponentials(xp, s, a, sink)
    share = e.of_sink * inverse(xp, e.z, a)
    return quadratic.number_gradient(xp, xp.where(share == 0, 0.0, share * x), like)


SOFTMAX = Family(
    "softmax_attention",
    weigh,
    score_gradient,
    beside=beside,
    numbers=("sink",),
    not_of_kernels=("sink",),
    output_only=("return_lse",),
)


@with_rows
@recorded(SOFTMAX)
@operation
def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    sink: float | Array | None = None,
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = exp(s_ij) / (exp(c) + Σ_t exp(s_it)) over the keys t visible to query i; without
    a sink c exp(c) is 0.

    Vaswani et al. 2017 eq 1; α_ij in Wortsman et al. 2023 eq 1. s_ij = scale·q_i·k_j + bias_ij.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        return_lse: also return lse_i = log(exp(c) + Σ_t exp(s_it)), (..., L), in the compute dtype; -inf on null rows.
        sink: c, the score of what has a share of each row but no value, so that weights sum to less than 1. None, and
            -inf, is softmax; 0 is "softmax off by one". A number, or an array of any real float dtype, () or (H,) with
            a number for each head, which is differentiable and not read: gpt-oss (OpenAI 2025) learns it in each head.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias` (-inf allowed), `causal`, `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d),
            `enable_gqa`, `dropout_mask`, `dropout`; see docs/semantics.md. A
            scale that is an array, () or (H,) with a number for each head, is differentiable.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_lse` (o, lse).
        A row that sees no key, or only scores of -inf, is null whatever the sink: w = 0, o = 0, all its gradients 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(q)
    a = quadratic.prepare(xp, q, k, v, **common)
    e = exponentials(xp, quadratic.scores(xp, a), a, sink)
    o = quadratic.cast(xp, quadratic.output(xp, a, e.u, inverse(xp, e.z, a)), q.dtype)
    return (o, xp.broadcast_to(logsumexp(xp, e), o.shape[:-1])) if return_lse else o


softmax_attention_weights = weights_of(softmax_attention, SOFTMAX)


@operation
def softmax_attention_vjp(
    q: A,
    k: A,
    v: A,
    do: A | None,
    dlse: A | None = None,
    *,
    sink: float | A | None = None,
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> dict[str, A]:
    """Gradients {"q", "k", "v"}, "bias" if one was passed, "scale" and "sink" where they are arrays, for the cotangents
    do and dlse (None = 0).

    With dw = do vᵀ ⊙ dropout: ds = w ⊙ (dw - Σ_j w dw + dlse), dq = scale·ds k, dk = scale·dsᵀ q,
    dv = (w ⊙ dropout)ᵀ do, dbias = ds, dscale = Σ ds ⊙ q kᵀ, dsink = Σ_i exp(c - lse_i) (dlse_i - Σ_j w dw), 0 on null
    rows; each has the shape and dtype of its argument.
    """
    xp = namespace(q)
    a, own = quadratic.prepare(xp, q, k, v, **common), {"sink": sink}
    s = quadratic.scores(xp, a)
    like: Bindings = {"q": q, "k": k, "v": v, "bias": common.get("bias"), **SOFTMAX.learned(own, common)}
    from_lse = None if dlse is None else lambda w: w * dlse[..., None]
    grads = SOFTMAX.gradients(xp, a, s, like, do, own, of_scores=from_lse)
    if dlse is not None and "sink" in like:
        grads["sink"] = grads["sink"] + _of_sink(xp, s, a, sink, dlse[..., None], like["sink"])
    return quadratic.rounded(xp, grads, like)
