"""Forgetting attention: softmax of scores that fade by what was forgotten between key and query."""

from typing import Unpack

from attnkit._core import quadratic
from attnkit._core.derived import with_rows
from attnkit._core.dispatch import namespace, operation, operation_checked_by
from attnkit._core.family import Family, recorded, weights_of
from attnkit._core.library import library
from attnkit._core.mask import positions
from attnkit._core.special import cumulative_sum, stop_gradient, sum_before
from attnkit._core.typing import Array, Bindings, Impl, Keywords, Namespace, WithoutCausal
from attnkit.ops import softmax

# ---------------------------------------------------------------------------------------------- what fades


def running_sum(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """The running sums c of x along its last axis as high + low: differences of near sums are those of small gates,
    however many large ones come before."""
    if x.dtype == xp.float32 and library(x) != "jax":
        c = cumulative_sum(xp, x, -1, xp.float64)
        high = xp.astype(c, x.dtype)
        return high, xp.astype(c - xp.astype(high, c.dtype), x.dtype)
    high = cumulative_sum(xp, x, -1)
    before = xp.concat([xp.zeros_like(high[..., :1]), high[..., :-1]], axis=-1)
    return high, cumulative_sum(xp, x - (high - before), -1)  # what a gate lost, up to a rounding of its own size


def fading(xp: Namespace, gates: Array, at: Array, passed: Array) -> Array:
    """c_i - c_j (..., L, S) of queries at these positions, c the running sum of gates (..., S).

    Its derivatives are those of the sum of the gates between: of whole rows and columns they would cancel.
    """
    c, rest = (_differences(xp, x, at) for x in running_sum(xp, stop_gradient(gates)))
    if library(gates) not in ("torch", "jax"):  # which differentiate, and not all ways of theirs can be asked for
        return c + rest
    change = gates - stop_gradient(gates)  # 0, and whatever automatic differentiation makes of it
    return c + rest + sum_before(xp, xp.where(passed, change[..., None, :], 0.0), reverse=True)


def _differences(xp: Namespace, c: Array, at: Array) -> Array:
    """c_i - c_j, c_i = 0 before the first token."""
    first = at < 0
    own = xp.where(first, 0.0, xp.take(c, xp.where(first, 0, at), axis=-1))
    return own[..., None] - c[..., None, :]


# ---------------------------------------------------------------------------------------------- the family


def seeing(
    *, log_forget: Array, mask: Array | None = None, key_lengths: Array | int | None = None, **common: object
) -> Keywords:
    """The keys up to a query's own position, and `kept`, (..., S): the tokens that neither a key mask nor key_lengths
    hides; for all of a call, because a mask of pairs may have one query in a block."""
    kept = None
    if mask is not None and (mask.ndim < 2 or mask.shape[-2] == 1):
        kept = mask if mask.ndim < 2 else mask[..., 0, :]
    if key_lengths is not None:
        at = positions(namespace(log_forget), log_forget, 0, log_forget.shape[-1])
        shorter = at < (key_lengths if isinstance(key_lengths, int) else key_lengths[..., None])
        kept = shorter if kept is None else kept & shorter
    given = {"mask": mask, "key_lengths": key_lengths, "kept": kept}
    given = {name: x for name, x in given.items() if x is not None}
    return {**common, **given, "log_forget": log_forget, "causal": True}


def prepare(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    log_forget: Array,
    kept: Array | None = None,
    at: Array | None = None,
    **common: Unpack[quadratic.Preparing],
) -> quadratic.Inputs:
    """`quadratic.prepare`, with c_i - c_j in the bias; `at` are the positions of the queries if `rows` are not."""
    a = quadratic.prepare(xp, q, k, v, **common)
    if a.keys == 0:
        return a
    gates = quadratic.cast(xp, log_forget, a.dtype)
    gates = gates if kept is None else xp.where(kept, gates, 0.0)
    if at is None:
        at = positions(xp, gates, a.rows.start, a.rows.stop) + (a.keys - a.rows.total)
    passed = positions(xp, gates, 0, a.keys) <= at[:, None]
    passed = passed if kept is None else passed & kept[..., None, :]
    faded = fading(xp, gates, at, passed)
    return a._replace(bias=faded if a.bias is None else a.bias + faded, passed=passed)


def beside(
    xp: Namespace, s: Array, a: quadratic.Inputs, w: Array, dw: Array, ds: Array, like: dict[str, Array]
) -> dict[str, Array]:
    """dlog_forget_l = Σ_{i >= l > j} ds_ij: row by row the sum over the keys before l."""
    if "log_forget" not in like:
        return {}
    if a.passed is None:  # there are no keys
        return {"log_forget": xp.zeros_like(quadratic.cast(xp, like["log_forget"], a.dtype))}
    before = sum_before(xp, quadratic.masked(xp, a, ds))
    crossing = xp.sum(xp.where(a.passed, before, 0.0), axis=-2)
    return {"log_forget": quadratic.sum_to(xp, crossing, tuple(like["log_forget"].shape))}


FORGETTING = Family(
    "forgetting_attention",
    softmax.weigh,
    softmax.score_gradient,
    prepare,
    beside=beside,
    arrays=("log_forget",),
    common=frozenset((*quadratic.COMMON, "log_forget", "kept")),
    output_only=("return_lse",),
    seeing=seeing,
)


@with_rows
@recorded(FORGETTING)
@operation
def forgetting_attention(
    q: Array,
    k: Array,
    v: Array,
    log_forget: Array,
    *,
    return_lse: bool = False,
    impl: Impl = "auto",
    **common: Unpack[WithoutCausal],
) -> Array | tuple[Array, Array]:
    """o_i = Σ_j w_ij v_j with w_ij = exp(t_ij) / Σ_t exp(t_it) over the keys visible to query i at positions up to its
    own, t_ij = s_ij + c_i - c_j, s_ij = scale·q_i·k_j + bias_ij and c the running sum of log_forget.

    Lin et al. 2025 eq 4 to 6, the Forgetting Transformer: w_ij ∝ exp(s_ij) Π_{j < l <= i} f_l, f_l = exp(log_forget_l),
    so that a token leaves f_l of the weights of all before it. Positions need no embedding.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        log_forget: (..., S), any real float dtype, at most 0 and finite; leading axes broadcast to those of the output,
            heads of q among them: the logarithms of the gates, as a rule log sigmoid of a projection of the tokens. c
            is kept to twice the digits of the compute dtype, and c_i - c_j is formed before s is added: gates of -10⁻³
            count behind thousands of -30. The values are not read.
        return_lse: also return log Σ_t exp(t_it), (..., L), in the compute dtype; -inf on null rows.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias` (-inf allowed), `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d),
            `enable_gqa`, `dropout_mask`, `dropout`; see docs/semantics.md. A scale that is an array, () or (H,) with a
            number for each head, is differentiable. The op is causal by itself and has no option `causal`. Gates of
            tokens that key_lengths or a key mask, (..., 1, S) or (S,), hides are read as 0: they may hold NaN.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_lse` (o, lse).
        Positions are aligned at the last token: query i is at i + S - L. So L = 1 with the k, v and log_forget of all
        tokens so far is a step of decoding; log_forget is what is cached of c, of which differences alone count. A row
        that sees no key, or only scores of -inf, is null: w = 0, o = 0, all its gradients 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(q)
    a, s = _scored(xp, q, k, v, log_forget, common)
    e = softmax.exponentials(xp, s, a)
    o = quadratic.cast(xp, quadratic.output(xp, a, e.u, softmax.inverse(xp, e.z, a)), q.dtype)
    return (o, xp.broadcast_to(softmax.logsumexp(xp, e), o.shape[:-1])) if return_lse else o


def _scored(
    xp: Namespace, q: Array, k: Array, v: Array, log_forget: Array, common: Bindings
) -> tuple[quadratic.Inputs, Array]:
    a = prepare(xp, q, k, v, **seeing(log_forget=log_forget, **common))
    return a, quadratic.scores(xp, a)


forgetting_attention_weights = weights_of(forgetting_attention, FORGETTING)


def _pulled(
    q: Array, k: Array, v: Array, do: Array | None, dlse: Array | None = None, *, log_forget: Array, **common: object
) -> dict[str, Array]:
    xp = namespace(q)
    a, s = _scored(xp, q, k, v, log_forget, common)
    learned = FORGETTING.learned({"log_forget": log_forget}, common)
    like = {"q": q, "k": k, "v": v, "bias": common.get("bias"), **learned}
    from_lse = None if dlse is None else lambda w: w * dlse[..., None]
    return quadratic.rounded(xp, FORGETTING.gradients(xp, a, s, like, do, {}, of_scores=from_lse), like)


@operation_checked_by(runs=_pulled)
def forgetting_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    log_forget: Array,
    do: Array | None,
    dlse: Array | None = None,
    *,
    impl: Impl = "auto",
    **common: Unpack[WithoutCausal],
) -> dict[str, Array]:
    """Gradients {"q", "k", "v", "log_forget"}, "bias" if one was passed and "scale" if it is an array, for the
    cotangents do and dlse (None = 0).

    With dw = do vᵀ ⊙ dropout: ds = w ⊙ (dw - Σ_j w dw + dlse), dlog_forget_l = Σ_{i >= l > j} ds_ij, i and j positions,
    dq = scale·ds k, dk = scale·dsᵀ q, dv = (w ⊙ dropout)ᵀ do, dbias = ds, dscale = Σ ds ⊙ q kᵀ; each has the shape and
    dtype of its argument. dlog_forget is a sum over the pairs on both sides of l, not a difference of sums over the
    sequence, in which small gradients would be lost; that of hidden tokens is 0.
    """
