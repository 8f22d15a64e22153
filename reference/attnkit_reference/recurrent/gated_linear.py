"""Gated linear attention: a state whose features fade by gates of their own."""

from typing import ClassVar, Unpack

import numpy as np

from attnkit_reference._check import Array
from attnkit_reference._op import derived_gradients, derived_weights
from attnkit_reference.linear.sums import one_token
from attnkit_reference.recurrent.calls import (
    OfToken,
    Options,
    Outputs,
    Recurrence,
    Size,
    State,
    at_most_zero,
    keywords,
    last_token,
    pull,
    pull_step,
    recurrence,
    single_values,
)


class GatedLinear(Recurrence):
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T."""

    additive: ClassVar[bool] = True

    def _fade(self, t: int | slice) -> Array:
        """exp(g_t) (..., d, 1)."""
        fade: Array = np.exp(self.gates["log_gate"][..., t, :, None])
        return fade

    def step(self, S: Array, t: int) -> Array:
        new: Array = self._fade(t) * S + self.k[..., t, :, None] * self.v[..., t, None, :]
        return new

    def pull_step(self, R: Array, t: int) -> Array:
        return self._fade(t) * R

    def pull_tokens(self, S: Array, R: Array, size: Size) -> dict[str, Array]:
        R = size(R)
        dk = (R @ size(self.v[..., None]))[..., 0]
        dv = (np.swapaxes(R, -1, -2) @ size(self.k[..., None]))[..., 0]
        return {"k": dk, "v": dv, "log_gate": np.sum(R * self._fade(slice(None)) * size(S), axis=-1)}


def gated_linear(op: str, q: Array, k: Array, v: Array, log_gate: Array, **options: Unpack[Options]) -> GatedLinear:
    call = recurrence(GatedLinear, op, q, k, v, {"log_gate": log_gate}, **options)
    at_most_zero(op, "log_gate", call.gates["log_gate"])
    return call


def _one(
    op: str, state: State | None, q_t: Array, k_t: Array, v_t: Array, log_gate_t: Array, **options: Unpack[OfToken]
) -> GatedLinear:
    tokens = one_token(op, q_t=q_t, k_t=k_t, v_t=v_t, log_gate_t=log_gate_t)
    return gated_linear(op, *tokens, initial_state=state, **options)


@keywords(gated_linear)
def gated_linear_attention(q: Array, k: Array, v: Array, log_gate: Array, **params: Unpack[Options]) -> Outputs:
    """o_t = scale S_t^T q_t with S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, S_0 = 0 or initial_state.

    q (..., T, d), k (..., T, d), v (..., T, e) and g = log_gate (..., T, d), entries at most 0 -> o (..., T, e), or
    (o, state). Leading axes broadcast; heads are axis -3. scale None is 1/√d. A gate is the logarithm of what is left
    of a feature of the state when token t comes: 0 keeps it, -∞ forgets it. As weights, w_ij = scale Σ_c q_ic k_jc
    exp(Σ_{j < t <= i} g_tc) for j <= i.

    Tokens that mask, a key mask (..., 1, T) or (T,), or key_lengths hide neither add nor decay: their k, v and gate are
    read as 0, may be NaN, and get the gradient 0. state = (S (..., d, e),) with the leading axes of k, v, log_gate, of
    masks and of initial_state; initial_state holds what came before. A query that sees neither a key nor a state gets
    output and gradients 0. causal is True: a recurrence has no other order. chunk_size has no effect here: it is for
    faster implementations.

    ValueError for shapes, values and unknown arguments, TypeError for dtypes. log_gate may have another dtype than q.
    Source: Yang et al. 2024 "Gated Linear Attention Transformers with Hardware-Efficient Training" §4.
    """
    return gated_linear("gated_linear_attention", q, k, v, log_gate, **params).forward()


def _weights(
    op: str,
    q: Array,
    k: Array,
    log_gate: Array,
    *,
    causal: bool = True,
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    scale: float | None = None,
) -> GatedLinear:
    """The call whose outputs are weights."""
    hides: Options = {"causal": causal, "mask": mask, "key_lengths": key_lengths, "scale": scale}
    return gated_linear(op, q, k, single_values(k), log_gate, **hides)


gated_linear_attention_weights = derived_weights(
    gated_linear_attention,
    _weights,
    GatedLinear.weights,
    """The weights w (..., T, T) of `gated_linear_attention` without a state, o = w v: scale Σ_c q_ic k_jc
    exp(Σ_{j < t <= i} g_tc) for j <= i, 0 elsewhere and at hidden tokens.
    """,
)
gated_linear_attention_vjp, gated_linear_attention_magnitudes = derived_gradients(
    gated_linear_attention,
    gated_linear,
    """Gradients of `gated_linear_attention`: {"q", "k", "v", "log_gate"} and "initial_state", a tuple, if given.

    do (..., T, e) is the cotangent of o, dstate = (dS,) that of the state; None is 0. With R_t the gradient of S_t,
    R_T = scale q_T do_T^T + dS and R_{t-1} = scale q_{t-1} do_{t-1}^T + diag(exp(g_t)) R_t: dq_t = scale S_t do_t,
    dk_t = R_t v_t, dv_t = R_t^T k_t, dg_t = Σ_e (R_t ⊙ diag(exp(g_t)) S_{t-1}), and diag(exp(g_1)) R_1 for S_0.
    """,
    """What rounding errors are measured against: "o", "state" if dstate is given, and the gradients, all with sums of
    absolute values in the place of sums, those in a state too.
    """,
    pull=pull,
)


@keywords(gated_linear, "scale")
def gated_linear_attention_step(
    state: State | None, q_t: Array, k_t: Array, v_t: Array, log_gate_t: Array, **params: Unpack[OfToken]
) -> tuple[Array, State]:
    """One more token: S' = diag(exp(g_t)) S + k_t v_t^T, o_t = scale S'^T q_t -> (o_t, (S',)).

    state as in `gated_linear_attention`, or None at the start; q_t (..., d), k_t (..., d), v_t (..., e), log_gate_t
    (..., d), heads on axis -2 -> o_t (..., e). The state passed in is not modified.
    """
    return last_token(_one("gated_linear_attention_step", state, q_t, k_t, v_t, log_gate_t, **params))


gated_linear_attention_step_vjp, gated_linear_attention_step_magnitudes = derived_gradients(
    gated_linear_attention_step,
    _one,
    'Gradients {"q_t", "k_t", "v_t", "log_gate_t"} and "state", a tuple, if there was one.',
    'Magnitudes of "o_t", "next_state" and the gradients, as in `gated_linear_attention_magnitudes`.',
    pull_step,
)
