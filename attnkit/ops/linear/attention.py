"""Linear attention (Katharopoulos et al. 2020): a product of features takes the place of exp(q·k).

Sums over keys become a state, so that time is linear in the number of tokens, a sequence can be resumed, and one more
token costs the same however many there were. Masks of pairs take the quadratic form of the same weights.
"""

from collections.abc import Callable
from typing import Literal, Unpack

from attnkit._core import check
from attnkit._core.quadratic import cast
from attnkit._core.special import relu
from attnkit._core.tokens import checked_with_arrays
from attnkit._core.typing import Array, Factor, Impl, Keywords, Namespace
from attnkit.ops.linear.decay import check_decay
from attnkit.ops.linear.record import Linear, op, step_of, step_vjp_of, vjp_of, weights_of
from attnkit.ops.linear.rule import BODIES
from attnkit.ops.linear.states import STATE_CHECKS, Scaled, State, not_negative, state_context, step_context
from attnkit.ops.linear.sums import Features, Rule

FeatureMap = Literal["elu_plus_one", "relu", "identity"] | Callable[[Array], Array]
"""A name of FEATURE_MAPS, or (..., n, d) -> (..., n, f)."""


# ---------------------------------------------------------------------------------------------- features


def _below(xp: Namespace, x: Array) -> Array:
    """exp(x) where x is not above 0."""
    return xp.exp(xp.where(x > 0, 0.0, x))


FEATURE_MAPS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "elu_plus_one": (
        lambda xp, x: xp.where(x > 0, x + 1.0, _below(xp, x)),
        lambda xp, x, d: xp.where(x > 0, d, d * _below(xp, x)),
    ),
    "relu": (relu, lambda xp, x, d: xp.where(x <= 0, 0.0, d)),
    "identity": (lambda xp, x: x, lambda xp, x, d: d),
}
"""φ(x) and φ'(x)·d by name; φ'(0) is 0 for relu and 1 for elu_plus_one. Kernels have tables of their own."""


def _features(xp: Namespace, op: str, feature_map: FeatureMap, x: Array) -> Features:
    if not callable(feature_map):
        phi, times_slope = FEATURE_MAPS[feature_map]
        return Features(phi(xp, x), lambda d: times_slope(xp, x, d))
    values = feature_map(x)
    if not check.is_array(values) or tuple(values.shape[:-1]) != tuple(x.shape[:-1]):
        got = tuple(values.shape) if check.is_array(values) else type(values).__name__
        expected = ", ".join(map(str, x.shape[:-1]))
        raise ValueError(f"{op}: feature_map must map (..., n, d) to (..., n, f) = ({expected}, f); got {got}")

    def pull(d: Array) -> Array:
        vjp = getattr(feature_map, "vjp", None)
        if vjp is None:
            raise NotImplementedError(
                f"{op}: explicit gradients need a feature_map with an attribute vjp(x, dfeatures) -> dx; got "
                f"{feature_map!r}; automatic differentiation of the op itself needs none"
            )
        dx: Array = vjp(x, d)
        return cast(xp, dx, x.dtype)

    return Features(cast(xp, values, x.dtype), pull)


def rule(
    op: str,
    *,
    feature_map: FeatureMap = "elu_plus_one",
    normalize: bool | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    log_decay: Factor | None = None,
    log_decay_t: Factor | None = None,
    **others: object,
) -> Rule:
    """Linear attention with its own options bound."""
    divides = feature_map != "identity" if normalize is None else normalize
    if log_decay_t is not None:
        log_decay = log_decay_t[..., None] if check.is_learned(log_decay_t) and log_decay_t.ndim else log_decay_t

    def features(xp: Namespace, x: Array) -> Features:
        return _features(xp, op, feature_map, x)

    def divide(xp: Namespace, raw: Array) -> tuple[Array, float, Array | None]:
        if not divides:
            return xp.ones_like(raw), 0.0, None
        return raw + eps, 1.0, raw + eps != 0

    return Rule(op, features, features, divide, 1.0 if scale is None else float(scale), log_decay=log_decay)


def signed(feature_map: FeatureMap = "elu_plus_one", scale: float | None = None, **others: object) -> bool:
    """Whether a weight can be negative."""
    return callable(feature_map) or feature_map == "identity" or (scale is not None and scale < 0)


# ---------------------------------------------------------------------------------------------- checks


def _check_feature_map(c: check.Context, name: str, value: object) -> None:
    if not callable(value) and value not in FEATURE_MAPS:
        check.refuse_name(c.op, name, value, FEATURE_MAPS, "or a callable")


