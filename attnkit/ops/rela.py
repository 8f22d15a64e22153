"""ReLA (Zhang et al. 2021): relu of the scores without a normaliser, followed by RMSNorm."""

from functools import partial
from typing import NamedTuple, Unpack

from attnkit._core import check, quadratic
from attnkit._core.activations import ACTIVATIONS
from attnkit._core.derived import vjp_like
from attnkit._core.dispatch import Kernel, namespace, operation_checked_by, with_gradients
from attnkit._core.family import Apart, Family, always, recorded, weights_of
from attnkit._core.special import may_have_gradient, stop_gradient
from attnkit._core.typing import A, AnyFunction, Array, Common, Factor, Impl, Keywords, Namespace
from attnkit.ops import pointwise

NORM_AXES = ("hidden", "head")
RELU: Keywords = {"activation": "relu", "alpha": 0.0}


# ---------------------------------------------------------------------------------------------- checks


def _context(op: str, arrays: Keywords, options: Keywords) -> check.Context:
    """Shapes of q, k, v as in every attention op; weights of one head or of all, and do with the heads joined."""
    without = {name: x for name, x in arrays.items() if name != "do"}
    c = check.attention_context(op, without, options)
    size = arrays["v"].shape[-1]
    joined = (*c.leading[:-1], c.queries, c.leading[-1] * size) if c.leading else (c.queries, size)
    axis = options.get("norm_axis", "hidden")
    _check_axis(c, "norm_axis", axis)
    shape = (joined[-1],) if axis == "hidden" else (size,)
    for name, x in (("norm_weight", arrays["norm_weight"]), ("gate_weight", options.get("gate_weight"))):
        if x is not None and check.is_array(x) and tuple(x.shape) != shape:
            check.wrong_shape(op, name, x, f"{shape} for norm_axis={axis!r}")
    if arrays.get("do") is not None and tuple(arrays["do"].shape) != joined:
        check.wrong_shape(op, "do", arrays["do"], f"{joined}, the shape of the output")
    return c


def _check_axis(c: check.Context, name: str, value: object) -> None:
    if value not in NORM_AXES:
        check.refuse_name(c.op, name, value, NORM_AXES)


def _check_gate(c: check.Context, name: str, value: Array | None) -> None:
    """Check library and dtype; `_context` checks the shape."""
    if value is not None:
        shape = tuple(value.shape) if check.is_array(value) else ()
        check.option_array(c, name, value, check.FLOATS, "a real float dtype", shape, "")


OWN = {"norm_axis": _check_axis, "gate_weight": _check_gate}


# ---------------------------------------------------------------------------------------------- the norm


class _Normed(NamedTuple):
    """x = relu(s) v (..., H, L, e) in the compute dtype, and the norm that turns it into the output."""

    x: Array  # (..., H, L, e)
    inverse: Array  # (..., 1, L, 1) or (..., H, L, 1): 1/√(mean x² + eps)
    weight: Array  # broadcasts to (..., H, L, e)
    opening: Array | None  # (..., H, L, e): sigmoid(gate ⊙ x)
    gate: Array | None  # broadcasts to (..., H, L, e)
    axes: tuple[int, ...]


def _spread(xp: Namespace, x: Array, weight: Array) -> Array:
    """A weight (H·e,) or (e,) as it multiplies x."""
    weight = quadratic.cast(xp, weight, x.dtype)
    return weight if x.ndim < 3 or weight.shape[0] == x.shape[-1] else xp.reshape(weight, (x.shape[-3], 1, x.shape[-1]))


def _norm(
    xp: Namespace, x: Array, norm_weight: Array, gate_weight: Array | None, norm_axis: str, eps: float
) -> _Normed:
    axes = (-3, -1) if norm_axis == "hidden" and x.ndim >= 3 else (-1,)
    inverse = 1.0 / xp.sqrt(quadratic.mean(xp, x * x, axes) + eps)
    weight = _of_rows(xp, x, norm_weight, axes)
    gate = None if gate_weight is None else _of_rows(xp, x, gate_weight, axes)
    opening = None if gate is None else ACTIVATIONS["sigmoid"].h(xp, gate * x)
    return _Normed(x, inverse, weight, opening, gate, axes)


def _of_rows(xp: Namespace, x: Array, weight: Array, axes: tuple[int, ...]) -> Array:
    """A weight as it multiplies x. Rows with x = 0 pass no gradient to it, whatever their cotangent, which may be
    that of padding.
    """
    weight = _spread(xp, x, weight)
    if not may_have_gradient(weight):
        return weight
    return xp.where(xp.any(x != 0, axis=axes, keepdims=True), weight, stop_gradient(weight))


def _swapped(xp: Namespace, x: Array) -> Array:
    """x with axes -3 and -2 exchanged; moveaxis has no rule for torch.vmap."""
    n = x.ndim
    return xp.permute_dims(x, (*range(n - 3), n - 2, n - 3, n - 1))


