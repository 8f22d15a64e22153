"""Performer (FAVOR+): random features whose products estimate exp(q·k/√d), and the sampler of their directions."""

from typing import Unpack

import numpy as np

from attnkit_reference._check import Array, as_float
from attnkit_reference._core import reduce_to, scores
from attnkit_reference._op import derived_gradients, derived_weights
from attnkit_reference.linear.attention import not_negative
from attnkit_reference.linear.states import Features, State
from attnkit_reference.linear.sums import (
    STATE,
    TOKENS,
    Attention,
    FeatureMap,
    FeatureRows,
    Outputs,
    Resumed,
    keywords,
    pull,
    step,
    step_gradients,
    visibility_of,
)
from attnkit_reference.lowrank.newton import whole
from attnkit_reference.pointwise import relu, relu_slope

KERNELS = ("softmax", "relu")


def orthogonal_features(m: int, d: int, seed: int) -> Array:
    """m directions (m, d) in float64: blocks of up to d orthogonal rows, each as long as a normal vector (d,).

    Per block: the Q of a d×d normal matrix, columns times the sign of R's diagonal, which makes it uniform over all
    rotations (Mezzadri 2007), transposed. Then row r gets the length of row r of an (m, d) normal matrix. NumPy's
    default generator draws them from `seed`, blocks first, so that every backend gets the same numbers. Source:
    Choromanski et al. 2021 "Rethinking Attention with Performers" §2.4.
    """
    for name, x in (("m", m), ("d", d)):
        whole("orthogonal_features", name, x, 1)
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(-(-m // d)):
        rotation, triangle = np.linalg.qr(rng.standard_normal((d, d)))
        blocks.append((rotation * np.where(np.diagonal(triangle) < 0, -1.0, 1.0)).T)
    lengths = np.linalg.norm(rng.standard_normal((m, d)), axis=1, keepdims=True)
    features: Array = np.concatenate(blocks)[:m] * lengths
    return features


def exponential_features(x: Array, omega: Array) -> Features:
    """φ_r = m^-1/2 exp(ω_r·x̃ - ‖x̃‖²/2) with x̃ = x d^-1/4; the level is the largest of these exponents."""
    m, d = omega.shape[-2:]
    y = x * d**-0.25
    exponents = y @ np.swapaxes(omega, -1, -2) - 0.5 * np.sum(y * y, axis=-1, keepdims=True)
    level = exponents.max(axis=-1)
    values = m**-0.5 * np.exp(exponents - level[..., None])

    def pull(dvalues: Array, absolute: bool) -> Array:
        d_exponents = values * dvalues
        total = np.sum(d_exponents, axis=-1, keepdims=True)
        dy = d_exponents @ np.abs(omega) + np.abs(y) * total if absolute else d_exponents @ omega - y * total
        dx: Array = d**-0.25 * reduce_to(dy, x.shape)
        return dx

    return Features(values, pull, level)


def relu_features(x: Array, omega: Array, eps: float) -> Features:
    """φ_r = m^-1/2 relu(ω_r·x) + eps."""
    factor = omega.shape[-2] ** -0.5
    dots = x @ np.swapaxes(omega, -1, -2)

    def pull(dvalues: Array, absolute: bool) -> Array:
        d_dots = factor * relu_slope(dots) * dvalues
        return reduce_to(d_dots @ (np.abs(omega) if absolute else omega), x.shape)

    return Features(factor * relu(dots) + eps, pull)


class Performer(Resumed, total=False):
    """The keyword arguments of `performer_attention`."""

    kernel: str
    eps: float


def performer(
    op: str,
    q: Array,
    k: Array,
    v: Array | None,
    projection: Array,
    *,
    kernel: str = "softmax",
    eps: float = 1e-3,
    **options: Unpack[Resumed],
) -> Attention:
    """The features of q and of k, and the denominator raw; o is 0 where that is not positive."""
    enable_gqa = options.get("enable_gqa", False)
    scores(op, q, k, v, scale=1.0, **visibility_of(options))
    if kernel not in KERNELS:
        raise ValueError(f"{op}: kernel; expected one of {', '.join(KERNELS)}, got {kernel!r}")
    eps = not_negative(op, "eps", eps)
    omega = as_float(op, "projection", projection)
    leading = _leading(q, k, enable_gqa)
    own = omega.shape[:-2]
    fits = omega.ndim >= 2 and omega.shape[-1:] == q.shape[-1:] and omega.shape[-2] > 0 and len(own) <= len(leading)
    if not fits or any(a not in (1, b) for a, b in zip(reversed(own), reversed(leading), strict=False)):
        text = f"expected a shape that broadcasts to {(*leading, 'm', *q.shape[-1:])}, got {omega.shape}"
        raise ValueError(f"{op}: projection does not fit; {text}")
    groups = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    shared = groups > 1 and omega.ndim > 2 and omega.shape[-3] > 1
    of_queries = np.repeat(omega, groups, axis=-3) if shared else omega

    def embed(omega: Array) -> FeatureMap:
        return lambda x: exponential_features(x, omega) if kernel == "softmax" else relu_features(x, omega, eps)

    def denominator(raw: Array) -> tuple[Array, Array, Array]:
        return raw, np.ones(raw.shape), ~(raw <= 0)

    return Attention(op, q, k, v, options, (embed(of_queries), embed(omega)), denominator)


def _leading(q: Array, k: Array, enable_gqa: bool) -> tuple[int, ...]:
    """Leading axes of a call with the heads of k; mismatches are refused with the other arguments."""
    shapes = [x.shape[:-2] for x in (q, k)]
    if enable_gqa and all(shapes):
        return (*np.broadcast_shapes(*(shape[:-1] for shape in shapes)), shapes[1][-1])
    return np.broadcast_shapes(*shapes)


@keywords(performer, *TOKENS)
def performer_rows(
    op: str, q: Array, k: Array, v: Array | None = None, *, projection: Array, **params: Unpack[Performer]
) -> FeatureRows:
    """The weights of Performer without a state."""
    return performer(op, q, k, v, projection, **params).rows()


@keywords(performer, *STATE, *TOKENS)
def performer_attention(q: Array, k: Array, v: Array, projection: Array, **params: Unpack[Performer]) -> Outputs:
    """o_i = N_i/D_i, N_i = Σ_j φ(q_i)·φ(k_j) v_j and D_i = Σ_j φ(q_i)·φ(k_j) over the visible keys; 0 where D_i = 0.

    q (..., L, d), k (..., S, d), v (..., S, e), projection (..., m, d) -> o (..., L, e), or (o, state). The rows ω_r of
    the projection are one set for all heads or one per head of k, from `orthogonal_features` or anywhere else; they
    have no gradient. kernel "softmax" (the default): φ(x)_r = m^-1/2 exp(ω_r·x̃ - ‖x̃‖²/2 - c) with x̃ = x d^-1/4, so
    that φ(q)·φ(k) estimates exp(q·k/√d). c is, for queries, the largest exponent over r, for keys the largest over r
    and the keys that the query sees: it cancels, and nothing is added to φ. kernel "relu": φ(x)_r = m^-1/2
    relu(ω_r·x) + eps. eps (1e-3, as in the authors' code) is of the relu kernel only.

    The state is (S (..., m, e), z (..., m), c (...)) for softmax, S and z in units of exp(c), c = -inf without a key;
    and (S, z) for relu. Everything else is as in `linear_attention`, without scale.

    The estimate is only close to softmax attention for small ‖q‖, ‖k‖ and large m; compare it with itself. Source:
    Choromanski et al. 2021 "Rethinking Attention with Performers" §2.3-2.4.
    """
    return performer("performer_attention", q, k, v, projection, **params).forward()


performer_attention_weights = derived_weights(
    performer_attention,
    performer_rows,
    doc="The weights w (..., L, S) of `performer_attention` without a state; exactly 0 where invisible.",
)
performer_attention_vjp, performer_attention_magnitudes = derived_gradients(
    performer_attention,
    performer,
    """Gradients of `performer_attention`: {"q", "k", "v"} and "initial_state", a tuple like it, if given.

    As in `linear_attention_vjp`; dx̃ = Σ_r dκ_r (ω_r - x̃) with dκ = φ ⊙ dφ for the softmax kernel. c cancels from o, not
    from the state: its gradient goes to the initial c or the first largest exponent.
    """,
    "Magnitudes of `performer_attention`, as in `linear_attention_magnitudes`.",
    pull=pull,
)


@keywords(performer, "enable_gqa")
def performer_attention_step(
    state: State | None, q_t: Array, k_t: Array, v_t: Array, projection: Array, **params: object
) -> tuple[Array, State]:
    """One more token of `performer_attention`, as `linear_attention_step`; with kernel "softmax", S and z are first
    multiplied by exp(c - c'), c' the larger of c and the largest exponent of k_t."""
    return step(performer, "performer_attention_step", state, q_t, k_t, v_t, projection=projection, **params)


performer_attention_step_vjp, performer_attention_step_magnitudes = step_gradients(performer_attention_step, performer)
