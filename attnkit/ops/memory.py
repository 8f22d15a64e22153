"""Key-value memory: a feed-forward network read as attention to learned slots (Shen et al. 2023)."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from attnkit._core import check, quadratic
from attnkit._core.derived import vjp_like
from attnkit._core.dispatch import namespace, operation_checked_by
from attnkit._core.family import Family
from attnkit._core.tokens import cotangent, one_of
from attnkit._core.typing import A, Array, Factor, Impl, Keywords, Namespace, Option
from attnkit.ops import pointwise, softmax

# how slots are weighed: like keys in the attention op of that name, without its scale and length
_FAMILIES: dict[str, tuple[Family, Keywords]] = {
    "relu": (pointwise.POINTWISE, {"activation": "relu", "alpha": 0.0}),
    "softmax": (softmax.SOFTMAX, {}),
}


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    x, keys, values = arrays["x"], arrays["keys"], arrays["values"]
    for name, array in (("x", x), ("keys", keys), ("values", values)):
        if array.ndim < 2:
            check.wrong_shape(op, name, array, "at least two axes, (..., tokens or slots, features)")
    if x.shape[-1] == 0:
        check.wrong_shape(op, "x", x, "at least one feature")
    if keys.shape[-1] != x.shape[-1]:
        check.wrong_shape(op, "keys", keys, f"(..., m, {x.shape[-1]}) as x has {x.shape[-1]} features")
    if values.shape[-2] != keys.shape[-2]:
        check.wrong_shape(op, "values", values, f"(..., {keys.shape[-2]}, e) as keys has {keys.shape[-2]} slots")
    shapes = [tuple(array.shape[:-2]) for array in (x, keys, values)]
    leading = check.broadcast(op, "the leading axes of x, keys and values", *shapes)
    context = check.Context(op, x, leading, x.shape[-2], keys.shape[-2], options, "x")
    m, e = values.shape[-2:]
    for name, size in (("key_bias", m), ("value_bias", e), ("norm_weight", e), ("norm_bias", e)):
        _vector(context, name, options.get(name), size)
    if options.get("norm_bias") is not None and options.get("norm_weight") is None:
        raise ValueError(f"{op}: norm_bias needs a norm_weight beside it; got None")
    cotangent(op, "do", arrays.get("do"), (*leading, x.shape[-2], e))
    return context


def _vector(c: check.Context, name: str, x: Array | None, size: int) -> None:
    if x is None:
        return
    check.option_array(c, name, x, check.FLOATS, f"one of {', '.join(check.FLOATS)}", (size,), "its size")
    if tuple(x.shape) != (size,):
        check.wrong_shape(c.op, name, x, f"({size},)")


def _checked_with_arrays(c: check.Context, name: str, value: object) -> None:
    """A vector: `_context` checks its shape together with the arrays that share its size."""


_VECTORS = ("key_bias", "value_bias", "norm_weight", "norm_bias")
_OWN = {"activation": one_of(*_FAMILIES), **dict.fromkeys(_VECTORS, _checked_with_arrays)}


class _Parts(NamedTuple):
    """Everything in the compute dtype."""

    a: quadratic.Inputs
    s: Array  # (..., T, m)
    u: Array  # (..., T, m): unnormalised weights, w = u·r
    r: Factor  # a number or (..., T, 1)
    h: Array  # (..., T, e), before the LayerNorm
    eps: float
    score_gradient: Callable[..., Array]


def _parts(
    xp: Namespace,
    x: Array,
    keys: Array,
    values: Array,
    *,
    activation: Literal["relu", "softmax"] = "relu",
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    eps: float = 1e-5,
    **norm: Array | None,
) -> _Parts:
    a = quadratic.prepare(xp, x, keys, values, bias=key_bias, scale=1.0)
    family, own = _FAMILIES[activation]
    s = quadratic.scores(xp, a)
    u, r = family.weigh(xp, s, a, **own)
    h = quadratic.output(xp, a, u, r)
    h = h if value_bias is None else h + quadratic.cast(xp, value_bias, a.dtype)
    return _Parts(a, s, u, r, h, eps, partial(family.score_gradient, **own))


@operation_checked_by(_context, _OWN)
def key_value_memory(
    x: A,
    keys: A,
    values: A,
    *,
    activation: Literal["relu", "softmax"] = "relu",
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    eps: float = 1e-5,
    impl: Impl = "auto",
) -> A:
    """H = act(x keysᵀ + key_bias) values + value_bias, and LayerNorm over the features of H if norm_weight is given.

    Shen et al. 2023 eq 1 and 2: their K = W₁ = `keys`, V = W₂ = `values`, d_h = m slots. "relu" is a feed-forward
    network, "softmax" a memory network, as good as the former only with the LayerNorm (§3.2). Without biases and norm
    it is `pointwise_attention(x, keys, values, alpha=0, scale=1)` or `softmax_attention(x, keys, values, scale=1)`.

    Args:
        x: (..., T, D). Leading axes broadcast, so that slots may be shared by all items.
        keys: (..., m, D).
        values: (..., m, e).
        activation: "relu" or "softmax" over the slots.
        key_bias, value_bias: (m,) and (e,), any real float dtype. The paper leaves them out after eq 1.
        norm_weight, norm_bias: (e,), any real float dtype: (H - mean)/√(variance + eps) ⊙ norm_weight + norm_bias,
            with the population variance. norm_bias needs norm_weight.
        eps: added to the variance; 1e-5 as in torch's LayerNorm. The paper gives none.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).

    Returns:
        (..., T, e) in the dtype of x, computed in float32 (float64 for float64).

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(x)
    p = _parts(xp, x, keys, values, activation=activation, key_bias=key_bias, value_bias=value_bias)
    y = p.h
    if norm_weight is not None:
        y = pointwise.normalise(xp, y, eps).centred * quadratic.cast(xp, norm_weight, p.a.dtype)
        y = y if norm_bias is None else y + quadratic.cast(xp, norm_bias, p.a.dtype)
    return quadratic.cast_for(x, xp, y, x.dtype)