def _joined(xp: Namespace, x: Array) -> Array:
    """(..., H, L, e) -> (..., L, H·e), heads in order."""
    if x.ndim < 3:
        return x
    x = _swapped(xp, x)
    return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def _heads_of(xp: Namespace, x: Array, like: Array) -> Array:
    """The inverse of `_joined`, to the shape of `like`."""
    if like.ndim < 3:
        return x
    return _swapped(xp, xp.reshape(x, (*x.shape[:-1], like.shape[-3], like.shape[-1])))


def normalised(
    xp: Namespace,
    x: Array,
    norm_weight: Array,
    *,
    gate_weight: Array | None = None,
    norm_axis: str = "hidden",
    eps: float = 1e-8,
) -> Array:
    """The output, from x = relu(s) v (..., H, L, e) in the compute dtype."""
    n = _norm(xp, x, norm_weight, gate_weight, norm_axis, eps)
    y = n.x * n.inverse * n.weight
    return _joined(xp, y if n.opening is None else y * n.opening)


def _of_weight(xp: Namespace, g: Array, like: Array) -> Array:
    """Gradients (..., H, L, e) of every token summed to those of a weight."""
    if g.ndim < 3 or like.shape[0] == g.shape[-1]:
        return xp.reshape(quadratic.sum_to(xp, g, (1, g.shape[-1])), like.shape)
    return xp.reshape(quadratic.sum_to(xp, g, (g.shape[-3], 1, g.shape[-1])), like.shape)


def normalised_vjp(
    xp: Namespace,
    x: Array,
    norm_weight: Array,
    do: Array,
    *,
    gate_weight: Array | None = None,
    norm_axis: str = "hidden",
    eps: float = 1e-8,
) -> dict[str, Array]:
    """Gradients {"x", "norm_weight"}, and "gate_weight" if passed, in the compute dtype.

    Rows with x = 0 add nothing to those of the weights whatever do is, which may be padding there.
    """
    n = _norm(xp, x, norm_weight, gate_weight, norm_axis, eps)
    do = _heads_of(xp, quadratic.cast(xp, do, x.dtype), x)
    unit, grads = n.x * n.inverse, dict[str, Array]()
    more: Factor = 0.0
    dy = of_some = xp.where(xp.any(x != 0, axis=n.axes, keepdims=True), do, 0.0)
    g = do * n.weight
    if n.opening is not None and gate_weight is not None:
        slope = of_some * (unit * n.weight) * ACTIVATIONS["sigmoid"].slope(xp, n.gate * n.x)
        more, grads["gate_weight"] = slope * n.gate, _of_weight(xp, slope * n.x, gate_weight)
        dy, g = of_some * n.opening, g * n.opening
    grads["norm_weight"] = _of_weight(xp, dy * unit, norm_weight)
    mean = quadratic.mean(xp, dy * n.weight * unit, n.axes)
    return grads | {"x": n.inverse * (g - unit * mean) + more}


# ---------------------------------------------------------------------------------------------- public


@operation_checked_by(_context, OWN)
def rela_attention(
    q: A,
    k: A,
    v: A,
    norm_weight: A,
    *,
    gate_weight: Array | None = None,
    norm_axis: str = "hidden",
    eps: float = 1e-8,
    impl: Impl = "auto",
    **common: Unpack[Common],
) -> A:
    """RMSNorm of x_i = Σ_j relu(s_ij) v_j, the heads joined: y = x/√(mean x² + eps) ⊙ norm_weight, (..., L, H·e).

    Zhang et al. 2021 §3 and their code; a baseline of Shen et al. 2023. s = scale·q kᵀ + bias, without a length scale.

    Args:
        q: (..., H, L, d). Leading axes broadcast; without a head axis H = 1.
        k: (..., H, S, d).
        v: (..., H, S, e).
        norm_weight: (H·e,) for norm_axis "hidden", (e,) for "head"; any real float dtype.
        gate_weight: of the same shape; y is multiplied by sigmoid(gate_weight ⊙ x), x not normalised. None = no gate.
        norm_axis: "hidden" (the official code): the mean runs over the H·e features of a token; "head" (a popular
            port): over the e features of a head.
        eps: added to the mean square; 1e-8 as in the official code.
        impl: "auto", "generic", the name of a kernel, or a tuple or list of names tried in order (see
            `attnkit.explain`).
        **common: `mask`, `bias`, `causal`, `window`, `key_lengths`, `query_mask`, `scale` (None = 1/√d), `enable_gqa`,
            `dropout_mask`, `dropout`; see docs/semantics.md. A
            scale that is an array, () or (H,) with a number for each head, is differentiable.

    Returns:
        o (..., L, H·e) in the dtype of q, heads in order, computed in float32 (float64 for float64). A token that sees
        no key, or whose scores are all negative, gives 0.

    Raises:
        ValueError: shapes or values that do not fit; an argument that this op does not take.
        TypeError: dtypes, libraries or devices that do not fit.
        NotImplementedError: `impl` names a kernel that cannot serve this call.
    """
    xp = namespace(q)
    a = quadratic.prepare(xp, q, k, v, **common)
    x = quadratic.output(xp, a, *pointwise.weigh(xp, quadratic.scores(xp, a), a, **RELU))
    y = normalised(xp, x, norm_weight, gate_weight=gate_weight, norm_axis=norm_axis, eps=eps)
    return quadratic.cast_for(q, xp, y, q.dtype)


