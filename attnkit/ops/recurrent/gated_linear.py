"""Gated linear attention (Yang et al. 2024): a state whose features fade by gates of their own."""

from typing import Unpack

from attnkit._core.typing import Array, Impl, Keywords, Namespace
from attnkit.ops.linear.chunks import fading_sums, pull_fading_sums
from attnkit.ops.linear.states import State
from attnkit.ops.recurrent.record import Call, Recurrent, Tokens, op, step_of, step_vjp_of, vjp_of, weights_of


def forward(xp: Namespace, m: Call) -> tuple[Array, Array]:
    """o in chunks and the last state."""
    return fading_sums(xp, m.q, m.k, m.v, m.gates["log_gate"], m.first)


def backward(xp: Namespace, m: Call, do: Array, dstate: Array) -> Keywords:
    """The gradients of `forward`."""
    grads = pull_fading_sums(xp, m.q, m.k, m.v, m.gates["log_gate"], m.first, do, dstate)
    return dict(zip(("q", "k", "v", "log_gate", "first"), grads, strict=True))


def token(xp: Namespace, m: Call) -> tuple[Array, Array]:
    """One step of the recurrence."""
    S = m.first * xp.exp(m.gates["log_gate"])[..., None] + m.k[..., None] * m.v[..., None, :]
    return (m.q[..., None, :] @ S)[..., 0, :], S


GATED_LINEAR = Recurrent("gated_linear_attention", ("log_gate",), (), lambda gates: (), forward, backward, token)


@op(GATED_LINEAR)
def gated_linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_gate: Array,
    *,
    causal: bool = True,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> Array | tuple[Array, State]:
    """o_t = scale·S_tᵀ q_t with S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ, S_0 = 0 or initial_state.

    Yang et al. 2024 §4 (α_t there is exp(g_t)). As weights, w_ij = scale·Σ_c q_ic k_jc exp(Σ_{j<t<=i} g_tc) for j <= i.

    Args:
        q: (..., T, d). Leading axes broadcast; heads are axis -3.
        k: (..., T, d).
        v: (..., T, e).
        log_gate: (..., T, d), any real float dtype, at most 0: g, the logarithm of what is left of a feature of the
            state when a token comes. 0 keeps it, -∞ forgets it.
        causal: True, the only order that a recurrence has.
        chunk_size: tokens that are multiplied out at a time, rounded up to a power of two; speed, not meaning.
        initial_state: (S (..., d, e),), any real float dtype: what came before. A row with a state is not null.
        return_state: also return the state after the last token.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, a key mask (..., 1, T) or (T,), and `key_lengths`: hidden tokens neither add nor decay; their
            k, v and gates may hold NaN and get the gradient 0. `scale`: None is 1/√d.

    Returns:
        o (..., T, e) in the dtype of q, computed in float32 (float64 for float64); with `return_state` (o, (S,)), S in
        the compute dtype, with the leading axes of k, v, log_gate, the masks and initial_state. A row that sees neither
        a key nor a state is 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


gated_linear_attention_weights = weights_of(
    gated_linear_attention,
    GATED_LINEAR,
    "w_ij = scale·Σ_c q_ic k_jc exp(Σ_{j<t<=i} g_tc) for j <= i, 0 elsewhere and at hidden tokens.",
)
gated_linear_attention_vjp = vjp_of(
    gated_linear_attention,
    GATED_LINEAR,
    """Gradients {"q", "k", "v", "log_gate"} and, where one was given, "initial_state" (a tuple), for the cotangents do
    and dstate = (dS,); None is 0.

    With R_t the gradient of S_t, R_{t-1} = scale·q_{t-1} do_{t-1}ᵀ + diag(exp(g_t)) R_t: dq_t = scale·S_t do_t, dk_t =
    R_t v_t, dv_t = R_tᵀ k_t, dg_t = Σ_e R_t ⊙ diag(exp(g_t)) S_{t-1}, chunk by chunk as the op itself. dg_t is a sum
    over the pairs on both sides of t, not a difference of sums over the sequence, in which small gates would be lost.
    """,
)
gated_linear_attention_step = step_of(
    gated_linear_attention,
    GATED_LINEAR,
    """One more token: S' = diag(exp(g_t)) S + k_t v_tᵀ, o_t = scale·S'ᵀ q_t.

    Args:
        state: from `gated_linear_attention` or this function; None = nothing seen yet. It is not changed.
        q_t, k_t, log_gate_t: (..., d). Leading axes broadcast; heads are axis -2.
        v_t: (..., e).
        scale, impl: as in `gated_linear_attention`.

    Returns:
        (o_t (..., e) in the dtype of q_t, (S',) in the compute dtype).
    """,
)
gated_linear_attention_step_vjp = step_vjp_of(
    gated_linear_attention,
    GATED_LINEAR,
    """Gradients {"q_t", "k_t", "v_t", "log_gate_t"} and, where there was one, "state" (a tuple), for do_t and dstate
    (None = 0).""",
)
