"""Performer (FAVOR+, Choromanski et al. 2021): random features whose products estimate exp(q·k/√d)."""

from typing import Unpack

from attnkit._core import check
from attnkit._core.dispatch import namespace
from attnkit._core.quadratic import cast
from attnkit._core.special import generator, real, relu, stop_gradient
from attnkit._core.tokens import one_of, whole
from attnkit._core.typing import Array, Impl, Keywords, Namespace
from attnkit.ops.linear.record import Linear, op, step_of, step_vjp_of, vjp_of, weights_of
from attnkit.ops.linear.rule import BODIES
from attnkit.ops.linear.states import STATE_CHECKS, State, Tokens, not_negative, state_context, step_context
from attnkit.ops.linear.sums import Features, Rule

KERNELS = ("softmax", "relu")


def orthogonal_features(m: int, d: int, seed: int) -> Array:
    """m directions (m, d), a NumPy array in float64: blocks of up to d orthogonal rows, as long as normal vectors (d,).

    Choromanski et al. 2021 §2.4. NumPy's default generator draws a d×d normal matrix per block, then an (m, d) one for
    the lengths, so that every backend gets the same numbers; convert them with the backend's own `asarray`. Each block
    is Qᵀ of the matrix' QR decomposition, columns of Q times the sign of R's diagonal: uniform over all rotations.

    >>> import attnkit
    >>> attnkit.orthogonal_features(6, 4, seed=0).shape
    (6, 4)
    """
    for name, x in (("m", m), ("d", d)):
        whole("orthogonal_features", name, x, 1)
    draws, blocks = generator(seed), []
    for _ in range(-(-m // d)):
        normal = draws.standard_normal((d, d))
        xp = namespace(normal)
        q, r = xp.linalg.qr(normal)
        blocks.append((q * xp.where(xp.linalg.diagonal(r) < 0, -1.0, 1.0)).mT)
    lengths = draws.standard_normal((m, d))
    return xp.concat(blocks)[:m, :] * xp.sqrt(xp.sum(lengths * lengths, axis=-1, keepdims=True))


# ---------------------------------------------------------------------------------------------- features


def _exponential(xp: Namespace, x: Array, omega: Array) -> Features:
    """m^-½ exp(ω_r·x̃ - ‖x̃‖²/2 - level), x̃ = x d^-¼, and the level, the largest of these exponents."""
    m, d = (real(xp, n, x.dtype) for n in omega.shape[-2:])
    y = x * d**-0.25
    exponents = y @ xp.matrix_transpose(omega) - 0.5 * xp.sum(y * y, axis=-1, keepdims=True)
    level = stop_gradient(xp.max(exponents, axis=-1))
    values = xp.exp(exponents - level[..., None]) * m**-0.5

    def pull(dvalues: Array) -> Array:
        d_exponents = values * dvalues
        return (d_exponents @ omega - y * xp.sum(d_exponents, axis=-1, keepdims=True)) * d**-0.25

    return Features(values, pull, level, exponents)


def _rectified(xp: Namespace, x: Array, omega: Array, eps: float) -> Features:
    """m^-½ relu(ω_r·x) + eps."""
    factor = real(xp, omega.shape[-2], x.dtype) ** -0.5
    dots = x @ xp.matrix_transpose(omega)

    def pull(dvalues: Array) -> Array:
        return (xp.where(dots <= 0, 0.0, dvalues) * factor) @ omega

    return Features(relu(xp, dots) * factor + eps, pull)


def rule(op: str, projection: Array, *, kernel: str = "softmax", eps: float = 1e-3, **others: object) -> Rule:
    """Performer with its own options bound. The projection is a constant to automatic differentiation.

    Query heads that share a head of the projection also share a head of k.
    """
    projection = stop_gradient(projection)

    def features(xp: Namespace, x: Array, omega: Array) -> Features:
        return _exponential(xp, x, omega) if kernel == "softmax" else _rectified(xp, x, omega, eps)

    def of_keys(xp: Namespace, x: Array) -> Features:
        return features(xp, x, cast(xp, projection, x.dtype))

    def of_queries(xp: Namespace, x: Array) -> Features:
        omega, heads = cast(xp, projection, x.dtype), x.shape[-3] if x.ndim > 2 else 1
        if omega.ndim > 2 and heads != 1 and omega.shape[-3] != 1 and omega.shape[-3] != heads:
            lead, (shared, *own) = omega.shape[:-3], omega.shape[-3:]
            wide = xp.broadcast_to(omega[..., None, :, :], (*lead, shared, heads // shared, *own))
            omega = xp.reshape(wide, (*lead, heads, *own))
        return features(xp, x, omega)

    def divide(xp: Namespace, raw: Array) -> tuple[Array, float, Array]:
        return raw, 1.0, ~(raw <= 0)

    return Rule(op, of_queries, of_keys, divide, levels=kernel == "softmax")


# ---------------------------------------------------------------------------------------------- checks


def _check_projection(op: str, x: Array, d: int, leading: tuple[int, ...]) -> None:
    if x.ndim < 2 or x.shape[-1] != d or x.shape[-2] == 0:
        check.wrong_shape(op, "projection", x, f"(..., m, {d}) as q has {d} features")
    if not check.fits(tuple(x.shape[:-2]), leading):
        check.wrong_shape(op, "projection", x, f"leading axes that broadcast to {leading}, those of q and k")


def _of_keys(context: check.Context, k_heads: int | None, options: Keywords) -> tuple[int, ...]:
    return (*context.leading[:-1], k_heads) if options.get("enable_gqa") and k_heads else context.leading


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    context = state_context(op, arrays, options)
    heads = arrays["k"].shape[-3] if arrays["k"].ndim > 2 else None
    _check_projection(op, arrays["projection"], arrays["q"].shape[-1], _of_keys(context, heads, options))
    return context


def _context_of_step(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    context = step_context(op, arrays, options)
    heads = arrays["k_t"].shape[-2] if arrays["k_t"].ndim > 1 else None
    _check_projection(op, arrays["projection"], arrays["q_t"].shape[-1], _of_keys(context, heads, options))
    return context


def _projection_of_rows(c: check.Context, name: str, x: Array) -> None:
    """For the options of statistics, which have no k: the heads of a projection must divide those of q."""
    check.one_home(c.op, ("q", name), (c.first, x))
    leading = c.leading
    if c.options.get("enable_gqa") and x.ndim > 2 and c.leading[-1] % max(x.shape[-3], 1) == 0:
        leading = (*c.leading[:-1], x.shape[-3])
    _check_projection(c.op, x, c.first.shape[-1], leading)


OWN = {"kernel": one_of(*KERNELS), "eps": not_negative, "projection": _projection_of_rows, **STATE_CHECKS}
PERFORMER = Linear("performer_attention", rule, BODIES, OWN, _context, _context_of_step)


# ---------------------------------------------------------------------------------------------- the op


@op(PERFORMER, PERFORMER.attend)
def performer_attention(
    q: Array,
    k: Array,
    v: Array,
    projection: Array,
    *,
    kernel: str = "softmax",
    eps: float = 1e-3,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
    **common: Unpack[Tokens],
) -> Array | tuple[Array, State]:
    """o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) over the keys j visible to i; 0 where the denominator is 0.

    Choromanski et al. 2021 §2.3-2.4. kernel="softmax": φ(x)_r = m^-½ exp(ω_r·x̃ - ‖x̃‖²/2 - c), x̃ = x d^-¼, so that
    φ(q)·φ(k) estimates exp(q·k/√d). c is the largest exponent, per query over r, for keys over r and the keys that the
    query sees: it cancels exactly, and nothing is added to φ. kernel="relu": φ(x)_r = m^-½ relu(ω_r·x) + eps.

    The estimate is close to softmax attention for short q and k and large m only.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        projection: (..., m, d), the ω_r, any real float dtype; shared by the heads or one per head of k. It is a
            constant: no implementation gives it a gradient. See `orthogonal_features`.
        kernel: "softmax" or "relu".
        eps: of the relu kernel; 1e-3 as in the authors' code.
        chunk_size, initial_state, return_state, impl, **common: as in `linear_attention`, without scale. A state is (S
            (..., m, e), z (..., m), c (...)) for the softmax kernel, S and z divided by exp(c), c = -inf without a key,
            and (S, z) for relu.

    Returns, raises: as `linear_attention`.
    """


performer_attention_weights = weights_of(performer_attention, PERFORMER)
performer_attention_vjp = vjp_of(
    performer_attention,
    PERFORMER,
    """Gradients of `performer_attention`, as `linear_attention_vjp`.

    For the softmax kernel dx̃ = Σ_r dκ_r (ω_r - x̃), dκ = φ ⊙ dφ. The level c cancels from o but not from the state: its
    gradient goes to the initial level or to the first exponent that is the largest.
    """,
)
performer_attention_step = step_of(
    performer_attention,
    PERFORMER,
    "One more token of `performer_attention`, as `linear_attention_step`; projection (..., m, d).",
)
performer_attention_step_vjp = step_vjp_of(performer_attention, PERFORMER)