@operation_checked_by(_context, OWN)
@vjp_like(rela_attention)
def rela_attention_vjp(
    q: Array, k: Array, v: Array, norm_weight: Array, do: Array, **options: object
) -> dict[str, Array]:
    """Gradients {"q", "k", "v", "norm_weight"}, and "gate_weight", "bias" and a learned "scale" if passed, for the
    cotangent do.

    With r = 1/√(mean x² + eps), σ = sigmoid(gate_weight ⊙ x), dy = do ⊙ σ and g = dy ⊙ norm_weight:
    dx = r·(g - x r²·mean(g ⊙ x)) + do ⊙ y ⊙ σ(1-σ) ⊙ gate_weight, dnorm_weight = Σ dy ⊙ x r,
    dgate_weight = Σ do ⊙ y ⊙ σ(1-σ) ⊙ x; then as in `pointwise_attention_vjp` with dx for do.
    """
    norm, common = RELA.split_options(options)
    xp = namespace(q)
    a = quadratic.prepare(xp, q, k, v, **common)
    s = quadratic.scores(xp, a)
    w, r = pointwise.weigh(xp, s, a, **RELU)
    x = quadratic.output(xp, a, w, r)
    through = normalised_vjp(xp, x, norm_weight, do, **norm)

    def ds_of(dw: Array) -> Array:
        ds: Array = RELA.score_gradient(xp, s, a, w, dw)
        return ds

    like = {"q": q, "k": k, "v": v, "bias": common.get("bias"), "norm_weight": norm_weight, **norm}
    like |= RELA.learned({}, common)
    return quadratic.rounded(xp, quadratic.backward(xp, a, w, through.pop("x"), ds_of, like) | through, like)


RELA = Family(
    "rela_attention",
    partial(pointwise.weigh, **RELU),
    partial(pointwise.score_gradient, **RELU),
    constant_factor=True,
    exact_zeros=always,
    output_only=("norm_weight", "gate_weight", "norm_axis", "eps"),
    apart=Apart(rela_attention, rela_attention_vjp, joins_heads=True),
)
recorded(RELA)(rela_attention)
rela_attention_weights = weights_of(rela_attention, RELA)


# ---------------------------------------------------------------------------------------------- kernels


def kernels(of: Kernel, pull_of: AnyFunction | None = None, replaces: tuple[str, ...] = ()) -> dict[str, Kernel]:
    """The table of a library: its kernel of point-wise attention, in the compute dtype, followed by the norm.

    Without `pull_of`, the gradients of that kernel, both are called by name, and what was prepared for them is used.
    """
    by_name: tuple[AnyFunction, ...] = (pointwise.pointwise_attention, pointwise.pointwise_attention_vjp)
    forward, backward = (partial(x, impl=of.name) for x in by_name) if pull_of is None else (of.call, pull_of)

    def wide(xp: Namespace, *arrays: Array) -> list[Array]:
        return [quadratic.cast(xp, x, quadratic.compute_dtype(xp, arrays[0])) for x in arrays]

    def attend(q: Array, k: Array, v: Array, norm_weight: Array, **options: object) -> Array:
        norm, common = RELA.split_options(options)
        xp = namespace(q)
        product = forward(*wide(xp, q, k, v), **RELU, **common)
        return quadratic.cast(xp, normalised(xp, product, norm_weight, **norm), q.dtype)

    def pull(q: Array, k: Array, v: Array, norm_weight: Array, do: Array, **options: object) -> dict[str, Array]:
        norm, common = RELA.split_options(options)
        xp = namespace(q)
        inputs = wide(xp, q, k, v)
        grads = normalised_vjp(xp, forward(*inputs, **RELU, **common), norm_weight, do, **norm)
        grads |= backward(*inputs, grads.pop("x"), **RELU, **common)
        return quadratic.rounded(xp, grads, {"q": q, "k": k, "v": v, "norm_weight": norm_weight, **options})

    def asked(question: AnyFunction) -> AnyFunction:
        return lambda q, k, v, *others, **options: question(q, k, v, **RELA.split_options(options)[1], **RELU)

    questions = (asked(of.unsupported), asked(of.is_faster))
    kernel = Kernel(of.name, attend, *questions, replaces=replaces, taken=of.taken)
    return with_gradients(rela_attention, kernel, pull)
