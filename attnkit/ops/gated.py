"""Gated attention unit: squared-relu attention of one head whose output a second projection gates (Hua et al. 2022)."""

from functools import partial
from typing import NamedTuple, TypedDict, Unpack

from attnkit._core import check
from attnkit._core.activations import ACTIVATIONS
from attnkit._core.derived import vjp_like
from attnkit._core.dispatch import Kernel, namespace, operation_checked_by, with_gradients
from attnkit._core.mask import Rows, visibility_of
from attnkit._core.quadratic import cast, compute_dtype, sum_to
from attnkit._core.tokens import chosen, cotangent
from attnkit._core.typing import A, Array, Bindings, Causal, Impl, Keywords, Length, Namespace, Option, Options, Seed
from attnkit.ops.pointwise import pointwise_attention, pointwise_attention_vjp

_SILU = ACTIVATIONS["silu"]
WEIGHTS = ("w_z", "w_u", "w_v", "w_o", "gamma_q", "beta_q", "gamma_k", "beta_k")
ATTENTION: Keywords = {"activation": "relu_squared", "alpha": 2.0, "scale": 1.0}


class OneHead(TypedDict, total=False):
    """The common options of `pointwise_attention`, without heads and scale."""

    mask: Array | None
    bias: Array | None
    causal: Causal
    window: tuple[int | None, int | None] | None
    key_lengths: Array | int | None
    query_mask: Array | None
    dropout_mask: Array | None
    dropout: tuple[float, Seed] | None


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    x = arrays["x"]
    if x.ndim < 2:
        check.wrong_shape(op, "x", x, "at least two axes, (..., tokens, features)")
    if x.shape[-1] == 0:
        check.wrong_shape(op, "x", x, "at least one feature")
    for name in WEIGHTS[:4]:
        if arrays[name].ndim != 2:
            check.wrong_shape(op, name, arrays[name], "a matrix")
    D, s, e = x.shape[-1], arrays["w_z"].shape[-1], arrays["w_v"].shape[-1]
    if s == 0:
        check.wrong_shape(op, "w_z", arrays["w_z"], f"({D}, s) with s at least 1")
    expected = {"w_z": (D, s), "w_u": (D, e), "w_v": (D, e), "w_o": (e, arrays["w_o"].shape[-1])}
    for name, shape in expected.items():
        if tuple(arrays[name].shape) != shape:
            check.wrong_shape(op, name, arrays[name], f"{shape}")
    for name in WEIGHTS[4:]:
        if tuple(arrays[name].shape) != (s,):
            check.wrong_shape(op, name, arrays[name], f"({s},)")
    leading, T = tuple(x.shape[:-2]), x.shape[-2]
    cotangent(op, "do", arrays.get("do"), (*leading, T, arrays["w_o"].shape[-1]))
    return check.Context(op, x, leading, T, T, options, "x")


class _Parts(NamedTuple):
    """Everything in the compute dtype: silu's arguments and values, and the inputs of the attention."""

    x: Array  # (..., T, D)
    weights: dict[str, Array]  # by name: (D, s), (D, e), (e, ·) or (s,)
    before: dict[str, Array]  # x W_z (..., T, s), x W_u and x W_v (..., T, e)
    after: dict[str, Array]  # z (..., T, s), u and v (..., T, e)
    q: Array  # (..., T, s)
    k: Array  # (..., T, s)
    used: Array | None  # (..., T) tokens used as a query or a key, None = all


def _used(xp: Namespace, x: Array, common: Bindings) -> Array | None:
    T, visibility = x.shape[-2], visibility_of(common)
    if not visibility.masked:  # under causality every token is used
        return None
    pairs = visibility.pairs(xp, x, T, Rows(0, T, T))
    return None if pairs is None else xp.any(pairs, axis=-1) | xp.any(pairs, axis=-2)


def _parts(xp: Namespace, x: Array, weights: dict[str, Array], common: Bindings) -> _Parts:
    dtype = compute_dtype(xp, x)
    wide = {name: cast(xp, w, dtype) for name, w in weights.items()}
    used = _used(xp, x, common)
    x = chosen(xp, used, cast(xp, x, dtype))
    before = {name: x @ wide[f"w_{name}"] for name in ("z", "u", "v")}
    after = {name: _SILU.h(xp, y) for name, y in before.items()}
    q = after["z"] * wide["gamma_q"] + wide["beta_q"]
    k = after["z"] * wide["gamma_k"] + wide["beta_k"]
    return _Parts(x, wide, before, after, q, k, used)


def _attend(impl: str, x: Array, *arrays: Array, **options: object) -> Array:
    """`gated_attention_unit` with its attention by an implementation."""
    xp = namespace(x)
    p = _parts(xp, x, dict(zip(WEIGHTS, arrays, strict=True)), options)
    a = pointwise_attention(p.q, p.k, p.after["v"], impl=impl, **{**ATTENTION, **options})
    return cast(xp, (p.after["u"] * a) @ p.weights["w_o"], x.dtype)


