"""Cosine attention: 1 + cos(q, k) takes the place of exp(q·k), a linear attention with one more feature."""

from typing import Unpack

from attnkit._core.typing import Array, Impl, Namespace
from attnkit.ops.linear.record import Linear, op, step_of, step_vjp_of, vjp_of, weights_of
from attnkit.ops.linear.rule import BODIES
from attnkit.ops.linear.states import STATE_CHECKS, State, Tokens, not_negative
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


def rule(op: str, *, eps: float = 1e-12, **others: object) -> Rule:
    """Cosine attention with its own options bound."""

    def features(xp: Namespace, x: Array) -> Features:
        return _direction(xp, x, eps)

    def divide(xp: Namespace, raw: Array) -> tuple[Array, Array, None]:
        return xp.where(raw <= 0, 0.0, raw) + FLOOR, xp.where(raw <= 0, 0.0, xp.ones_like(raw)), None

    return Rule(op, features, features, divide)


OWN = {"eps": not_negative, **STATE_CHECKS}
COSINE = Linear("cosine_attention", rule, BODIES, OWN)


@op(COSINE, COSINE.attend)
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
) -> Array | tuple[Array, State]:
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


cosine_attention_weights = weights_of(cosine_attention, COSINE)
cosine_attention_vjp = vjp_of(
    cosine_attention,
    COSINE,
    "Gradients of `cosine_attention`, as `linear_attention_vjp`; a denominator at its floor has slope 0.",
)
cosine_attention_step = step_of(
    cosine_attention, COSINE, "One more token of `cosine_attention`, as `linear_attention_step`."
)
cosine_attention_step_vjp = step_vjp_of(cosine_attention, COSINE)