@operation_checked_by(_context, _OWN)
@vjp_like(key_value_memory)
def key_value_memory_vjp(x: Array, keys: Array, values: Array, do: Array, **options: Option) -> dict[str, Array]:
    """Gradients {"x", "keys", "values"}, and of each bias and norm weight passed, for the cotangent do.

    With y the normalised H, r = 1/√(variance + eps), g = norm_weight ⊙ do: dH = r·(g - mean(g) - y·mean(g ⊙ y)), or do
    without a norm; dw = dH valuesᵀ; ds = relu'(s) ⊙ dw, or w ⊙ (dw - Σ w dw); dx = ds keys, dkeys = dsᵀ x,
    dvalues = wᵀ dH, dkey_bias = Σ ds, dvalue_bias = Σ dH, dnorm_weight = Σ do ⊙ y, dnorm_bias = Σ do.
    """
    xp = namespace(x)
    p = _parts(xp, x, keys, values, **options)
    do, w = quadratic.cast(xp, do, p.a.dtype), p.u * p.r
    vectors, dh = {"norm_bias": do}, do
    if options.get("norm_weight") is not None:
        normed = pointwise.normalise(xp, p.h, p.eps)
        g = do * quadratic.cast(xp, options["norm_weight"], p.a.dtype)
        along = quadratic.mean(xp, g * normed.centred, (-1,))
        dh = (g - quadratic.mean(xp, g, (-1,)) - normed.centred * along) * normed.inverse
        vectors["norm_weight"] = do * normed.centred

    def ds_of(dw: Array) -> Array:
        return p.score_gradient(xp, p.s, p.a, w, dw)

    like = {"q": x, "k": keys, "v": values, "bias": options.get("key_bias")}
    grads = quadratic.rounded(xp, quadratic.backward(xp, p.a, w, dh, ds_of, like), like)
    names = {"q": "x", "k": "keys", "v": "values", "bias": "key_bias"}
    grads = {names[name]: g for name, g in grads.items()}
    for name, g in (vectors | {"value_bias": dh}).items():
        vector = options.get(name)
        if vector is not None:
            grads[name] = quadratic.cast(xp, quadratic.sum_to(xp, g, tuple(vector.shape)), vector.dtype)
    return grads