def _check_normalize(c: check.Context, name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{c.op}: normalize must be None, True or False; got {value!r}")
    if value and c.options.get("feature_map") == "identity":
        raise ValueError(f"{c.op}: normalize must be None or False for identity, whose row sums can be 0; got True")


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    """`state_context`, and a decay, which has the heads of k and an order."""
    context = state_context(op, arrays, options)
    x, causal = options.get("log_decay"), options.get("causal", False)
    if x is None:
        return context
    if causal is not True:
        raise ValueError(f"{op}: log_decay needs causal=True, an order in which tokens decay; got causal={causal!r}")
    check_decay(context, "log_decay", x, _leading_of_keys(context, arrays["k"], options), context.keys)
    return context


def _step_context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    context = step_context(op, arrays, options)
    if options.get("log_decay_t") is not None:
        leading = _leading_of_keys(context, arrays["k_t"][..., None, :], options)
        check_decay(context, "log_decay_t", options["log_decay_t"], leading, None)
    return context


def _leading_of_keys(c: check.Context, k: Array, options: Keywords) -> tuple[int, ...]:
    """The leading axes of a call with the heads of k."""
    return (*c.leading[:-1], k.shape[-3]) if options.get("enable_gqa") else c.leading


OWN = {
    "log_decay": checked_with_arrays,
    "log_decay_t": checked_with_arrays,
    "feature_map": _check_feature_map,
    "normalize": _check_normalize,
    "eps": not_negative,
    "scale": check.plain_number,
    **STATE_CHECKS,
}
LINEAR = Linear("linear_attention", rule, BODIES, OWN, _context, _step_context, signed=signed)


# ---------------------------------------------------------------------------------------------- the op


@op(LINEAR, LINEAR.attend)
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: FeatureMap = "elu_plus_one",
    normalize: bool | None = None,
    eps: float = 1e-6,
    log_decay: float | Array | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
    **common: Unpack[Scaled],
) -> Array | tuple[Array, State]:
    """o_i = φ(q_i)ᵀS_i / (φ(q_i)·z_i + eps) with S_i = Σ_j φ(k_j) v_jᵀ, z_i = Σ_j φ(k_j) over the keys j visible to i.

    Katharopoulos et al. 2020 eq 4-12 (causal: S_i, Z_i there). The weights are w_ij = scale·φ(q_i)·φ(k_j)/den_i. With a
    decay S_i = exp(g_i) S_{i-1} + φ(k_i) v_iᵀ, z likewise: φ(q_i)·φ(k_j) counts exp(Σ_{j<l<=i} g_l) times.

    Args:
        q: (..., L, d). Leading axes broadcast; heads are axis -3.
        k: (..., S, d).
        v: (..., S, e).
        feature_map: φ. "elu_plus_one" (the paper's, eq 7): x + 1 above 0, exp(x) below. "relu". "identity". Or a
            callable (..., n, d) -> (..., n, f) on arrays of the library in the compute dtype; its output is set to 0 at
            tokens that take no part. For explicit gradients it needs an attribute vjp(x, dφ) -> dx.
        normalize: divide by the row sum. None: True, but False for "identity", whose row sums can be 0 or negative
            (True there is an error). Where the denominator is 0, o is 0.
        eps: added to the denominator, as in the authors' code.
        log_decay: g, at most 0, the logarithm of what is left of S and z when a token comes; needs causal=True. A
            number; an array of shape () or (H,), one for each head of k (RetNet, lightning attention: with "identity");
            or (..., S), one for each token (the decay of Mamba-2), 0 keeping all and -∞ nothing. Arrays have any real
            float dtype. Hidden tokens do not decay: theirs is read as 0, may be NaN and gets the gradient 0. An array
            of one axis is one for each head, if the call has heads.
        chunk_size: tokens that are multiplied out at a time under causality; speed, not meaning.
        initial_state: (S (..., f, e), z (..., f)), any real float dtype, with the heads of k: keys that came before and
            that every query sees. A row with a state is not null. With `causal` it needs L = S.
        return_state: also return the state: initial_state plus all keys that `key_lengths` and (for some query) `mask`
            allow, whatever `causal` and `query_mask` say, for later queries may see them.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `causal`, `key_lengths`, `query_mask`, `scale` (a factor of φ(q)·φ(k), None = 1) and
            `enable_gqa`; see docs/semantics.md. A mask of pairs (not a key mask) costs O(L·S).

    Returns:
        o (..., L, e) in the dtype of q, computed in float32 (float64 for float64); with `return_state` (o, (S, z)), the
        state in the compute dtype. A row that sees neither a key nor a state is 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


linear_attention_weights = weights_of(linear_attention, LINEAR)
linear_attention_vjp = vjp_of(
    linear_attention,
    LINEAR,
    """Gradients {"q", "k", "v"}, "log_decay" of an array and, where one was given, "initial_state" (a tuple), for the
    cotangents do and dstate = (dS, dz); None is 0, for a part too.

    With dn = do/den and dd = -(do·o)/den: dφ(q_i) = S_i dn_i + z_i dd_i in one pass; dφ(k_j) = R_j v_j + r_j and dv_j
    = R_jᵀφ(k_j) in a second one from the end, R_j = Σ φ(q_i) dn_iᵀ + dS and r_j = Σ φ(q_i) dd_i + dz over the queries
    that see key j (Katharopoulos et al. 2020 eq 13-15, with the denominator). S_i is made again, not kept or
    subtracted. dg_l = <exp(g_l) [S, z]_{l-1}, [R, r]_l>, R_l being the gradient of S_l, as a sum over the pairs on both
    sides of l: a difference of sums over the sequence would lose what small gates get.
    """,
)
linear_attention_step = step_of(
    linear_attention,
    LINEAR,
    """One more token: S' = S + φ(k_t) v_tᵀ, z' = z + φ(k_t), o_t = φ(q_t)ᵀS'/(φ(q_t)·z' + eps).

    Katharopoulos et al. 2020 eq 16-20.

    Args:
        state: from `linear_attention` or this function; None = nothing seen yet. It is not changed.
        q_t: (..., d). Leading axes broadcast; heads are axis -2.
        k_t: (..., d).
        v_t: (..., e).
        log_decay_t: by exp of which S and z are multiplied first; a number, or an array (...) over the axes
            before the last of k_t.
        feature_map, normalize, eps, scale, enable_gqa, impl: as in `linear_attention`.

    Returns:
        (o_t (..., e) in the dtype of q_t, (S', z') in the compute dtype).
    """,
)
linear_attention_step_vjp = step_vjp_of(linear_attention, LINEAR)
