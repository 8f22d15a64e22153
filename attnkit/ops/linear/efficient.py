"""Efficient attention (Shen et al. 2021): a softmax of q over its features and of k over the tokens."""

from typing import Any, Unpack

from attnkit._core import check
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.tokens import key_mask
from attnkit._core.typing import Array, Impl
from attnkit.ops.linear.by_feature import attend, attend_vjp, rows, step, step_vjp, weights
from attnkit.ops.linear.rule import feature_family
from attnkit.ops.linear.states import STATE_CHECKS, Heads, Options, State, Tokens, state_context, step_context, stepping

OWN = {"mask": key_mask, **STATE_CHECKS}


@operation_checked_by(state_context, OWN)
def efficient_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> Any:
    """o_i = Σ_c softmax(q_i)_c (Σ_j exp(k_jc) v_j) / (Σ_j exp(k_jc)), c over the d features, j over the visible keys.

    Shen et al. 2021, without masks and causality there; no scale. Under causality each query has sums of its own, so
    that the last one gets what it gets without. (The other causal form in use, with features exp(k) and one sum for all
    of them, is linear attention.)

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        chunk_size: tokens that are multiplied out at a time under causality, the next power of two; speed, not meaning.
            Every feature has fading sums of its own, so that a chunk is halved log2(chunk_size) times.
        initial_state: (S (..., d, e), z (..., d), m (..., d)), any real float dtype, with the heads of k: m_c is the
            largest k_jc so far (-inf without a key), S_c = Σ_j exp(k_jc - m_c) v_j and z_c = Σ_j exp(k_jc - m_c). A row
            with a state is not null. With `causal` it needs L = S.
        return_state: also return the state: initial_state plus all keys that `key_lengths` and `mask` allow, whatever
            `causal` and `query_mask` say, for later queries may see them.
        impl: "auto", "generic", the name of a kernel, or a tuple of names tried in order (see `attnkit.explain`).
        **common: `mask`, a key mask (..., 1, S) or (S,), `causal`, `key_lengths`, `query_mask`, `enable_gqa`.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_state` (o, (S, z, m)),
        the state in the compute dtype. A row that sees neither a key nor a state is 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    options = Options(initial_state, chunk_size, common)
    return attend(namespace(q), "efficient_attention", q, k, v, options, return_state)


@operation_checked_by(check.attention_context, OWN)
def efficient_attention_weights(q: Array, k: Array, *, impl: Impl = "auto", **common: Unpack[Tokens]) -> Array:
    """The weights w_ij = Σ_c softmax(q_i)_c exp(k_jc)/Σ_t exp(k_tc), (..., L, S), of `efficient_attention` without a
    state, in the dtype of q; rows sum to 1, null rows to 0."""
    return weights(namespace(q), q, k, common)


@operation_checked_by(state_context, OWN)
def efficient_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    *,
    dstate: State | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> dict[str, Any]:
    """Gradients {"q", "k", "v"} and, where one was given, "initial_state" (a tuple), for the cotangents do and dstate =
    (dS, dz, dm); None is 0, for a part too.

    With p_ijc = exp(k_jc)/Σ_t exp(k_tc) and x = softmax(q): dx_ic = Σ_j p_ijc (do_i·v_j) in one pass; dk_jc = Σ_i x_ic
    p_ijc (do_i·v_j - dx_ic) and dv_j = Σ_i,c x_ic p_ijc do_i in a second one from the end. The gradient of a state
    reaches k through m too: the initial m or the first largest key.
    """
    options = Options(initial_state, chunk_size, common)
    return attend_vjp(namespace(q), "efficient_attention_vjp", q, k, v, do, dstate, options)


@stepping
@operation_checked_by(step_context, OWN)
def efficient_attention_step(
    q_t: Array,
    k_t: Array,
    v_t: Array,
    *,
    state: State | None = None,
    impl: Impl = "auto",
    **common: Unpack[Heads],
) -> tuple[Array, State]:
    """One more token of `efficient_attention`: m' = max(m, k_t), S and z times exp(m - m') plus those of k_t; shapes as
    in `linear_attention_step`."""
    heads = common.get("enable_gqa", False)
    return step(namespace(q_t), "efficient_attention_step", q_t, k_t, v_t, state, heads)


@stepping
@operation_checked_by(step_context, OWN)
def efficient_attention_step_vjp(
    q_t: Array,
    k_t: Array,
    v_t: Array,
    do_t: Array | None,
    *,
    state: State | None = None,
    dstate: State | None = None,
    impl: Impl = "auto",
    **common: Unpack[Heads],
) -> dict[str, Any]:
    """Gradients {"q_t", "k_t", "v_t"} and, where there was one, "state", for do_t and dstate (None = 0)."""
    heads = common.get("enable_gqa", False)
    return step_vjp(namespace(q_t), "efficient_attention_step_vjp", q_t, k_t, v_t, do_t, state, dstate, heads)


EFFICIENT = feature_family("efficient_attention", rows, OWN)
