"""Efficient attention (Shen et al. 2021): a softmax of q over its features and of k over the tokens."""

from typing import Unpack

from attnkit._core.tokens import key_mask
from attnkit._core.typing import Array, Impl
from attnkit.ops.linear.by_feature import BODIES
from attnkit.ops.linear.record import Linear, op, step_of, step_vjp_of, vjp_of, weights_of
from attnkit.ops.linear.states import STATE_CHECKS, State, Tokens

OWN = {"mask": key_mask, **STATE_CHECKS}
EFFICIENT = Linear("efficient_attention", lambda op, **options: op, BODIES, OWN)


@op(EFFICIENT, EFFICIENT.attend)
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
) -> Array | tuple[Array, State]:
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
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, a key mask (..., 1, S) or (S,), `causal`, `key_lengths`, `query_mask`, `enable_gqa`.

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_state` (o, (S, z, m)),
        the state in the compute dtype. A row that sees neither a key nor a state is 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


efficient_attention_weights = weights_of(
    efficient_attention,
    EFFICIENT,
    """The weights w_ij = Σ_c softmax(q_i)_c exp(k_jc)/Σ_t exp(k_tc), (..., L, S), of `efficient_attention` without a
    state, in the dtype of q; rows sum to 1, null rows to 0.""",
)
efficient_attention_vjp = vjp_of(
    efficient_attention,
    EFFICIENT,
    """Gradients {"q", "k", "v"} and, where one was given, "initial_state" (a tuple), for the cotangents do and dstate =
    (dS, dz, dm); None is 0, for a part too.

    With p_ijc = exp(k_jc)/Σ_t exp(k_tc) and x = softmax(q): dx_ic = Σ_j p_ijc (do_i·v_j) in one pass; dk_jc = Σ_i x_ic
    p_ijc (do_i·v_j - dx_ic) and dv_j = Σ_i,c x_ic p_ijc do_i in a second one from the end. The gradient of a state
    reaches k through m too: the initial m or the first largest key.
    """,
)
efficient_attention_step = step_of(
    efficient_attention,
    EFFICIENT,
    """One more token of `efficient_attention`: m' = max(m, k_t), S and z times exp(m - m') plus those of k_t; shapes as
    in `linear_attention_step`.""",
)
efficient_attention_step_vjp = step_vjp_of(efficient_attention, EFFICIENT)
