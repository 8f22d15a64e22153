"""Cosine attention: 1 + cos(q, k) takes the place of exp(q·k), a linear attention with one more feature."""

from typing import Any, Unpack

from attnkit._core import check, quadratic
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.typing import Array, Impl, Namespace
from attnkit.ops.linear.rule import FoundRows, attend, attend_vjp, feature_family, rows_of_rule, step, step_vjp, weights
from attnkit.ops.linear.states import (
    STATE_CHECKS,
    Heads,
    Options,
    State,
    Tokens,
    not_negative,
    state_context,
    step_context,
    stepping,
)
from attnkit.ops.linear.sums import Features, Rule

FLOOR = 1e-6  # of the denominator


def _direction(xp: Namespace, x: Array, eps: float) -> Features:
    """[1, x/‖x‖], or [1, 0] where ‖x‖ <= eps. x is divided by its largest entry first: squares do not underflow."""
    size = xp.max(xp.abs(x), axis=-1, keepdims=True)
    size = xp.where(size == 0, 1.0, size)
    unit = x / size
    square = xp.sum(unit * unit, axis=-1, keepdims=True)
    points = ~(xp.sqrt(square) * size <= eps)  # a NaN stays a NaN
    norm = xp.sqrt(xp.where(points, square, 1.0))
    hat = xp.where(points, unit / norm, 0.0)
    inverse = xp.where(points, 1.0 / (norm * size), 0.0)

    def pull(d: Array) -> Array:
        d = d[..., 1:]
        return inverse * (d - hat * xp.sum(hat * d, axis=-1, keepdims=True))

    return Features(xp.concat([xp.ones_like(size), hat], axis=-1), pull)


def rule(op: str, *, eps: float = 1e-12) -> Rule:
    """Cosine attention with its own options bound."""

    def features(xp: Namespace, x: Array) -> Features:
        return _direction(xp, x, eps)

    def divide(xp: Namespace, raw: Array) -> tuple[Array, Array, None]:
        return xp.where(raw <= 0, 0.0, raw) + FLOOR, xp.where(raw <= 0, 0.0, xp.ones_like(raw)), None

    return Rule(op, features, features, divide)


def rows(xp: Namespace, a: quadratic.Inputs, **own: Any) -> FoundRows:
    """The weights of a tile of queries, for statistics."""
    return rows_of_rule(xp, rule("row_statistics(cosine_attention)", **own), a)


OWN = {"eps": not_negative, **STATE_CHECKS}


@operation_checked_by(state_context, OWN)
def cosine_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    eps: float = 1e-12,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> Any:
    """o_i = Σ_j (1 + q̂_i·k̂_j) v_j / den_i over the visible keys, den_i = max(n_i + q̂_i·Σ_j k̂_j, 0) + 1e-6, x̂ = x/‖x‖.

    Su 2020 (spaces.ac.cn/archives/7546), Li et al. 2020 "Linear Attention Mechanism": exp(q·k) ≈ 1 + q·k of unit
    vectors. It is linear attention with φ(x) = [1, x̂]. Where all keys point away from q, den_i is about 0 and o_i,
    though finite, is of no use.

    Args:
        eps: x with ‖x‖ <= eps has x̂ = 0 and gradient 0.
        q, k, v, chunk_size, initial_state, return_state, impl, **common: as in `linear_attention`, without scale. A
            state is (S (..., d + 1, e), z (..., d + 1)); z_0 counts keys.

    Returns, raises: as `linear_attention`.
    """
    options = Options(initial_state, chunk_size, common)
    return attend(namespace(q), rule("cosine_attention", eps=eps), q, k, v, options, return_state)


@operation_checked_by(check.attention_context, OWN)
def cosine_attention_weights(
    q: Array, k: Array, *, eps: float = 1e-12, impl: Impl = "auto", **common: Unpack[Tokens]
) -> Array:
    """The weights w (..., L, S) of `cosine_attention` without a state, in the dtype of q."""
    return weights(namespace(q), rule("cosine_attention_weights", eps=eps), q, k, common)


@operation_checked_by(state_context, OWN)
def cosine_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    *,
    dstate: State | None = None,
    eps: float = 1e-12,
    chunk_size: int = 64,
    initial_state: State | None = None,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> dict[str, Any]:
    """Gradients of `cosine_attention`, as `linear_attention_vjp`; a denominator at its floor has slope 0."""
    options = Options(initial_state, chunk_size, common)
    return attend_vjp(namespace(q), rule("cosine_attention_vjp", eps=eps), q, k, v, do, dstate, options)


@stepping
@operation_checked_by(step_context, OWN)
def cosine_attention_step(
    q_t: Array,
    k_t: Array,
    v_t: Array,
    *,
    state: State | None = None,
    eps: float = 1e-12,
    impl: Impl = "auto",
    **common: Unpack[Heads],
) -> tuple[Array, State]:
    """One more token of `cosine_attention`, as `linear_attention_step`."""
    bound, heads = rule("cosine_attention_step", eps=eps), common.get("enable_gqa", False)
    return step(namespace(q_t), bound, q_t, k_t, v_t, state, heads)


@stepping
@operation_checked_by(step_context, OWN)
def cosine_attention_step_vjp(
    q_t: Array,
    k_t: Array,
    v_t: Array,
    do_t: Array | None,
    *,
    state: State | None = None,
    dstate: State | None = None,
    eps: float = 1e-12,
    impl: Impl = "auto",
    **common: Unpack[Heads],
) -> dict[str, Any]:
    """Gradients {"q_t", "k_t", "v_t"} and, where there was one, "state", for do_t and dstate (None = 0)."""
    bound, heads = rule("cosine_attention_step_vjp", eps=eps), common.get("enable_gqa", False)
    return step_vjp(namespace(q_t), bound, q_t, k_t, v_t, do_t, state, dstate, heads)


COSINE = feature_family("cosine_attention", rows, OWN)
