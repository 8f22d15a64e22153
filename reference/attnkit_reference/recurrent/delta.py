"""The delta rule: a state corrects what it holds about a key (DeltaNet, gated DeltaNet, Kimi delta attention)."""

from typing import Unpack

import numpy as np

from attnkit_reference._check import Array
from attnkit_reference._op import derived_gradients, derived_weights
from attnkit_reference.linear.sums import one_token
from attnkit_reference.recurrent.calls import (
    OfSequence,
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


class Fading(Options, total=False):
    """The keyword arguments of `delta_attention`."""

    log_decay: Array | None


class Delta(Recurrence):
    """P = diag(exp(g_t)) S_{t-1}, r = v_t - P^T k_t, u = β_t r, S_t = P + k_t u^T."""

    def _fade(self, t: int | slice) -> Array:
        """exp(g_t) (..., d or 1, 1)."""
        fade: Array = np.exp(self.gates["log_decay"][..., t, :, None]) if "log_decay" in self.gates else np.ones((1, 1))
        return fade

    def _parts(self, S: Array, t: int | slice) -> tuple[Array, Array, Array, Array]:
        """P, r as a row (..., 1, e), β (..., 1, 1), k as a column."""
        P, k = self._fade(t) * S, self.k[..., t, :, None]
        r = self.v[..., t, None, :] - np.swapaxes(k, -1, -2) @ P
        return P, r, self.gates["beta"][..., t, :, None], k

    def step(self, S: Array, t: int) -> Array:
        P, r, beta, k = self._parts(S, t)
        new: Array = P + k * (beta * r)
        return new

    def state_size(self, states: Array) -> Array:
        """|P| + |k| |u|^T of the last token."""
        tokens = self.k.shape[-2]
        if tokens == 0:
            return super().state_size(states)
        P, r, beta, k = self._parts(states[..., -2, :, :], tokens - 1)
        size: Array = np.abs(P) + np.abs(k) * np.abs(beta * r)
        return size

    def _pull(self, R: Array, t: int | slice) -> tuple[Array, Array, Array]:
        """du and dr as rows, and dP."""
        k = self.k[..., t, :, None]
        du = np.swapaxes(k, -1, -2) @ R
        dr = self.gates["beta"][..., t, :, None] * du
        return du, dr, R - k * dr

    def pull_step(self, R: Array, t: int) -> Array:
        before: Array = self._fade(t) * self._pull(R, t)[2]
        return before

    def pull_tokens(self, S: Array, R: Array, size: Size) -> dict[str, Array]:
        P, r, beta, k = self._parts(S, slice(None))
        du, dr, dP = self._pull(R, slice(None))
        dk = size(R) @ size(np.swapaxes(beta * r, -1, -2)) + size(-P) @ size(np.swapaxes(dr, -1, -2))
        dv = size(beta) * (size(np.swapaxes(k, -1, -2)) @ size(R))
        grads = {"k": dk[..., 0], "v": dv[..., 0, :], "beta": np.sum(size(du) * size(r), axis=-1)}
        if "log_decay" in self.gates:
            dg = np.sum(size(dP) * size(P), axis=-1)
            number = self.gates["log_decay"].shape[-1] == 1
            grads["log_decay"] = np.sum(dg, axis=-1, keepdims=True) if number else dg
        return grads


def delta(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    log_decay: Array | None = None,
    chunk_size: int = 32,
    **options: Unpack[OfSequence],
) -> Delta:
    """The call, with log_decay told by its axes: those of beta, or one more."""
    gates: dict[str, Array] = {"beta": beta}
    numbers: tuple[str, ...] = ("beta",)
    if log_decay is not None:
        gates["log_decay"] = log_decay
        numbers = numbers if np.ndim(log_decay) > np.ndim(beta) else ("beta", "log_decay")
    call = recurrence(Delta, op, q, k, v, gates, numbers, chunk_size=chunk_size, **options)
    if log_decay is not None:
        at_most_zero(op, "log_decay", call.gates["log_decay"])
    size = call.gates["beta"]
    if np.any((size < 0) | (size > 2)):
        raise ValueError(f"{op}: beta; expected numbers from 0 to 2, got {np.min(size)} to {np.max(size)}")
    return call


def _one(
    op: str,
    state: State | None,
    q_t: Array,
    k_t: Array,
    v_t: Array,
    beta_t: Array,
    *,
    log_decay_t: Array | None = None,
    **options: Unpack[OfToken],
) -> Delta:
    q, k, v = one_token(op, q_t=q_t, k_t=k_t, v_t=v_t)
    decay = None
    if log_decay_t is not None:
        vector = np.ndim(log_decay_t) > np.ndim(beta_t)
        decay = log_decay_t[..., None, :] if vector else np.asarray(log_decay_t)[..., None]
    return delta(op, q, k, v, np.asarray(beta_t)[..., None], log_decay=decay, initial_state=state, **options)


@keywords(delta)
def delta_attention(q: Array, k: Array, v: Array, beta: Array, **params: Unpack[Fading]) -> Outputs:
    """o_t = scale S_t^T q_t with S_t = P + β_t k_t (v_t - P^T k_t)^T, P = diag(exp(g_t)) S_{t-1}, S_0 = 0 or
    initial_state.

    q (..., T, d), k (..., T, d), v (..., T, e), beta (..., T) from 0 to 2 -> o (..., T, e), or (o, state). Leading axes
    broadcast; heads are axis -3. Before k_t writes v_t, the state gives up the share β_t of what it holds about k_t.
    log_decay is g, at most 0: (..., T), a number per token (gated DeltaNet); or with one axis more than beta,
    (..., T, d), a number per feature (Kimi delta attention); None is 0 (DeltaNet). scale None is 1/√d. Keys are used as
    they are: with β ‖k‖² <= 2 a state cannot grow by itself, so models divide keys by their norms.

    Hidden tokens, states, causal, chunk_size and errors are those of `gated_linear_attention`; beta and log_decay of
    hidden tokens are read as 0, may be NaN, and may have another dtype than q.

    Source: Schlag et al. 2021 "Linear Transformers Are Secretly Fast Weight Programmers"; Yang et al. 2024
    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"; Yang et al. 2025 "Gated Delta
    Networks"; Kimi Team 2025 "Kimi Linear".
    """
    return delta("delta_attention", q, k, v, beta, **params).forward()


def _weights(
    op: str,
    q: Array,
    k: Array,
    beta: Array,
    *,
    log_decay: Array | None = None,
    causal: bool = True,
    mask: Array | None = None,
    key_lengths: int | Array | None = None,
    scale: float | None = None,
) -> Delta:
    """The call whose outputs are weights."""
    hides: OfSequence = {"causal": causal, "mask": mask, "key_lengths": key_lengths, "scale": scale}
    return delta(op, q, k, single_values(k), beta, log_decay=log_decay, **hides)


delta_attention_weights = derived_weights(
    delta_attention,
    _weights,
    Delta.weights,
    """The weights w (..., T, T) of `delta_attention` without a state, o = w v: scale q_i^T A_i A_{i-1} ... A_{j+1} β_j
    k_j with A_t = (I - β_t k_t k_t^T) diag(exp(g_t)) for j <= i, 0 elsewhere and at hidden tokens.
    """,
)
delta_attention_vjp, delta_attention_magnitudes = derived_gradients(
    delta_attention,
    delta,
    """Gradients of `delta_attention`: {"q", "k", "v", "beta"}, "log_decay" and "initial_state", a tuple, if given.

    do (..., T, e) is the cotangent of o, dstate = (dS,) that of the state; None is 0. With R_t the gradient of S_t,
    r = v_t - P^T k_t and dr = β_t R_t^T k_t: dq_t = scale S_t do_t, dk_t = β_t R_t r - P dr, dv_t = dr,
    dβ_t = (R_t^T k_t)·r, dP = R_t - k_t dr^T, dg_t = Σ_e dP ⊙ P (over d too if g_t is a number), and
    R_{t-1} = scale q_{t-1} do_{t-1}^T + diag(exp(g_t)) dP.
    """,
    """What rounding errors are measured against: "o", "state" if dstate is given, and the gradients with the summands
    of their last contraction in absolute value, for example scale Σ_c |q_c| |S_c| for o.
    """,
    pull=pull,
)


@keywords(_one, "scale")
def delta_attention_step(
    state: State | None,
    q_t: Array,
    k_t: Array,
    v_t: Array,
    beta_t: Array,
    *,
    log_decay_t: Array | None = None,
    **params: Unpack[OfToken],
) -> tuple[Array, State]:
    """One more token: S' = P + β_t k_t (v_t - P^T k_t)^T, P = diag(exp(g_t)) S, o_t = scale S'^T q_t -> (o_t, (S',)).

    state as in `delta_attention`, or None at the start; q_t (..., d), k_t (..., d), v_t (..., e), beta_t (...),
    log_decay_t (...) or (..., d), heads on axis -2 of q_t -> o_t (..., e). The state passed in is not modified.
    """
    call = _one("delta_attention_step", state, q_t, k_t, v_t, beta_t, log_decay_t=log_decay_t, **params)
    return last_token(call)


delta_attention_step_vjp, delta_attention_step_magnitudes = derived_gradients(
    delta_attention_step,
    _one,
    'Gradients {"q_t", "k_t", "v_t", "beta_t"}, "log_decay_t" and "state", a tuple, if there was one.',
    'Magnitudes of "o_t", "next_state" and the gradients, as in `delta_attention_magnitudes`.',
    pull_step,
)