def _pull(impl: str, x: Array, *others: Array, **options: Option) -> dict[str, Array]:
    """`gated_attention_unit_vjp` with it."""
    *arrays, do = others
    xp, weights = namespace(x), dict(zip(WEIGHTS, arrays, strict=True))
    p, options = _parts(xp, x, weights, options), {**ATTENTION, "impl": impl, **options}
    a = pointwise_attention(p.q, p.k, p.after["v"], **options)
    do = chosen(xp, p.used, cast(xp, do, p.x.dtype))
    gated = do @ p.weights["w_o"].mT
    inside = pointwise_attention_vjp(p.q, p.k, p.after["v"], p.after["u"] * gated, **options)
    dz = inside["q"] * p.weights["gamma_q"] + inside["k"] * p.weights["gamma_k"]
    after = {"z": dz, "u": a * gated, "v": inside["v"]}
    before = {name: _SILU.slope(xp, p.before[name]) * g for name, g in after.items()}
    grads = {
        "x": before["z"] @ p.weights["w_z"].mT + before["u"] @ p.weights["w_u"].mT + before["v"] @ p.weights["w_v"].mT,
        **{f"w_{name}": p.x.mT @ dy for name, dy in before.items()},
        "w_o": (p.after["u"] * a).mT @ do,
        "gamma_q": inside["q"] * p.after["z"],
        "beta_q": inside["q"],
        "gamma_k": inside["k"] * p.after["z"],
        "beta_k": inside["k"],
    }
    like = {"x": x, **weights}
    rounded = {name: cast(xp, sum_to(xp, g, tuple(like[name].shape)), like[name].dtype) for name, g in grads.items()}
    return rounded | ({"bias": inside["bias"]} if "bias" in inside else {})


@operation_checked_by(_context, check.PLAIN_NUMBERS, runs=partial(_attend, "generic"))
def gated_attention_unit(
    x: A,
    w_z: Array,
    w_u: Array,
    w_v: Array,
    w_o: Array,
    gamma_q: Array,
    beta_q: Array,
    gamma_k: Array,
    beta_k: Array,
    *,
    alpha: float = 2.0,
    length: Length = "visible",
    impl: Impl = "auto",
    **common: Unpack[OneHead],
) -> A:
    """o = (u ⊙ a) W_o, where a_i = n_i^-alpha Σ_j relu(q_i·k_j)² v_j is squared-relu attention and u a gate.

    Hua et al. 2022 §3; used by Wortsman et al. 2023 §4. u = silu(x W_u), v = silu(x W_v), z = silu(x W_z),
    q = z ⊙ gamma_q + beta_q, k = z ⊙ gamma_k + beta_k: one head, no 1/√s. The attention is `pointwise_attention` with
    relu_squared and scale 1.

    Args:
        x: (..., T, D).
        w_z: (D, s); w_u, w_v: (D, e); w_o: (e, D'); gamma_q, beta_q, gamma_k, beta_k: (s,); any real float dtype.
        alpha: exponent of the length. 2 is Hua et al.'s relu(q·k/n)², 1 the form of Wortsman et al.
        length: n_i, as in `pointwise_attention`.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias`, `causal`, `window`, `key_lengths`, `query_mask`, `dropout_mask`, `dropout` as in
            `pointwise_attention`. bias is added before the relu, and so divided by the length with it.

    Returns:
        o (..., T, D') in the dtype of x, computed in float32 (float64 for float64). A token that sees no key gives 0;
        if it is not a key either, it may be NaN.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """


@operation_checked_by(_context, check.PLAIN_NUMBERS)
@vjp_like(gated_attention_unit)
def gated_attention_unit_vjp(x: Array, *others: Array, **options: Unpack[Options]) -> dict[str, Array]:
    """Gradients of x, of every weight and, if passed, of "bias", for the cotangent do.

    da = u ⊙ (do W_oᵀ), du = a ⊙ (do W_oᵀ), dq, dk, dv from da as in `pointwise_attention_vjp`,
    dz = gamma_q ⊙ dq + gamma_k ⊙ dk; with y = x W and dy = silu'(y) times the gradient of silu(y): dW = xᵀ dy,
    dx = Σ dy Wᵀ.
    """
    return _pull("generic", x, *others, **options)


# ---------------------------------------------------------------------------------------------- kernels


def kernels(of: Kernel) -> dict[str, Kernel]:
    """The table of a library: the attention by its kernel of point-wise attention."""

    def unsupported(x: Array, *weights: Array, **options: object) -> str | None:
        return of.unsupported(x, x, x, **{**ATTENTION, **options})

    kernel = Kernel(of.name, partial(_attend, of.name), unsupported)
    return with_gradients(gated_attention_unit, kernel, partial(_pull, of.name))
