"""Linear attention: a product of features takes the place of exp(q·k), and sums over keys become a state."""

from collections.abc import Callable
from typing import Unpack

import numpy as np

from attnkit_reference._check import Array, number
from attnkit_reference._op import derived_gradients, derived_weights
from attnkit_reference.linear.states import Features, State
from attnkit_reference.linear.sums import (
    SCALED,
    STATE,
    Attention,
    FeatureRows,
    Outputs,
    Resumed,
    keywords,
    pull,
    step,
    step_gradients,
)
from attnkit_reference.pointwise import relu, relu_slope


def elu_plus_one(x: Array) -> Array:
    """x + 1 above 0, exp(x) elsewhere: expm1(x) + 1 would lose the tail of small x."""
    return np.where(x > 0, x + 1.0, np.exp(np.where(x > 0, 0.0, x)))


def elu_plus_one_slope(x: Array) -> Array:
    return np.where(x > 0, 1.0, np.exp(np.where(x > 0, 0.0, x)))


Map = str | Callable[[Array], Array]
FEATURE_MAPS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "elu_plus_one": (elu_plus_one, elu_plus_one_slope),
    "relu": (relu, relu_slope),
    "identity": (lambda x: x, lambda x: np.where(np.isnan(x), x, 1.0)),
}


class Scaled(Resumed, total=False):
    scale: float | None


class Linear(Scaled, total=False):
    """The keyword arguments of `linear_attention`."""

    feature_map: Map
    normalize: bool | None
    eps: float
    log_decay: float | Array | None


def features(op: str, feature_map: Map, x: Array) -> Features:
    """φ(x) and its pull-back: by the slope of the named map, or by `feature_map.vjp(x, dφ)`."""
    if not callable(feature_map):
        h, slope = FEATURE_MAPS[feature_map]
        return Features(h(x), lambda d, absolute: np.abs(slope(x)) * d if absolute else slope(x) * d)
    values = feature_map(x)
    if not isinstance(values, np.ndarray) or values.shape[:-1] != x.shape[:-1]:
        got = getattr(values, "shape", type(values).__name__)
        raise ValueError(f"{op}: feature_map of (..., n, d); expected (..., n, f) = {(*x.shape[:-1], 'f')}, got {got}")

    def pull(d: Array, absolute: bool) -> Array:
        vjp: Callable[[Array, Array], Array] | None = getattr(feature_map, "vjp", None)
        if vjp is None:
            text = "expected a callable with an attribute vjp(x, dfeatures) -> dx for gradients, got one without"
            raise NotImplementedError(f"{op}: feature_map; {text}")
        if not absolute:
            return vjp(x, d)
        each = (vjp(x, np.where(np.arange(d.shape[-1]) == f, d, 0.0)) for f in range(d.shape[-1]))
        return sum((np.abs(dx) for dx in each), np.zeros(x.shape))

    return Features(values, pull)


def linear(
    op: str,
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    feature_map: Map = "elu_plus_one",
    normalize: bool | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    log_decay: float | Array | None = None,
    **options: Unpack[Resumed],
) -> Attention:
    """The features and the denominator raw + eps, or 1."""
    if not callable(feature_map) and feature_map not in FEATURE_MAPS:
        names = ", ".join(FEATURE_MAPS)
        raise ValueError(f"{op}: feature_map; expected one of {names} or a callable, got {feature_map!r}")
    if normalize is not None and not isinstance(normalize, bool):
        raise TypeError(f"{op}: normalize; expected None, True or False, got {normalize!r}")
    if normalize and feature_map == "identity":
        raise ValueError(f"{op}: normalize; expected None or False for identity, whose row sums can be 0, got True")
    eps = not_negative(op, "eps", eps)
    factor = 1.0 if scale is None else number(op, "scale", scale)
    divides = feature_map != "identity" if normalize is None else normalize

    def denominator(raw: Array) -> tuple[Array, Array, Array]:
        if divides:
            return raw + eps, np.ones(raw.shape), raw + eps != 0
        return np.ones(raw.shape), np.zeros(raw.shape), np.ones(raw.shape, dtype=bool)

    def embed(x: Array) -> Features:
        return features(op, feature_map, x)

    signed = callable(feature_map) or feature_map == "identity" or factor < 0
    return Attention(op, q, k, v, options, (embed, embed), denominator, factor, signed, log_decay)


def one_token_of(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: Map = "elu_plus_one",
    normalize: bool | None = None,
    eps: float = 1e-6,
    log_decay_t: float | Array | None = None,
    **options: Unpack[Scaled],
) -> Attention:
    """`linear` of one token, which decays by log_decay_t."""
    g = log_decay_t[..., None] if isinstance(log_decay_t, np.ndarray) and log_decay_t.ndim else log_decay_t
    if g is not None:
        options["causal"] = True
    return linear(op, q, k, v, feature_map=feature_map, normalize=normalize, eps=eps, log_decay=g, **options)


def not_negative(op: str, name: str, x: object) -> float:
    value = number(op, name, x)
    if value < 0:
        raise ValueError(f"{op}: {name}; expected a number >= 0, got {x!r}")
    return value


