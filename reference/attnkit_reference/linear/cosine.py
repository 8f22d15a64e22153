"""Cosine attention: exp(q·k) is replaced by 1 + cos(q, k), a linear attention with one more feature."""

from typing import Unpack

import numpy as np

from attnkit_reference._check import Array
from attnkit_reference._op import derived_gradients, derived_weights
from attnkit_reference.linear.attention import not_negative
from attnkit_reference.linear.states import Features, State
from attnkit_reference.linear.sums import (
    STATE,
    TOKENS,
    Attention,
    FeatureRows,
    Outputs,
    Resumed,
    keywords,
    pull,
    step,
    step_gradients,
)

FLOOR = 1e-6  # of the denominator


def direction(x: Array, eps: float) -> Features:
    """[1, x/‖x‖], and [1, 0] with gradient 0 where ‖x‖ <= eps; dx = (dy - y (y·dy))/‖x‖."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    points = ~(norm <= eps)
    inverse = np.where(points, 1.0 / np.where(points, norm, 1.0), 0.0)
    y = x * inverse

    def pull(d: Array, absolute: bool) -> Array:
        d = d[..., 1:]
        if absolute:
            dx: Array = inverse * (d + np.abs(y) * np.sum(np.abs(y) * d, axis=-1, keepdims=True))
        else:
            dx = inverse * (d - y * np.sum(y * d, axis=-1, keepdims=True))
        return dx

    return Features(np.concatenate([np.ones(norm.shape), y], axis=-1), pull)


class Cosine(Resumed, total=False):
    """The keyword arguments of `cosine_attention`."""

    eps: float


def cosine(
    op: str, q: Array, k: Array, v: Array | None = None, *, eps: float = 1e-12, **options: Unpack[Resumed]
) -> Attention:
    """The features and the denominator max(raw, 0) + 1e-6, whose slope at 0 is 0."""
    eps = not_negative(op, "eps", eps)

    def denominator(raw: Array) -> tuple[Array, Array, Array]:
        den = np.where(raw <= 0, 0.0, raw) + FLOOR
        return den, np.where(raw <= 0, 0.0, 1.0), np.ones(raw.shape, dtype=bool)

    def embed(x: Array) -> Features:
        return direction(x, eps)

    return Attention(op, q, k, v, options, (embed, embed), denominator)


@keywords(cosine, *TOKENS)
def cosine_rows(op: str, q: Array, k: Array, v: Array | None = None, **params: Unpack[Cosine]) -> FeatureRows:
    """The weights of cosine attention without a state."""
    return cosine(op, q, k, v, **params).rows()


@keywords(cosine, *STATE, *TOKENS)
def cosine_attention(q: Array, k: Array, v: Array, **params: Unpack[Cosine]) -> Outputs:
    """o_i = Σ_j (1 + q̂_i·k̂_j) v_j/den_i over the visible keys, den_i = max(n_i + q̂_i·Σ_j k̂_j, 0) + 1e-6, x̂ = x/‖x‖.

    It is linear attention with φ(x) = [1, x̂], or [1, 0] with gradient 0 where ‖x‖ <= eps: with the first two terms of
    exp(q·k) for unit vectors. Shapes, states (S (..., d + 1, e), z (..., d + 1); z_0 counts keys), chunk_size and the
    other arguments are those of `linear_attention`, without scale.

    Weights are non-negative up to rounding. Where every key points away from q, the denominator is about 0 and o is
    useless, though finite. Source: Su 2020 (spaces.ac.cn/archives/7546); Li et al. 2020 "Linear Attention Mechanism".
    """
    return cosine("cosine_attention", q, k, v, **params).forward()


cosine_attention_weights = derived_weights(
    cosine_attention,
    cosine_rows,
    doc="The weights w (..., L, S) of `cosine_attention` without a state; exactly 0 where invisible.",
)


@keywords(cosine, *TOKENS)
def cosine_attention_weights_magnitudes(q: Array, k: Array, **params: Unpack[Cosine]) -> dict[str, Array]:
    """What rounding errors of the weights are measured against: (1 + |q̂|·|k̂|)/den, as 1 + cos may cancel."""
    return cosine("cosine_attention_weights", q, k, None, **params).weights_size()


cosine_attention_vjp, cosine_attention_magnitudes = derived_gradients(
    cosine_attention,
    cosine,
    "Gradients of `cosine_attention`, as in `linear_attention_vjp`; a denominator at its floor has slope 0.",
    "Magnitudes of `cosine_attention`, as in `linear_attention_magnitudes`.",
    pull=pull,
)


@keywords(cosine, "enable_gqa")
def cosine_attention_step(
    state: State | None, q_t: Array, k_t: Array, v_t: Array, **params: object
) -> tuple[Array, State]:
    """One more token of `cosine_attention`, as `linear_attention_step`."""
    return step(cosine, "cosine_attention_step", state, q_t, k_t, v_t, **params)


cosine_attention_step_vjp, cosine_attention_step_magnitudes = step_gradients(cosine_attention_step, cosine)