@keywords(linear, *SCALED)
def linear_rows(op: str, q: Array, k: Array, v: Array | None = None, **params: Unpack[Linear]) -> FeatureRows:
    """The weights of linear attention without a state."""
    return linear(op, q, k, v, **params).rows()


@keywords(linear, *STATE, *SCALED)
def linear_attention(q: Array, k: Array, v: Array, **params: Unpack[Linear]) -> Outputs:
    """o_i = φ(q_i)·S_i/(φ(q_i)·z_i + eps) with S_i = Σ_j φ(k_j) v_j^T and z_i = Σ_j φ(k_j) over the keys visible to i.

    q (..., L, d), k (..., S, d), v (..., S, e) -> o (..., L, e), or (o, state). Leading axes broadcast; heads are axis
    -3. With a scale, the weights are w_ij = scale φ(q_i)·φ(k_j)/(Σ_j scale φ(q_i)·φ(k_j) + eps).

    feature_map is φ: elu_plus_one (the default: x + 1 above 0, exp(x) below), relu, identity, or a callable (..., n, d)
    -> (..., n, f), whose output is set to 0 at tokens that take no part; for the explicit gradients a callable needs an
    attribute vjp(x, dφ) -> dx. normalize None means True, but False for identity, whose row sums can be 0 (True there
    is an error). Where the denominator is 0, so is o. scale None is 1. chunk_size has no effect here: it is for faster
    implementations.

    log_decay is g, entries at most 0: S_t = exp(g_t) S_{t-1} + φ(k_t) v_t^T, z likewise, so that φ(q_i)·φ(k_j) counts
    exp(Σ_{j<l<=i} g_l) times. A number, an array () or (H,) with one for each head of k, or (..., S) with one for each
    token of k, of any float dtype; it needs causal=True. Tokens that key_lengths or, for every query, mask hide do not
    decay: their g is read as 0, may be NaN, and gets the gradient 0.

    state = (S (..., f, e), z (..., f)), with the heads of k: initial_state plus all keys that key_lengths and (for some
    query) mask allow, whatever causal and query_mask say. initial_state counts as keys that every query sees, so that a
    row with a state is not null; under causal it needs L = S. mask, causal, key_lengths, query_mask and enable_gqa are
    those of `softmax_attention`; there is no bias, window or dropout.

    A query that sees no key and no state gets output and gradients 0. ValueError for shapes, values and unknown
    arguments, TypeError for dtypes. Source: Katharopoulos et al. 2020 "Transformers are RNNs" eq 4-12, 16-20; decay:
    Sun et al. 2023 "Retentive Network" eq 5 (one for each head), Dao & Gu 2024 "Transformers are SSMs" (each token).
    """
    return linear("linear_attention", q, k, v, **params).forward()


linear_attention_weights = derived_weights(
    linear_attention,
    linear_rows,
    doc="The weights w (..., L, S) of `linear_attention` without a state; exactly 0 where invisible.",
)
linear_attention_vjp, linear_attention_magnitudes = derived_gradients(
    linear_attention,
    linear,
    """Gradients of `linear_attention`: {"q", "k", "v"} and "initial_state", a tuple like it, if given.

    do (..., L, e) is the cotangent of o, dstate = (dS, dz) that of the state; None is 0, for a part too. With dn =
    scale do/den and dd = -scale (do·o)/den (0 if not normalized): dφ(q_i) = S_i dn_i + z_i dd_i, dφ(k_j) = R_j v_j +
    r_j, dv_j = R_j^T φ(k_j), where R_j = Σ_i φ(q_i) dn_i^T + dS and r_j = Σ_i φ(q_i) dd_i + dz over the queries i that
    see key j. With an array log_decay {"log_decay"} too: dg_l is the sum of what passes l, Σ_{j<l<=i} s_ij ds_ij, with
    the initial state among the keys and dstate among the queries, over all tokens that share a number.
    """,
    """What rounding errors are measured against: "o", "state" if dstate is given, and the gradients with the summands
    of their last contraction in absolute value, for example Σ_j |w| |v| for o and Σ_j |φ(k)| |v| for S.
    """,
    pull=pull,
)


@keywords(one_token_of, "scale", "enable_gqa")
def linear_attention_step(
    state: State | None, q_t: Array, k_t: Array, v_t: Array, **params: object
) -> tuple[Array, State]:
    """One more token: S' = S + φ(k_t) v_t^T, z' = z + φ(k_t), o_t = φ(q_t)·S'/(φ(q_t)·z' + eps) -> (o_t, (S', z')).

    state as in `linear_attention`, or None at the start; q_t (..., d), k_t (..., d), v_t (..., e), heads on
    axis -2 -> o_t (..., e). The state passed in is not modified. With log_decay_t, a number or an array over the
    leading axes of k_t, S and z are multiplied by exp(log_decay_t) first. Source: Katharopoulos et al. 2020 eq 16-20.
    """
    return step(one_token_of, "linear_attention_step", state, q_t, k_t, v_t, **params)


linear_attention_step_vjp, linear_attention_step_magnitudes = step_gradients(
    linear_attention_step,
    one_token_of,
    'Gradients {"q_t", "k_t", "v_t"}, "log_decay_t" of an array, and "state", a tuple like it, if there was one.',
    'Magnitudes of "o_t", "next_state" and the gradients, as in `linear_attention_magnitudes`.',
)
